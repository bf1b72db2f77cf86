"""Rows in host memory, and the addresses of a pool's buffers."""

import ctypes
import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax import LayerRange, MHAGeometry, MLAGeometry
from tests import oracles
from tests.pools.junk import GEOMETRIES, MHA, assert_holds, junk_pool

SLOTS = np.array([5, 23, 9, -1, 4, 17, 12])
OTHER_SLOTS = np.array([6, 8, 24, 7, 9, 22, 4])


def restored(planes, slots, other_slots, first_slot):
    rows = [oracles.read_rows(plane, None, slots, first_slot) for plane in planes]
    return [
        oracles.write_rows(plane, None, other_slots, new, first_slot)
        for plane, new in zip(planes, rows, strict=True)
    ]


@pytest.mark.parametrize("restore_chunk", [1, 6, 7, 8])
@pytest.mark.parametrize("offload_chunk", [1, 6, 7, 8])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_chunk_edge(name, offload_chunk, restore_chunk):
    geometry = GEOMETRIES[name]
    pool, planes = junk_pool(geometry)
    rows = kvjax.offload(pool, SLOTS, chunk_tokens=offload_chunk)
    assert len(rows) == len(SLOTS)
    pool = kvjax.restore(pool, OTHER_SLOTS, rows, chunk_tokens=restore_chunk)
    assert_holds(pool, restored(planes, SLOTS, OTHER_SLOTS, geometry.first_slot))


def test_no_rows():
    pool, planes = junk_pool(MHA)
    rows = kvjax.offload(pool, [])
    assert len(rows) == 0 and [plane.shape for plane in rows.rows] == [(3, 0, 2, 8), (3, 0, 2, 16)]
    assert_holds(kvjax.restore(pool, [], rows), planes)


def test_rows_that_do_not_fit_are_refused_before_the_first_chunk():
    pool, planes = junk_pool(MHA)
    rows = kvjax.offload(pool, SLOTS)
    k, v = rows.rows
    cut = dataclasses.replace(rows, rows=(k, v[:, :-1]))
    with pytest.raises(kvjax.GeometryError, match="rows of plane 'v'"):
        kvjax.restore(pool, OTHER_SLOTS, cut, chunk_tokens=2)
    assert_holds(pool, planes)


def test_host_rows_and_pool_share_no_memory():
    pool, planes = junk_pool(MHA)
    rows = kvjax.offload(pool, SLOTS)
    pool = kvjax.zero(pool, np.arange(4, 24))
    pool = kvjax.restore(pool, SLOTS, rows)
    for plane in rows.rows:
        assert plane.flags.owndata
        plane.view(np.uint8)[...] = 9  # reused at once
    expected = [oracles.zero_rows(plane, range(4, 24), 4) for plane in planes]
    for out, plane in zip(expected, planes, strict=True):
        out[:, SLOTS[SLOTS >= 4]] = plane[:, SLOTS[SLOTS >= 4]]
    assert_holds(pool, expected)


LAYERS = LayerRange(2, 4)


@pytest.mark.parametrize(
    "geometry, lengths, item_lengths",
    [
        # X3: what fp8 takes, not what it came from. X8: latent rows once, not for K and V.
        (MHAGeometry(12, 4, LAYERS, 2, 4, "float8_e4m3fn"), [128] * 4, [32] * 4),
        (MHAGeometry(12, 4, LAYERS, 2, 4, "float32"), [512] * 4, [128] * 4),
        (
            MHAGeometry(12, 4, LAYERS, 2, 4, "bfloat16", 6, "float8_e5m2"),
            [256, 256, 192, 192],
            [64, 64, 48, 48],
        ),
        (MLAGeometry(12, 4, LAYERS, 12, 4, "bfloat16"), [512] * 2, [128] * 2),
        (MLAGeometry(12, 4, LAYERS, 12, 4, "bfloat16", padding_page=False), [384] * 2, [128] * 2),
        (  # FP5: all latents, then all scales, then all ropes
            MLAGeometry(12, 4, LAYERS, 4, 3, "bfloat16", "per_token_head"),
            [64, 64, 64, 64, 96, 96],
            [16, 16, 16, 16, 24, 24],
        ),
    ],
)
def test_buffer_infos(geometry, lengths, item_lengths):
    pool, planes = junk_pool(geometry)
    infos = kvjax.buffer_infos(pool)
    assert infos[1:] == (lengths, item_lengths)
    assert all(type(number) is int for numbers in infos for number in numbers)
    layers = [layer for plane in planes for layer in plane]
    for address, length, layer in zip(*infos[:2], layers, strict=True):
        if next(iter(pool.planes[0].devices())).platform == "cpu":
            assert bytes((ctypes.c_ubyte * length).from_address(address)) == layer.tobytes()


def test_a_pool_that_is_used_up_has_no_buffers():
    pool, _ = junk_pool(MHA)
    kvjax.zero(pool, [5])
    with pytest.raises(RuntimeError, match="deleted or donated"):
        kvjax.buffer_infos(pool)
