"""read_quantized_kv against NumPy's product and ml_dtypes' casts, and what a head loses."""

from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from kvjax.geometry import DTYPE_BYTES
from kvjax.ops import read_quantized_kv as op
from tests import cases, oracles
from tests.contracts.test_write_quantized_kv import FORMATS
from tests.implementations import INTERPRETED, for_examples, on_cases, run
from tests.strategies import any_slots, inputs, layers, planes, random_rows, seeds

NAMES = ["reference", INTERPRETED, pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]


def compare(read, case, planes, layer, slots, *, dtype="bfloat16"):
    actual = read(case, planes, layer, slots, first_slot=case.first_slot, dtype=dtype)
    rows = [oracles.read_rows(plane, layer, slots, case.first_slot) for plane in planes]
    for have, stored, scale in zip(actual, rows[::2], rows[1::2], strict=True):
        kind = FORMATS[str(stored.dtype)]
        want = oracles.dequantize_kv(stored, scale, kind, dtype)
        assert have.dtype == want.dtype
        with np.errstate(all="ignore"):
            inverse = 1 / scale.astype(np.float64)
        flushed = oracles.meets_subnormals(stored.view(kind), inverse)
        oracles.assert_same_numbers(have, want, flushed | oracles.meets_subnormals(scale, 1.0))


@on_cases(
    reference=cases.MANY_QUANTIZED_KV,
    interpreted=cases.FEW_QUANTIZED_KV,
    gpu=cases.QUANTIZED_KV_FOR_GPU,
)
def test_equals_oracle(name, case):
    """The dtype to read is that of K that would have been written."""
    read = partial(run, "read_quantized_kv", name)
    check = partial(compare, read, case, dtype=case.given[0])
    for_examples(name, inputs(case, planes, layers, any_slots), check)


