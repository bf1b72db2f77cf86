"""Torch pools of K and V in 8 bits: what engines write and read, and where rows take their scales.

What holds for every pool is in test_kv_cache.py, which has these among its geometries.
"""

import dataclasses
import inspect

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

import kvjax
import kvtorch
from kvjax import GeometryError
from kvtorch.pools.kv_cache import KVCache
from kvtorch.pools.mha import MHATokenToKVPool
from kvtorch.pools.quantized_mha import QuantizedMHATokenToKVPool
from tests import oracles
from tests.interop.torch_pools import GEOMETRIES, assert_holds, junk_pool, zero_pool
from tests.strategies import seeds, some_slots
from tests.torch import quantized
from tests.torch.pools import DEVICES, Counter, Layer, slots
from tests.torch.quantized import KvCase, assert_same_numbers
from tests.torch.tensors import LAYOUTS, to_numpy, to_torch

INT8, FP8 = (GEOMETRIES[f"mha, {name}"] for name in ("int8", "fp8"))
SOURCES = ["float32", "bfloat16", "float16", "float8_e5m2"]
MODELS = ["float32", "bfloat16", "float16"]
NUM_TOKENS = 5

by_geometry = pytest.mark.parametrize("geometry", [INT8, FP8], ids=["int8", "fp8"])
by_device = pytest.mark.parametrize("device", DEVICES)


def pool_of(geometry=INT8, device="cpu", **changes):
    """A pool by its constructor, of two layers, of 12 slots in pages of 4."""
    options = {
        "size": 12,
        "page_size": 4,
        "dtype": torch.bfloat16,
        "head_num": 2,
        "head_dim": 8,
        "layer_num": 2,
        "device": device,
        "enable_memory_saver": False,
        "quantization": geometry.quantization,
    }
    return QuantizedMHATokenToKVPool(**options | changes)


@by_device
@by_geometry
@pytest.mark.parametrize("source", SOURCES)
@settings(max_examples=8)
@given(data=st.data())
def test_writes_and_reads_equal_the_oracle(source, geometry, device, data):
    model = data.draw(st.sampled_from(MODELS))
    geometry = dataclasses.replace(geometry, dtype=model, v_dtype=model)
    pool, planes = junk_pool(geometry, device=device)
    layer_id = data.draw(st.integers(2, 4))
    loc = data.draw(some_slots(NUM_TOKENS, geometry.first_slot, geometry.num_rows))
    loc = loc.astype(data.draw(st.sampled_from([np.int32, np.int64])))
    layout = data.draw(st.sampled_from(LAYOUTS))
    case = KvCase(quantized.INT8, 2, 8, 16, source, NUM_TOKENS)
    values = quantized.any_heads(data.draw(seeds), case)
    k, v = (layout(to_torch(part, device), 2) for part in values)

    where = to_torch(loc, device)
    assert pool.set_kv_buffer(Layer(layer_id), where, k, v) is None
    wanted = quantized.written_kv(planes, layer_id - 2, loc, *values)
    there = [slot for slot in loc if geometry.first_slot <= slot < geometry.num_rows]
    for tensor, expected in zip(pool.planes, wanted, strict=True):
        actual = to_numpy(tensor).view(expected.dtype)
        assert_same_numbers(actual[layer_id - 2, there], expected[layer_id - 2, there])
        actual[layer_id - 2, there] = expected[layer_id - 2, there]
        oracles.assert_same_bits(actual, expected)
    for tensor, given_values in zip([where, k, v], [loc, *values], strict=True):
        oracles.assert_same_bits(to_numpy(tensor), given_values)

    for dtype in (None, *SOURCES):
        found = pool.get_mha_kv_buffer(
            Layer(layer_id), where, None if dtype is None else getattr(torch, dtype)
        )
        expected = quantized.read_kv(wanted, layer_id - 2, loc, np.dtype(dtype or model))
        for part, rows in zip(found, expected, strict=True):
            assert_same_numbers(to_numpy(part), rows)


def parts_of(device="cpu"):
    """K and V of finite numbers."""
    rng = np.random.default_rng(0)
    shapes = [(NUM_TOKENS, 2, dim) for dim in (8, 16)]
    return [to_torch(rng.standard_normal(shape).astype("f4"), device) for shape in shapes]


GOOD = {"loc": slots(4, 5, 6, 7, 8), **dict(zip(("cache_k", "cache_v"), parts_of(), strict=True))}
ONES = torch.ones((5, 2, 8))


