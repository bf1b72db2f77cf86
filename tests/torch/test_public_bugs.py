"""Faults that real pools had, by the ids of the collection; each with the right answer.

What concerns the allocators, the request table and DLPack is in their tests; here is what concerns
the pools of kvtorch.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

import kvjax
from kvjax import GeometryError, LayerRange, MHAGeometry, MLAGeometry
from kvjax.geometry import DTYPE_BYTES
from kvtorch.sglang import get_mla_kv_buffer_triton, set_mla_kv_buffer_triton
from tests import oracles
from tests.interop.torch_pools import assert_holds, junk_pool, zero_pool
from tests.torch.pools import (
    CALLS,
    DEVICES,
    READS,
    WRITES,
    Layer,
    flattened,
    mha,
    mla,
    slots,
    values,
    write,
)
from tests.torch.tensors import to_numpy

by_device = pytest.mark.parametrize("device", DEVICES)
by_dtype = pytest.mark.parametrize("dtype", list(DTYPE_BYTES))
SLOT_DTYPES = [torch.int32, torch.int64]

MHA = MHAGeometry(8, 1, LayerRange(3, 4), 1, 4, "float32", v_head_dim=8)
MLA = MLAGeometry(8, 1, LayerRange(3, 4), 4, 4, "float32")


def with_ones(planes, slot):
    planes = [plane.copy() for plane in planes]
    for plane in planes:
        plane[0, slot] = 1
    return planes


def rows_that_hold_their_index(size, device):
    """A pool of two layers in which every number is the number of its row."""
    pool = mha(size, 1, torch.float32, 1, 4, 2, device)
    for plane in pool.planes:
        plane.copy_(torch.arange(size + 1).view(1, -1, 1, 1))
    return pool


def first_column(pool):
    """The first number of each row, which has to be the same in every layer and plane."""
    columns = torch.cat([plane[..., 0, 0] for plane in pool.planes])
    assert (columns == columns[0]).all()
    return columns[0].int().tolist()


@by_device
def test_wr1_latent_and_rope_meet_inside_a_block(device):
    latent = torch.tensor([i % 251 for i in range(528)], dtype=torch.uint8, device=device)
    rope = torch.tensor([i % 97 + 100 for i in range(128)], dtype=torch.uint8, device=device)
    parts = [part.view(1, 1, -1) for part in (latent, rope)]
    pool = mla(16, 1, torch.float8_e4m3fn, 528, 128, 1, device)
    where = slots(3, device=device)
    pool.set_mla_kv_buffer(Layer(0), where, *(x.view(torch.float8_e4m3fn) for x in parts))
    buffer = torch.zeros((17, 1, 656), dtype=torch.uint8, device=device)
    set_mla_kv_buffer_triton(buffer, where, *parts)
    for stored in (pool.kv_buffer[0], buffer):
        row = stored[3, 0]
        assert row[[0, 511, 512, 527, 528, 655]].tolist() == [0, 9, 10, 25, 100, 130]
        assert row.sum() == stored.sum() == 80996
    for have, want in zip(pool.get_mla_kv_buffer(Layer(0), where), parts, strict=True):
        assert torch.equal(have.view(torch.uint8), want)
    outputs = [torch.empty_like(part) for part in parts]
    get_mla_kv_buffer_triton(buffer, where, *outputs)
    assert all(map(torch.equal, outputs, parts))


@by_device
@pytest.mark.parametrize("latent_dim, rope_dim", [(64, 32), (100, 28), (512, 64), (16, 0)])
def test_wr1_any_widths(latent_dim, rope_dim, device):
    pool = mla(16, 1, torch.float32, latent_dim, rope_dim, 1, device)
    latent = torch.arange(1.0, latent_dim + 1, device=device).view(1, 1, -1)
    rope = -torch.arange(1.0, rope_dim + 1, device=device).view(1, 1, -1)
    where = slots(3, device=device)
    pool.set_mla_kv_buffer(Layer(0), where, latent, rope)
    assert torch.equal(pool.kv_buffer[0][3], torch.cat([latent, rope], -1)[0])
    assert torch.equal(pool.kv_buffer[0].sum(), (latent.sum() + rope.sum()))
    for have, want in zip(pool.get_mla_kv_buffer(Layer(0), where), (latent, rope), strict=True):
        assert torch.equal(have, want)


@by_device
@pytest.mark.parametrize("dtype", SLOT_DTYPES)
@pytest.mark.parametrize("geometry", [MHA, MLA], ids=["mha", "mla"])
@pytest.mark.parametrize("call", [name for name in WRITES if name != "move_kv_cache"])
def test_wr2_wr3_a_slot_that_is_not_there_is_not_another(call, geometry, dtype, device):
    pool, planes = junk_pool(geometry, device=device)
    absent = [-1, -9, 9, 12, 0, 2**31 - 1, -(2**31)]
    WRITES[call](pool, slots(*absent, dtype=dtype, device=device))
    assert_holds(pool, planes)
    if call == "load_cpu_copy":  # which writes copies of the first row
        for plane in pool.planes:
            plane[:, 1] = 1
        planes = with_ones(planes, 1)
    WRITES[call](pool, slots(*absent, 2, dtype=dtype, device=device))
    assert_holds(pool, with_ones(planes, 2))


@by_device
@pytest.mark.parametrize("dtype", SLOT_DTYPES)
def test_wr2_wr3_parts_of_a_row(dtype, device):
    pool, planes = junk_pool(MLA, device=device)
    where = slots(-1, -9, 9, 12, 0, 2, dtype=dtype, device=device)
    part = torch.ones((6, 1, 4), device=device)
    pool.set_mla_kv_buffer(Layer(3), where, part, part)
    assert_holds(pool, with_ones(planes, 2))


@by_device
@pytest.mark.parametrize("geometry", [MHA, MLA], ids=["mha", "mla"])
def test_wr2_wr3_nothing_moves_to_where_nothing_is(geometry, device):
    pool, planes = junk_pool(geometry, device=device)
    for dst in (-1, 9, 0):
        pool.move_kv_cache(slots(dst, device=device), slots(2, device=device))
        assert_holds(pool, planes)


def test_wr3_a_page_past_the_end_is_not_the_last_one():
    pool, planes = junk_pool(MHAGeometry(8, 4, LayerRange(3, 4), 1, 4, "float32"))
    for call in WRITES.values():
        call(pool, slots(12, 13, 14, 15))
        assert_holds(pool, planes)


@by_device
@pytest.mark.parametrize("geometry", [MHA, MLA], ids=["mha", "mla"])
@pytest.mark.parametrize("call", READS)
def test_wr3_reads_past_the_end_are_no_other_row(call, geometry, device):
    pool, _ = junk_pool(geometry, device=device)
    for slot in (9, -1, 0, 2**31 - 1, -(2**31), 2**32 + 5):
        rows = flattened(READS[call](pool, slots(slot, device=device)))
        assert rows and all(part.numel() and not part.any() for part in rows)
    with kvjax.checks(), pytest.raises(IndexError, match=r"indices\[0\]=9"):
        READS[call](pool, slots(9, device=device))


@by_dtype
@by_device
@pytest.mark.parametrize("where", [(0, 0, 0, 4), (0, 3, 2, 4)])
@pytest.mark.parametrize("make", [mha, mla])
def test_wr4_s1_the_padding_page_stays_zero(make, where, dtype, device):
    pool = make(8, 4, getattr(torch, dtype), *((1, 16) if make is mha else (12, 4)), 1, device)
    new = values(pool, 4)
    for rows in new:
        rows[:3], rows[3] = float("nan"), 5
    write(pool, 0, slots(*where, device=device), new)
    if make is mla:
        pool.set_mla_kv_buffer(
            Layer(0), slots(*where, device=device), new[0][..., :12], new[0][..., 12:]
        )
    for buffer in pool.get_kv_buffer(0):
        assert not buffer[:4].contiguous().view(torch.uint8).any()
        attended = torch.tensor([0.0, 1.0], device=device) @ buffer.float()[[0, 4], 0]
        assert (attended == 5).all()
    assert pool.audit() == []


# The last row starts at element 2 147 484 096, past what int32 holds.
FAR = MLAGeometry(3_728_271, 1, 1, 512, 64, "float8_e4m3fn")


@pytest.mark.slow
@by_device
def test_wr6_a_row_past_two_to_the_31_elements(device):
    pool = zero_pool(FAR, device)
    last = slots(3_728_271, dtype=torch.int32, device=device)
    sevens = torch.full((1, 1, 576), 7, dtype=torch.uint8, device=device)
    sevens = sevens.view(torch.float8_e4m3fn)
    for attempt in range(2):
        pool.planes[0][0, -1] = 0
        if attempt:
            pool.set_mla_kv_buffer(Layer(0), last, sevens[..., :512], sevens[..., 512:])
        else:
            pool.set_kv_buffer(Layer(0), last, sevens, None)
        assert (pool.planes[0][0, -1] == 7).all() and not pool.planes[0][0, :2].any()
        for part in pool.get_mla_kv_buffer(Layer(0), last):
            assert (part.view(torch.uint8) == 7).all()
    pool.move_kv_cache(slots(1, device=device), last)
    assert (pool.planes[0][0, 1] == 7).all() and not pool.planes[0][0, 2].any()


def test_wr6_lengths_are_python_numbers():
    pool = mla(4, 1, torch.float8_e4m3fn, 512, 64, 1)
    _, lengths, _ = pool.get_contiguous_buf_infos()
    assert lengths == [5 * 576] and type(lengths[0]) is int


@by_device
def test_fp1_s1_scales_divide_and_leave_the_callers_tensors_alone(device):
    kinds = [
        lambda scale: scale,
        lambda scale: torch.tensor(scale, device=device),
        lambda scale: torch.tensor([scale], device=device),
        lambda scale: torch.tensor(scale, dtype=torch.bfloat16, device=device),
    ]
    for kind in kinds:
        k, v = (torch.tensor([2.0, 4, 8, 16], device=device).view(1, 1, 4) for _ in range(2))
        pool = mha(8, 1, torch.float8_e4m3fn, 1, 4, 1, device)
        pool.set_kv_buffer(Layer(0), slots(2, device=device), k, v, kind(0.5), kind(4.0))
        assert bytes(pool.k_buffer[0][2, 0].tolist()).hex() == "48505860"
        assert bytes(pool.v_buffer[0][2, 0].tolist()).hex() == "30384048"
        assert pool.k_buffer[0].dtype == pool.v_buffer[0].dtype == torch.uint8
        assert pool.get_key_buffer(0)[2, 0].float().tolist() == [4, 8, 16, 32]
        assert k.flatten().tolist() == v.flatten().tolist() == [2, 4, 8, 16]


def test_fp1_a_scale_of_none_is_one_and_is_ignored_for_fp8():
    wide = torch.tensor([2.0, 4, 8, 16]).view(1, 1, 4)
    narrow = wide.to(torch.float8_e4m3fn)
    stored = []
    for k, k_scale in ((wide, None), (wide, 1.0), (narrow, None), (narrow, 2.0)):
        pool = mha(8, 1, torch.float8_e4m3fn, 1, 4, 1)
        pool.set_kv_buffer(Layer(0), slots(2), k, wide, k_scale)
        stored.append(pool.k_buffer[0])
    assert all(torch.equal(stored[0], other) for other in stored[1:])


CHAINS = [
    ([2, 3, 4], [1, 2, 3], [0, 1, 1, 2, 3, 5, 6, 7, 8]),
    ([1, 2, 3], [2, 3, 4], [0, 2, 3, 4, 4, 5, 6, 7, 8]),
    ([1, 2], [2, 1], [0, 2, 1, 3, 4, 5, 6, 7, 8]),
    ([5], [5], [0, 1, 2, 3, 4, 5, 6, 7, 8]),
    ([1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [0, 5, 4, 3, 2, 1, 6, 7, 8]),
    ([1, 2, 3, 4, 5, 6, 7], [7, 1, 2, 3, 4, 5, 6], [0, 7, 1, 2, 3, 4, 5, 6, 8]),
    ([], [], [0, 1, 2, 3, 4, 5, 6, 7, 8]),
]


@by_device
@pytest.mark.parametrize("dtype", SLOT_DTYPES)
@pytest.mark.parametrize("dst, src, expected", CHAINS)
def test_mv1_overlapping_moves(dst, src, expected, dtype, device):
    pool = rows_that_hold_their_index(8, device)
    pool.move_kv_cache(*(slots(*x, dtype=dtype, device=device) for x in (dst, src)))
    assert first_column(pool) == expected


@by_device
def test_mv1_an_empty_float_tensor_and_a_strided_view(device):
    pool = rows_that_hold_their_index(8, device)
    pool.move_kv_cache(torch.tensor([], device=device), torch.tensor([], device=device))
    pool.move_kv_cache(slots(2, 9, 3, 9, device=device)[::2], slots(5, 0, 6, 0, device=device)[::2])
    assert first_column(pool) == [0, 1, 5, 6, 4, 5, 6, 7, 8]


@by_device
def test_mv1_three_thousand_rows(device):
    pool = rows_that_hold_their_index(4000, device)
    dst = np.random.default_rng(0).permutation(np.arange(1, 4001))[:3000]
    src = np.roll(dst, 1)
    pool.move_kv_cache(*(torch.from_numpy(x).to(device) for x in (dst, src)))
    expected = np.arange(4001)
    expected[dst] = src
    assert first_column(pool) == expected.tolist()


@by_device
@pytest.mark.parametrize("slot", [2**32 + 5, 2**31, -(2**31) - 1, -(2**32) + 5])
@pytest.mark.parametrize("call", WRITES)
def test_dl3_a_slot_is_never_cut_to_another(call, slot, device):
    pool, planes = junk_pool(MHA, device=device)
    WRITES[call](pool, slots(slot, device=device))
    assert_holds(pool, planes)
    with kvjax.checks(), pytest.raises(IndexError, match=f"={slot} is not there"):
        WRITES[call](pool, slots(slot, device=device))
    pool.move_kv_cache(slots(1, device=device), slots(slot, device=device))
    assert_holds(pool, [np.where(np.arange(9).reshape(1, 9, 1, 1) == 1, 0, x) for x in planes])


@by_device
def test_dl5_a_host_buffer_may_be_reused_at_once(device):
    pool = mha(1 << 14, 1, torch.float8_e4m3fn, 1, 256, 1, device)
    where = torch.arange(1, pool.size + 1, device=device)
    pinned = device == "cuda"
    copies = [
        [
            [torch.full((8192, 1, 256), 7, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
            for _ in range(2)
        ]
    ]
    flat = torch.full((2, 1, pool.size, 1, 256), 9, dtype=torch.uint8, pin_memory=pinned)
    for call, data, byte in ((pool.load_cpu_copy, copies, 7), (pool.transfer, flat, 9)):
        args = (data, where) if byte == 7 else (where, data)
        for _ in range(3):  # so that the pool is still busy when it is written
            pool.move_kv_cache(where, where.flip(0))
        call(*args)
        for part in flattened(data):
            part.fill_(1)
        for plane in pool.planes:
            assert (plane[0, 1:] == byte).all()


def test_ho2_a_host_copy_is_no_view_of_anything_larger():
    pool, _ = junk_pool(MHAGeometry(64, 1, 2, 1, 4, "float32"))
    for part in flattened(pool.get_cpu_copy(torch.arange(1, 9))):
        assert part.untyped_storage().nbytes() == part.nbytes == 8 * 16


X2 = {
    "cache_k": (MHA, "set_kv_buffer", {"cache_k": 4, "cache_v": 8}),
    "cache_v": (MHA, "set_kv_buffer", {"cache_k": 4, "cache_v": 8}),
    "cache_k_nope": (MLA, "set_mla_kv_buffer", {"cache_k_nope": 4, "cache_k_rope": 4}),
    "cache_k_rope": (MLA, "set_mla_kv_buffer", {"cache_k_nope": 4, "cache_k_rope": 4}),
    "cache_k of latent rows": (MLA, "set_kv_buffer", {"cache_k": 8, "cache_v": 4}),
}


@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("case", X2)
def test_x2_as_many_rows_as_slots(case, num_rows):
    geometry, method, widths = X2[case]
    argument = case.partition(" ")[0]
    pool, planes = junk_pool(geometry)
    rows = {
        name: torch.ones((num_rows if name == argument else 3, 1, width))
        for name, width in widths.items()
    }
    with pytest.raises(GeometryError, match=rf"{argument} has shape \[{num_rows}, "):
        getattr(pool, method)(Layer(3), slots(1, 2, 3), **rows)
    assert_holds(pool, planes)


def test_x3_sizes_are_of_what_is_stored():
    pool = mha(12, 4, torch.float8_e4m3fn, 2, 4, 2)
    _, lengths, item_lengths = pool.get_contiguous_buf_infos()
    assert (lengths, item_lengths) == ([128] * 4, [32] * 4)
    assert pool.get_kv_size_bytes() == (256, 256)
    assert sum(part.nbytes for part in flattened(pool.get_cpu_copy(slots(5)))) == 32


@by_device
@pytest.mark.parametrize("geometry", [MHA, MLA], ids=["mha", "mla"])
def test_x5_resumed_memory_is_cleared_where_it_is(geometry, device):
    pool, _ = junk_pool(geometry, device=device)
    addresses = pool.get_contiguous_buf_infos()[0]
    for plane in pool.planes:
        plane.view(torch.uint8).fill_(0xFF)  # NaN, also in the padding page
    assert pool.audit()
    pool.clear()
    assert pool.audit() == [] and not any(plane.any() for plane in pool.planes)
    assert pool.get_contiguous_buf_infos()[0] == addresses


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["get_cpu_copy", "load_cpu_copy"])
def test_x6_host_copies_wait_for_every_stream(way):
    pool = mha(8, 1, torch.float32, 1, 4, 1, "cuda")
    where, forward = slots(2, device="cuda"), torch.cuda.Stream()
    ones = [torch.ones((1, 1, 4), device="cuda") for _ in range(2)]
    pool.set_kv_buffer(Layer(0), where, *ones)  # compiles
    twos = [[[torch.full((1, 1, 4), 2.0)] * 2]]
    torch.cuda.synchronize()
    with torch.cuda.stream(forward):
        torch.cuda._sleep(200_000_000)  # a tenth of a second, at least
        pool.set_kv_buffer(Layer(0), where, ones[0] * 3, ones[1] * 3)
    if way == "get_cpu_copy":
        assert all((part == 3).all() for part in flattened(pool.get_cpu_copy(where)))
    else:  # the slot has another owner now
        pool.load_cpu_copy(twos, where)
        torch.cuda.synchronize()
        assert all((plane[0, 2] == 2).all() for plane in pool.planes)


def test_x8_latent_rows_are_one_buffer_a_layer():
    pool = mla(12, 4, torch.bfloat16, 512, 64, 3, start_layer=3)
    addresses, lengths, _ = pool.get_contiguous_buf_infos()
    assert len(addresses) == 3 and sum(lengths) == pool.geometry.bytes


def test_x10_part_of_the_tokens_into_slots_of_their_own():
    pool = rows_that_hold_their_index(32, "cpu")
    flat = pool.get_flat_data(torch.arange(1, 9))
    pool.transfer(slots(20, 21, 22, 23), flat[:, :, 4:])
    assert first_column(pool) == [*range(20), 5, 6, 7, 8, *range(24, 33)]


@by_device
def test_x14_padded_slots_may_repeat(device):
    pool, planes = junk_pool(MHA, device=device)
    where = slots(-1, -1, 3, -1, 0, 0, 9, 9, device=device)
    new = values(pool, 8)
    for rows in new:
        rows *= torch.arange(8, device=device).view(8, 1, 1) - 1
    write(pool, 3, where, new)
    planes = with_ones(planes, 3)
    assert_holds(pool, planes)
    pool.move_kv_cache(where, slots(1, 2, 4, 5, 6, 7, 8, 3, device=device))
    assert_holds(pool, [oracles.move_rows(plane, [3], [4], 1) for plane in planes])


@by_device
@pytest.mark.parametrize(
    "dtype, bits", [("float8_e5m2", "7b7b7bfb7b"), ("float8_e4m3fn", "7e7e7efe7e")]
)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_s9_what_is_finite_stays_finite(dtype, bits, source, device):
    large = torch.tensor([60000, 1e6, float("inf"), -1e6, 3e38], device=device).to(source)
    pool = mha(8, 1, getattr(torch, dtype), 1, 5, 1, device)
    pool.set_kv_buffer(Layer(0), slots(2, device=device), *[large.view(1, 1, 5)] * 2)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        assert to_numpy(buffer[2, 0]).tobytes().hex() == bits
    assert pool.get_key_buffer(0).float().isfinite().all()


def test_s3_latent_rows_of_another_dtype_are_cast():
    pool = mla(8, 1, torch.float8_e4m3fn, 4, 4, 1)
    pool.set_kv_buffer(Layer(0), slots(2), torch.ones((1, 1, 8), dtype=torch.bfloat16), None)
    assert (pool.kv_buffer[0][2] == 0x38).all()


@pytest.mark.parametrize("call", CALLS)
def test_the_comparisons_can_fail(call):
    pool, planes = junk_pool(MHA)
    pool.planes[1][0, 8] += 1
    CALLS[call](pool, slots(7))
    with pytest.raises(AssertionError):
        assert_holds(pool, planes)
