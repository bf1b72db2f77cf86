"""What holds for every kind of torch pool, against the oracles applied to each plane."""

import dataclasses
import logging

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

import kvjax
from kvjax import GeometryError
from kvtorch.pools.kv_cache import KVCache
from tests import oracles
from tests.interop.torch_pools import (
    GEOMETRIES,
    assert_holds,
    empty_planes,
    junk_pool,
    torch_pool,
    zero_pool,
)
from tests.pools.junk import rows_of, stored
from tests.strategies import random_rows
from tests.torch.pools import (
    CALLS,
    DEVICES,
    NAMES,
    READS,
    WRITES,
    Counter,
    Layer,
    flattened,
    mha,
    mla,
    slots,
)
from tests.torch.pools import flat as flat_ones
from tests.torch.tensors import to_numpy, to_torch

by_name = pytest.mark.parametrize("name", NAMES)
by_device = pytest.mark.parametrize("device", DEVICES)

# Of a pool of 20 slots in pages of 4: some of the padding page, below, past the end, repeated.
READ = np.array([7, 3, 23, -1, 7, 24, 4, 2**31 - 1, -24], np.int64)
WRITTEN = np.array([7, 3, 23, -1, 24, 4, 0, -20, 10], np.int64)


def assert_rows(actual, planes, layer, where, first):
    for part, plane in zip(actual, planes, strict=True):
        expected = oracles.read_rows(stored(plane), layer, where, first)
        oracles.assert_same_bits(to_numpy(part), expected)


def written(planes, layer, where, rows, first):
    return [
        oracles.write_rows(plane, layer, where, new, first)
        for plane, new in zip(planes, rows, strict=True)
    ]


@by_name
@by_device
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_mha_9_a_mla_11_flat_data_comes_out_and_goes_in(name, device, dtype):
    geometry = GEOMETRIES[name]
    pool, planes = junk_pool(geometry, device=device)
    first, layers = geometry.first_slot, len(geometry.layers)
    read, to = (torch.tensor(x, dtype=dtype, device=device) for x in (READ, WRITTEN))

    flat = pool.get_flat_data(read)
    parts = [flat] if len(planes) == 1 else flat
    assert all(part.device == pool.planes[0].device for part in parts)
    assert_rows(parts, planes, None, READ, first)

    rows = random_rows(1, rows_of(geometry), layers, len(WRITTEN))
    new = [to_torch(part) for part in rows]  # on the host, where hierarchical caches have it
    pool.transfer(to, new[0] if len(new) == 1 else new)
    planes = written(planes, None, WRITTEN, rows, first)
    assert_holds(pool, planes)

    for layer_id in geometry.layers.start, geometry.layers.stop - 1:
        layer = layer_id - geometry.layers.start
        rows = random_rows(layer_id, rows_of(geometry), len(WRITTEN))
        new = [to_torch(stored(part)) for part in rows]
        pool.transfer_per_layer(to, new[0] if len(new) == 1 else new, layer_id)
        planes = written(planes, layer, WRITTEN, rows, first)
        assert_holds(pool, planes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2])
def test_a_mha_9_k_and_v_of_one_form_are_stacked(dtype):
    pool = mha(8, 4, dtype, 2, 3, 2)
    flat = pool.get_flat_data(slots(4, 5, 6))
    assert (flat.shape, flat.dtype) == ((2, 2, 3, 2, 3), pool.store_dtype)
    flat += 1
    pool.transfer(slots(7, 8, 9), flat)
    assert torch.equal(pool.get_flat_data(slots(7, 8, 9)), flat)
    pool.transfer_per_layer(slots(10, 11, 4), flat[:, 1], 1)
    assert torch.equal(pool.get_flat_data(slots(10, 11, 4))[:, 1], flat[:, 1])


