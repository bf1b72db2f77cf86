"""The serving loop and the verifier, over a data plane of NumPy arrays."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvjax.geometry import LayerRange, MHAGeometry
from kvjax.replay import live_rows, verify
from kvjax.replay.jobs import Job
from kvjax.replay.null_plane import NullPlane
from kvjax.replay.scheduler import Scheduler, Settings
from kvjax.replay.verify import Verifier
from tests.replay.numpy_plane import NumpyPlane

SMALL = Settings(
    num_pages=12,
    page_size=2,
    unit_len=4,
    host_units=3,
    concurrency=3,
    step_ms=10,
    compact_every=5,
)


def make_plane(engine):
    geometry = MHAGeometry(
        num_slots=engine.num_pages * engine.page_size,
        page_size=engine.page_size,
        layers=LayerRange(2, 4),
        num_kv_heads=1,
        head_dim=4,
        dtype="bfloat16",
        v_dtype="float8_e4m3fn",
    )
    return NumpyPlane(geometry, engine.host_units * engine.unit_len)


def job(number, units=(), tail=1, output_len=1, arrival_ms=0.0):
    return Job(number, arrival_ms, len(units) * SMALL.unit_len + tail, output_len, tuple(units))


def serve(jobs, engine=SMALL):
    """Serves to the end; returns the scheduler, and a verifier that has read everything back."""
    plane = make_plane(engine)
    scheduler = Scheduler(jobs, plane, engine)
    verifier = Verifier(scheduler, plane, seed=0)
    for _ in scheduler.steps():
        pass
    verifier.read_back(lambda tokens: None)
    verifier.audit()
    return scheduler, verifier


@st.composite
def workloads(draw):
    jobs, now = [], 0
    for number in range(draw(st.integers(1, 12))):
        steps = draw(st.lists(st.integers(0, 1), max_size=4))
        units = [int("1" + "".join(map(str, steps[: i + 1]))) for i in range(len(steps))]
        now += draw(st.integers(0, 60))
        tail, output_len = draw(st.integers(0, 3)), draw(st.integers(1, 9))
        jobs.append(job(number, units, tail if units else tail + 1, output_len, now))
    return jobs


@settings(max_examples=150)
@given(workloads(), st.integers(1, 4), st.integers(0, 3), st.integers(0, 6), st.booleans())
def test_every_row_and_page_is_right_at_every_step(
    jobs, concurrency, host_units, compact_every, large_pages
):
    engine = dataclasses.replace(
        SMALL, concurrency=concurrency, host_units=host_units, compact_every=compact_every
    )
    if large_pages:
        engine = dataclasses.replace(engine, page_size=4, num_pages=6)
    plane = make_plane(engine)
    scheduler = Scheduler(jobs, plane, engine)
    verifier = Verifier(scheduler, plane, seed=0)
    for _ in scheduler.steps():
        verifier.read_back(lambda tokens: None)
        verifier.sample(4)
        verifier.audit()
        assert verifier.verdict.messages == []
        assert len(scheduler.batch) <= concurrency
    stats = scheduler.stats
    assert stats.requests_finished + stats.requests_rejected == len(jobs)
    rejected = {rejected.number for rejected in scheduler.rejected}
    served = [job for job in jobs if job.number not in rejected]
    assert stats.input_tokens == sum(job.input_len for job in served)
    assert stats.prefill_tokens == stats.input_tokens - stats.hit_tokens
    assert stats.decode_tokens == sum(job.output_len for job in served)

    # A sweep's plane takes the same decisions.
    null = Scheduler(jobs, NullPlane(engine.num_pages, engine.page_size), engine)
    for _ in null.steps():
        pass
    counted = [dataclasses.replace(s, moved_tokens=0, seconds={}) for s in (stats, null.stats)]
    assert counted[0] == counted[1]


def test_a_running_request_shares_its_blocks():
    scheduler, _ = serve([job(0, [7, 8], output_len=9), job(1, [7, 8, 9])])
    assert scheduler.stats.device_hit_tokens == 2 * SMALL.unit_len
    assert scheduler.stats.peak_running == 2


def test_an_input_that_is_cached_to_its_last_token_prefills_nothing():
    scheduler, verifier = serve([job(0, [7, 8]), job(1, [7, 8], tail=0, output_len=5)])
    assert scheduler.stats.prefill_tokens == 2 * SMALL.unit_len + 1
    assert verifier.verdict.ok


def test_a_unit_goes_to_the_host_and_comes_back():
    others = [job(1, [20, 21, 22]), job(2, [30, 31, 32]), job(3, [7])]
    engine = dataclasses.replace(SMALL, num_pages=8, concurrency=1, host_units=6)
    scheduler, verifier = serve([job(0, [7]), *others], engine)
    assert scheduler.stats.offloaded_tokens > 0
    assert scheduler.stats.restored_tokens == scheduler.stats.host_hit_tokens == SMALL.unit_len
    assert scheduler.index.num_dropped == 0
    assert verifier.verdict.host_rows > 0
    assert verifier.verdict.ok


def test_two_requests_of_one_step_restore_a_unit_once():
    filler = job(1, [20, 21, 22])
    last = [job(2, [7], arrival_ms=500), job(3, [7], arrival_ms=500)]
    engine = dataclasses.replace(SMALL, num_pages=8)
    scheduler, verifier = serve(
        [job(0, [7]), dataclasses.replace(filler, arrival_ms=100), *last], engine
    )
    assert scheduler.stats.restored_tokens == scheduler.stats.host_hit_tokens == SMALL.unit_len
    assert scheduler.stats.device_hit_tokens == SMALL.unit_len
    assert verifier.verdict.ok


def test_without_a_host_tier_evicted_units_are_gone():
    engine = dataclasses.replace(SMALL, num_pages=8, concurrency=1, host_units=0)
    scheduler, _ = serve([job(0, [7]), job(1, [20, 21, 22]), job(2, [7])], engine)
    assert scheduler.stats.hit_tokens == 0
    assert scheduler.index.num_dropped == scheduler.stats.evicted_units > 0


def test_a_request_that_can_never_fit_is_counted_and_the_others_are_served():
    too_long = job(1, range(50, 56), output_len=1)
    scheduler, verifier = serve([job(0, [7]), too_long, job(2, [7])])
    assert scheduler.rejected == [too_long]
    assert scheduler.stats.requests_rejected == 1
    assert scheduler.stats.requests_finished == 2
    assert verifier.verdict.ok


def test_a_request_that_fits_exactly_is_served():
    exact = job(0, range(50, 55), tail=1, output_len=3)
    scheduler, verifier = serve([exact, job(1, [7], arrival_ms=1)])
    assert scheduler.stats.requests_finished == 2
    assert verifier.verdict.ok


def test_requests_wait_for_their_arrival_and_for_a_row():
    scheduler = Scheduler(
        [job(i, [10 * i], arrival_ms=i // 4 * 1000) for i in range(8)], make_plane(SMALL), SMALL
    )
    list(scheduler.steps())
    # Four at once for three rows, one step each; the next four after a pause.
    assert [sample.now_ms for sample in scheduler.timeline] == [0, 10, 1000, 1010]
    assert [sample.running for sample in scheduler.timeline] == [3, 1, 3, 1]
    assert [sample.waiting for sample in scheduler.timeline] == [1, 0, 1, 0]


@pytest.fixture
def served():
    """A plane with rows in both tiers, served with one request still running."""
    engine = dataclasses.replace(SMALL, num_pages=8, compact_every=0)
    plane = make_plane(engine)
    last = job(2, [30], output_len=9, arrival_ms=200)
    scheduler = Scheduler([job(0, [7]), job(1, [20, 21], arrival_ms=100), last], plane, engine)
    for _ in scheduler.steps():
        if scheduler.stats.requests_finished == 2 and len(scheduler.batch):
            break
    assert scheduler.index.num_on_host
    return scheduler, plane, Verifier(scheduler, plane, seed=0)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_every_live_row_is_read_back(served, monkeypatch, tier):
    scheduler, plane, verifier = served
    monkeypatch.setattr(verify, "_CHUNK_ROWS", 3)
    done = []
    verifier.read_back(done.append)
    assert verifier.verdict.ok
    on_device, on_host = live_rows.on_device(scheduler), live_rows.on_host(scheduler)
    assert done[-1] == len(on_device) + len(on_host)
    assert verifier.verdict.device_rows == len(on_device) * len(plane.layers) > 3
    assert verifier.verdict.host_rows == len(on_host) * len(plane.layers) > 3
    # Any one bit of any of them is missed.
    planes, live = (plane.pool, on_device) if tier == "device" else (plane.host, on_host)
    random = np.random.default_rng(0)
    for slot in live.slots:
        rows = planes[random.integers(2)]
        where = (random.integers(2), slot, 0, random.integers(4))
        bit = rows.dtype.type(1 << random.integers(8 * rows.itemsize))
        rows[where] ^= bit
        again = verify.Verifier(scheduler, plane, seed=0)
        again.read_back(lambda tokens: None)
        rows[where] ^= bit
        assert again.verdict.wrong_rows == 1


def test_a_wrong_row_is_described(served):
    scheduler, plane, verifier = served
    (running, _), *_ = scheduler.batch
    slot = running.pages[0] * SMALL.page_size
    plane.pool[1][1, slot, 0, 3] ^= 1
    unit = next(scheduler.index.on_host())
    host_slot = unit.host_unit * SMALL.unit_len
    plane.host[0][0, host_slot, 0, 0] ^= 1
    verifier.read_back(lambda tokens: None)
    assert verifier.verdict.messages == [
        f"device slot {slot}, layer 3, plane v: not the row of request 2 at position 4",
        f"host slot {host_slot}, layer 2, plane k: not the row of cached unit {unit.key} "
        f"at position {unit.depth * SMALL.unit_len}",
    ]


def test_a_wrong_row_is_found_by_sampling(served):
    _, plane, verifier = served
    for rows in plane.pool:
        rows[:] = np.roll(rows, 1, axis=1)
    verifier.sample(16)
    assert verifier.verdict.wrong_rows > 0
    assert not verifier.verdict.ok


def test_the_audit_finds_a_page_nobody_has_and_one_that_two_have(served):
    scheduler, plane, verifier = served
    plane.null.prefill(np.array([0]), np.array([1]), None, None)
    verifier.audit()
    assert "pages do not add up" in verifier.verdict.messages[0]
    first, *_ = scheduler.index.on_device()
    (running, _), *_ = scheduler.batch
    running.pages[0] = first.pages[0]
    verifier.audit()
    assert "a page has two owners" in verifier.verdict.messages
    running.pages[0] = 0
    verifier.audit()
    assert "an owner has a page that is not there" in verifier.verdict.messages
