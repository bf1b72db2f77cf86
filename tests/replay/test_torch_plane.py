"""Replays through kvtorch: SGLang's pools and allocators, every row read back."""

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

from kvjax.geometry import DTYPE_BYTES, PlaneSpec
from kvjax.replay import content, torch_content, torch_plane
from kvjax.replay.null_plane import NullPlane
from kvjax.replay.pooled_plane import PooledPlane
from kvjax.replay.scheduler import Scheduler
from kvjax.replay.verify import Verifier
from tests.replay.workloads import (
    ENGINE,
    GEOMETRIES,
    QUANTIZED,
    WIDE,
    WIDE_QUANTIZED,
    make_jobs,
)

EVERY_GEOMETRY = GEOMETRIES | QUANTIZED
EVERY_WIDE_GEOMETRY = WIDE | WIDE_QUANTIZED
GEOMETRY = GEOMETRIES["mha-bfloat16-float8_e4m3fn"]
SINGLE_SLOTS = dataclasses.replace(ENGINE, page_size=1, num_pages=80)


PLANES = {dtype: (PlaneSpec("k", (2, 12), dtype),) * 2 for dtype in DTYPE_BYTES}
PLANES |= {name: geometry.planes for name, geometry in QUANTIZED.items()}


@pytest.mark.parametrize("planes", PLANES.values(), ids=PLANES)
def test_numpy_and_torch_agree(planes):
    tags = np.array([0, 1, 2, 2**32 - 1, 77, 77], np.uint32)
    positions = np.array([0, 0, 5, 2**31, 3, 4], np.uint32)
    signed = [torch.from_numpy(array.view(np.int32).copy()) for array in (tags, positions)]
    expected = content.expected_rows(planes, range(3, 5), tags, positions)
    for number, (plane, rows) in enumerate(zip(planes, expected, strict=True)):
        bits = torch_content.row_bits(planes, number, range(3, 5), *signed)
        found = bits.numpy().view(content.bits_dtype(plane.dtype))
        np.testing.assert_array_equal(found, rows, strict=True)


def serve(geometry, settings=ENGINE, device="cpu"):
    parts = torch_plane.create(geometry, settings, device)
    plane = PooledPlane(*parts, settings.page_size)
    scheduler = Scheduler(make_jobs(60), plane, settings)
    verifier = Verifier(scheduler, plane, seed=0)
    for _ in scheduler.steps():
        verifier.sample(8)
    return plane, scheduler, verifier


def check_every_row(geometry, settings=ENGINE, device="cpu"):
    plane, scheduler, verifier = serve(geometry, settings, device)
    stats = scheduler.stats
    assert min(stats.restored_tokens, stats.offloaded_tokens, stats.moved_tokens) > 0
    verifier.read_back(lambda tokens: None)
    account = verifier.audit()
    assert verifier.verdict.messages == []
    assert min(verifier.verdict.device_rows, verifier.verdict.host_rows) > 0
    assert account["free"] + account["cached"] == account["total"] == settings.num_pages
    assert plane.rows.pool.audit() == []

    null = Scheduler(make_jobs(60), NullPlane(settings.num_pages, settings.page_size), settings)
    for _ in null.steps():
        pass
    counted = [dataclasses.replace(s, moved_tokens=0, seconds={}) for s in (stats, null.stats)]
    assert counted[0] == counted[1]


@pytest.mark.parametrize("geometry", EVERY_GEOMETRY.values(), ids=EVERY_GEOMETRY)
def test_every_row_is_right(geometry):
    check_every_row(geometry)


def test_every_row_is_right_in_pages_of_one_slot():
    check_every_row(dataclasses.replace(GEOMETRY, page_size=1), SINGLE_SLOTS)


def test_every_row_is_right_in_small_chunks(monkeypatch):
    monkeypatch.setitem(torch_plane._MOST_ELEMENTS, "cpu", 200)
    check_every_row(GEOMETRY)


@pytest.mark.gpu
@pytest.mark.parametrize("name", EVERY_WIDE_GEOMETRY)
def test_every_row_is_right_on_a_gpu(name):
    check_every_row(EVERY_WIDE_GEOMETRY[name], device="cuda")


def flip_a_bit(tensor, slot):
    tensor.view(torch.uint8).flatten(2)[-1, slot, 3] ^= 1


@pytest.mark.parametrize(
    "name", ["mha-bfloat16-float8_e4m3fn", "mla-bfloat16", "mla-quantized-bfloat16", "mha-int8"]
)
def test_one_wrong_bit_in_the_pool_is_found(name):
    plane, scheduler, verifier = serve(EVERY_GEOMETRY[name])
    unit = next(scheduler.index.on_device())
    flip_a_bit(plane.rows.pool.planes[-1], int(unit.pages[0]) * ENGINE.page_size)
    verifier.read_back(lambda tokens: None)
    assert verifier.verdict.wrong_rows == 1
    assert f"layer 5, plane {plane.planes[-1].name}" in verifier.verdict.messages[0]


def test_one_wrong_bit_in_the_host_tier_is_found():
    plane, scheduler, verifier = serve(GEOMETRY)
    unit = next(scheduler.index.on_host())
    flip_a_bit(plane.rows.host[-1], unit.host_unit * ENGINE.unit_len)
    verifier.read_back(lambda tokens: None)
    assert verifier.verdict.wrong_rows == 1
    assert verifier.verdict.messages[0].startswith("host slot ")
