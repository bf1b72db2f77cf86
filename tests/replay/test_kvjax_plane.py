"""Replays through kvjax itself: pools, allocator and host tier, every row read back."""

import dataclasses

import jax
import numpy as np
import pytest

from kvjax.geometry import MHAGeometry
from kvjax.replay import kvjax_plane
from kvjax.replay.jobs import Job
from kvjax.replay.null_plane import NullPlane
from kvjax.replay.pooled_plane import PooledPlane
from kvjax.replay.scheduler import Scheduler
from kvjax.replay.verify import Verifier
from tests.replay.workloads import (
    ENGINE,
    GEOMETRIES,
    HEADS,
    QUANTIZED,
    SIZES,
    WIDE,
    WIDE_QUANTIZED,
    make_jobs,
)

EVERY_GEOMETRY = GEOMETRIES | QUANTIZED
EVERY_WIDE_GEOMETRY = WIDE | WIDE_QUANTIZED


def serve(geometry, count=60):
    plane = PooledPlane(*kvjax_plane.create(geometry, ENGINE), ENGINE.page_size)
    scheduler = Scheduler(make_jobs(count), plane, ENGINE)
    verifier = Verifier(scheduler, plane, seed=0)
    for _ in scheduler.steps():
        verifier.sample(8)
    return plane, scheduler, verifier


def check_every_row(geometry):
    _, scheduler, verifier = serve(geometry)
    stats = scheduler.stats
    assert min(stats.device_hit_tokens, stats.host_hit_tokens, stats.restored_tokens) > 0
    assert min(stats.offloaded_tokens, scheduler.index.num_dropped, stats.moved_tokens) > 0
    verifier.read_back(lambda tokens: None)
    account = verifier.audit()
    assert verifier.verdict.messages == []
    assert min(verifier.verdict.device_rows, verifier.verdict.host_rows) > 0
    assert account["used"] == 0
    assert account["free"] + account["cached"] == account["total"] == ENGINE.num_pages

    null = Scheduler(make_jobs(60), NullPlane(ENGINE.num_pages, ENGINE.page_size), ENGINE)
    for _ in null.steps():
        pass
    counted = [dataclasses.replace(s, moved_tokens=0, seconds={}) for s in (stats, null.stats)]
    assert counted[0] == counted[1]


@pytest.mark.parametrize("geometry", EVERY_GEOMETRY.values(), ids=EVERY_GEOMETRY)
def test_every_row_is_right(geometry):
    check_every_row(geometry)


@pytest.mark.gpu
@pytest.mark.parametrize("name", EVERY_WIDE_GEOMETRY)
def test_every_row_is_right_with_kernels_and_a_pinned_host_tier(name):
    check_every_row(EVERY_WIDE_GEOMETRY[name])


def test_an_input_longer_than_one_write(monkeypatch):
    monkeypatch.setattr(kvjax_plane, "_MOST_WRITTEN", 64)
    geometry = MHAGeometry(**SIZES | {"num_slots": 400}, **HEADS, dtype="bfloat16")
    engine = dataclasses.replace(ENGINE, num_pages=100)
    plane = PooledPlane(*kvjax_plane.create(geometry, engine), engine.page_size)
    scheduler = Scheduler([Job(0, 0, 301, 3, tuple(range(37)))], plane, engine)
    verifier = Verifier(scheduler, plane, seed=0)
    for _ in scheduler.steps():
        pass
    verifier.read_back(lambda tokens: None)
    assert verifier.verdict.ok
    assert verifier.verdict.device_rows == 37 * 8 * 3


def flip_a_bit(pool, slot):
    """The pool with one bit of one byte of its last plane changed, in its last layer."""
    *others, plane = pool.planes
    bits = np.array(plane)
    bits.view(np.uint8).reshape(*bits.shape[:2], -1)[-1, slot, 3] ^= 1
    return dataclasses.replace(pool, planes=(*others, jax.numpy.asarray(bits)))


@pytest.mark.parametrize(
    "name", ["mha-bfloat16-float8_e4m3fn", "mla-bfloat16", "mla-quantized-bfloat16", "mha-int8"]
)
def test_one_wrong_bit_in_the_pool_is_found(name):
    plane, scheduler, verifier = serve(EVERY_GEOMETRY[name])
    unit = next(scheduler.index.on_device())
    plane.rows.pool = flip_a_bit(plane.rows.pool, int(unit.pages[0]) * ENGINE.page_size)
    verifier.read_back(lambda tokens: None)
    assert verifier.verdict.wrong_rows == 1
    assert f"layer 5, plane {plane.planes[-1].name}" in verifier.verdict.messages[0]


def test_one_wrong_bit_in_the_host_tier_is_found():
    plane, scheduler, verifier = serve(GEOMETRIES["mha-float32"])
    unit = next(scheduler.index.on_host())
    plane.rows.host_pool = flip_a_bit(plane.rows.host_pool, unit.host_unit * ENGINE.unit_len)
    verifier.read_back(lambda tokens: None)
    assert verifier.verdict.wrong_rows == 1
    assert verifier.verdict.messages[0].startswith("host slot ")


def test_a_move_that_is_not_simultaneous_is_found(monkeypatch):
    def one_after_the_other(pool, dst, src):
        planes = [np.array(plane) for plane in pool.planes]
        for to, source in zip(dst, src, strict=True):
            for plane in planes:
                plane[:, to] = plane[:, source]
        planes = tuple(jax.numpy.asarray(plane) for plane in planes)
        return dataclasses.replace(pool, planes=planes)

    monkeypatch.setattr(kvjax_plane, "_move", one_after_the_other)
    _, _, verifier = serve(GEOMETRIES["mha-float32"])
    verifier.read_back(lambda tokens: None)
    assert verifier.verdict.wrong_rows > 1


def test_the_audit_counts_the_allocators_pages():
    plane, _, verifier = serve(GEOMETRIES["mha-float32"], count=5)
    plane.restore(np.arange(ENGINE.unit_len, dtype=np.int32))  # pages that nobody will know of
    verifier.audit()
    assert "pages do not add up" in verifier.verdict.messages[0]