@by_name
@by_device
@pytest.mark.parametrize("chunk_tokens", [1, 4, 8192])
def test_a_mha_7_a_mla_12_host_copies_come_in_chunks(name, device, chunk_tokens):
    geometry = GEOMETRIES[name]
    pool, planes = junk_pool(geometry, device=device)
    setattr(pool, pool._CHUNK, chunk_tokens)
    copies = pool.get_cpu_copy(torch.from_numpy(READ).to(device))
    assert len(copies) == len(geometry.layers)
    for layer, chunks in enumerate(copies):
        assert type(chunks) is list and len(chunks) == -(-len(READ) // chunk_tokens)
        for i, chunk in enumerate(chunks):
            assert type(chunk) is (torch.Tensor if len(planes) == 1 else list)
            parts = [chunk] if len(planes) == 1 else chunk
            assert all(part.is_cpu and part.is_pinned() == (device == "cuda") for part in parts)
            where = READ[i * chunk_tokens :][:chunk_tokens]
            assert_rows(parts, planes, layer, where, geometry.first_slot)

    pool.load_cpu_copy(copies, torch.from_numpy(WRITTEN).to(device))
    rows = [oracles.read_rows(plane, None, READ, geometry.first_slot) for plane in planes]
    assert_holds(pool, written(planes, None, WRITTEN, rows, geometry.first_slot))


@by_name
def test_a_mha_7_a_mla_12_no_slots_give_a_list_of_no_chunks_a_layer(name):
    pool, planes = junk_pool(GEOMETRIES[name])
    assert pool.get_cpu_copy(slots()) == [[], [], []]
    pool.load_cpu_copy([[], [], []], torch.tensor([]))
    assert_holds(pool, planes)


@by_name
def test_a_mha_7_a_host_copy_shares_nothing_with_the_pool(name):
    pool, planes = junk_pool(GEOMETRIES[name])
    for chunk in (x for layer in pool.get_cpu_copy(slots(7, 8)) for x in layer):
        for part in [chunk] if isinstance(chunk, torch.Tensor) else chunk:
            part.fill_(1)
    assert_holds(pool, planes)


def test_a_mha_8_whatever_does_not_fit_is_refused_before_anything_is_written():
    geometry = GEOMETRIES["mha"]
    pool, planes = junk_pool(geometry)
    pool.cpu_offloading_chunk_size = 2
    where = slots(4, 5, 6)

    def broken(break_it):
        copies = pool.get_cpu_copy(where)
        break_it(copies)
        return copies

    def set_part(layer, chunk, plane, change):
        def break_it(copies):
            copies[layer][chunk][plane] = change(copies[layer][chunk][plane])

        return break_it

    cases = {
        "2 layers, need 3": lambda copies: copies.pop(),
        r"\[2\] has 1 chunks, need 2": lambda copies: copies[2].pop(),
        r"\[2\] has 3 chunks, need 2": lambda copies: copies[2].append(copies[2][0]),
        r"\[2\]\[1\] has 1 planes, need 2": lambda copies: copies[2][1].pop(),
        r"\[2\]\[1\] of plane 'k' is .*\[2, 2, 8\]": set_part(2, 1, 0, lambda x: x.repeat(2, 1, 1)),
        r"\[0\]\[0\] of plane 'v' is .*\[1, 2, 16\]": set_part(0, 0, 1, lambda x: x[:1]),
        r"\[1\]\[0\] of plane 'k' is torch.float32": set_part(1, 0, 0, lambda x: x.float()),
        r"\[1\]\[1\] of plane 'v' is torch.uint8\[1, 32\]": set_part(
            1, 1, 1, lambda x: x.flatten(1)
        ),
    }
    for message, break_it in cases.items():
        with pytest.raises(GeometryError, match=message):
            pool.load_cpu_copy(broken(break_it), where)
    with pytest.raises(GeometryError, match="1 chunks, need 2"):  # of another chunk size
        copies = pool.get_cpu_copy(slots(4, 5))
        pool.load_cpu_copy(copies, where)
    with pytest.raises(TypeError, match="need a tensor"):
        pool.load_cpu_copy(broken(set_part(2, 1, 1, lambda x: x.tolist())), where)
    for size in (0, -1):
        pool.cpu_offloading_chunk_size = size
        with pytest.raises(ValueError, match="cpu_offloading_chunk_size"):
            pool.get_cpu_copy(where)
    assert_holds(pool, planes)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda x: x[:1], GeometryError, "flat_data has 1 planes, need 2"),
        (lambda x: [x[0], x[1][..., :8]], GeometryError, r"'v' is .*\[3, 2, 2, 8\], need"),
        (lambda x: [x[0][:1], x[1]], GeometryError, r"'k' is .*\[1, 2, 2, 8\], need"),
        (lambda x: [x[0][:, :1], x[1]], GeometryError, r"'k' is .*\[3, 1, 2, 8\], need"),
        (lambda x: [x[0].half(), x[1]], GeometryError, "'k' is torch.float16"),
        (lambda x: [x[0], x[1].view(torch.int8)], GeometryError, "'v' is torch.int8"),
        (lambda x: [x[0], x[1].tolist()], TypeError, "need a tensor"),
    ],
)
def test_a_mha_10_flat_data_that_does_not_fit_is_refused(change, error, message):
    pool, planes = junk_pool(GEOMETRIES["mha"])
    with pytest.raises(error, match=message):
        pool.transfer(slots(4, 5), change(list(pool.get_flat_data(slots(6, 7)))))
    assert_holds(pool, planes)


