"""write_quantized of kvtorch against NumPy's division and ml_dtypes' casts."""

from functools import partial

import hypothesis.strategies as st
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

from kvjax.errors import UnsupportedError
from kvtorch.ops.write_quantized import write_quantized
from tests import oracles
from tests.strategies import seeds, some_slots
from tests.torch import compiled, quantized
from tests.torch.implementations import (
    INTERPRETED,
    NAMES,
    call,
    device_of,
    for_examples,
    on_cases,
    tensors,
)
from tests.torch.quantized import FIRST_SLOT, LAYER, Case, assert_same_numbers
from tests.torch.tensors import LAYOUTS, to_numpy

on_all = on_cases(
    reference=quantized.REFERENCE,
    interpreted=quantized.INTERPRETED,
    gpu=quantized.FOR_GPU,
    reference_on_gpu=quantized.REFERENCE_ON_GPU,
)


def write(name, case, planes, slots, parts):
    """What becomes of the planes; ``parts`` are tensors, and keep their bits."""
    *stored, indices = tensors([*planes, slots], name)
    before = [to_numpy(part) for part in parts]
    result = call(
        *("write_quantized", name, stored, LAYER, indices, *parts),
        first_slot=FIRST_SLOT,
        constants=case.constants,
    )
    assert result is None
    for tensor, expected in zip([indices, *parts], [slots, *before], strict=True):
        oracles.assert_same_bits(to_numpy(tensor), expected)
    return [to_numpy(plane) for plane in stored]


def compare(write, case, planes, slots, values):
    """Rows that nobody wrote keep their bits, also where these are NaNs."""
    found = write(case, planes, slots, values)
    wanted = quantized.written(planes, LAYER, slots, *values)
    there = [slot for slot in slots if FIRST_SLOT <= slot < case.num_rows]
    for actual, expected in zip(found, wanted, strict=True):
        assert_same_numbers(actual[LAYER, there], expected[LAYER, there])
        actual[LAYER, there] = expected[LAYER, there]
        oracles.assert_same_bits(actual, expected)


def write_by(name, case, planes, slots, values):
    return write(name, case, planes, slots, tensors(values, name))


@on_all
def test_b_q_equals_oracle(name, case):
    # Triton's interpreter rounds where a GPU does not: there, numbers that need no rounding.
    values = quantized.exact_values if name == INTERPRETED else quantized.any_values

    def check(seed, slots, is_wide):
        slots = slots.astype(np.int64) if is_wide else slots
        planes = quantized.junk_planes(seed, case)
        compare(partial(write_by, name), case, planes, slots, values(seed, case))

    slots = some_slots(case.num_tokens, FIRST_SLOT, case.num_rows)
    for_examples(name, st.tuples(seeds, slots, st.booleans()), check)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_heads", [True, False])
def test_parts_of_any_strides(name, layout, with_heads):
    case = Case(16, 8, "bfloat16", "float32", 3)
    values = quantized.exact_values(0, case)
    parts = [layout(part, 2) for part in tensors(values, name)]
    parts = parts if with_heads else [part.squeeze(1) for part in parts]
    planes, slots = quantized.junk_planes(1, case), np.array([6, 4, 9])
    compare(
        lambda case, planes, slots, _: write(name, case, planes, slots, parts),
        *(case, planes, slots, values),
    )


@pytest.mark.parametrize("name", NAMES)
def test_slots_of_any_stride_and_latents_that_are_bits(name):
    case = Case(16, 8, "float32", "float32", 3)
    values, planes = quantized.exact_values(0, case), quantized.junk_planes(1, case)
    *stored, latent, rope = tensors([*planes, *values], name)
    stored[0] = stored[0].view(torch.uint8)
    slots = torch.tensor([5, 6, -1, 7, 9, 8], device=device_of(name))[::2]
    call("write_quantized", name, stored, LAYER, slots, latent, rope, first_slot=FIRST_SLOT)
    wanted = quantized.written(planes, LAYER, [5, -1, 9], *values)
    wanted[0] = wanted[0].view(np.uint8)
    for plane, expected in zip(stored, wanted, strict=True):
        oracles.assert_same_bits(to_numpy(plane), expected)


def one_row(name, latent, rope, dtype="bfloat16"):
    """Latents in float32, the scale, and the rope, as they are stored."""
    case = Case(len(latent), len(rope), dtype, "float32", 1)
    values = [np.array(part, np.float32).reshape(1, 1, -1) for part in (latent, rope)]
    planes = write_by(name, case, quantized.junk_planes(0, case), np.array([5]), values)
    return [plane[LAYER, 5, 0] for plane in planes]


EXACTLY = ["reference", NAMES[2]]
"""Not Triton's interpreter, which rounds to fp8 in its own way and knows no NaN of it."""