@by_geometry
@pytest.mark.parametrize(
    "argument, value, error, message",
    [
        ("k_scale", 1.0, ValueError, "k_scale=1.0: the pool makes its own scales"),
        ("k_scale", torch.tensor(2.0), ValueError, "k_scale=2.0: the pool makes its own"),
        ("v_scale", torch.ones(1), ValueError, "v_scale=.*the pool makes its own scales"),
        ("cache_k", ONES[:1], GeometryError, r"cache_k has shape \[1, 2, 8\], need \[5, 2, 8\]"),
        ("cache_k", ONES[:, :1], GeometryError, r"\[5, 1, 8\], need"),
        ("cache_k", ONES.flatten(1), GeometryError, r"\[5, 16\], need"),
        ("cache_v", ONES, GeometryError, r"cache_v has shape \[5, 2, 8\], need \[5, 2, 16\]"),
        ("cache_v", None, TypeError, "cache_v is <class 'NoneType'>, need a tensor"),
        ("cache_k", ONES.double(), TypeError, "cache_k has dtype torch.float64"),
        ("cache_k", ONES.to(torch.int8), TypeError, "cache_k has dtype torch.int8"),
        ("cache_v", GOOD["cache_v"].to("meta"), ValueError, "cache_v is on meta"),
        ("loc", slots(4, 5), GeometryError, r"cache_k has shape \[5, 2, 8\], need \[2, 2, 8\]"),
        ("loc", slots(4, 5)[:, None], ValueError, r"loc has shape \[2, 1\]"),
        ("layer", Layer(5), GeometryError, "layer_id=5 is not on this rank"),
    ],
)
def test_whatever_does_not_fit_is_refused_before_anything_changes(
    argument, value, error, message, geometry
):
    pool, planes = junk_pool(geometry)
    good = GOOD | {"layer": Layer(3)}
    with pytest.raises(error, match=message):
        pool.set_kv_buffer(**good | {argument: value})
    assert_holds(pool, planes)
    pool.set_kv_buffer(**good)  # nothing else stood against it
    with pytest.raises(AssertionError):
        assert_holds(pool, planes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"quantization": "per_token_head"}, "'per_token_head' is not for K and V; allowed"),
        ({"quantization": "int4"}, "'int4' is not for K and V"),
        ({"dtype": torch.float8_e4m3fn}, "is the model's where a pool is quantised"),
        ({"dtype": torch.int8}, "int8 cannot be stored"),
        ({"size": 10}, "num_slots=10 is not a multiple"),
        ({"start_layer": -1}, "layers -1..1"),
    ],
)
def test_pools_that_cannot_be_are_refused(changes, message):
    with pytest.raises(GeometryError, match=message):
        pool_of(**changes)


def test_how_k_and_v_are_quantised_has_no_default():
    with pytest.raises(TypeError, match="quantization"):
        QuantizedMHATokenToKVPool(8, 4, torch.float16, 1, 4, 1, "cpu", False)
    with pytest.raises(GeometryError, match="allowed"):
        pool_of(quantization="")


def test_without_a_quantisation_it_is_no_such_pool():
    """``None`` would make planes of K and V alone."""
    with pytest.raises(GeometryError, match="quantization=None"):
        pool_of(quantization=None)


def test_it_is_an_engines_pool():
    assert kvtorch.QuantizedMHATokenToKVPool is QuantizedMHATokenToKVPool
    assert issubclass(QuantizedMHATokenToKVPool, KVCache)
    for name in ("__init__", "set_kv_buffer", "get_key_buffer", "get_value_buffer"):
        ours = inspect.signature(getattr(QuantizedMHATokenToKVPool, name)).parameters
        wanted = inspect.signature(getattr(MHATokenToKVPool, name)).parameters
        positional = [x for x, p in wanted.items() if p.kind is not p.KEYWORD_ONLY]
        assert list(ours)[: len(positional)] == positional, name
        assert [ours[x].default for x in positional] == [wanted[x].default for x in positional]


@by_device
@by_geometry
def test_attributes_and_buffers(geometry, device):
    pool = pool_of(geometry, device, start_layer=3, v_head_dim=6)
    store = torch.int8 if geometry is INT8 else torch.uint8
    expected = {
        "dtype": torch.bfloat16,
        "store_dtype": store,
        "quantization": geometry.quantization,
        "head_num": 2,
        "head_dim": 8,
        "start_layer": 3,
        "end_layer": 4,
        "alt_stream": None,
    }
    assert {name: getattr(pool, name) for name in expected} == expected
    rows = ((2, 8), store), ((2, 1), torch.float32), ((2, 6), store), ((2, 1), torch.float32)
    found = []
    for name, plane, (row, dtype) in zip(pool._BUFFERS, pool.planes, rows, strict=True):
        buffers = getattr(pool, name)
        assert type(buffers) is list and len(buffers) == 2
        for buffer, layer in zip(buffers, plane, strict=True):
            assert (buffer.shape, buffer.dtype) == ((16, *row), dtype)
            assert buffer.is_contiguous() and not buffer.any()
            assert buffer.data_ptr() == layer.data_ptr()
        found += buffers
    assert pool.data_ptrs.tolist() == [buffer.data_ptr() for buffer in found]
    assert pool.data_strides.tolist() == [16] * 2 + [8] * 2 + [12] * 2 + [8] * 2
    assert pool.get_kv_size_bytes() == (2 * 16 * 2 * (8 + 4), 2 * 16 * 2 * (6 + 4))
    assert sum(pool.get_kv_size_bytes()) == pool.geometry.bytes