@by_name
@by_device
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("disjoint", [False, True])
def test_a_mha_16_a_mla_13_every_pool_moves_at_once(name, device, dtype, disjoint):
    geometry = GEOMETRIES[name]
    pool, planes = junk_pool(geometry, device=device)
    dst, src = WRITTEN, np.array([3, 7, 7, 5, 6, 24, 8, 9, 4], np.int64)
    src = np.where(np.isin(src, dst), 11, src) if disjoint else src
    for _ in range(2):
        pool.move_kv_cache(
            *(torch.tensor(x, dtype=dtype, device=device) for x in (dst, src)), disjoint=disjoint
        )
        planes = [oracles.move_rows(plane, dst, src, geometry.first_slot) for plane in planes]
    assert_holds(pool, planes)
    with pytest.raises(ValueError, match="tgt_loc has 2 entries, src_loc 1"):
        pool.move_kv_cache(slots(4, 5, device=device), slots(6, device=device))
    assert_holds(pool, planes)


@pytest.mark.parametrize("disjoint", [False, True])
def test_a_promise_of_disjoint_slots_reaches_the_operation(disjoint, monkeypatch):
    given = []
    monkeypatch.setattr(
        "kvtorch.pools.plane_pool.move_rows", lambda *_, **options: given.append(options)
    )
    zero_pool(GEOMETRIES["mla"]).move_kv_cache(slots(4), slots(5), disjoint=disjoint)
    assert given == [{"first_slot": 4, "disjoint": disjoint}]


@by_name
@by_device
def test_a_mha_5_a_mla_5_addresses_are_where_the_layers_are(name, device):
    geometry = GEOMETRIES[name]
    pool, _ = junk_pool(geometry, device=device)
    pool.register_layer_transfer_counter(counter := Counter())
    addresses, lengths, item_lengths = pool.get_contiguous_buf_infos()
    buffers = [layer for plane in pool.planes for layer in plane]
    assert addresses == [layer.data_ptr() for layer in buffers]
    rows = [spec.row_bytes for spec in geometry.planes for _ in range(len(geometry.layers))]
    assert lengths == [row * geometry.num_rows for row in rows]
    assert item_lengths == [row * geometry.page_size for row in rows]
    assert all(type(x) is int for x in (*addresses, *lengths, *item_lengths))
    assert counter.waits == []  # unlike upstream: it is an address, not what is there


LAYER_CALLS = {
    "get_key_buffer": lambda pool, layer_id: pool.get_key_buffer(layer_id),
    "get_value_buffer": lambda pool, layer_id: pool.get_value_buffer(layer_id),
    "get_kv_buffer": lambda pool, layer_id: pool.get_kv_buffer(layer_id),
    "set_kv_buffer": lambda pool, layer_id: pool.set_kv_buffer(
        Layer(layer_id), slots(), *[pool.get_key_buffer(2)[:0]] * 2
    ),
    "transfer_per_layer": lambda pool, layer_id: pool.transfer_per_layer(
        slots(4), flat_ones(pool, 1, all_layers=False), layer_id
    ),
}


@by_name
@pytest.mark.parametrize("call", LAYER_CALLS)
def test_a_mha_12_a_layer_of_another_rank_is_refused(name, call):
    pool, planes = junk_pool(GEOMETRIES[name])
    for layer_id in (1, 5, 0, -1, -2, 100):
        with pytest.raises(GeometryError, match=rf"{layer_id}.* holds layers 2..4"):
            LAYER_CALLS[call](pool, layer_id)
    assert_holds(pool, planes)


