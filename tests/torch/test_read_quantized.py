"""read_quantized of kvtorch against NumPy's products and ml_dtypes' casts."""

import hypothesis.strategies as st
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

from kvjax.errors import UnsupportedError
from kvtorch.ops.read_quantized import read_quantized
from tests import oracles
from tests.strategies import random_rows, seeds, some_slots
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
from tests.torch.tensors import to_numpy

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


def any_planes(seed, case):
    """Any bits, but scales that a write could have made, and some that it could not."""
    latents, scales, ropes = random_rows(seed, case.rows, quantized.NUM_LAYERS, case.num_rows)
    rng = np.random.default_rng(seed)
    made = 10.0 ** rng.uniform(-28, 36, scales.shape)
    return [latents, np.where(rng.random(scales.shape) < 0.8, made, scales).astype("f4"), ropes]


def exact_planes(seed, case):
    """Products that all dtypes have."""
    rng = np.random.default_rng(seed)
    shapes = [(quantized.NUM_LAYERS, case.num_rows, *row) for row, _ in case.rows]
    latents, ropes = (rng.integers(-8, 9, shape) for shape in (shapes[0], shapes[2]))
    scales = 2.0 ** rng.integers(-2, 3, shapes[1])
    return [
        plane.astype(dtype)
        for plane, (_, dtype) in zip((latents, scales, ropes), case.rows, strict=True)
    ]


def read(name, case, planes, slots, dtype):
    *stored, indices = tensors([*planes, slots], name)
    parts = call(
        *("read_quantized", name, stored, LAYER, indices),
        first_slot=FIRST_SLOT,
        dtype=None if dtype is None else getattr(torch, dtype),
        constants=case.constants,
    )
    for tensor, expected in zip([*stored, indices], [*planes, slots], strict=True):
        oracles.assert_same_bits(to_numpy(tensor), expected)
    assert all(part.is_contiguous() for part in parts)
    return [to_numpy(part) for part in parts]


def compare(read, case, planes, slots, dtype):
    wanted = quantized.read(planes, LAYER, slots, np.dtype(dtype or case.dtype))
    for actual, expected in zip(read(case, planes, slots, dtype), wanted, strict=True):
        assert_same_numbers(actual, expected)


@on_cases(
    reference=quantized.REFERENCE,
    interpreted=quantized.INTERPRETED,
    gpu=quantized.FOR_GPU[:9],
    reference_on_gpu=quantized.REFERENCE_ON_GPU,
)
def test_b_m_17_equals_oracle(name, case):
    # Triton's interpreter rounds where a GPU does not: there, numbers that need no rounding.
    planes = exact_planes if name == INTERPRETED else any_planes

    def check(seed, slots, dtype, is_wide):
        slots = slots.astype(np.int64) if is_wide else slots
        compare(
            lambda *args: read(name, *args),
            *(case, planes(seed, case), slots, dtype),
        )

    slots = some_slots(case.num_tokens, FIRST_SLOT, case.num_rows, distinct=False)
    dtypes = st.sampled_from([None, *DTYPES])
    for_examples(name, st.tuples(seeds, slots, dtypes, st.booleans()), check)


@pytest.mark.parametrize("name", NAMES)
def test_slots_of_any_stride_and_latents_that_are_bits(name):
    case = Case(16, 8, "float32", num_tokens=3)
    planes = exact_planes(0, case)
    stored = tensors(planes, name)
    stored[0] = stored[0].view(torch.uint8)
    slots = torch.tensor([5, 6, -1, 7, 9, 8, 2**40, 0, 3, 0], device=device_of(name))[::2]
    parts = call("read_quantized", name, stored, LAYER, slots, first_slot=FIRST_SLOT)
    wanted = quantized.read(planes, LAYER, slots.tolist(), "float32")
    for part, expected in zip(parts, wanted, strict=True):
        oracles.assert_same_bits(to_numpy(part), expected)
        assert not part[1].any() and not part[3].any() and not part[4].any()


def test_a_wrong_implementation_is_caught():
    """The comparison can fail: a scale left out; a product rounded on its way."""
    case = Case(3, 2, "bfloat16", num_tokens=1)
    planes, slots = any_planes(0, case), np.array([5])
    planes[1][LAYER, 5] = 0.3

    def unscaled(case, planes, slots, dtype):
        return read(
            "reference", case, [planes[0], np.ones_like(planes[1]), planes[2]], slots, dtype
        )

    def in_bfloat16(case, planes, slots, dtype):
        scale = planes[1][LAYER, slots].astype("bfloat16")
        with np.errstate(all="ignore"):
            return [
                (plane[LAYER, slots].astype("bfloat16") * scale).astype(dtype)
                for plane in (planes[0], planes[2])
            ]

    compare(lambda *args: read("reference", *args), case, planes, slots, "float32")
    for wrong in (unscaled, in_bfloat16):
        with pytest.raises(AssertionError):
            compare(wrong, case, planes, slots, "float32")


def test_an_implementation_that_cannot_run_says_why():
    planes = tensors(exact_planes(0, Case(4, 2)), "reference")
    with pytest.raises(UnsupportedError, match=r"triton: needs .*CUDA device.* on cpu"):
        read_quantized(planes, 0, torch.tensor([4]), first_slot=4, implementation="triton")


def test_compiles_once_for_all_sizes():
    arguments = "i, f8, f, b, b, b, 1, n, n + 9, 4, 16, 8, 16, 8, 4, True"
    assert compiled.times("read_quantized", arguments, [1, 7, 16, 4096, 2**31 - 10]) == 1


@pytest.mark.parametrize("model", ["f", "b"])
def test_compiles_for_every_dtype_that_results_may_have(model):
    arguments = f"i, f8, f, {model}, n, n, 1, 7, 16, 4, 100, 28, 128, 32, 1, True"
    assert compiled.times("read_quantized", arguments, compiled.FLOATS) == 5