@by_geometry
def test_getters_give_the_live_buffers(geometry):
    pool = zero_pool(geometry)
    pool.set_kv_buffer(Layer(3), slots(7), torch.ones((1, 2, 8)), -torch.ones((1, 2, 16)))
    largest, dtype = (127, torch.int8) if geometry is INT8 else (448, torch.float8_e4m3fn)
    k, v = pool.get_kv_buffer(3)
    for pair, alone, plane, sign in (
        (k, pool.get_key_buffer(3), 0, 1),
        (v, pool.get_value_buffer(3), 2, -1),
    ):
        assert type(pair) is type(alone) is tuple
        values, scales = pair
        assert (values.dtype, scales.dtype) == (dtype, torch.float32)
        for one, other, i in zip(pair, alone, (plane, plane + 1), strict=True):
            assert one.data_ptr() == other.data_ptr() == pool.planes[i][1].data_ptr()
            assert one.shape == pool.planes[i][1].shape
        assert (values[7].float() == sign * largest).all()
        oracles.assert_same_bits(
            to_numpy(scales[7]), np.full((2, 1), np.float32(1) / np.float32(largest))
        )


@by_geometry
def test_slots_that_are_not_there_read_as_zeros(geometry):
    pool, planes = junk_pool(geometry)
    for plane in pool.planes:
        plane[:, :4] = 1
    found = pool.get_mha_kv_buffer(Layer(2), slots(3, 9, -1, 24, 2**40), torch.float32)
    assert [part.shape for part in found] == [(5, 2, 8), (5, 2, 16)]
    for part, wanted in zip(found, quantized.read_kv(planes, 0, [9], "f4"), strict=True):
        assert not part[[0, 2, 3, 4]].any()
        assert_same_numbers(to_numpy(part[1:2]), wanted)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.uint8])
def test_reads_are_of_floats_that_float32_holds(dtype):
    pool = zero_pool(INT8)
    with pytest.raises(GeometryError, match=f"{dtype} cannot be stored"):
        pool.get_mha_kv_buffer(Layer(2), slots(4), dtype)


@by_geometry
def test_reads_wait_for_a_transfer_and_are_refused_when_lent(geometry):
    pool = zero_pool(geometry)
    pool.register_layer_transfer_counter(counter := Counter())
    pool.get_mha_kv_buffer(Layer(4), slots(5))
    assert counter.waits == [2]
    with kvjax.checks(), pytest.raises(IndexError, match=r"loc\[1\]=24 is not there"):
        pool.get_mha_kv_buffer(Layer(4), slots(5, 24))
    with pytest.raises(GeometryError, match="layer_id=5"):
        pool.get_mha_kv_buffer(Layer(5), slots(5))
    pool._lent_to = "somebody"
    with pytest.raises(RuntimeError, match="lent"):
        pool.get_mha_kv_buffer(Layer(4), slots(5))


HERE, THERE = [5, 9, 4, 17, 12], [6, 23, 8, 10, 7]


def moved(pool, other):
    pool.move_kv_cache(slots(*THERE, device=pool.device), slots(*HERE, device=pool.device))
    return pool


def through_the_host(pool, other):
    copies = pool.get_cpu_copy(slots(*HERE, device=pool.device))
    other.load_cpu_copy(copies, slots(*THERE, device=pool.device))
    return other


def as_flat_data(pool, other):
    flat = pool.get_flat_data(slots(*HERE, device=pool.device))
    other.transfer(slots(*THERE, device=pool.device), flat)
    return other


def layer_by_layer(pool, other):
    flat = pool.get_flat_data(slots(*HERE, device=pool.device))
    for layer_id in range(2, 5):
        layer = [part[layer_id - 2] for part in flat]
        other.transfer_per_layer(slots(*THERE, device=pool.device), layer, layer_id)
    return other


def by_jax(pool, _):
    with pool.jax() as lease:
        lease.pool = kvjax.move(lease.pool, np.array(THERE), np.array(HERE))
    return pool


WAYS = [moved, through_the_host, as_flat_data, layer_by_layer, by_jax]


def carried(geometry, way, device, spoil=lambda pool: None):
    """What is read before rows take a way, and behind it."""
    pool, other = zero_pool(geometry, device), zero_pool(geometry, device)
    pool.set_kv_buffer(Layer(3), slots(*HERE, device=device), *parts_of(device))
    before = pool.get_mha_kv_buffer(Layer(3), slots(*HERE, device=device), torch.float32)
    end = way(pool, other)
    spoil(end)
    after = end.get_mha_kv_buffer(Layer(3), slots(*THERE, device=device), torch.float32)
    assert end.audit() == []
    return [torch.cat([part.flatten() for part in parts]) for parts in (before, after)]