@pytest.mark.parametrize(
    "given, start, end",
    [
        ((None, None), 0, 2),
        ((0, None), 0, 2),
        ((3, None), 3, 5),  # upstream: 2
        ((3, 6), 3, 6),
        ((0, 3), 0, 3),
        ((0, 0), 0, 0),  # upstream: 2
    ],
)
def test_a_kv_1_layers_are_none_or_given(given, start, end):
    for pool in (
        mha(8, 4, torch.float16, 1, 4, 3, start_layer=given[0], end_layer=given[1]),
        mla(8, 4, torch.float16, 4, 4, 3, start_layer=given[0], end_layer=given[1]),
    ):
        assert (pool.start_layer, pool.end_layer) == (start, end)
        assert pool.get_key_buffer(start + 2).data_ptr() == pool.planes[0][2].data_ptr()


@pytest.mark.parametrize("make", [mha, mla])
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"size": 10}, "num_slots=10 is not a multiple of page_size=4"),
        ({"size": 0}, "num_slots=0"),
        ({"page_size": 0}, "page_size=0"),
        ({"layer_num": 0}, "layers 0..0 are empty"),
        ({"start_layer": -1}, "layers -1..2"),
        ({"dtype": torch.float8_e4m3fnuz}, "float8_e4m3fnuz cannot be stored"),
        ({"dtype": torch.int8}, "int8 cannot be stored"),
    ],
)
def test_a_kv_1_sizes_that_no_pool_can_have_are_refused(make, changes, message):
    options = {"size": 8, "page_size": 4, "dtype": torch.float16, "layer_num": 3, "device": "cpu"}
    kind = {"head_num": 2, "head_dim": 4} if make is mha else {"lora": 4, "rope": 4}
    make(**options, **kind)
    with pytest.raises(GeometryError, match=message):
        make(**options | changes, **kind)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_a_kv_1_fp8_is_stored_as_bytes(dtype):
    for pool in (mha(8, 4, dtype, 1, 4, 2), mla(8, 4, dtype, 4, 4, 2)):
        assert pool.store_dtype == (torch.uint8 if dtype.itemsize == 1 else dtype)
        assert all(plane.dtype == pool.store_dtype for plane in pool.planes)
        assert pool.get_key_buffer(0).dtype == dtype
        assert pool.dtype == dtype and pool.cpu_offloading_chunk_size == 8192


def test_a_kv_2_the_base_class_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        KVCache(8, 4, torch.float16, 1, "cpu", False)
    assert KVCache.__abstractmethods__ == {
        "__init__",
        "get_key_buffer",
        "get_value_buffer",
        "get_kv_buffer",
        "set_kv_buffer",
    }


@by_name
def test_a_kv_5_only_getters_wait_for_a_transfer(name):
    pool, _ = junk_pool(GEOMETRIES[name])
    assert pool.layer_transfer_counter is None
    pool.register_layer_transfer_counter(counter := Counter())
    for call in (*READS.values(), *WRITES.values()):
        call(pool, slots(6))
    pool.get_contiguous_buf_infos(), pool.get_kv_size_bytes(), pool.audit()
    assert counter.waits == []
    pool.get_key_buffer(4), pool.get_value_buffer(3), pool.get_kv_buffer(2)
    assert counter.waits == [2, 1, 0, 0]
    pool.register_layer_transfer_counter(None)
    pool.get_kv_buffer(2)
    assert counter.waits == [2, 1, 0, 0]


@by_name
@pytest.mark.parametrize("call", READS)
def test_a_kv_6_the_padding_page_reads_as_zeros_whatever_is_there(name, call):
    pool = zero_pool(GEOMETRIES[name])
    for plane in pool.planes:
        plane.fill_(1)
    for slot, is_there in ((3, False), (4, True)):
        rows = flattened(READS[call](pool, slots(slot)))
        assert rows and all(part.any() == is_there for part in rows)


@by_name
@pytest.mark.parametrize("call", WRITES)
def test_a_kv_6_nothing_reaches_the_padding_page(name, call):
    pool, planes = junk_pool(GEOMETRIES[name])
    WRITES[call](pool, slots(0, 1, 2, 3))
    assert_holds(pool, planes)
    WRITES[call](pool, slots(9))
    with pytest.raises(AssertionError):  # the comparison can fail
        assert_holds(pool, planes)


@by_name
@pytest.mark.parametrize("call", CALLS)
def test_checks_mode_raises_for_a_slot_that_is_not_there(name, call):
    pool, planes = junk_pool(GEOMETRIES[name])
    with kvjax.checks():
        for where, message in (
            ((8, 24), r"\[1\]=24 is not there; slots are 4..23"),
            ((3, 8), r"\[0\]=3 is not there"),
            ((8, 9, -1), r"\[2\]=-1 is not there"),
        ):
            with pytest.raises(IndexError, match=message):
                CALLS[call](pool, slots(*where))
        if call in WRITES:
            with pytest.raises(ValueError, match=r"\[2\]=8 repeats"):
                CALLS[call](pool, slots(8, 9, 8))
        assert_holds(pool, planes)
        CALLS[call](pool, slots(8, 9))


