"""read_quantized_kv of kvtorch against NumPy's products and ml_dtypes' casts."""

import hypothesis.strategies as st
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

from kvjax.errors import UnsupportedError
from kvtorch.ops.read_quantized_kv import read_quantized_kv
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
from tests.torch.quantized import FIRST_SLOT, FP8, INT8, LAYER, STORED, KvCase, assert_same_numbers
from tests.torch.tensors import to_numpy

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


def any_planes(seed, case):
    """Any bits, but scales that a write could have made, and some that it could not."""
    planes = random_rows(seed, case.rows, quantized.NUM_LAYERS, case.num_rows)
    rng = np.random.default_rng(seed)
    for i in (1, 3):
        scales = planes[i]
        made = 10.0 ** rng.uniform(-28, 36, scales.shape)
        made = np.where(rng.random(scales.shape) < 0.8, made, scales).astype("f4")
        planes = (*planes[:i], made, *planes[i + 1 :])
    return planes


def exact_planes(seed, case):
    """Products that all dtypes have."""
    rng = np.random.default_rng(seed)
    planes = []
    for i, (row, dtype) in enumerate(case.rows):
        shape = (quantized.NUM_LAYERS, case.num_rows, *row)
        plane = 2.0 ** rng.integers(-2, 3, shape) if i % 2 else rng.integers(-8, 9, shape)
        planes.append(plane.astype(dtype))
    return planes


def read(name, case, planes, slots, dtype):
    *stored, indices = tensors([*planes, slots], name)
    parts = call(
        *("read_quantized_kv", name, stored, LAYER, indices),
        first_slot=FIRST_SLOT,
        dtype=getattr(torch, dtype),
        constants=case.constants,
    )
    for tensor, expected in zip([*stored, indices], [*planes, slots], strict=True):
        oracles.assert_same_bits(to_numpy(tensor), expected)
    assert all(part.is_contiguous() for part in parts)
    return [to_numpy(part) for part in parts]


def compare(read, case, planes, slots, dtype):
    wanted = quantized.read_kv(planes, LAYER, slots, np.dtype(dtype))
    for actual, expected in zip(read(case, planes, slots, dtype), wanted, strict=True):
        assert_same_numbers(actual, expected)


@on_cases(
    reference=quantized.KV_REFERENCE,
    interpreted=quantized.KV_INTERPRETED,
    gpu=quantized.KV_FOR_GPU[:14],
    reference_on_gpu=quantized.KV_REFERENCE_ON_GPU,
)
def test_equals_oracle(name, case):
    # Triton's interpreter rounds where a GPU does not: there, numbers that need no rounding.
    planes = exact_planes if name == INTERPRETED else any_planes

    def check(seed, slots, dtype, is_wide):
        slots = slots.astype(np.int64) if is_wide else slots
        compare(lambda *args: read(name, *args), case, planes(seed, case), slots, dtype)

    slots = some_slots(case.num_tokens, FIRST_SLOT, case.num_rows, distinct=False)
    for_examples(name, st.tuples(seeds, slots, st.sampled_from(DTYPES), st.booleans()), check)


@pytest.mark.parametrize("name", NAMES)
def test_any_int8_and_any_scale_into_float32(name):
    """No cast is left to round, so that Triton's interpreter can be asked, too."""
    case = KvCase(INT8, 3, 20, 12, num_tokens=40)
    slots = np.arange(FIRST_SLOT, FIRST_SLOT + 40)
    compare(lambda *args: read(name, *args), case, any_planes(0, case), slots, "float32")


@pytest.mark.parametrize("name", NAMES)
def test_slots_of_any_stride_and_fp8_that_is_bits(name):
    case = KvCase(FP8, 2, 16, 8, "float32", 3)
    planes = exact_planes(0, case)
    stored = tensors(planes, name)
    stored = [plane.view(torch.uint8) if i % 2 == 0 else plane for i, plane in enumerate(stored)]
    slots = torch.tensor([5, 6, -1, 7, 9, 8, 2**40, 0, 3, 0], device=device_of(name))[::2]
    parts = call(
        *("read_quantized_kv", name, stored, LAYER, slots),
        first_slot=FIRST_SLOT,
        dtype=torch.float32,
    )
    wanted = quantized.read_kv(planes, LAYER, slots.tolist(), "float32")
    for part, expected in zip(parts, wanted, strict=True):
        oracles.assert_same_bits(to_numpy(part), expected)
        assert not part[1].any() and not part[3].any() and not part[4].any()


@pytest.mark.parametrize("stored", STORED)
def test_a_wrong_implementation_is_caught(stored):
    """The comparison can fail: a scale of another head; a product rounded on its way."""
    case = KvCase(stored, 3, 4, 2, num_tokens=1)
    planes, slots = list(any_planes(0, case)), np.array([5])
    for i in (1, 3):
        planes[i][LAYER, 5] = np.float32([[0.3], [0.7], [1.1]])

    def of_another_head(case, planes, slots, dtype):
        planes = [np.roll(plane, i % 2, axis=2) for i, plane in enumerate(planes)]
        return read("reference", case, planes, slots, dtype)

    def in_bfloat16(case, planes, slots, dtype):
        k, k_scale, v, v_scale = (plane[LAYER, slots].astype("bfloat16") for plane in planes)
        return [(part * scale).astype(dtype) for part, scale in ((k, k_scale), (v, v_scale))]

    compare(lambda *args: read("reference", *args), case, planes, slots, "float32")
    for wrong in (of_another_head, in_bfloat16):
        with pytest.raises(AssertionError):
            compare(wrong, case, planes, slots, "float32")


def test_an_implementation_that_cannot_run_says_why():
    planes = tensors(exact_planes(0, KvCase(INT8, 2, 4, 4)), "reference")
    slots = torch.tensor([4])
    with pytest.raises(UnsupportedError, match=r"triton: needs .*CUDA device.* on cpu"):
        read_quantized_kv(
            *(planes, 0, slots), first_slot=4, dtype=torch.float32, implementation="triton"
        )


@pytest.mark.parametrize("stored", ["torch.int8", "f8"])
def test_compiled_reads_and_writes_are_wide(stored):
    """And a scale is read once by a thread, not once for each element."""
    arguments = f"i, {stored}, f, {stored}, f, b, b, 1, n, n + 9, 4, 8, 128, 128, 128, 16, True"
    code = compiled.code("read_quantized_kv", arguments)
    assert code.count("ld.global.v4.b32") >= 1
    assert code.count("st.global.v4.b32") >= 2
    assert code.count("ld.global.b32") <= 2
    for word in ("ld.global.b8", "st.global.b16", "ftz"):
        assert word not in code, word


@pytest.mark.parametrize("stored", ["torch.int8", "f8"])
def test_compiles_for_every_dtype_that_results_may_have(stored):
    arguments = f"i, {stored}, f, {stored}, f, n, n, 1, 7, 16, 4, 3, 100, 28, 128, 4, True"
    assert compiled.times("read_quantized_kv", arguments, compiled.FLOATS) == 5