@by_device
@by_geometry
@pytest.mark.parametrize("way", WAYS)
def test_rows_take_their_scales_along(way, geometry, device):
    before, after = carried(geometry, way, device)
    assert torch.equal(after, before)


@by_geometry
@pytest.mark.parametrize("plane", range(4))
@pytest.mark.parametrize("way", WAYS)
def test_a_plane_that_is_left_behind_or_spoilt_is_caught(way, plane, geometry):
    """The comparison above can fail."""

    def leave_behind(pool):
        pool.planes[plane].zero_()

    def flip_a_bit(pool):
        pool.planes[plane].view(torch.uint8)[1, THERE[0], 1, -1] ^= 1

    for spoil in (leave_behind, flip_a_bit):
        before, after = carried(geometry, way, "cpu", spoil)
        assert not torch.equal(after, before)


@by_geometry
def test_a_graph_of_gradients_ends_before_the_pool(geometry):
    pool = zero_pool(geometry)
    k, v = (part.requires_grad_() for part in (torch.ones((1, 2, 8)), torch.ones((1, 2, 16))))
    pool.set_kv_buffer(Layer(2), slots(4), k * 2, v)
    assert not any(plane.requires_grad for plane in pool.planes)
    assert (pool.get_mha_kv_buffer(Layer(2), slots(4))[0] == 2).all()


@pytest.mark.gpu
@by_geometry
def test_the_gpu_writes_and_reads_what_the_cpu_does(geometry):
    geometry = dataclasses.replace(geometry, num_slots=4000)
    pools = [junk_pool(geometry, device=device)[0] for device in ("cpu", "cuda")]
    rng = np.random.default_rng(0)
    loc = rng.permutation(geometry.num_rows)[:3000]
    k, v = (
        (rng.normal(size=(3000, 2, dim)) * 10.0 ** rng.uniform(-9, 9, (3000, 2, 1))).astype("f4")
        for dim in (8, 16)
    )
    read = []
    for pool in pools:
        where, *parts = (torch.from_numpy(x).to(pool.device) for x in (loc, k, v))
        pool.set_kv_buffer(Layer(3), where, *parts)
        read.append(pool.get_mha_kv_buffer(Layer(3), where))
    for ours, theirs in zip(pools[0].planes + read[0], pools[1].planes + read[1], strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.cpu().view(torch.uint8))


@pytest.mark.gpu
@by_geometry
def test_writes_and_reads_are_captured_in_a_graph(geometry):
    pool, expected = zero_pool(geometry, "cuda"), zero_pool(geometry)
    where, (k, v) = slots(*HERE, device="cuda"), parts_of("cuda")
    pool.set_kv_buffer(Layer(3), where, k, v)  # compiles
    pool.get_mha_kv_buffer(Layer(3), where)
    pool.clear()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.set_kv_buffer(Layer(3), where, k, v)
        found = pool.get_mha_kv_buffer(Layer(3), where)
    where.copy_(slots(*THERE))
    graph.replay()
    torch.cuda.synchronize()
    expected.set_kv_buffer(Layer(3), slots(*THERE), k.cpu(), v.cpu())
    wanted = expected.get_mha_kv_buffer(Layer(3), slots(*THERE))
    for actual, other in zip((*pool.planes, *found), (*expected.planes, *wanted), strict=True):
        assert_same_numbers(to_numpy(actual), to_numpy(other))


@pytest.mark.gpu
@by_geometry
def test_rows_behind_more_elements_than_int32_counts(geometry):
    sizes = {"num_kv_heads": 8, "head_dim": 128, "v_head_dim": 128}
    small, large = (
        zero_pool(dataclasses.replace(geometry, num_slots=num_slots, **sizes), "cuda")
        for num_slots in (20, 1 << 20)
    )
    assert large.planes[0][:2].numel() == 2**31 + 2 * 4 * 1024
    k, v = torch.randn((2, NUM_TOKENS, 8, 128), device="cuda")
    first = slots(*HERE, device="cuda")
    last = first + (1 << 20) - 20
    small.set_kv_buffer(Layer(4), first, k, v)
    large.set_kv_buffer(Layer(4), last, k, v)
    for ours, theirs in zip(large.planes, small.planes, strict=True):
        assert torch.equal(ours[2, last], theirs[2, first])
        assert not ours[:2].any() and not ours[2, : last.min()].any()
    for ours, theirs in zip(
        large.get_mha_kv_buffer(Layer(4), last),
        small.get_mha_kv_buffer(Layer(4), first),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
