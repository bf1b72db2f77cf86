"""write_quantized against NumPy's division and ml_dtypes' casts, one token at a time."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops import quantizing
from kvjax.ops import write_quantized as op
from tests import cases, oracles
from tests.implementations import INTERPRETED, for_examples, on_cases, run
from tests.strategies import inputs, layers, planes, random_rows, seeds, slots

FP8 = "float8_e4m3fn"
FLOAT32 = np.finfo(np.float32)
NAMES = ["reference", INTERPRETED, pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]


def compare(write, case, planes, layer, slots, latent, rope):
    actual = write(case, planes, layer, slots, latent, rope, first_slot=case.first_slot)
    rows = oracles.quantize(latent, rope, planes[2].dtype)
    flushed = np.broadcast_to(oracles.meets_subnormals(rope, rows[1]), rope.shape)
    expected, may_be_zero = (
        [
            oracles.write_rows(plane, layer, slots, new, case.first_slot)
            for plane, new in zip(old, news, strict=True)
        ]
        for old, news in (
            (planes, rows),
            ([np.zeros(plane.shape, bool) for plane in planes], [*map(np.zeros_like, rows)]),
        )
    )
    may_be_zero[2] = oracles.write_rows(may_be_zero[2], layer, slots, flushed, case.first_slot)
    for position, (have, want, zeros) in enumerate(zip(actual, expected, may_be_zero, strict=True)):
        numbers = (have.view(FP8), want.view(FP8)) if position == 0 else (have, want)
        oracles.assert_same_numbers(*numbers, zeros)


def some_tokens(seed, case):
    """Latent and rope of any magnitudes: in a token alike or not, and what is no number."""
    rng = np.random.default_rng(seed)
    (_, latent_dim), (_, rope_dim) = case.rows[0][0], case.rows[2][0]
    magnitudes = 2.0 ** rng.uniform(-149, 128, (case.num_tokens, 1, 1))
    parts = []
    for width, dtype in zip((latent_dim, rope_dim), case.given, strict=True):
        shape = (case.num_tokens, 1, width)
        values = rng.standard_normal(shape) * magnitudes
        values *= 2.0 ** (rng.uniform(-20, 2, shape) * rng.integers(0, 2, (case.num_tokens, 1, 1)))
        odd = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, 1e-26, 1e-39, -1e-45], shape)
        is_odd = rng.random(shape) < rng.choice([0, 0, 1 / width, 1], (case.num_tokens, 1, 1))
        with np.errstate(all="ignore"):
            parts.append(np.where(is_odd, odd, values).astype(np.float32).astype(dtype))
    return tuple(parts)


def tokens(case):
    return seeds.map(lambda seed: some_tokens(seed, case))


@on_cases(
    reference=cases.MANY_QUANTIZED,
    interpreted=cases.FEW_QUANTIZED,
    gpu=cases.QUANTIZED_FOR_GPU,
)
def test_equals_oracle(name, case):
    write = partial(run, "write_quantized", name)
    for_examples(
        name,
        inputs(case, planes, layers, slots, tokens),
        lambda planes, layer, slots, parts: compare(write, case, planes, layer, slots, *parts),
    )


def write_all(name, latent, rope, dtype="bfloat16"):
    """Compares what is written of all tokens, in a row of slots."""
    given = (str(latent.dtype), str(rope.dtype))
    case = cases.quantized(latent.shape[-1], rope.shape[-1], dtype, given, latent.shape[0])
    planes = random_rows(0, case.rows, 1, case.num_rows)
    # What a NaN of the planes carries is theirs.
    planes = planes[0], np.nan_to_num(planes[1]), np.nan_to_num(planes[2].astype(np.float32))
    planes = *planes[:2], planes[2].astype(dtype)
    slots = np.arange(case.first_slot, case.first_slot + case.num_tokens, dtype=np.int32)
    write = partial(run, "write_quantized", name, detect_races=False)
    compare(write, case, planes, np.int32(0), slots, latent, rope)


AMAXES = [0.0, 1e-26, 3e-5, 0.3, 1.0, 448.0, 500.0, 3.3e38]


def every_bfloat16():
    return np.arange(1 << 16, dtype=np.uint16).view("bfloat16")


@pytest.mark.parametrize(
    "name",
    [
        "reference",
        pytest.param(INTERPRETED, marks=pytest.mark.slow),
        pytest.param("mosaic_gpu", marks=pytest.mark.gpu),
    ],
)
def test_every_bfloat16_among_its_neighbours(name):
    """So that the token's scale is of its magnitude; those that are no numbers are there too."""
    values = every_bfloat16().reshape(-1, 1, 256)
    write_all(name, values, values[..., ::16])


@pytest.mark.parametrize(
    "amax, dtype, name",
    [
        *((amax, dtype, "reference") for amax in AMAXES for dtype in ("bfloat16", "float32")),
        pytest.param(3e-5, "bfloat16", INTERPRETED, marks=pytest.mark.slow),
        *(
            pytest.param(amax, dtype, "mosaic_gpu", marks=pytest.mark.gpu)
            for amax in AMAXES
            for dtype in ("bfloat16", "float32")
        ),
    ],
)
def test_every_bfloat16_under_a_given_scale(amax, dtype, name):
    """As rope too, where it may be larger than the latent; every scale is another division."""
    values = every_bfloat16()
    amax = np.float32(amax).astype("bfloat16")
    small = np.where(np.abs(values.astype(np.float32)) <= amax.astype(np.float32), values, amax)
    small[::256] = amax
    write_all(name, small.reshape(-1, 1, 256), values.reshape(-1, 1, 256), dtype)


