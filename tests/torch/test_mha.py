"""Torch pools of K and V: what engines read of them, and writes as engines may make them."""

import dataclasses
import inspect

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

from kvjax import GeometryError
from kvjax.geometry import DTYPE_BYTES
from kvtorch.pools.mha import MHATokenToKVPool
from tests import oracles
from tests.equivalence.upstream import require_sglang
from tests.interop.torch_pools import GEOMETRIES, assert_holds, junk_pool
from tests.pools.junk import numbers
from tests.strategies import seeds, some_slots
from tests.torch.pools import DEVICES, Layer, mha, slots
from tests.torch.tensors import LAYOUTS, to_numpy, to_torch

MHA = GEOMETRIES["mha"]
NUM_TOKENS = 5
PAIRS = [(dtype, dtype) for dtype in DTYPE_BYTES]
PAIRS += [("bfloat16", "float8_e4m3fn"), ("float8_e5m2", "float32"), ("float16", "bfloat16")]
SOURCES = [("float32", "bfloat16"), ("float16", "float32"), ("float8_e5m2", "float8_e4m3fn")]

kinds_of_scale = st.sampled_from(
    [
        lambda scale, device: scale,
        lambda scale, device: np.float32(scale),
        lambda scale, device: torch.tensor(scale, device=device),
        lambda scale, device: torch.tensor([scale], device=device),
        lambda scale, device: torch.tensor(scale, dtype=torch.float64),
        lambda scale, device: torch.nn.Parameter(torch.tensor(scale, device=device)),
        lambda scale, device: None,
    ]
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("source", [*SOURCES, None], ids=lambda x: "+".join(x or ["same"]))
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
@settings(max_examples=8)
@given(data=st.data())
def test_a_mha_14_equals_the_oracle(pair, source, device, data):
    geometry = dataclasses.replace(MHA, dtype=pair[0], v_dtype=pair[1])
    pool, planes = junk_pool(geometry, device=device)
    layer_id = data.draw(st.integers(2, 4))
    loc = data.draw(some_slots(NUM_TOKENS, geometry.first_slot, geometry.num_rows))
    loc = loc.astype(data.draw(st.sampled_from([np.int32, np.int64])))
    layout = data.draw(st.sampled_from(LAYOUTS))
    given_values, scales, expected = [], [], []
    for spec, dtype, plane in zip(geometry.planes, source or pair, planes, strict=True):
        new = numbers(
            data.draw(seeds), (NUM_TOKENS, *spec.row_shape), dtype, any_bits=dtype == spec.dtype
        )
        number = data.draw(st.floats(0.125, 8, width=32))
        scales.append(data.draw(kinds_of_scale)(number, device))
        given_values.append(new)
        new = oracles.narrow(new, spec.dtype, None if scales[-1] is None else number)
        expected.append(oracles.write_rows(plane, layer_id - 2, loc, new, geometry.first_slot))
    tensors = [layout(to_torch(new, device), 2) for new in given_values]

    where = to_torch(loc, device)
    assert pool.set_kv_buffer(Layer(layer_id), where, *tensors, *scales) is None
    assert_holds(pool, expected)
    for tensor, new in zip([where, *tensors], [loc, *given_values], strict=True):
        oracles.assert_same_bits(to_numpy(tensor), new)


def test_the_comparison_can_fail():
    pool, planes = junk_pool(MHA)
    pool.v_buffer[1].view(torch.uint8)[7, 1, 3] ^= 1
    with pytest.raises(AssertionError):
        assert_holds(pool, planes)


ONES = torch.ones((3, 2, 8))
GOOD = {"loc": slots(4, 5, 6), "cache_k": ONES, "cache_v": torch.ones((3, 2, 16))}


@pytest.mark.parametrize(
    "argument, value, error, message",
    [
        ("cache_k", ONES[:1], GeometryError, r"cache_k has shape \[1, 2, 8\], need \[3, 2, 8\]"),
        ("cache_k", ONES[:, :1], GeometryError, r"\[3, 1, 8\], need"),
        ("cache_k", ONES[..., :1], GeometryError, r"\[3, 2, 1\], need"),
        ("cache_k", ONES.flatten(1), GeometryError, r"\[3, 16\], need"),
        ("cache_k", ONES[:, 0], GeometryError, r"\[3, 8\], need"),
        ("cache_k", torch.tensor(1.0), GeometryError, r"\[\], need"),
        ("cache_k", torch.ones((5, 2, 8)), GeometryError, r"\[5, 2, 8\], need"),
        ("cache_v", ONES, GeometryError, r"cache_v has shape \[3, 2, 8\], need \[3, 2, 16\]"),
        ("cache_v", None, TypeError, "cache_v is <class 'NoneType'>, need a tensor"),
        ("cache_k", np.ones((3, 2, 8), np.float32), TypeError, "cache_k is .*ndarray"),
        ("cache_k", ONES.double(), TypeError, "cache_k has dtype torch.float64"),
        ("cache_k", ONES.int(), TypeError, "cache_k has dtype torch.int32"),
        ("cache_k", ONES.byte(), TypeError, "cache_k has dtype torch.uint8"),
        ("cache_v", GOOD["cache_v"].to("meta"), ValueError, "cache_v is on meta"),
        ("loc", slots(4, 5), GeometryError, r"cache_k has shape \[3, 2, 8\], need \[2, 2, 8\]"),
        ("loc", slots(), GeometryError, r"need \[0, 2, 8\]"),
        ("loc", slots(4, 5, 6)[:, None], ValueError, r"loc has shape \[3, 1\]"),
        ("loc", [4, 5, 6], TypeError, "loc is <class 'list'>"),
        ("loc", slots(4, 5, 6).to("meta"), ValueError, "loc is on meta"),
        ("k_scale", torch.ones(2), ValueError, r"k_scale has shape \[2\]"),
        ("k_scale", torch.ones((1, 1)), ValueError, r"k_scale has shape \[1, 1\]"),
        ("v_scale", torch.ones(1).to("meta"), ValueError, "v_scale is on meta"),
        ("v_scale", "2", TypeError, "v_scale is <class 'str'>"),
        ("v_scale", [2.0], TypeError, "v_scale is <class 'list'>"),
        ("k_scale", 0, ValueError, "k_scale=0.0 cannot be divided by"),
        ("k_scale", torch.tensor(0.0), ValueError, "k_scale=0.0 cannot be divided by"),
        ("k_scale", float("inf"), ValueError, "k_scale=inf"),
        ("v_scale", float("nan"), ValueError, "v_scale=nan"),
        ("v_scale", 1e-50, ValueError, "v_scale=1e-50"),
        ("v_scale", -1e39, ValueError, "v_scale=-1e"),
    ],
)
def test_a_mha_14_whatever_does_not_fit_is_refused_before_anything_changes(
    argument, value, error, message
):
    pool, planes = junk_pool(MHA)
    with pytest.raises(error, match=message):
        pool.set_kv_buffer(Layer(3), **GOOD | {argument: value})
    assert_holds(pool, planes)
    pool.set_kv_buffer(Layer(3), **GOOD)  # nothing else stood against it
    assert pool.get_value_buffer(3)[6, 1, 15] == 1


def test_a_mha_14_a_scale_may_be_any_other_number():
    pool = mha(8, 4, torch.float8_e4m3fn, 1, 4, 1)
    for scale in (2, -0.5, True, np.float64(4), 2.0**-149, 3e38):
        pool.set_kv_buffer(Layer(0), slots(4), ONES[:1, :1, :4], ONES[:1, :1, :4], 1.0, scale)
        expected = oracles.narrow(np.ones(4, np.float32), "float8_e4m3fn", scale)
        oracles.assert_same_bits(to_numpy(pool.get_value_buffer(0)[4, 0]), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_mha_14_a_graph_of_gradients_ends_before_the_pool(device):
    pool = mha(8, 4, torch.float16, 1, 4, 1, device)
    k, v = (torch.ones((1, 1, 4), device=device, requires_grad=True) for _ in range(2))
    scale = torch.ones(1, device=device, requires_grad=True)
    pool.set_kv_buffer(Layer(0), slots(4, device=device), k * 2, v, scale, scale)
    assert not any(plane.requires_grad for plane in pool.planes)
    assert pool.get_key_buffer(0)[4].flatten().tolist() == [2] * 4


@pytest.mark.gpu
def test_a_mha_14_tensors_of_another_device_are_refused():
    pool, planes = junk_pool(MHA, device="cuda")
    on_gpu = {name: value.cuda() for name, value in GOOD.items()}
    for argument in ("cache_k", "cache_v"):
        with pytest.raises(ValueError, match=f"{argument} is on cpu, need cuda:0"):
            pool.set_kv_buffer(Layer(3), **on_gpu | {argument: GOOD[argument]})
    assert_holds(pool, planes)


def test_a_mha_1_attributes():
    pool = MHATokenToKVPool(
        size=12,
        page_size=4,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=8,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
        start_layer=5,
        end_layer=8,
    )
    expected = {
        "size": 12,
        "page_size": 4,
        "dtype": torch.bfloat16,
        "store_dtype": torch.bfloat16,
        "head_num": 2,
        "head_dim": 8,
        "layer_num": 3,
        "device": "cpu",
        "start_layer": 5,
        "end_layer": 8,
        "cpu_offloading_chunk_size": 8192,
        "enable_custom_mem_pool": False,
        "custom_mem_pool": None,
        "layer_transfer_counter": None,
        "alt_stream": None,
        "device_module": torch.cpu,
    }
    assert {name: getattr(pool, name) for name in expected} == expected
    assert pool.maybe_get_custom_mem_pool() is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("device", DEVICES)
def test_a_mha_2_buffers_are_views_of_the_planes(dtype, device):
    pool = mha(8, 4, dtype, 2, 16, 3, device, start_layer=1)
    for buffers, plane in zip((pool.k_buffer, pool.v_buffer), pool.planes, strict=True):
        assert type(buffers) is list and len(buffers) == 3
        for layer, buffer in zip(plane, buffers, strict=True):
            assert (buffer.shape, buffer.dtype) == ((12, 2, 16), pool.store_dtype)
            assert buffer.is_contiguous() and not buffer.any()
            assert buffer.data_ptr() == layer.data_ptr()
    buffers = pool.k_buffer + pool.v_buffer
    assert pool.data_ptrs.dtype == torch.uint64 and pool.data_strides.dtype == torch.int64
    assert pool.data_ptrs.tolist() == [buffer.data_ptr() for buffer in buffers]
    assert pool.data_strides.tolist() == [32 * dtype.itemsize] * 6
    assert {pool.data_ptrs.device, pool.data_strides.device} == {buffers[0].device}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2])
