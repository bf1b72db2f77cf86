"""Upstream's functions on single buffers, against NumPy."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

import kvjax
from kvjax import GeometryError
from kvjax.geometry import DTYPE_BYTES
from kvtorch.sglang import (
    copy_all_layer_kv_cache,
    copy_two_array,
    fused_downcast,
    get_mla_kv_buffer_triton,
    set_mla_kv_buffer_triton,
)
from tests import oracles
from tests.pools.junk import numbers
from tests.strategies import random_bits
from tests.torch.pools import DEVICES, slots
from tests.torch.tensors import to_numpy, to_torch

by_device = pytest.mark.parametrize("device", DEVICES)
LOC = np.array([5, 0, -1, 9, 12, 3, -12], np.int64)  # of 12 rows
DTYPES = [*DTYPE_BYTES, "uint8"]


def buffer(dtype, width=20, seed=0):
    return random_bits(seed, (12, 1, width), dtype)


@by_device
@pytest.mark.parametrize("with_1", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", ["bfloat16", "float32", None])
def test_a_mla_2_a_part_each(dtype, source, with_1, device):
    if dtype == "uint8":
        source = "uint8"
    old = buffer(dtype)
    kinds = (source or dtype, dtype)
    parts = [
        numbers(width, (len(LOC), 1, width), kind, any_bits=kind == dtype)
        if kind != "uint8"
        else random_bits(width, (len(LOC), 1, width), kind)
        for width, kind in zip((16, 4), kinds, strict=True)
    ]
    tensors = [to_torch(part, device) for part in parts]
    tensors = tensors if with_1 else [tensor.squeeze(1) for tensor in tensors]
    kv_buffer = to_torch(old, device)
    set_mla_kv_buffer_triton(kv_buffer, to_torch(LOC, device), *tensors)
    narrow = parts if dtype == "uint8" else [oracles.narrow(part, dtype) for part in parts]
    expected = oracles.write_rows(old[None], 0, LOC, np.concatenate(narrow, -1), 0)[0]
    oracles.assert_same_bits(to_numpy(kv_buffer), expected)

    outputs = [torch.empty_like(part, dtype=kv_buffer.dtype) for part in tensors]
    get_mla_kv_buffer_triton(kv_buffer, to_torch(LOC, device), *outputs)
    rows = oracles.read_rows(expected[None], 0, LOC, 0)
    for output, part in zip(outputs, np.split(rows, [16], -1), strict=True):
        oracles.assert_same_bits(to_numpy(output), part.reshape(output.shape))


def test_each_output_has_its_own_dtype():
    kv_buffer = torch.tensor([1.0, 300.0, 500.0, -1.0]).repeat(12, 1, 1)
    nope, rope = torch.empty((1, 1, 3), dtype=torch.float8_e4m3fn), torch.empty((1, 1)).half()
    get_mla_kv_buffer_triton(kv_buffer, slots(0), nope, rope)
    assert nope.float().flatten().tolist() == [1, 288, 448] and rope.item() == -1


GOOD = {
    "kv_buffer": torch.zeros((12, 1, 20)),
    "loc": slots(1, 2, 3),
    "first": torch.ones((3, 1, 16)),
    "second": torch.ones((3, 4)),
}


@pytest.mark.parametrize("function", [set_mla_kv_buffer_triton, get_mla_kv_buffer_triton])
@pytest.mark.parametrize(
    "changes, error",
    [
        ({"kv_buffer": torch.zeros((12, 1, 21))}, GeometryError),
        ({"kv_buffer": torch.zeros((12, 2, 10))}, GeometryError),
        ({"kv_buffer": torch.zeros((12, 20))}, GeometryError),
        ({"kv_buffer": torch.zeros((12, 1, 40))[..., ::2]}, GeometryError),
        ({"kv_buffer": torch.zeros((12, 1, 20), dtype=torch.uint8)}, TypeError),
        ({"kv_buffer": torch.zeros((12, 1, 20), dtype=torch.int32)}, TypeError),
        ({"first": torch.ones((2, 1, 16))}, GeometryError),
        ({"first": torch.ones((3, 2, 16))}, GeometryError),
        ({"second": torch.ones((1, 4))}, GeometryError),
        ({"second": torch.ones((3, 4), dtype=torch.uint8)}, TypeError),
        ({"second": torch.ones((3, 4), dtype=torch.float64)}, TypeError),
        ({"second": torch.ones((3, 4), device="meta")}, ValueError),
        ({"loc": slots(1, 2)}, GeometryError),
        ({"loc": slots(1, 2, 3)[None]}, ValueError),
    ],
)
def test_what_does_not_fit_is_refused(function, changes, error):
    arguments = GOOD | changes
    before = {name: value.clone() for name, value in arguments.items()}
    with pytest.raises(error):
        function(*arguments.values())
    assert all(
        torch.equal(value, before[name]) for name, value in arguments.items() if not value.is_meta
    )
    function(*(value.clone() for value in GOOD.values()))


@by_device
def test_a_mha_17_rows_move_at_once_in_every_buffer(device):
    old = [
        random_bits(i, (12, 2, width), dtype)
        for i, (width, dtype) in enumerate(
            [(8, "float16"), (8, "float16"), (3, "uint8"), (4, "float8_e5m2")]
        )
    ]
    buffers = [to_torch(plane, device) for plane in old]
    dst, src = np.array([1, 0, 2, -1, 12]), np.array([0, 1, 12, 4, 5])
    copy_all_layer_kv_cache(buffers, to_torch(dst, device), to_torch(src, device))
    for tensor, plane in zip(buffers, old, strict=True):
        expected = oracles.move_rows(plane[None], dst, src, 0)[0]
        oracles.assert_same_bits(to_numpy(tensor), expected)
    copy_all_layer_kv_cache([], slots(1), slots(2))
    with pytest.raises(ValueError, match="tgt_loc has 2 entries, src_loc 1"):
        copy_all_layer_kv_cache(buffers, slots(1, 2, device=device), slots(3, device=device))
    with pytest.raises(GeometryError, match="rows; need as many"):
        copy_all_layer_kv_cache([buffers[0], buffers[1][:5]], slots(1), slots(2))
    with pytest.raises(GeometryError, match=r"buffers\[1\] has .* contiguous"):
        copy_all_layer_kv_cache([buffers[0], buffers[1].mT], slots(1), slots(2))


@by_device
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("source", ["float32", "bfloat16"])
def test_a_rm_10_scaled_clamped_and_cast(dtype, source, device):
    k, v = (np.clip(numbers(seed, (5, 2, 8), source, any_bits=False), -1e4, 1e4) for seed in (0, 1))
    tensors = [to_torch(x, device) for x in (k, v)]
    scales = (0.3, torch.tensor(1.7, device=device))
    kind, limit = getattr(torch, dtype), 200.0
    result = fused_downcast(*tensors, *scales, kind, torch.uint8, limit, -limit)
    for tensor, got, x, scale in zip(tensors, result, (k, v), (0.3, 1.7), strict=True):
        clamped = np.clip(x.astype(np.float32) / np.float32(scale), -limit, limit)
        expected = oracles.narrow(clamped, dtype).view(np.uint8)
        oracles.assert_same_bits(to_numpy(got), expected)
        oracles.assert_same_bits(to_numpy(tensor), x)  # out of place
    unscaled = fused_downcast(*tensors, None, None, kind, kind, limit, -limit)
    expected = oracles.narrow(np.clip(k.astype(np.float32), -limit, limit), dtype)
    oracles.assert_same_bits(to_numpy(unscaled[0]), expected)


@by_device
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_a_rm_11_two_arrays_at_once(dtype, device):
    store = "uint8" if dtype.startswith("float8") else dtype
    old = [random_bits(i, (12, 2, width), store) for i, width in enumerate((8, 4))]
    new = [
        numbers(i, (len(LOC), *x.shape[1:]), "float32", any_bits=False) for i, x in enumerate(old)
    ]
    dst, src = ([to_torch(x, device) for x in arrays] for arrays in (old, new))
    dtypes = getattr(torch, dtype), getattr(torch, store)
    copy_two_array(to_torch(LOC, device), dst[0], src[0], dst[1], src[1], *dtypes)
    for tensor, plane, rows in zip(dst, old, new, strict=True):
        narrow = oracles.narrow(rows, dtype).view(plane.dtype)
        expected = oracles.write_rows(plane[None], 0, LOC, narrow, 0)[0]
        oracles.assert_same_bits(to_numpy(tensor), expected)


@pytest.mark.parametrize(
    "src, dst_dtype, dtype, store, error",
    [
        (torch.ones((1, 2, 4)), torch.uint8, torch.float16, torch.uint8, GeometryError),
        (torch.ones((1, 2, 4)), torch.uint8, torch.float8_e5m2, torch.float8_e5m2, GeometryError),
        (torch.ones((1, 2, 4)), torch.float16, torch.float16, torch.float16, GeometryError),
        (torch.ones((2, 2, 4)).int(), torch.float16, torch.float16, torch.float16, TypeError),
    ],
)
def test_a_rm_11_what_does_not_fit_is_refused_before_anything_is_written(
    src, dst_dtype, dtype, store, error
):
    first = torch.zeros((12, 2, 4), dtype=store)
    second = torch.zeros((12, 2, 4), dtype=dst_dtype)
    with pytest.raises(error):
        copy_two_array(slots(1, 2), first, torch.ones((2, 2, 4)), second, src, dtype, store)
    assert not first.view(torch.uint8).any()


def test_checks_mode_names_the_row():
    with kvjax.checks(), pytest.raises(IndexError, match=r"loc\[1\]=12 .* 0..11"):
        set_mla_kv_buffer_triton(GOOD["kv_buffer"], slots(0, 12, 1), *list(GOOD.values())[2:])


def test_the_comparison_can_fail():
    old = buffer("float16")
    with pytest.raises(AssertionError):
        oracles.assert_same_bits(to_numpy(to_torch(old)), oracles.zero_rows(old[None], [3], 0)[0])