EDGES = {  # the latent, and the scale that it makes
    "zeros": ([0.0, -0.0], np.float32(1e-26) / 448),
    "subnormal": ([1e-39, -1e-45], np.float32(1e-26) / 448),
    "just above the smallest": ([2e-26], np.float32(2e-26) / 448),
    "one": ([1.0, -2.0, 4.0, 0.5], 4 / 448),
    "the largest": ([FLOAT32.max, 1.0], FLOAT32.max / np.float32(448)),
    "infinite": ([-np.inf, 1.0], FLOAT32.max / np.float32(448)),
    "no number": ([np.nan, 1.0, np.inf], np.nan),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("edge", EDGES)
def test_scales_at_the_edges(edge, name):
    given, scale = EDGES[edge]
    latent = np.resize(np.float32(given), (1, 1, 16))
    rope = np.resize(np.float32([1, -3, 0, FLOAT32.max, -np.inf, np.nan, 1e-30, 7]), (1, 1, 16))
    write_all(name, latent, rope)
    write_all(name, latent, rope, "float32")
    _, actual, _ = oracles.quantize(latent, rope, "bfloat16")
    np.testing.assert_array_equal(actual.item(), np.float32(scale))


def times_the_inverse(values, scale):
    return values * (np.float32(1) / scale)


def not_saturated(values, dtype):
    return jax.lax.bitcast_convert_type(values.astype(dtype), jnp.uint8)


@pytest.mark.parametrize(
    "module, what, wrong",
    [
        (quantizing, "quotient", times_the_inverse),
        (op, "narrow", not_saturated),
        (quantizing, "SMALLEST_AMAX", 1e-20),
    ],
)
def test_a_wrong_implementation_is_caught(monkeypatch, module, what, wrong):
    """The comparison above can fail: what XLA makes of a division; a plain cast; a constant."""
    case = cases.quantized(16, 256, "float32", ("float32", "float32"), 3)
    planes = tuple(np.zeros((1, case.num_rows, *shape), dtype) for shape, dtype in case.rows)
    latent, rope = np.zeros((3, 1, 16), np.float32), np.zeros((3, 1, 256), np.float32)
    latent[0], latent[1, 0, 0], rope[0] = 0.3, np.inf, np.arange(256)
    args = case, planes, np.int32(0), np.array([4, 5, 6], np.int32), latent, rope

    def write(case, *args, **options):
        return op.reference(*jax.tree.map(jnp.asarray, args), **options)

    def compare_all():
        compare(lambda *args, **by: [*map(np.asarray, write(*args, **by))], *args)

    compare_all()
    monkeypatch.setattr(module, what, wrong)
    with pytest.raises(AssertionError):
        compare_all()


def test_a_plane_left_behind_is_caught():
    """The comparison above can fail: a scale that is not written."""

    def forgetful(case, planes, *args, **options):
        latent, _, rope = run("write_quantized", "reference", case, planes, *args, **options)
        return latent, planes[1], rope

    case = cases.quantized(16, 8, "float32", ("float32", "float32"), 1)
    planes = tuple(np.zeros((1, case.num_rows, *shape), dtype) for shape, dtype in case.rows)
    ones = np.ones((1, 1, 16), np.float32), np.ones((1, 1, 8), np.float32)
    args = case, planes, np.int32(0), np.array([5], np.int32), *ones
    compare(partial(run, "write_quantized", "reference"), *args)
    with pytest.raises(AssertionError):
        compare(forgetful, *args)


@pytest.mark.parametrize("case", cases.TO_LOWER_QUANTIZED, ids=str)
def test_the_kernel_lowers_for_cuda(case, monkeypatch):
    for constant, value in case.constants:
        monkeypatch.setattr(f"kvjax.ops.{constant}", value)
    planes = tuple(jnp.zeros((2, case.num_rows, *shape), dtype) for shape, dtype in case.rows)
    parts = [
        jnp.zeros((case.num_tokens, *shape), dtype)
        for (shape, _), dtype in zip((case.rows[0], case.rows[2]), case.given, strict=True)
    ]
    write = jax.jit(partial(op._mosaic_gpu, first_slot=4))
    traced = write.trace(planes, jnp.int32(1), jnp.zeros(case.num_tokens, jnp.int32), *parts)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @mosaic_gpu" in text


def some_planes(latent_dim, rope_dim, dtype="bfloat16"):
    case = cases.quantized(latent_dim, rope_dim, dtype, (), 1)
    return tuple(jnp.zeros((1, case.num_rows, *shape), dtype) for shape, dtype in case.rows)


@pytest.mark.parametrize(
    "latent_dim, rope_dim, given, reason",
    [
        (512, 64, "bfloat16", None),
        (512, 8, "bfloat16", None),
        (512, 4, "float32", "8 bytes is not a multiple of 16"),
        (120, 64, "bfloat16", "120 bytes"),
        (512, 8, "float8_e4m3fn", "8 bytes"),
        (15360, 1024, "bfloat16", "16384 numbers are more than a block can stage"),
    ],
)
def test_what_the_kernel_cannot_write(latent_dim, rope_dim, given, reason):
    parts = (jnp.zeros((1, 1, width), given) for width in (latent_dim, rope_dim))
    actual = op.cannot_write(some_planes(latent_dim, rope_dim), *parts)
    assert (actual is None) if reason is None else (reason in actual)