def test_a_mha_12_a_mha_13_getters_give_the_live_buffer(dtype):
    pool = mha(8, 4, dtype, 2, 16, 3, start_layer=1)
    k, v = pool.get_kv_buffer(2)
    assert k.dtype == v.dtype == dtype
    assert k.data_ptr() == pool.get_key_buffer(2).data_ptr() == pool.k_buffer[1].data_ptr()
    assert v.data_ptr() == pool.get_value_buffer(2).data_ptr() == pool.v_buffer[1].data_ptr()
    k.view(torch.uint8)[7] = 1
    assert (pool.k_buffer[1][7].view(torch.uint8) == 1).all()
    if dtype == torch.float16:
        assert k is pool.k_buffer[1]


def test_a_mha_4_bytes_of_k_and_of_v():
    pool = mha(8, 4, torch.bfloat16, 2, 8, 3, v_head_dim=4, v_dtype=torch.float8_e4m3fn)
    assert pool.get_kv_size_bytes() == (3 * 12 * 2 * 8 * 2, 3 * 12 * 2 * 4)
    assert all(type(size) is int for size in pool.get_kv_size_bytes())


def test_v_may_differ_from_k():
    pool = mha(8, 4, torch.bfloat16, 2, 8, 1, v_head_dim=4, v_dtype=torch.float8_e4m3fn)
    assert pool.k_buffer[0].shape == (12, 2, 8) and pool.v_buffer[0].shape == (12, 2, 4)
    assert pool.get_key_buffer(0).dtype == pool.store_dtype == torch.bfloat16
    assert pool.v_buffer[0].dtype == torch.uint8
    assert pool.get_value_buffer(0).dtype == torch.float8_e4m3fn
    assert pool.data_strides.tolist() == [32, 8]
    k, v = pool.get_flat_data(slots(4))
    assert (k.dtype, v.dtype) == (torch.bfloat16, torch.uint8)


