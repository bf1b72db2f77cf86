"""write_quantized_kv against NumPy's division and casts, one head at a time."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops import quantizing
from kvjax.ops import write_quantized_kv as op
from tests import cases, oracles
from tests.implementations import INTERPRETED, for_examples, on_cases, run
from tests.strategies import inputs, layers, planes, random_rows, seeds, slots

FLOAT32 = np.finfo(np.float32)
FORMATS = {"int8": "int8", "uint8": "float8_e4m3fn"}
"""What planes of a dtype hold: numbers of another."""

NAMES = ["reference", INTERPRETED, pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]
MOSTLY_REFERENCE = [
    "reference",
    pytest.param(INTERPRETED, marks=pytest.mark.slow),
    pytest.param("mosaic_gpu", marks=pytest.mark.gpu),
]


def compare(write, case, planes, layer, slots, k, v):
    actual = write(case, planes, layer, slots, k, v, first_slot=case.first_slot)
    rows = []
    for values, plane in ((k, planes[0]), (v, planes[2])):
        stored, scale = oracles.quantize_kv(values, FORMATS[str(plane.dtype)])
        rows += [stored.view(plane.dtype), scale]
    for old, new, have in zip(planes, rows, actual, strict=True):
        want = oracles.write_rows(old, layer, slots, new, case.first_slot)
        assert have.dtype == want.dtype
        kind = FORMATS.get(str(want.dtype), want.dtype)
        oracles.assert_same_numbers(have.view(kind), want.view(kind))


def some_values(seed, case):
    """K and V of any magnitudes: in a head alike or not, and what is no number."""
    rng = np.random.default_rng(seed)
    parts = []
    for (row_shape, _), dtype in zip(case.rows[::2], case.given, strict=True):
        shape, by_head = (case.num_tokens, *row_shape), (case.num_tokens, row_shape[0], 1)
        values = rng.standard_normal(shape) * 2.0 ** rng.uniform(-149, 128, by_head)
        values *= 2.0 ** (rng.uniform(-20, 2, shape) * rng.integers(0, 2, by_head))
        odd = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, 1e-26, 1e-39, -1e-45], shape)
        is_odd = rng.random(shape) < rng.choice([0, 0, 1 / row_shape[1], 1], by_head)
        with np.errstate(all="ignore"):
            parts.append(np.where(is_odd, odd, values).astype(np.float32).astype(dtype))
    return tuple(parts)


def values(case):
    return seeds.map(lambda seed: some_values(seed, case))


@on_cases(
    reference=cases.MANY_QUANTIZED_KV,
    interpreted=cases.FEW_QUANTIZED_KV,
    gpu=cases.QUANTIZED_KV_FOR_GPU,
)
def test_equals_oracle(name, case):
    write = partial(run, "write_quantized_kv", name)
    for_examples(
        name,
        inputs(case, planes, layers, slots, values),
        lambda planes, layer, slots, parts: compare(write, case, planes, layer, slots, *parts),
    )


def write_all(name, stored, k, v):
    """Compares what is written of all tokens, in a row of slots, and returns it."""
    num_tokens, num_heads, k_dim = k.shape
    given = str(k.dtype), str(v.dtype)
    case = cases.quantized_kv(num_heads, (k_dim, v.shape[-1]), stored, given, num_tokens)
    # What a NaN of the planes carries is theirs.
    planes = [np.nan_to_num(plane) for plane in random_rows(0, case.rows, 1, case.num_rows)]
    slots = np.arange(case.first_slot, case.first_slot + num_tokens, dtype=np.int32)
    args = tuple(planes), np.int32(0), slots, k, v
    written = []

    def write(case, *args, **options):
        written.extend(run("write_quantized_kv", name, case, *args, detect_races=False, **options))
        return written

    compare(write, case, *args)
    return [plane[0, slots] for plane in written]


def every_bfloat16():
    return np.arange(1 << 16, dtype=np.uint16).view("bfloat16")


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("name", MOSTLY_REFERENCE)
def test_every_bfloat16_among_its_neighbours(name, stored):
    """So that a head's scale is of its magnitude; those that are no numbers are there too."""
    values = every_bfloat16().reshape(-1, 4, 64)
    write_all(name, stored, values, values[::-1, ::-1])


