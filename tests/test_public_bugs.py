"""Faults that real pools had, by the ids of the collection; each with the right answer.

What concerns the allocators and the request table is in their tests; here is what concerns planes.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kvjax
from kvjax import GeometryError, LayerRange, MHAGeometry, MLAGeometry, mha, mla
from kvjax.geometry import DTYPE_BYTES
from kvjax.transfer import HostRows
from tests import oracles
from tests.pools.junk import IMPLEMENTATIONS, assert_holds, junk_pool, pool_of

by_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def with_row(planes, slot, row):
    """The planes with ``row``, or as much of it as they have room for, at one slot of layer 0."""
    planes = [plane.copy() for plane in planes]
    for plane in planes:
        plane[0, slot] = row[: plane.shape[-1]]
    return planes


def rows_that_hold_their_index(geometry):
    """A pool in which every number is the number of its row."""
    _, planes = junk_pool(geometry)
    for plane in (planes := [plane.copy() for plane in planes]):
        plane[...] = np.arange(plane.shape[1]).reshape(1, -1, 1, 1)
    return pool_of(geometry, planes)


def first_column(pool):
    """The first number of each row, which has to be the same in every layer and plane."""
    columns = [np.asarray(plane)[..., 0, 0] for plane in pool.planes]
    assert all((column == columns[0][:1]).all() for column in columns)
    return columns[0][0].astype(int).tolist()


@by_implementation
def test_wr1_latent_and_rope_meet_inside_a_block(implementation):
    pool = kvjax.create(MLAGeometry(16, 1, 1, 528, 128, "float8_e4m3fn"))
    latent = np.array([i % 251 for i in range(528)], np.uint8)
    rope = np.array([i % 97 + 100 for i in range(128)], np.uint8)
    parts = [part.view(ml_dtypes.float8_e4m3fn).reshape(1, 1, -1) for part in (latent, rope)]
    pool = mla.write(pool, 0, [3], *parts, implementation=implementation)
    row = np.asarray(pool.planes[0])[0, 3, 0]
    assert row[[0, 511, 512, 527, 528, 655]].tolist() == [0, 9, 10, 25, 100, 130]
    assert row.astype(int).sum() == 80996
    for have, want in zip(mla.read(pool, 0, [3]), parts, strict=True):
        oracles.assert_same_bits(have, want)


@pytest.mark.parametrize("latent_dim, rope_dim", [(64, 32), (100, 28), (512, 64), (16, 0)])
def test_wr1_any_widths(latent_dim, rope_dim):
    pool = kvjax.create(MLAGeometry(16, 1, 1, latent_dim, rope_dim, "float32"))
    latent = np.arange(1, latent_dim + 1, dtype=np.float32).reshape(1, 1, -1)
    rope = -np.arange(1, rope_dim + 1, dtype=np.float32).reshape(1, 1, -1)
    pool = mla.write(pool, 0, [3], latent, rope)
    np.testing.assert_array_equal(pool.planes[0][0, 3, 0], np.concatenate([latent, rope], -1)[0, 0])
    for have, want in zip(mla.read(pool, 0, [3]), (latent, rope), strict=True):
        oracles.assert_same_bits(have, want)


MHA = MHAGeometry(8, 1, 1, 1, 4, "float32")
MLA = MLAGeometry(8, 1, 1, 4, 4, "float32")
ONES = np.ones((5, 1, 4), np.float32)
WRITES = {
    "mha": (MHA, lambda pool, slots, **by: mha.write(pool, 0, slots, ONES, ONES, **by)),
    "mla": (MLA, lambda pool, slots, **by: mla.write(pool, 0, slots, ONES, ONES, **by)),
    "scatter": (
        MHA,
        lambda pool, slots, **by: kvjax.scatter(pool, slots, (ONES[None], ONES[None]), **by),
    ),
}


@by_implementation
@pytest.mark.parametrize("name", WRITES)
def test_wr2_wr3_a_slot_that_is_not_there_is_not_another(name, implementation):
    geometry, write = WRITES[name]
    write = partial(write, implementation=implementation)
    slots = [-1, -9, 9, 12, 2]
    for call in (
        lambda pool: write(pool, slots),
        lambda pool: write(pool, np.int64(slots)),
        lambda pool: jax.jit(write)(pool, np.int32(slots)),
    ):
        pool, planes = junk_pool(geometry)
        assert_holds(call(pool), with_row(planes, 2, np.ones(8, np.float32)))


@by_implementation
def test_wr2_wr3_nothing_moves_to_where_nothing_is(implementation):
    pool, planes = junk_pool(MHA)
    for dst in (-1, 9, 0):
        pool = kvjax.move(pool, [dst], [2], implementation=implementation)
        assert_holds(pool, planes)


@by_implementation
def test_wr3_a_page_past_the_end_is_not_the_last_one(implementation):
    pool, planes = junk_pool(dataclasses.replace(MHA, page_size=4))
    pages = [3, 2**30], [1, 2]  # 2**30 pages of 4 are 2**32 slots, which int32 takes for 0
    assert_holds(kvjax.copy_pages(pool, *pages, implementation=implementation), planes)


@by_implementation
def test_wr3_reads_past_the_end_are_no_other_row(implementation):
    pool, _ = junk_pool(MHA)
    for slots in ([9], [-1], [0], [2**31 - 1], [-(2**31)]):
        rows = [
            *kvjax.gather(pool, slots, implementation=implementation),
            *mha.read(pool, 0, slots, implementation=implementation),
            *kvjax.offload(pool, slots).rows,
        ]
        assert not any(np.asarray(row).view(np.uint32).any() for row in rows)


@pytest.mark.parametrize(
    "kind, dtype, implementation",
    [
        *((kind, dtype, "reference") for kind in ("mha", "mla") for dtype in DTYPE_BYTES),
        pytest.param("mha", "float8_e4m3fn", "mosaic_gpu", marks=pytest.mark.gpu),
        pytest.param("mla", "bfloat16", "mosaic_gpu", marks=pytest.mark.gpu),
    ],
)
def test_wr4_the_padding_page_stays_zero(kind, dtype, implementation):
    slots = [0, 0, 3, 0, 4]
    rows = np.full((5, 1, 16), np.nan, np.float32)
    rows[-1] = 5
    if kind == "mha":
        pool = kvjax.create(MHAGeometry(8, 4, 1, 1, 16, dtype))
        pool = mha.write(pool, 0, slots, rows, rows, implementation=implementation)
    else:
        pool = kvjax.create(MLAGeometry(8, 4, 1, 16, 16, dtype))
        pool = mla.write(pool, 0, slots, rows, rows, implementation=implementation)
    for plane in kvjax.layer(pool, 0):
        assert not oracles.bits(plane[:4]).any()
        attended = jnp.array([0.0, 1.0]) @ plane.astype("float32")[np.array([0, 4]), 0]
        np.testing.assert_array_equal(attended, 5)


# The last row starts at element 2 147 484 096, past what int32 holds.
FAR = MLAGeometry(3_728_271, 1, 1, 512, 64, "float8_e4m3fn")


@pytest.mark.slow
def test_wr6_a_row_past_two_to_the_31_elements():
    sevens = np.full((1, 1, 576), 7, np.uint8).view(ml_dtypes.float8_e4m3fn)
    last = np.array([3_728_271], np.int32)
    pool = mla.write_joined(kvjax.create(FAR), 0, last, sevens)
    plane = pool.planes[0]
    assert np.asarray(plane[0, -1] == 7).all() and not np.asarray(plane[0, :2]).any()
    read = np.concatenate(mla.read(pool, 0, last), axis=-1)
    oracles.assert_same_bits(read, sevens)
    pool = kvjax.move(pool, [1], last)
    assert (
        np.asarray(pool.planes[0][0, 1] == 7).all() and not np.asarray(pool.planes[0][0, 2]).any()
    )


def test_wr6_addresses_are_python_numbers():
    _, lengths, _ = kvjax.buffer_infos(kvjax.create(dataclasses.replace(FAR, num_slots=4)))
    assert lengths == [5 * 576] and FAR.bytes == 2_147_484_672


def test_fp1_scales_divide_and_leave_the_callers_arrays_alone():
    values = np.array([2, 4, 8, 16], np.float32).reshape(1, 1, 4)
    kinds = [
        lambda s: s,
        np.float32,
        jnp.float32,
        lambda s: np.array([s]),
        lambda s: jnp.array([s]),
    ]
    for kind in kinds:
        k, v = jnp.array(values), jnp.array(values)
        pool = kvjax.create(MHAGeometry(8, 1, 1, 1, 4, "float8_e4m3fn"))
        pool = mha.write(pool, 0, [2], k, v, k_scale=kind(0.5), v_scale=kind(4.0))
        k_bits, v_bits = (np.asarray(plane)[0, 2, 0].tobytes().hex() for plane in pool.planes)
        assert (k_bits, v_bits) == ("48505860", "30384048")
        assert [plane.dtype for plane in pool.planes] == ["uint8", "uint8"]
        assert kvjax.layer(pool, 0)[0][2, 0].astype(float).tolist() == [4, 8, 16, 32]
        oracles.assert_same_bits(k, values)
        oracles.assert_same_bits(v, values)


def test_fp1_a_scale_of_none_is_one_and_is_ignored_for_fp8():
    values = np.array([2, 4, 8, 16], np.float32).reshape(1, 1, 4)
    narrow = values.astype(ml_dtypes.float8_e4m3fn)
    stored = []
    for k, k_scale in ((values, None), (values, 1.0), (narrow, None), (narrow, 2.0)):
        pool = kvjax.create(MHAGeometry(8, 1, 1, 1, 4, "float8_e4m3fn"))
        stored.append(mha.write(pool, 0, [2], k, values, k_scale=k_scale).planes[0])
    for plane in stored[1:]:
        np.testing.assert_array_equal(plane, stored[0])


QUANTIZED = MLAGeometry(12, 4, 2, 4, 3, "bfloat16", "per_token_head")


def a_quantized_row(slot, latent=(1, -2, 4, 0.5)):
    """A pool with one row, in its second layer; the rope is the same for any latent."""
    parts = np.float32(latent).reshape(1, 1, 4), np.float32([1, -3, 0]).reshape(1, 1, 3)
    return mla.write(kvjax.create(QUANTIZED), 1, [slot], *parts)


def quantized_row(pool, slot):
    return [np.asarray(part).ravel().tolist() for part in mla.read(pool, 1, [slot])]


def test_fp4_a_row_of_zeros_has_a_scale():
    pool = a_quantized_row(5, latent=(0, 0, 0, 0))
    latent, scale, rope = (np.asarray(plane)[1, 5] for plane in pool.planes)
    assert 0 < scale.item() < np.inf and not latent.any() and np.isfinite(rope.astype(float)).all()
    assert [part.ravel().tolist() for part in mla.read(pool, 1, [5])] == [[0] * 4, [1, -3, 0]]


def test_fp4_a_row_of_numbers():
    latent, scale, rope = (np.asarray(plane)[1, 5, 0] for plane in a_quantized_row(5).planes)
    assert latent.tobytes().hex() == "6ef67e66" and scale.item() == np.float32(4 / 448)
    assert rope.tolist() == [112, -336, 0]
    assert quantized_row(a_quantized_row(5), 5) == [[1, -2, 4, 0.5], [1, -3, 0]]


def test_fp4_s4_a_rope_that_would_overflow_is_refused():
    with pytest.raises(GeometryError, match="range of float16"):
        dataclasses.replace(QUANTIZED, dtype="float16")


QUANTIZED_KV = {
    name: MHAGeometry(12, 4, 2, 2, 4, "bfloat16", 3, quantization=f"{name}_per_token_head")
    for name in ("int8", "fp8")
}


def quantized_heads(name):
    """Of K, and of V, two heads that are stored exactly, each with another scale."""
    largest = {"int8": 127, "fp8": 448}[name]
    k, v = np.float32([[1, -2, 64, largest], [0] * 4]), np.float32([[-6, 0, largest]] * 2)
    return k, v * np.float32([[1], [4]])


def pool_with_heads(slot, name):
    pool = kvjax.create(QUANTIZED_KV[name])
    return mha.write(pool, 1, [slot], *(heads[None] for heads in quantized_heads(name)))


def holds_heads(pool, slot, name):
    read = mha.read(pool, 1, [slot], "float32")
    return all(
        np.array_equal(have[0], want)
        for have, want in zip(read, quantized_heads(name), strict=True)
    )


@pytest.mark.parametrize("name", QUANTIZED_KV)
def test_fp4_heads_of_numbers(name):
    pool = pool_with_heads(5, name)
    k, k_scale, v, v_scale = (np.asarray(plane)[1, 5] for plane in pool.planes)
    of_zeros = np.float32(1e-26) / np.float32({"int8": 127, "fp8": 448}[name])
    assert k_scale.ravel().tolist() == [1, of_zeros] and v_scale.ravel().tolist() == [1, 4]
    bits = {
        "int8": ("01fe407f00000000", "fa007ffa007f"),
        "fp8": ("38c0687e00000000", "cc007ecc007e"),
    }
    assert (k.tobytes().hex(), v.tobytes().hex()) == bits[name]
    assert holds_heads(pool, 5, name) and not holds_heads(pool, 6, name)


MOVES = {  # FP5: from slot 5 of one pool to slot 9
    "move": lambda pool: kvjax.move(pool, [9], [5]),
    "copy_pages": lambda pool: kvjax.copy_pages(pool, [2], [1]),
    "offload": lambda pool: kvjax.restore(empty_like(pool), [9], kvjax.offload(pool, [5])),
    "gather": lambda pool: kvjax.scatter(empty_like(pool), [9], kvjax.gather(pool, [5])),
    "copy_rows": lambda pool: kvjax.copy_rows(empty_like(pool), [9], pool, [5]),
}


def empty_like(pool):
    return kvjax.create(pool.geometry)


@pytest.mark.parametrize("name", MOVES)
def test_fp5_scales_travel_with_their_payload(name):
    pool = MOVES[name](a_quantized_row(5))
    assert quantized_row(pool, 9) == [[1, -2, 4, 0.5], [1, -3, 0]]


@pytest.mark.parametrize("kind", QUANTIZED_KV)
@pytest.mark.parametrize("name", MOVES)
def test_fp5_scales_of_heads_travel_with_them(name, kind):
    assert holds_heads(MOVES[name](pool_with_heads(5, kind)), 9, kind)


@pytest.mark.parametrize("kind", QUANTIZED_KV)
def test_fp5_zero_leaves_no_head_and_no_scale(kind):
    pool = kvjax.zero(pool_with_heads(5, kind), [5])
    assert not any(np.asarray(plane).any() for plane in pool.planes)
    assert not any(np.asarray(part).any() for part in mha.read(pool, 1, [5]))


@pytest.mark.parametrize("kind", QUANTIZED_KV)
def test_fp5_host_rows_have_room_for_the_scales_of_heads(kind):
    rows = kvjax.offload(pool_with_heads(5, kind), [5])
    num_bytes = 2 * 2 * (4 + 4 + 3 + 4)  # layers, heads, K and its scale, V and its scale
    assert sum(plane.nbytes for plane in rows.rows) == num_bytes
    assert num_bytes == QUANTIZED_KV[kind].bytes_per_token


@pytest.mark.parametrize("kind", QUANTIZED_KV)
def test_x8_quantised_heads_are_four_buffers_a_layer(kind):
    geometry = QUANTIZED_KV[kind]
    addresses, lengths, item_lengths = kvjax.buffer_infos(kvjax.create(geometry))
    assert len(addresses) == 4 * 2 and sum(lengths) == geometry.bytes
    row_bytes = 2 * 4, 2 * 4, 2 * 3, 2 * 4
    assert item_lengths == [4 * num_bytes for num_bytes in row_bytes for _ in range(2)]


def test_fp5_host_rows_have_room_for_scales():
    rows = kvjax.offload(a_quantized_row(5), [5])
    assert sum(plane.nbytes for plane in rows.rows) == 28 == QUANTIZED.bytes_per_token


def test_fp5_zero_leaves_nothing_and_reads_as_zeros():
    pool = kvjax.zero(a_quantized_row(5), [5])
    assert not any(np.asarray(plane).any() for plane in pool.planes)
    assert quantized_row(pool, 5) == [[0] * 4, [0] * 3]


CHAINS = [
    ([2, 3, 4], [1, 2, 3], [0, 1, 1, 2, 3, 5, 6, 7, 8]),
    ([1, 2, 3], [2, 3, 4], [0, 2, 3, 4, 4, 5, 6, 7, 8]),
    ([1, 2], [2, 1], [0, 2, 1, 3, 4, 5, 6, 7, 8]),
    ([5], [5], [0, 1, 2, 3, 4, 5, 6, 7, 8]),
    ([1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [0, 5, 4, 3, 2, 1, 6, 7, 8]),
    ([1, 2, 3, 4, 5, 6, 7], [7, 1, 2, 3, 4, 5, 6], [0, 7, 1, 2, 3, 4, 5, 6, 8]),
    ([], [], [0, 1, 2, 3, 4, 5, 6, 7, 8]),
]


@by_implementation
@pytest.mark.parametrize("dst, src, expected", CHAINS)
def test_mv1_overlapping_moves(dst, src, expected, implementation):
    for make in (list, np.int32, np.int64):
        pool = rows_that_hold_their_index(MHAGeometry(8, 1, 2, 1, 4, "float32"))
        pool = kvjax.move(pool, make(dst), make(src), implementation=implementation)
        assert first_column(pool) == expected


def test_mv1_an_empty_float_list_and_a_strided_view():
    pool = rows_that_hold_their_index(MHAGeometry(8, 1, 2, 1, 4, "float32"))
    pool = kvjax.move(pool, np.array([]), np.array([]))
    pool = kvjax.move(pool, np.array([2, 9, 3, 9])[::2], np.array([5, 0, 6, 0])[::2])
    assert first_column(pool) == [0, 1, 5, 6, 4, 5, 6, 7, 8]


@by_implementation
def test_mv1_three_thousand_rows(implementation):
    pool = rows_that_hold_their_index(MHAGeometry(4000, 1, 2, 1, 4, "float32"))
    slots = np.random.default_rng(0).permutation(np.arange(1, 4001))[:3000]
    pool = kvjax.move(pool, slots, np.roll(slots, 1), implementation=implementation)
    expected = np.arange(4001)
    expected[slots] = np.roll(slots, 1)
    assert first_column(pool) == expected.tolist()


TOO_LARGE = {
    "write": lambda pool, slots: mha.write(pool, 0, slots, ONES[:1], ONES[:1]),
    "move, dst": lambda pool, slots: kvjax.move(pool, slots, [1]),
    "move, src": lambda pool, slots: kvjax.move(pool, [1], slots),
    "offload": kvjax.offload,
    "zero": kvjax.zero,
}


@pytest.mark.parametrize("slot", [2**32 + 5, 2**31, -(2**31) - 1])
@pytest.mark.parametrize("name", TOO_LARGE)
def test_dl3_a_slot_is_never_cut_to_another(name, slot):
    call, (pool, planes) = TOO_LARGE[name], junk_pool(MHA)
    for slots in ([slot], np.array([slot])):
        with pytest.raises(OverflowError, match="does not fit int32"):
            call(pool, slots)
    assert_holds(pool, planes)
    with jax.enable_x64(True):
        slots = jnp.array([slot])
    new = call(pool, slots)  # on the device it is one that is not there
    if name == "move, src":
        planes = with_row(planes, 1, np.zeros(4, np.float32))
    if isinstance(new, kvjax.Pool):
        assert_holds(new, planes)


def aligned(shape, byte):
    """An fp8 array that JAX on CPU would share, for it begins at a multiple of 64 bytes."""
    raw = np.full(int(np.prod(shape)) + 64, byte, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:][: raw.size - 64].view(ml_dtypes.float8_e4m3fn).reshape(shape)


HOST_WRITES = {
    "write": lambda pool, slots, k, v: mha.write(pool, 0, slots, k, v),
    "scatter": lambda pool, slots, k, v: kvjax.scatter(pool, slots, (k[None], v[None])),
    "scatter_layer": lambda pool, slots, k, v: kvjax.scatter_layer(pool, 0, slots, (k, v)),
    "restore": lambda pool, slots, k, v: kvjax.restore(
        pool, slots, HostRows((k[None], v[None]), pool.geometry.planes, pool.geometry.layers)
    ),
}


@pytest.mark.parametrize("name", HOST_WRITES)
def test_dl5_a_host_buffer_may_be_reused_at_once(name):
    geometry = MHAGeometry(1 << 14, 1, 1, 1, 1024, "float8_e4m3fn")
    for _ in ("compile", "test"):
        pool, slots = kvjax.create(geometry), np.arange(1, geometry.num_rows)
        k, v = aligned((slots.size, 1, 1024), 7), aligned((slots.size, 1, 1024), 8)
        for _ in range(3):  # so that the pool is still busy when it is written
            pool = kvjax.move(pool, slots, slots[::-1])
        pool = HOST_WRITES[name](pool, slots, k, v)
        k[...], v[...], slots[...] = 0, 0, 1
    for plane, byte in zip(pool.planes, (7, 8), strict=True):
        assert (np.asarray(plane)[0, 1:] == byte).all()


@by_implementation
@pytest.mark.parametrize("calling", ["eager", "jit", "jit and donate"])
def test_dl6_rows_that_nobody_writes_survive(calling, implementation):
    geometry = dataclasses.replace(MHA, v_head_dim=8)
    pool, planes = junk_pool(geometry)
    rows = np.ones((1, 1, 4), np.float32), np.ones((1, 1, 8), np.float32)
    write = partial(kvjax.scatter_layer, implementation=implementation)
    if calling != "eager":
        write = jax.jit(write, donate_argnums=0 if "donate" in calling else ())
    new = write(pool, 0, np.array([1], np.int32), rows)
    assert_holds(new, with_row(planes, 1, np.ones(8, np.float32)))
    if calling == "jit":  # nobody gave the pool away
        assert_holds(pool, planes)


@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("kind", ["k", "v", "latent", "rope", "rows"])
def test_x2_as_many_rows_as_slots(kind, num_rows):
    right, wrong = np.ones((3, 1, 4), np.float32), np.ones((num_rows, 1, 4), np.float32)
    calls = {
        "k": (MHA, partial(mha.write, k=wrong, v=right)),
        "v": (MHA, partial(mha.write, k=right, v=wrong)),
        "latent": (MLA, partial(mla.write, latent=wrong, rope=right)),
        "rope": (MLA, partial(mla.write, latent=right, rope=wrong)),
        "rows": (MLA, partial(mla.write_joined, rows=np.repeat(wrong, 2, -1))),
    }
    geometry, write = calls[kind]
    pool, planes = junk_pool(geometry)
    with pytest.raises(GeometryError, match=rf"{kind} has shape \({num_rows}, "):
        write(pool, 0, [1, 2, 3])
    assert_holds(pool, planes)


def test_x3_host_rows_take_what_the_pool_stores():
    pool = kvjax.create(MHAGeometry(12, 4, 2, 2, 4, "float8_e4m3fn"))
    rows = kvjax.offload(pool, [5])
    assert sum(plane.nbytes for plane in rows.rows) == 32 == pool.geometry.bytes_per_token


def test_x8_latent_rows_are_one_buffer_a_layer():
    geometry = MLAGeometry(12, 4, LayerRange(3, 6), 512, 64, "bfloat16")
    addresses, lengths, _ = kvjax.buffer_infos(kvjax.create(geometry))
    assert len(addresses) == 3 and sum(lengths) == geometry.bytes


def test_x10_part_of_the_tokens_into_slots_of_their_own():
    pool = rows_that_hold_their_index(MHAGeometry(32, 1, 2, 1, 4, "float32"))
    rows = kvjax.offload(pool, np.arange(1, 9))
    part = dataclasses.replace(rows, rows=tuple(plane[:, 4:] for plane in rows.rows))
    pool = kvjax.restore(pool, [20, 21, 22, 23], part)
    assert first_column(pool) == [*range(20), 5, 6, 7, 8, *range(24, 33)]


@by_implementation
def test_x14_padded_slots_may_repeat(implementation):
    pool, planes = junk_pool(MHA)
    slots, rows = [-1, -1, 3, -1, 0, 0, 9, 9], np.arange(32, dtype=np.float32).reshape(8, 1, 4)
    pool = mha.write(pool, 0, slots, rows, rows, implementation=implementation)
    assert_holds(pool, with_row(planes, 3, rows[2, 0]))
    pool = kvjax.move(pool, slots, [1, 2, 4, 5, 6, 7, 8, 3], implementation=implementation)
    assert_holds(pool, [oracles.move_rows(plane, [3], [4], 1) for plane in planes])


@pytest.mark.parametrize(
    "dtype, bits", [("float8_e5m2", "7b7b7bfb7b"), ("float8_e4m3fn", "7e7e7efe7e")]
)
@pytest.mark.parametrize("source", ["float32", "bfloat16"])
def test_s9_what_is_finite_stays_finite(dtype, bits, source):
    values = np.array([60000, 1e6, np.inf, -1e6, 3e38]).astype(source).reshape(1, 1, 5)
    pool = kvjax.create(MHAGeometry(8, 1, 1, 1, 5, dtype))
    pool = mha.write(pool, 0, [2], values, values)
    assert np.asarray(pool.planes[0])[0, 2, 0].tobytes().hex() == bits
    assert np.isfinite(kvjax.layer(pool, 0)[0].astype(jnp.float32)).all()


def test_ho2_host_rows_are_no_view_of_anything_larger():
    pool, _ = junk_pool(MHAGeometry(64, 1, 2, 1, 4, "float32"))
    rows = kvjax.offload(pool, np.arange(1, 9))
    assert all(plane.base is None and plane.nbytes == 2 * 8 * 16 for plane in rows.rows)
    again = kvjax.offload(pool, np.arange(1, 9))
    for plane, other in zip(rows.rows, again.rows, strict=True):
        plane[...] = 0
        assert other.any()