@pytest.mark.parametrize("name", EXACTLY)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_b_q_what_does_not_fit_saturates_and_nan_stays(name, dtype):
    largest = np.float32(torch.finfo(getattr(torch, dtype)).max)
    latent, scale, rope = one_row(name, [np.inf, -np.inf, 3e38, 1.0], [1.0, np.nan], dtype)
    assert scale == np.finfo(np.float32).max / np.float32(448)
    np.testing.assert_array_equal(latent.astype(np.float32), [448, -448, 384, 0])
    assert rope[0] > 0 and np.isnan(rope[1])

    latent, scale, rope = one_row(name, [0.0, -0.0], [np.inf, -3e38, 0.0], dtype)
    assert scale == np.float32(1e-26) / np.float32(448)
    oracles.assert_same_bits(latent.view(np.uint8), np.array([0, 0x80], np.uint8))
    np.testing.assert_array_equal(rope.astype(np.float32), [largest, -largest, 0])

    latent, scale, rope = one_row(name, [1.0, np.nan, np.inf], [1.0, 0.0], dtype)
    for part in (latent, scale, rope):
        assert np.isnan(part.astype(np.float32)).all()


@pytest.mark.parametrize("name", EXACTLY)
def test_b_q_scales_are_quotients_rounded_once(name):
    """Not products with 1/448, which torch makes of a division by a number on a GPU."""
    amaxes = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    case = Case(1, 1, "float32", "float32", 500)
    values = [amaxes.reshape(-1, 1, 1), amaxes.reshape(-1, 1, 1)]
    slots = np.arange(4, 504)
    planes = write_by(name, case, quantized.junk_planes(0, case), slots, values)
    quotients = np.abs(amaxes) / np.float32(448)
    assert (quotients != np.abs(amaxes) * (np.float32(1) / np.float32(448))).any()
    oracles.assert_same_bits(planes[1][LAYER, 4:504, 0, 0], quotients)


@pytest.mark.parametrize("name", EXACTLY)
def test_fp4_the_row_of_the_report(name):
    latent, scale, rope = one_row(name, [1, -2, 4, 0.5], [1, -3, 0])
    assert latent.tobytes().hex() == "6ef67e66"
    assert scale == np.float32(4) / np.float32(448)
    np.testing.assert_array_equal(rope.astype(np.float32), [112, -336, 0])


def test_a_wrong_implementation_is_caught():
    """The comparison can fail: a product with the inverse; a slot that wraps; no saturation."""
    case = Case(1, 1, "float32", "float32", 1)

    def wrong(stored, case, planes, slots, values):
        planes = [plane.copy() for plane in planes]
        for plane, rows in zip(planes, stored(*values), strict=True):
            plane[LAYER, slots] = rows
        return planes

    def right(latent, rope):
        return [
            rows.view(dtype)
            for rows, (_, dtype) in zip(
                oracles.quantize(latent, rope, "float32"), case.rows, strict=True
            )
        ]

    def by_the_inverse(latent, rope):
        scale = np.abs(latent) * (np.float32(1) / np.float32(448))
        return (latent / scale).astype("float8_e4m3fn"), scale, rope / scale

    def unsaturated(latent, rope):
        latents, scale, _ = right(latent, rope)
        return latents, scale, rope / scale

    value = next(
        x for x in np.arange(1, 99, dtype=np.float32) if x / 448 != x * (np.float32(1) / 448)
    )
    for stored, latent, rope, slot in (
        (by_the_inverse, value, 1, 5),
        (unsaturated, 0, 3e38, 5),
        (right, 1, 1, -1),
    ):
        values = [np.full((1, 1, 1), x, np.float32) for x in (latent, rope)]
        planes = quantized.junk_planes(0, case)
        compare(partial(wrong, right), case, planes, np.array([5]), values)
        with np.errstate(over="ignore"), pytest.raises(AssertionError):
            compare(partial(wrong, stored), case, planes, np.array([slot]), values)


def test_an_implementation_that_cannot_run_says_why():
    planes = [plane.copy() for plane in quantized.junk_planes(0, Case(4, 2, "float32"))]
    planes = tensors(planes, "reference")
    args = planes, 0, torch.tensor([4]), torch.ones(1, 1, 4), torch.ones(1, 1, 2)
    with pytest.raises(UnsupportedError, match=r"triton: needs .*CUDA device.* on cpu"):
        write_quantized(*args, first_slot=4, implementation="triton")
    with pytest.raises(ValueError, match="no implementation 'cuda'; it has triton, reference"):
        write_quantized(*args, first_slot=4, implementation="cuda")
    planes[2] = planes[2].to(torch.float16)
    with pytest.raises(UnsupportedError, match="triton: takes ropes of float32 or bfloat16"):
        write_quantized(*args, first_slot=4, implementation="triton")


ARGUMENTS = "i, f8, f, b, b, b, 1, n, n + 9, 4, 16, 16, 16, 8, 16, 8, 4, 3e38, True"


def test_compiles_once_for_all_sizes():
    assert compiled.times("write_quantized", ARGUMENTS, [1, 7, 16, 4096, 2**31 - 10]) == 1


def test_b_q_compiled_quotients_are_rounded_once_and_casts_saturate():
    code = compiled.code("write_quantized", ARGUMENTS)
    assert "div.rn.f32" in code and "cvt.rn.satfinite.e4m3x2.f32" in code
    for word in ("div.full", "div.approx", "rcp", "ftz"):
        assert word not in code, word


@pytest.mark.parametrize("model", ["f", "b"])
def test_compiles_for_every_dtype_that_values_may_have(model):
    constants = "100, 28, 128, 32, 1, 3e38, True"
    arguments = f"i, f8, f, {model}, n, n, 1, 7, 16, 4, 100, 28, {constants}"
    assert compiled.times("write_quantized", arguments, compiled.FLOATS) == 5