AMAXES = [0.0, 1e-26, 3e-5, 0.3, 1.0, 127.0, 448.0, 500.0, 3.3e38]


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize(
    "amax, name",
    [
        *((amax, "reference") for amax in AMAXES),
        pytest.param(3e-5, INTERPRETED, marks=pytest.mark.slow),
        *(pytest.param(amax, "mosaic_gpu", marks=pytest.mark.gpu) for amax in AMAXES),
    ],
)
def test_every_bfloat16_under_a_given_scale(amax, name, stored):
    """Every scale is another division; that of V is a third of it."""
    values = every_bfloat16().astype(np.float32)
    amax = np.float32(amax).astype("bfloat16").astype(np.float32)
    small = np.where(np.abs(values) <= amax, values, amax)
    small[::64] = amax
    small = small.reshape(-1, 4, 64)
    write_all(name, stored, small.astype("bfloat16"), small / np.float32(3))


def halves_and_largest():
    """What lies between two numbers of int8, every such number, after 127 and its negative."""
    return np.concatenate([[127, -127], np.arange(-127, 127) + 0.5]).astype(np.float32)


@pytest.mark.parametrize("exponent", [-90, 0, 100])
@pytest.mark.parametrize("name", NAMES)
def test_int8_ties_go_to_even(name, exponent):
    """Of a head whose largest number is 127 scales, and the scale a power of two."""
    numbers = halves_and_largest()
    even = [half - 0.5 if (half - 0.5) % 2 == 0 else half + 0.5 for half in numbers[2:]]
    values = np.ldexp(numbers, exponent).reshape(1, 1, 256)
    k, _, v, _ = write_all(name, "int8", values, -values)
    np.testing.assert_array_equal(k.ravel(), [127, -127, *even])
    np.testing.assert_array_equal(v.ravel(), -k.ravel())


EDGES = {  # a head, and its largest magnitude as it counts
    "zeros": ([0.0, -0.0], np.float32(1e-26)),
    "subnormal": ([1e-39, -1e-45], np.float32(1e-26)),
    "just above the smallest": ([2e-26], np.float32(2e-26)),
    "one": ([1.0, -2.0, 4.0, 0.5], np.float32(4)),
    "the largest": ([FLOAT32.max, 1.0], FLOAT32.max),
    "infinite": ([-np.inf, 1.0], FLOAT32.max),
    "no number": ([np.nan, 1.0, np.inf], np.float32(np.nan)),
}


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_scales_at_the_edges(name, stored):
    heads = np.stack([np.resize(np.float32(head), 16) for head, _ in EDGES.values()])[None]
    k, k_scale, _, v_scale = write_all(name, stored, heads, heads[:, ::-1])
    expected = [amax / np.float32(127 if stored == "int8" else 448) for _, amax in EDGES.values()]
    np.testing.assert_array_equal(k_scale[0, :, 0], expected)
    np.testing.assert_array_equal(v_scale[0, ::-1, 0], expected)
    if stored == "int8":
        by_name = dict(zip(EDGES, k[0], strict=True))
        assert by_name["infinite"][:2].tolist() == [-127, 0]
        assert by_name["no number"][:3].tolist() == [0, 0, 0]


def times_the_inverse(values, scale):
    return values * (np.float32(1) / scale)


def not_saturated(values, dtype):
    return jax.lax.bitcast_convert_type(values.astype(dtype), jnp.uint8)


def away_from_zero(values):
    return jnp.trunc(values + jnp.copysign(0.5, values))


