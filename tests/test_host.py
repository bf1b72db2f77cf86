"""Host pools: what they hold, where they lie, and that they go away."""

import ctypes
import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import host
from tests.pools.junk import GEOMETRIES

GEOMETRY = kvjax.MHAGeometry(64, 16, 3, 2, 16, "bfloat16", v_head_dim=32, v_dtype="float8_e4m3fn")
TIERS = [pytest.param(None, id="here"), pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]


def filled(seed):
    """A device pool of random bits in every row that is there."""
    rng, slots = np.random.default_rng(seed), np.arange(16, 80)
    rows = tuple(
        jnp.asarray(
            rng.integers(0, 256, (3, 64, *spec.row_shape[:-1], spec.row_bytes // 2), np.uint8)
        )
        .view(spec.dtype)
        .reshape(3, 64, *spec.row_shape)
        for spec in GEOMETRY.planes
    )
    return kvjax.scatter(kvjax.create(GEOMETRY), slots, rows), rows


def bits(rows):
    return [np.asarray(plane).view(np.uint8) for plane in rows]


@pytest.mark.parametrize("implementation", TIERS)
def test_rows_go_to_the_host_and_come_back(implementation):
    pool, rows = filled(seed=1)
    tier = host.create(GEOMETRY)
    slots, parked, elsewhere = np.array([16, 79, 30]), np.array([0, 63, 5]), np.array([40, 41, 20])
    tier = kvjax.copy_rows(tier, parked, pool, slots, implementation=implementation)
    for have, want in zip(bits(kvjax.gather(tier, parked)), bits(rows), strict=True):
        np.testing.assert_array_equal(have, want[:, slots - 16])
    pool = kvjax.copy_rows(pool, elsewhere, tier, parked, implementation=implementation)
    for have, want in zip(bits(kvjax.gather(pool, elsewhere)), bits(rows), strict=True):
        np.testing.assert_array_equal(have, want[:, slots - 16])


def test_one_layer_at_a_time():
    pool, rows = filled(seed=2)
    tier = kvjax.copy_rows(host.create(GEOMETRY), [7], pool, [50], layers=1)
    for have, want in zip(bits(kvjax.gather(tier, [7])), bits(rows), strict=True):
        np.testing.assert_array_equal(have[1, 0], want[1, 50 - 16])
        assert not have[[0, 2]].any()


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_every_dtype_that_planes_have_can_be_pinned(geometry):
    for spec in geometry.planes:
        _, num_bits = host._DL_DTYPES[spec.storage_dtype]
        assert num_bits == 8 * spec.itemsize


def test_slot_0_is_a_slot_and_there_is_no_padding_page():
    geometry = host.create(GEOMETRY).geometry
    assert (geometry.first_slot, geometry.num_rows) == (0, 64)
    assert geometry.bytes == 64 * GEOMETRY.bytes_per_token


def test_offload_is_in_place():
    geometry = dataclasses.replace(GEOMETRY, num_slots=4096)
    pool, tier, slots = kvjax.create(geometry), host.create(geometry), jnp.arange(16, 20)
    copy = jax.jit(kvjax.copy_rows, donate_argnums=0)
    memory = copy.lower(tier, slots - 16, pool, slots).compile().memory_analysis()
    assert memory.temp_size_in_bytes < geometry.bytes / 100
    assert memory.alias_size_in_bytes == tier.geometry.bytes


@pytest.mark.gpu
def test_the_planes_are_host_memory_that_is_freed():
    gc.collect()
    before = len(host._ALIVE)
    pool, rows = filled(seed=3)
    tier = host.create(GEOMETRY)
    address = tier.planes[0].unsafe_buffer_pointer()
    tier = jax.block_until_ready(kvjax.copy_rows(tier, [9], pool, [33]))
    assert tier.planes[0].unsafe_buffer_pointer() == address
    (k_row, *_) = bits(rows)
    row_bytes = GEOMETRY.planes[0].row_bytes
    # The host reads the bytes at the very address that the GPU wrote to.
    seen = ctypes.string_at(address + 9 * row_bytes, row_bytes)
    assert seen == k_row[0, 33 - 16].tobytes()
    assert len(host._ALIVE) == before + len(GEOMETRY.planes)
    with host._current_context() as driver:
        flags = ctypes.c_uint()
        assert driver.cuMemHostGetFlags(ctypes.byref(flags), ctypes.c_void_p(address)) == 0
    del tier
    gc.collect()
    assert len(host._ALIVE) == before
    with host._current_context() as driver:
        flags = ctypes.c_uint()
        assert driver.cuMemHostGetFlags(ctypes.byref(flags), ctypes.c_void_p(address)) != 0