@by_name
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "where, error",
    [
        (torch.tensor([[4, 5]]), ValueError),
        (torch.tensor([True, False]), TypeError),
        (torch.tensor([4.0]), TypeError),
        (torch.tensor([4, 5], dtype=torch.int16), TypeError),
    ],
)
def test_slots_are_one_row_of_integers(name, call, where, error):
    pool, planes = junk_pool(GEOMETRIES[name])
    with pytest.raises(error):
        CALLS[call](pool, where)
    assert_holds(pool, planes)


@by_name
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.gpu
def test_slots_may_be_on_the_host(name, call):
    pools = [junk_pool(GEOMETRIES[name], device="cuda")[0] for _ in range(2)]
    CALLS[call](pools[0], slots(8, 2, 9))
    CALLS[call](pools[1], slots(8, 2, 9, device="cuda"))
    for ours, theirs in zip(*(pool.planes for pool in pools), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


TOUCHES_PLANES = {
    **{name: lambda pool, call=call: call(pool, slots(6)) for name, call in CALLS.items()},
    "get_key_buffer": lambda pool: pool.get_key_buffer(2),
    "get_value_buffer": lambda pool: pool.get_value_buffer(2),
    "get_kv_buffer": lambda pool: pool.get_kv_buffer(2),
    "get_kv_size_bytes": lambda pool: pool.get_kv_size_bytes(),
    "get_contiguous_buf_infos": lambda pool: pool.get_contiguous_buf_infos(),
    "audit": lambda pool: pool.audit(),
    "clear": lambda pool: pool.clear(),
    "_clear_buffers": lambda pool: pool._clear_buffers(),
    "jax": lambda pool: pool.jax().__enter__(),
}


@by_name
@pytest.mark.parametrize("call", TOUCHES_PLANES)
def test_a_lent_or_freed_pool_is_not_touched(name, call):
    pool, planes = junk_pool(GEOMETRIES[name])
    pool._lent_to = "somebody"
    with pytest.raises(RuntimeError, match="lent"):
        TOUCHES_PLANES[call](pool)
    pool._lent_to = None
    assert_holds(pool, planes)
    pool._clear_buffers()
    with pytest.raises(RuntimeError, match="no memory"):
        TOUCHES_PLANES[call](pool)
    pool._create_buffers()
    assert pool.audit() == [] and not any(plane.any() for plane in pool.planes)


@by_name
def test_a_mha_3_freed_planes_leave_nothing_behind(name):
    pool, _ = junk_pool(GEOMETRIES[name])
    addresses = [plane.data_ptr() for plane in pool.planes]
    pool._clear_buffers()
    for attribute in (*pool._BUFFERS, "data_ptrs", "data_strides"):
        assert not hasattr(pool, attribute)
    held = [x for x in vars(pool).values() if isinstance(x, torch.Tensor)]
    held += [t for x in vars(pool).values() if isinstance(x, list | tuple) for t in x]
    assert not any(isinstance(x, torch.Tensor) and x.data_ptr() in addresses for x in held)


def swap_layers(pool):
    buffers = getattr(pool, pool._BUFFERS[0])
    buffers[0], buffers[1] = buffers[1], buffers[0]


def copy_a_layer(pool):
    buffers = getattr(pool, pool._BUFFERS[-1])
    of_layer = buffers[2]
    is_one = isinstance(of_layer, torch.Tensor)
    buffers[2] = of_layer.clone() if is_one else (*of_layer[:2], of_layer[2].clone())


def lose_a_layer(pool):
    getattr(pool, pool._BUFFERS[0]).pop()


OF_ALL_PLANES = (swap_layers, lose_a_layer)


def dirty_the_padding_page(pool):
    pool.planes[-1][1, 3, 0, -1] = 1


def minus_zero(pool):
    pool.planes[0].view(torch.uint8)[2, 0, 0, -1] = 0x80


def other_address(pool):
    pool.data_ptrs = torch.zeros_like(pool.data_ptrs)


def other_stride(pool):
    pool.data_strides[0] += 1


@by_name
@pytest.mark.parametrize(
    "spoil, message",
    [
        (swap_layers, "buffer is not the layers of its plane"),
        (copy_a_layer, "buffer is not the layers of its plane"),
        (lose_a_layer, "buffer is not the layers of its plane"),
        (dirty_the_padding_page, "padding page of layer 3 is not zero"),
        (minus_zero, "padding page of layer 4 is not zero"),
        (other_address, "data_ptrs"),
        (other_stride, "data_strides"),
    ],
)
def test_an_audit_finds(name, spoil, message):
    pool, _ = junk_pool(GEOMETRIES[name])
    assert pool.audit() == []
    spoil(pool)
    found = pool.audit()
    assert found and all(message in each for each in found)
    together = len(pool._BUFFERS) < len(pool.planes)  # a tuple for each layer, of all planes
    assert len(found) == (len(pool.planes) if together and spoil in OF_ALL_PLANES else 1)


@by_name
def test_a_pool_over_memory_that_is_there(name):
    geometry = GEOMETRIES[name]
    planes = empty_planes(geometry)
    pool = torch_pool(geometry, planes)
    assert [plane.data_ptr() for plane in pool.planes] == [plane.data_ptr() for plane in planes]
    assert pool.custom_mem_pool is None and not pool.enable_custom_mem_pool
    strided = [plane.repeat_interleave(2, -1)[..., ::2] for plane in planes]
    for wrong in (
        [plane[:, :-1] for plane in planes],
        [plane[:1] for plane in planes],
        [plane.double() for plane in planes],
        [*planes, planes[0]],
        strided,
        [strided[0], *planes[1:]],
    ):
        with pytest.raises(GeometryError, match="plane"):
            torch_pool(geometry, wrong)


@by_name
@by_device
def test_a_mod_4_transfers_are_timed_for_who_listens(name, device, caplog):
    pool = zero_pool(GEOMETRIES[name], device)
    pool.transfer(slots(4, 5), flat_ones(pool, 2))
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, "kvtorch.pools.timing"):
        pool.transfer(slots(4, 5), flat_ones(pool, 2))
    (record,) = caplog.records
    assert "Transfer time: " in record.message and "tokens/s" in record.message


