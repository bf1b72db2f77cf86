"""narrow against NumPy's division and ml_dtypes' casts."""

import functools

import hypothesis.strategies as st
import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

from kvjax.geometry import DTYPE_BYTES
from kvjax.ops.narrow import narrow
from tests import oracles
from tests.strategies import random_bits, seeds

FLOATS = ["float32", "bfloat16", "float16"]
FP8 = ["float8_e4m3fn", "float8_e5m2"]
SCALES = [None, 1.0, 0.5, 0.3, -2.0, 3e38, 2e-38, np.inf]
BACKENDS = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


@functools.cache
def compiled(dtype, has_scale):
    function = (lambda v, s: narrow(v, dtype, s)) if has_scale else (lambda v: narrow(v, dtype))
    return jax.jit(function)


def compare(values, dtype, scale=None, *, backend="cpu", run=compiled):
    """Bit for bit, but for what a NaN carries."""
    if scale is not None:
        scale = np.float32(scale)
        values = np.where(oracles.meets_subnormals(values, scale), values.dtype.type(0), values)
    args = (values,) if scale is None else (values, scale)
    args = jax.device_put(args, jax.devices(backend)[0])
    actual = np.asarray(run(dtype, scale is not None)(*args)).view(dtype)
    expected = oracles.narrow(values, dtype, scale)
    same = oracles.assert_same_bits if values.dtype == dtype else oracles.assert_same_numbers
    same(actual, expected)


@pytest.mark.parametrize(
    "source, backend",
    [
        *((source, "cpu") for source in ("bfloat16", "float16", *FP8)),
        *(pytest.param(source, "gpu", marks=pytest.mark.gpu) for source in ("bfloat16", "float16")),
    ],
)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_value_of_a_small_dtype(source, dtype, backend):
    num_bytes = np.dtype(source).itemsize
    values = np.arange(1 << 8 * num_bytes, dtype=f"u{num_bytes}").view(source)
    for scale in SCALES:
        compare(values, dtype, scale, backend=backend)


EDGES = [0.0, -0.0, 448.0, 464.0, 464.1, 480.0, 57344.0, 61440.0, 61441.0, 65519.0, 65520.0, 3.4e38]
EDGES += [2.0**-10, 2.0**-17, 2.0**-25, 2.0**-149, np.inf, -np.inf, np.nan, -np.nan]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@settings(max_examples=25)
@given(data=st.data())
def test_any_float32(dtype, backend, data):
    near_edges = np.array(EDGES, np.float32).view(np.uint32)[:, None] + np.arange(-2, 3)
    junk = random_bits(data.draw(seeds), 4000, "uint32")
    values = np.r_[near_edges.astype(np.uint32).ravel(), junk].view(np.float32)
    scale = data.draw(st.none() | st.sampled_from(SCALES) | st.floats(2.0**-99, 2.0**99, width=32))
    compare(values, dtype, scale, backend=backend)


@pytest.mark.parametrize("dtype, largest", [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)])
def test_fp8_saturates(dtype, largest):
    values = np.array([1e6, -1e6, np.inf, -np.inf, np.nan, -0.0], np.float32)
    stored = np.asarray(narrow(jax.numpy.asarray(values), dtype)).view(dtype).astype(np.float32)
    np.testing.assert_array_equal(stored, [largest, -largest, largest, -largest, np.nan, -0.0])


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_values_of_the_dtype_keep_their_bits_and_ignore_the_scale(dtype):
    values = random_bits(0, 1000, dtype)
    compare(values, dtype)
    stored = np.asarray(narrow(jax.numpy.asarray(values), dtype, jax.numpy.float32(2)))
    oracles.assert_same_bits(stored.view(dtype), values)


def times_the_inverse(dtype, has_scale):
    return lambda values, scale: (values.astype(np.float32) * (np.float32(1) / scale)).astype(dtype)


def unsaturated(dtype, has_scale):
    return lambda values: values.astype(dtype)


@pytest.mark.parametrize(
    "value, scale, wrong", [(3.433e-05, 0.3, times_the_inverse), (480.0, None, unsaturated)]
)
def test_a_wrong_implementation_is_caught(value, scale, wrong):
    """The comparison above can fail: what XLA makes of a division by a scalar; a plain cast."""
    values = np.array([value], ml_dtypes.bfloat16)
    dtype = "float8_e5m2" if scale else "float8_e4m3fn"
    compare(values, dtype, scale)
    with pytest.raises(AssertionError):
        compare(values, dtype, scale, run=wrong)