@pytest.mark.parametrize(
    "stored, module, what, wrong",
    [
        ("int8", quantizing, "quotient", times_the_inverse),
        ("uint8", quantizing, "quotient", times_the_inverse),
        ("uint8", op, "narrow", not_saturated),
        ("int8", quantizing, "SMALLEST_AMAX", 1e-20),
        ("int8", jnp, "rint", away_from_zero),
    ],
)
def test_a_wrong_implementation_is_caught(monkeypatch, stored, module, what, wrong):
    """The comparison above can fail: what XLA makes of a division; a plain cast; a constant."""
    case = cases.quantized_kv(1, (256, 16), stored, ("float32", "float32"), 4)
    planes = tuple(np.zeros((1, case.num_rows, *shape), dtype) for shape, dtype in case.rows)
    k, v = np.zeros((4, 1, 256), np.float32), np.zeros((4, 1, 16), np.float32)
    k[0], k[1] = 0.3, np.random.default_rng(0).uniform(-1, 1, 256)
    ties = np.resize([448, *range(17, 32, 2)], 256) if stored == "uint8" else halves_and_largest()
    k[2], k[3] = ties, ties * np.float32(307 / 1024)  # not all products with its inverse are ties
    v[2, 0, 0] = np.inf
    args = case, planes, np.int32(0), np.array([4, 5, 6, 7], np.int32), k, v

    def write(case, *args, **options):
        return [*map(np.asarray, op.reference(*jax.tree.map(jnp.asarray, args), **options))]

    compare(write, *args)
    monkeypatch.setattr(module, what, wrong)
    with pytest.raises(AssertionError):
        compare(write, *args)


@pytest.mark.parametrize("forgotten", range(4))
def test_a_plane_left_behind_is_caught(forgotten):
    """The comparison above can fail: a scale, or what is scaled, that is not written."""

    def forgetful(case, planes, *args, **options):
        written = list(run("write_quantized_kv", "reference", case, planes, *args, **options))
        written[forgotten] = planes[forgotten]
        return written

    case = cases.quantized_kv(2, (16, 8), "int8", ("float32", "float32"), 1)
    planes = tuple(np.zeros((1, case.num_rows, *shape), dtype) for shape, dtype in case.rows)
    ones = np.ones((1, 2, 16), np.float32), np.ones((1, 2, 8), np.float32)
    args = case, planes, np.int32(0), np.array([5], np.int32), *ones
    compare(partial(run, "write_quantized_kv", "reference"), *args)
    with pytest.raises(AssertionError):
        compare(forgetful, *args)


@pytest.mark.parametrize("case", cases.TO_LOWER_QUANTIZED_KV, ids=str)
def test_the_kernel_lowers_for_cuda(case):
    planes = tuple(jnp.zeros((2, case.num_rows, *shape), dtype) for shape, dtype in case.rows)
    parts = [
        jnp.zeros((case.num_tokens, *shape), dtype)
        for (shape, _), dtype in zip(case.rows[::2], case.given, strict=True)
    ]
    write = jax.jit(partial(op._mosaic_gpu, first_slot=4))
    traced = write.trace(planes, jnp.int32(1), jnp.zeros(case.num_tokens, jnp.int32), *parts)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @mosaic_gpu" in text


@pytest.mark.parametrize(
    "num_heads, head_dims, given, reason",
    [
        (8, (128, 128), "bfloat16", None),
        (1, (16, 576), "float16", None),
        (128, (128, 128), "float32", None),
        (8, (128, 8), "bfloat16", "a head of 8 numbers in 8 bits is not a multiple of 16 bytes"),
        (3, (40, 128), "float8_e4m3fn", "a head of 40 numbers"),
        (128, (192, 192), "float32", "128 x 192 numbers, are more than a block can stage"),
        (128, (192, 192), "bfloat16", None),
        (128, (256, 192), "float8_e5m2", "128 x 256 and 128 x 192 numbers"),
    ],
)
def test_what_the_kernel_cannot_write(num_heads, head_dims, given, reason):
    case = cases.quantized_kv(num_heads, head_dims, "int8", (), 1)
    planes = tuple(jnp.zeros((1, case.num_rows, *shape), dtype) for shape, dtype in case.rows)
    parts = [jnp.zeros((1, num_heads, dim), given) for dim in head_dims]
    actual = op.cannot_write(planes, *parts)
    assert (actual is None) if reason is None else (reason in actual)