SCALES = [1.0, 4 / 127, 1e-26 / 448, 3.4e38 / 448, 3.4e38 / 127, 0.3, np.nan, 0.0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_stored_value_times_some_scales(dtype, stored, name):
    """Over as many tokens as there are scales, every head meets each of them."""
    case = cases.quantized_kv(4, (64, 16), stored, (), len(SCALES))
    every = np.arange(256, dtype=np.uint8).reshape(4, 64).view(stored)
    k = np.broadcast_to(every, (1, case.num_rows, 4, 64))
    which = np.arange(case.num_rows)[:, None] + np.arange(4)
    scale = np.array(SCALES, np.float32)[which % len(SCALES)][None, ..., None]
    planes = k, scale, k[..., ::-1, :16], scale[..., ::-1, :]
    slots = np.arange(case.first_slot, case.first_slot + len(SCALES), dtype=np.int32)
    read = partial(run, "read_quantized_kv", name)
    compare(read, case, planes, np.int32(0), slots, dtype=dtype)


# A value of int8 is off by half a scale; as many as 127 scales are rounded twice more in float32,
# their quotient and their product, by a part in 2^24 each. Numbers of e4m3fn from 2^-6 on are at
# most a part in 2^4 off, smaller ones 2^-10.
BOUNDS = {
    "int8": lambda values, scale: np.broadcast_to(scale / 2 * (1 + 2.0**-15), values.shape),
    "uint8": lambda values, scale: (
        np.maximum(np.abs(values) * 2.0**-4, scale * 2.0**-10) * (1 + 2.0**-20)
    ),
}


def lost(values, stored):
    """By how much each of ``values`` is off once written and read, and at most may be."""
    num_tokens, num_heads, head_dim = values.shape
    case = cases.quantized_kv(num_heads, (head_dim, head_dim), stored, (), num_tokens)
    planes = tuple(np.zeros((1, case.num_rows, *shape), dtype) for shape, dtype in case.rows)
    slots = np.arange(4, 4 + num_tokens, dtype=np.int32)
    write = partial(run, "write_quantized_kv", "reference", case, first_slot=4)
    read = partial(run, "read_quantized_kv", "reference", case, first_slot=4, dtype="float32")
    planes = write(planes, 0, slots, values, -values)
    k, v = read(planes, 0, slots)
    np.testing.assert_array_equal(k, -v)
    scale, values = planes[1][0, slots].astype(np.float64), values.astype(np.float64)
    return np.abs(k - values), BOUNDS[stored](values, scale)


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", FORMATS)
@settings(max_examples=50)
@given(seed=seeds, exponent=st.integers(-130, 126), spread=st.integers(0, 40))
def test_what_a_head_loses(stored, source, seed, exponent, spread):
    rng = np.random.default_rng(seed)
    shape = 16, 2, 64
    values = rng.uniform(-1, 1, shape) * 2.0 ** -rng.uniform(0, spread, shape)
    with np.errstate(all="ignore"):
        values = np.ldexp(values, exponent).astype(source)
    values[~np.isfinite(values.astype(np.float32))] = 1
    by, at_most = lost(values, stored)
    assert (by <= at_most).all()


@pytest.mark.parametrize("stored", FORMATS)
def test_the_bound_is_no_looser_than_it_has_to_be(stored):
    by, at_most = lost(np.random.default_rng(0).standard_normal((64, 2, 64)), stored)
    assert (by <= at_most).all() and (by > at_most * 0.9).any()


@pytest.mark.parametrize("stored", FORMATS)
def test_a_head_of_the_largest_numbers_is_not_finite_in_float32_if_its_scale_was_rounded_up(stored):
    largest = np.full((1, 1, 16), np.finfo(np.float32).max)
    bits, scale = oracles.quantize_kv(largest, FORMATS[stored])
    read = oracles.dequantize_kv(bits, scale, FORMATS[stored], "float32")
    assert np.isinf(read).all() == (stored == "int8")


@pytest.mark.parametrize("stored", FORMATS)
def test_a_wrong_implementation_is_caught(stored):
    """The comparison above can fail: heads that are multiplied by each other's scale."""

    def crossed(case, planes, *args, **options):
        k, k_scale, v, v_scale = planes
        planes = k, k_scale[..., ::-1, :], v, v_scale
        return run("read_quantized_kv", "reference", case, planes, *args, **options)

    case = cases.quantized_kv(2, (16, 8), stored, (), 1)
    k, k_scale, v, v_scale = random_rows(0, case.rows, 1, case.num_rows)
    k_scale = np.broadcast_to(np.array([[0.5], [2]], np.float32), k_scale.shape)
    args = case, (k, k_scale, v, np.ones_like(v_scale)), np.int32(0), np.array([5], np.int32)
    compare(partial(run, "read_quantized_kv", "reference"), *args)
    with pytest.raises(AssertionError):
        compare(crossed, *args)


@pytest.mark.parametrize(
    "case, dtype",
    [
        *((cases.TO_LOWER_QUANTIZED_KV[0], dtype) for dtype in DTYPE_BYTES),
        *((cases.TO_LOWER_QUANTIZED_KV[1], dtype) for dtype in DTYPE_BYTES),
        *((case, "bfloat16") for case in cases.TO_LOWER_QUANTIZED_KV[2:]),
    ],
    ids=str,
)
def test_the_kernel_lowers_for_cuda(case, dtype):
    planes = tuple(jnp.zeros((2, case.num_rows, *shape), plane) for shape, plane in case.rows)
    read = jax.jit(partial(op._mosaic_gpu, first_slot=4, dtype=dtype))
    traced = read.trace(planes, jnp.int32(1), jnp.zeros(case.num_tokens, jnp.int32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @mosaic_gpu" in text


@pytest.mark.parametrize(
    "num_heads, head_dims, dtype, reason",
    [
        (8, (128, 128), "bfloat16", None),
        (1, (16, 576), "float8_e5m2", None),
        (128, (128, 128), "float32", None),
        (8, (128, 8), "float32", "a head of 8 numbers in 8 bits is not a multiple of 16 bytes"),
        (128, (192, 192), "float32", "128 x 192 numbers, are more than a block can stage"),
        (128, (192, 192), "bfloat16", None),
    ],
)
def test_what_the_kernel_cannot_read(num_heads, head_dims, dtype, reason):
    case = cases.quantized_kv(num_heads, head_dims, "uint8", (), 1)
    planes = tuple(jnp.zeros((1, case.num_rows, *shape), plane) for shape, plane in case.rows)
    actual = op.cannot_read(planes, dtype)
    assert (actual is None) if reason is None else (reason in actual)