def test_signatures_are_upstreams():
    upstream = require_sglang().MHATokenToKVPool
    for name, method in inspect.getmembers(upstream, inspect.isfunction):
        wanted = inspect.signature(method).parameters
        if name != "transfer":  # whose decorator hides its parameters
            ours = inspect.signature(getattr(MHATokenToKVPool, name)).parameters
            assert list(ours)[: len(wanted)] == list(wanted), name
            assert [ours[x].default for x in wanted] == [p.default for p in wanted.values()]


@pytest.mark.gpu
@pytest.mark.parametrize("pair", [("bfloat16",) * 2, ("float8_e4m3fn",) * 2])
def test_the_gpu_writes_what_the_cpu_writes(pair):
    geometry = dataclasses.replace(MHA, num_slots=4000, dtype=pair[0], v_dtype=pair[1])
    pools = [junk_pool(geometry, device=device)[0] for device in ("cpu", "cuda")]
    rng = np.random.default_rng(0)
    loc = rng.permutation(geometry.num_rows)[:3000]
    k, v = (
        rng.normal(size=(3000, *spec.row_shape)).astype(np.float32) * 300
        for spec in geometry.planes
    )
    for pool in pools:
        tensors = [torch.from_numpy(x).to(pool.device) for x in (loc, k, v)]
        scales = [torch.tensor(0.7, device=pool.device), 1.3]
        pool.set_kv_buffer(Layer(3), *tensors, *scales)
    for ours, theirs in zip(*(pool.planes for pool in pools), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.cpu().view(torch.uint8))