def test_a_mod_3_the_size_is_logged(caplog):
    with caplog.at_level(logging.INFO, "kvtorch.pools.plane_pool"):
        mha((1 << 18) - 4, 4, torch.float8_e4m3fn, 1, 256, 1, v_head_dim=128)
    assert "#tokens: 262140, k 0.06 GB, v 0.03 GB" in caplog.text


@pytest.mark.gpu
@by_name
def test_no_method_of_a_decode_step_waits_for_the_gpu(name):
    geometry = dataclasses.replace(GEOMETRIES[name], num_slots=4000)
    pool = zero_pool(geometry, "cuda")
    where = slots(4, 5, 6, device="cuda")
    WRITES["set_kv_buffer"](pool, where)
    pool.move_kv_cache(where, where.flip(0))
    torch.cuda.synchronize()
    with torch.cuda.device("cuda"):
        torch.cuda.set_sync_debug_mode("error")
        try:
            WRITES["set_kv_buffer"](pool, where)
            pool.move_kv_cache(where, where.flip(0))
            pool.get_flat_data(where)
            pool.get_kv_buffer(2)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@by_name
def test_writes_and_moves_are_captured_in_a_graph(name):
    geometry = GEOMETRIES[name]
    pool, planes = junk_pool(geometry, device="cuda")
    where, src = slots(4, 5, 0, device="cuda"), slots(8, 9, 10, device="cuda")
    WRITES["set_kv_buffer"](pool, where)  # compiles
    pool.move_kv_cache(where, src)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        WRITES["set_kv_buffer"](pool, where)
        pool.move_kv_cache(where + 7, where)
    for tensor, plane in zip(pool.planes, planes, strict=True):
        tensor.view(torch.uint8).copy_(torch.from_numpy(plane.view(np.uint8)))
    where.copy_(slots(15, 16, 2))
    graph.replay()
    torch.cuda.synchronize()
    expected, _ = junk_pool(geometry)
    WRITES["set_kv_buffer"](expected, slots(15, 16, 2))
    expected.move_kv_cache(slots(22, 23, 9), slots(15, 16, 2))
    for actual, wanted in zip(pool.planes, expected.planes, strict=True):
        assert torch.equal(actual.cpu().view(torch.uint8), wanted.view(torch.uint8))
