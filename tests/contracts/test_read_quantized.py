"""read_quantized against NumPy's product and ml_dtypes' casts, and what a token loses."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvjax.geometry import DTYPE_BYTES
from kvjax.ops import read_quantized as op
from tests import cases, oracles
from tests.implementations import INTERPRETED, for_examples, on_cases, run
from tests.strategies import any_slots, inputs, layers, planes, random_bits, random_rows

FP8 = "float8_e4m3fn"
NAMES = ["reference", INTERPRETED, pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]


def compare(read, case, planes, layer, slots, *, dtype="bfloat16"):
    actual = read(case, planes, layer, slots, first_slot=case.first_slot, dtype=dtype)
    latent, scale, rope = (
        oracles.read_rows(plane, layer, slots, case.first_slot) for plane in planes
    )
    expected = oracles.dequantize(latent, scale, rope, dtype)
    for have, want, stored in zip(actual, expected, (latent.view(FP8), rope), strict=True):
        assert have.dtype == want.dtype
        with np.errstate(all="ignore"):
            inverse = 1 / scale.astype(np.float64)
        flushed = oracles.meets_subnormals(stored, inverse) | oracles.meets_subnormals(scale, 1.0)
        oracles.assert_same_numbers(have, want, flushed)


@on_cases(
    reference=cases.MANY_QUANTIZED,
    interpreted=cases.FEW_QUANTIZED,
    gpu=cases.QUANTIZED_FOR_GPU,
)
def test_equals_oracle(name, case):
    """The dtype to read is that of the latent that would have been written."""
    read = partial(run, "read_quantized", name)
    check = partial(compare, read, case, dtype=case.given[0])
    for_examples(name, inputs(case, planes, layers, any_slots), check)


SCALES = [1.0, 4 / 448, 1e-26 / 448, 3.4e38 / 448, 0.3, np.nan, 0.0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_stored_value_times_some_scales(dtype, name):
    case = cases.quantized(256, 16, "float32", (), len(SCALES))
    latent = np.broadcast_to(np.arange(256, dtype=np.uint8), (1, case.num_rows, 1, 256))
    scale = np.resize(np.float32(SCALES), (1, case.num_rows, 1, 1))
    rope = random_bits(0, (1, case.num_rows, 1, 16), "float32")
    slots = np.arange(case.first_slot, case.first_slot + len(SCALES), dtype=np.int32)
    read = partial(run, "read_quantized", name)
    compare(read, case, (latent, scale, rope), np.int32(0), slots, dtype=dtype)


@pytest.mark.parametrize("rope_dtype", ["bfloat16", "float32"])
def test_what_a_token_loses(rope_dtype):
    """Of e4m3fn, numbers from 2^-6 on are at most a part in 2^4 off, smaller ones 2^-10.

    So a latent is off by a part in 2^4 of itself, or by 2^-10 scales: at most amax / 28, which is
    half of what the largest numbers, 256 and more, are apart. The rope is as precise as its dtype.
    """
    rng = np.random.default_rng(0)
    shape = (4096, 1, 64)
    latent, rope = (
        (rng.standard_normal(shape) * 2.0 ** rng.uniform(-12, 3, shape)).astype(np.float32)
        for _ in range(2)
    )
    amax = np.abs(latent).max(axis=-1, keepdims=True)
    stored = oracles.quantize(latent, rope, rope_dtype)
    case = cases.quantized(64, 64, rope_dtype, (), shape[0])
    planes = tuple(
        np.concatenate([np.zeros((4, *part.shape[1:]), part.dtype), part])[None] for part in stored
    )
    slots = np.arange(4, 4 + shape[0], dtype=np.int32)
    read = run("read_quantized", "reference", case, planes, 0, slots, first_slot=4, dtype="float32")
    lost, lost_rope = (
        np.abs(have - given) for have, given in zip(read, (latent, rope), strict=True)
    )
    rounding = 1 + 2.0**-20  # the division, the product, and the scale itself, in float32
    bound = np.maximum(np.abs(latent) * 2.0**-4, amax / 448 * 2.0**-10) * rounding
    assert (lost <= bound).all() and (lost <= amax / 28 * rounding).all()
    assert (lost > bound * 0.9).any()  # it is no looser than it has to be
    epsilon = float(ml_dtypes.finfo(rope_dtype).eps)
    assert (lost_rope <= np.abs(rope) * (epsilon / 2 + 2.0**-22)).all()


def test_a_wrong_implementation_is_caught():
    """The comparison above can fail: a rope that is not multiplied."""

    def forgetful(case, planes, *args, **options):
        latent, rope = run("read_quantized", "reference", case, planes, *args, **options)
        scale = oracles.read_rows(planes[1], 0, args[1], case.first_slot)
        return latent, (rope.astype(np.float32) / scale).astype(rope.dtype)

    case = cases.quantized(16, 8, "float32", (), 1)
    old = random_rows(0, case.rows, 1, case.num_rows)
    planes = old[0], np.full_like(old[1], 0.5), np.ones_like(old[2])
    args = case, planes, np.int32(0), np.array([5], np.int32)
    compare(partial(run, "read_quantized", "reference"), *args)
    with pytest.raises(AssertionError):
        compare(forgetful, *args)


@pytest.mark.parametrize(
    "case, dtype",
    [
        *((cases.TO_LOWER_QUANTIZED[0], dtype) for dtype in DTYPE_BYTES),
        *((case, "bfloat16") for case in cases.TO_LOWER_QUANTIZED[1:]),
    ],
    ids=str,
)
def test_the_kernel_lowers_for_cuda(case, dtype, monkeypatch):
    for constant, value in case.constants:
        monkeypatch.setattr(f"kvjax.ops.{constant}", value)
    planes = tuple(jnp.zeros((2, case.num_rows, *shape), plane) for shape, plane in case.rows)
    read = jax.jit(partial(op._mosaic_gpu, first_slot=4, dtype=dtype))
    traced = read.trace(planes, jnp.int32(1), jnp.zeros(case.num_tokens, jnp.int32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @mosaic_gpu" in text


@pytest.mark.parametrize(
    "latent_dim, rope_dim, dtype, reason",
    [
        (512, 64, "bfloat16", None),
        (512, 8, "bfloat16", None),
        (512, 8, FP8, "8 bytes is not a multiple of 16"),
        (512, 4, "float32", "8 bytes"),
        (120, 64, "bfloat16", "120 bytes"),
        (15360, 1024, "bfloat16", "16384 numbers are more than a block can stage"),
    ],
)
def test_what_the_kernel_cannot_read(latent_dim, rope_dim, dtype, reason):
    case = cases.quantized(latent_dim, rope_dim, "bfloat16", (), 1)
    planes = tuple(jnp.zeros((1, case.num_rows, *shape), plane) for shape, plane in case.rows)
    actual = op.cannot_read(planes, dtype)
    assert (actual is None) if reason is None else (reason in actual)
