"""Torch pools of latent rows: what engines read of them, and writes as engines may make them."""

import dataclasses
import inspect

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

import kvjax
from kvjax import GeometryError
from kvjax.geometry import DTYPE_BYTES
from kvtorch.pools.mla import MLATokenToKVPool
from tests import oracles
from tests.equivalence.upstream import require_sglang
from tests.interop.torch_pools import GEOMETRIES, assert_holds, junk_pool
from tests.pools.junk import numbers
from tests.strategies import seeds, some_slots
from tests.torch.pools import DEVICES, Counter, Layer, mla, slots
from tests.torch.tensors import LAYOUTS, to_numpy, to_torch

MLA = GEOMETRIES["mla"]
NUM_TOKENS = 5
SOURCES = [("float32", "bfloat16"), ("float16", "float32"), ("float8_e4m3fn", "bfloat16")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("source", [*SOURCES, None], ids=lambda x: "+".join(x or ["same"]))
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@settings(max_examples=8)
@given(data=st.data())
def test_a_mla_10_parts_are_cast_each_by_itself(dtype, source, device, data):
    geometry = dataclasses.replace(MLA, dtype=dtype)
    pool, (plane,) = junk_pool(geometry, device=device)
    layer_id = data.draw(st.integers(2, 4))
    loc = data.draw(some_slots(NUM_TOKENS, geometry.first_slot, geometry.num_rows))
    loc = loc.astype(data.draw(st.sampled_from([np.int32, np.int64])))
    layout = data.draw(st.sampled_from(LAYOUTS))
    given_values = [
        numbers(data.draw(seeds), (NUM_TOKENS, 1, width), kind, any_bits=kind == dtype)
        for width, kind in zip((16, 4), source or (dtype, dtype), strict=True)
    ]
    tensors = [layout(to_torch(part, device), 2) for part in given_values]
    without_1 = data.draw(st.booleans())
    pool.set_mla_kv_buffer(
        Layer(layer_id),
        to_torch(loc, device),
        *(tensor.squeeze(1) if without_1 else tensor for tensor in tensors),
    )
    row = np.concatenate([oracles.narrow(part, dtype) for part in given_values], -1)
    plane = oracles.write_rows(plane, layer_id - 2, loc, row, geometry.first_slot)
    assert_holds(pool, [plane])
    for tensor, part in zip(tensors, given_values, strict=True):
        oracles.assert_same_bits(to_numpy(tensor), part)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("source", ["float32", "bfloat16", "float8_e5m2", None])
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@settings(max_examples=5)
@given(data=st.data())
def test_a_mla_9_whole_rows(dtype, source, device, data):
    geometry = dataclasses.replace(MLA, dtype=dtype)
    pool, (plane,) = junk_pool(geometry, device=device)
    layer_id = data.draw(st.integers(2, 4))
    loc = data.draw(some_slots(NUM_TOKENS, geometry.first_slot, geometry.num_rows))
    kind = source or dtype
    rows = numbers(data.draw(seeds), (NUM_TOKENS, 1, 20), kind, any_bits=kind == dtype)
    tensor = data.draw(st.sampled_from(LAYOUTS))(to_torch(rows, device), 2)
    v = data.draw(st.sampled_from([None, tensor[..., :16]]))
    pool.set_kv_buffer(Layer(layer_id), to_torch(loc, device), tensor, v)
    new = oracles.narrow(rows, dtype)
    assert_holds(pool, [oracles.write_rows(plane, layer_id - 2, loc, new, geometry.first_slot)])
    oracles.assert_same_bits(to_numpy(tensor), rows)


def test_the_comparison_can_fail():
    pool, planes = junk_pool(MLA)
    pool.kv_buffer[1].view(torch.uint8)[7, 0, 3] ^= 1
    with pytest.raises(AssertionError):
        assert_holds(pool, planes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("to", [None, *DTYPE_BYTES])
def test_get_mla_kv_buffer_copies_the_two_parts(dtype, to, device):
    geometry = dataclasses.replace(MLA, dtype=dtype)
    pool, _ = junk_pool(geometry, device=device)
    rows = numbers(0, (3, 24, 1, 20), dtype, any_bits=to in (None, dtype))
    rows[:, : geometry.first_slot] = 0
    pool.planes[0].copy_(to_torch(oracles.bits(rows) if pool.store_dtype == torch.uint8 else rows))
    loc = np.array([7, 3, 23, -1, 7, 24, 4, -4])
    pool.register_layer_transfer_counter(counter := Counter())
    parts = pool.get_mla_kv_buffer(
        Layer(4), torch.from_numpy(loc).to(device), to and getattr(torch, to)
    )
    assert counter.waits == [2]
    read = oracles.read_rows(rows, 2, loc, geometry.first_slot)
    read = oracles.narrow(read, read.dtype if to is None else np.dtype(to))
    for part, expected in zip(parts, np.split(read, [16], -1), strict=True):
        oracles.assert_same_bits(to_numpy(part), expected)
    with pytest.raises(GeometryError, match="layer_id=5"):
        pool.get_mla_kv_buffer(Layer(5), slots(4, device=device))
    with kvjax.checks(), pytest.raises(IndexError, match=r"loc\[1\]=3"):
        pool.get_mla_kv_buffer(Layer(4), slots(4, 3, device=device))


def test_a_kv_6_the_padding_page_reads_as_zeros_whatever_is_there():
    pool, _ = junk_pool(MLA)
    pool.planes[0].fill_(1)
    for part in pool.get_mla_kv_buffer(Layer(3), slots(3, 4)):
        assert not part[0].any() and part[1].all()


ONES = torch.ones((3, 1, 20))
LATENT, ROPE = ONES[..., :16], ONES[..., :4]
GOOD = {"loc": slots(4, 5, 6), "cache_k_nope": LATENT, "cache_k_rope": ROPE}
GOOD_ROWS = {"loc": slots(4, 5, 6), "cache_k": ONES, "cache_v": None}


@pytest.mark.parametrize(
    "method, argument, value, error, message",
    [
        (0, "cache_k", ONES[:1], GeometryError, r"cache_k has shape \[1, 1, 20\], need \[3, 1"),
        (0, "cache_k", ONES[:, 0], GeometryError, r"\[3, 20\], need \[3, 1, 20\]"),
        (0, "cache_k", LATENT, GeometryError, r"\[3, 1, 16\], need"),
        (0, "cache_k", ONES.double(), TypeError, "cache_k has dtype torch.float64"),
        (0, "cache_k", ONES.byte(), TypeError, "cache_k has dtype torch.uint8"),
        (0, "cache_k", ONES.to("meta"), ValueError, "cache_k is on meta"),
        (0, "loc", slots(4, 5), GeometryError, r"need \[2, 1, 20\]"),
        (0, "loc", slots(4, 5, 6)[None], ValueError, "loc has shape"),
        (1, "cache_k_nope", LATENT[:1], GeometryError, r"cache_k_nope has shape \[1, 1, 16\]"),
        (1, "cache_k_nope", LATENT[:1, 0], GeometryError, r"\[1, 16\], need \[3, 16\]"),
        (1, "cache_k_nope", ROPE, GeometryError, r"cache_k_nope has shape \[3, 1, 4\]"),
        (1, "cache_k_nope", LATENT.repeat(1, 2, 1), GeometryError, r"\[3, 2, 16\], need"),
        (1, "cache_k_rope", ROPE[:2], GeometryError, r"cache_k_rope has shape \[2, 1, 4\]"),
        (1, "cache_k_rope", LATENT, GeometryError, r"cache_k_rope has shape \[3, 1, 16\]"),
        (1, "cache_k_rope", ROPE.long(), TypeError, "cache_k_rope has dtype torch.int64"),
        (1, "cache_k_rope", None, TypeError, "cache_k_rope is <class 'NoneType'>"),
        (1, "cache_k_rope", ROPE.to("meta"), ValueError, "cache_k_rope is on meta"),
        (1, "loc", slots(4), GeometryError, r"cache_k_nope has shape \[3, 1, 16\], need \[1"),
    ],
)
def test_a_mla_9_a_mla_10_whatever_does_not_fit_is_refused_before_anything_changes(
    method, argument, value, error, message
):
    pool, planes = junk_pool(MLA)
    call, good = [(pool.set_kv_buffer, GOOD_ROWS), (pool.set_mla_kv_buffer, GOOD)][method]
    with pytest.raises(error, match=message):
        call(Layer(3), **good | {argument: value})
    with pytest.raises(GeometryError, match="layer_id=1"):
        call(Layer(1), **good)
    assert_holds(pool, planes)
    call(Layer(3), **good)  # nothing else stood against it
    assert pool.get_key_buffer(3)[6, 0, 19] == 1


def test_a_mla_10_the_layer_is_the_models():
    pool, planes = junk_pool(MLA)  # of layers 2 to 4
    pool.set_mla_kv_buffer(Layer(2), **GOOD)
    for layer_id, changed in ((2, True), (3, False), (4, False)):
        same = oracles.same_bits(to_numpy(pool.get_key_buffer(layer_id)), planes[0][layer_id - 2])
        assert same != changed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("device", DEVICES)
def test_a_mla_3_a_mla_6_a_mla_7_buffers_are_views_of_the_plane(dtype, device):
    pool = mla(8, 4, dtype, 16, 4, 3, device, start_layer=1)
    assert type(pool.kv_buffer) is list and len(pool.kv_buffer) == 3
    for layer, buffer in zip(pool.planes[0], pool.kv_buffer, strict=True):
        assert (buffer.shape, buffer.dtype) == ((12, 1, 20), pool.store_dtype)
        assert buffer.data_ptr() == layer.data_ptr() and not buffer.any()
    k, v = pool.get_kv_buffer(2)
    assert (k.dtype, v.dtype, k.shape, v.shape) == (dtype, dtype, (12, 1, 20), (12, 1, 16))
    assert k.is_contiguous() and v.stride() == k.stride()
    assert k.data_ptr() == v.data_ptr() == pool.kv_buffer[1].data_ptr()
    v.view(torch.uint8)[7] = 1
    width = 16 * dtype.itemsize
    assert (pool.kv_buffer[1].view(torch.uint8)[7, 0, :width] == 1).all()
    assert pool.kv_buffer[1].any(-1).sum() == 1
    assert (pool.kv_lora_rank, pool.qk_rope_head_dim) == (16, 4)


def test_a_mla_4_bytes_of_all_rows():
    size = mla(8, 4, torch.bfloat16, 16, 4, 3).get_kv_size_bytes()
    assert type(size) is int and size == 3 * 12 * 20 * 2


def test_signatures_are_upstreams():
    upstream = require_sglang().MLATokenToKVPool
    for name, method in inspect.getmembers(upstream, inspect.isfunction):
        wanted = inspect.signature(method).parameters
        if name != "transfer":  # whose decorator hides its parameters
            ours = inspect.signature(getattr(MLATokenToKVPool, name)).parameters
            assert list(ours)[: len(wanted)] == list(wanted), name
            assert [ours[x].default for x in wanted] == [p.default for p in wanted.values()]
