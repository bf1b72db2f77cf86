"""Which request runs when, and in which pages?

Time is the trace's. A step serves all that run: it admits who has arrived and fits, in order of
arrival; prefills what no tier has of their input; then appends one token to every running request.
A step takes ``step_ms``, whatever it does; where nothing runs, time jumps to the next arrival.

A request is admitted when there are pages for its whole output, after evicting idle cached units
if need be: so decoding never runs short and nothing is preempted. Its full blocks can be shared
from that moment on.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from kvjax.replay import content
from kvjax.replay.batch import Batch, Running
from kvjax.replay.data_plane import DataPlane
from kvjax.replay.jobs import Job
from kvjax.replay.prefix_index import PrefixIndex, Unit, device_pages, host_slots
from kvjax.replay.stats import Sample, Stats

_TIMELINE_SAMPLES = 400  # moments of the trace, enough for a plot


@dataclasses.dataclass(frozen=True)
class Settings:
    """The size of the two tiers and how the engine serves.

    ``host_units`` are places of ``unit_len`` tokens. ``compact_every`` is in steps; 0 is never.
    """

    num_pages: int
    page_size: int
    unit_len: int
    host_units: int
    concurrency: int
    step_ms: float
    compact_every: int

    @property
    def pages_per_unit(self) -> int:
        """Pages of one cached unit."""
        return self.unit_len // self.page_size


class Scheduler:
    """Serves ``jobs``, which are sorted by arrival, through ``plane``; ``steps`` is the loop."""

    def __init__(self, jobs: Sequence[Job], plane: DataPlane, settings: Settings) -> None:
        self.settings = settings
        self.stats = Stats()
        self.timeline: list[Sample] = []
        self.rejected: list[Job] = []
        self.index = PrefixIndex(settings.host_units)
        self.batch = Batch(settings.concurrency)
        self._jobs = jobs
        self._arrivals_ms = np.array([job.arrival_ms for job in jobs])
        self._next_job = 0
        self._plane = plane
        self._now_ms = 0.0
        # Free pages that no running request will need. Negative only while requests are admitted.
        self._spare_pages = settings.num_pages

    def steps(self) -> Iterator[int]:
        """Serves everything, one engine step at a time; yields how many have been done."""
        while self._next_job < len(self._jobs) or len(self.batch):
            if not len(self.batch):
                self._now_ms = max(self._now_ms, self._arrivals_ms[self._next_job])
            self._admit()
            self._sample()
            if len(self.batch):
                self._decode()
                self._finish()
            self._now_ms += self.settings.step_ms
            self.stats.steps += 1
            if self.settings.compact_every and not self.stats.steps % self.settings.compact_every:
                self._compact()
            yield self.stats.steps

    def _admit(self) -> None:
        admitted: list[Running] = []
        restored: list[Unit] = []
        while (
            self._next_job < len(self._jobs)
            and (job := self._jobs[self._next_job]).arrival_ms <= self._now_ms
            and len(admitted) < self.batch.num_free_rows
        ):
            num_pages = -(-(job.input_len + job.output_len) // self.settings.page_size)
            if num_pages > self.settings.num_pages:
                self.rejected.append(job)
                self.stats.requests_rejected += 1
            elif (request := self._take_pages(job, num_pages, restored)) is not None:
                admitted.append(request)
            else:
                assert admitted or len(self.batch), "with nobody running, whatever fits is admitted"
                break
            self._next_job += 1
        if self._spare_pages < 0:
            self._evict(-(self._spare_pages // self.settings.pages_per_unit))
        if restored:
            self._restore(restored)
        if admitted:
            self._prefill(admitted)
        self.stats.peak_running = max(self.stats.peak_running, len(self.batch))

    def _take_pages(self, job: Job, num_pages: int, restored: list[Unit]) -> Running | None:
        """Books ``num_pages`` for a job, less those it shares; ``None`` if there are too few.

        Adds to ``restored`` the units that are on the host and that nobody restores already.
        """
        pages_per_unit = self.settings.pages_per_unit
        path = self.index.match(job.units)
        on_host = [unit for unit in path if unit.host_unit is not None and not unit.users]
        idle = sum(unit.host_unit is None and not unit.users for unit in path)
        num_pages -= (len(path) - len(on_host)) * pages_per_unit
        if num_pages > self._spare_pages + (self.index.num_idle - idle) * pages_per_unit:
            return None
        self._spare_pages -= num_pages
        restored += on_host
        self.index.acquire(path)
        new = self.index.insert(path[-1] if path else None, job.units[len(path) :])
        self.stats.input_tokens += job.input_len
        self.stats.host_hit_tokens += len(on_host) * self.settings.unit_len
        self.stats.device_hit_tokens += (len(path) - len(on_host)) * self.settings.unit_len
        return Running(job, path + new, num_matched=len(path))

    def _evict(self, num_units: int) -> None:
        evicted = self.index.evict(num_units)
        offloaded = [unit for unit in evicted if unit.host_unit is not None]
        if offloaded:
            with self.stats.timed("offload"):
                self._plane.offload(
                    device_pages(offloaded), host_slots(offloaded, self.settings.unit_len)
                )
        with self.stats.timed("free"):
            self._plane.free(device_pages(evicted))
        self._spare_pages += num_units * self.settings.pages_per_unit
        self.stats.evicted_units += num_units
        self.stats.offloaded_tokens += len(offloaded) * self.settings.unit_len

    def _restore(self, units: list[Unit]) -> None:
        with self.stats.timed("restore"):
            pages = self._plane.restore(host_slots(units, self.settings.unit_len))
        for unit, unit_pages in zip(units, pages.reshape(len(units), -1), strict=True):
            self.index.restore(unit, unit_pages)
        self.stats.restored_tokens += len(units) * self.settings.unit_len

    def _prefill(self, admitted: list[Running]) -> None:
        unit_len, page_size = self.settings.unit_len, self.settings.page_size
        prefix_lens = np.array([r.num_matched * unit_len for r in admitted], np.int32)
        seq_lens = np.array([r.job.input_len for r in admitted], np.int32)
        tags = np.concatenate([self._input_tags(request) for request in admitted])
        positions = np.concatenate(
            [np.arange(*span, dtype=np.uint32) for span in zip(prefix_lens, seq_lens, strict=True)]
        )
        with self.stats.timed("prefill"):
            slots = self._plane.prefill(prefix_lens, seq_lens, tags, positions)
        self.stats.prefill_tokens += len(slots)
        ends = np.cumsum(seq_lens - prefix_lens)
        for request, own in zip(admitted, np.split(slots, ends[:-1]), strict=True):
            pages = own[::page_size] // page_size
            for unit in request.path[request.num_matched :]:
                unit.pages, pages = np.split(pages, [self.settings.pages_per_unit])
            request.pages = pages.tolist()
            # An input that was cached to its last token ends with a page: the next token starts
            # another one, wherever the last slot was.
            self.batch.add(request, int(own[-1]) if len(own) else 0)

    def _input_tags(self, request: Running) -> np.ndarray:
        """The tag of every input token after the matched prefix."""
        unit_len = self.settings.unit_len
        keys = np.array(request.job.units[request.num_matched :], np.int64)
        tail = request.job.input_len - len(request.path) * unit_len
        own = np.full(tail, request.job.number, np.int64)
        return np.concatenate(
            [np.repeat(content.unit_tags(keys), unit_len), content.request_tags(own)]
        )

    def _decode(self) -> None:
        batch, rows, page_size = self.batch, self.batch.rows, self.settings.page_size
        positions = batch.seq_lens[rows]
        tags = content.request_tags(batch.numbers[rows])
        with self.stats.timed("decode"):
            slots = self._plane.decode(
                positions + 1, batch.last_slots[rows], tags, positions.astype(np.uint32)
            )
        for i in np.flatnonzero(positions % page_size == 0):
            batch[rows[i]].pages.append(int(slots[i]) // page_size)
        batch.last_slots[rows] = slots
        batch.seq_lens[rows] += 1
        batch.left[rows] -= 1
        self.stats.decode_tokens += len(rows)

    def _finish(self) -> None:
        finished = self.batch.pop_finished()
        for request in finished:
            self.index.release(request.path)
        pages = [page for request in finished for page in request.pages]
        if pages:
            with self.stats.timed("free"):
                self._plane.free(np.array(pages, np.int32))
        self._spare_pages += len(pages)
        self.stats.requests_finished += len(finished)

    def _compact(self) -> None:
        """Puts every owner's pages next to each other, at the beginning of the pool.

        Sources and destinations overlap in chains and cycles; ``move`` is simultaneous.
        """
        units = list(self.index.on_device())
        running = [request for request, _ in self.batch]
        pages = np.concatenate(
            [device_pages(units), *(np.array(r.pages, np.int32) for r in running)]
        )
        new_pages = np.arange(1, len(pages) + 1, dtype=np.int32)
        with self.stats.timed("compact"):
            self._plane.compact(pages)
        renumbered = np.zeros(self.settings.num_pages + 1, np.int32)
        renumbered[pages] = new_pages
        for unit in units:
            unit.pages = renumbered[unit.pages]
        for request in running:
            request.pages = renumbered[request.pages].tolist()
        page_size, last_slots = self.settings.page_size, self.batch.last_slots
        last_slots[:] = renumbered[last_slots // page_size] * page_size + last_slots % page_size
        self.stats.compactions += 1
        self.stats.moved_tokens += int((pages != new_pages).sum()) * page_size

    def _sample(self) -> None:
        """Adds to the timeline, at regular distances over the time of the arrivals."""
        due = len(self.timeline) * self._arrivals_ms[-1] / _TIMELINE_SAMPLES
        if self._now_ms < due:
            return
        unit_len, index = self.settings.unit_len, self.index
        private_pages = sum(len(request.pages) for request, _ in self.batch)
        used_units = index.num_on_device - index.num_idle
        arrived = int(np.searchsorted(self._arrivals_ms, self._now_ms, side="right"))
        self.timeline.append(
            Sample(
                now_ms=self._now_ms,
                running=len(self.batch),
                waiting=arrived - self._next_job,
                used_tokens=private_pages * self.settings.page_size + used_units * unit_len,
                idle_tokens=index.num_idle * unit_len,
                host_tokens=index.num_on_host * unit_len,
                hit_tokens=self.stats.hit_tokens,
                input_tokens=self.stats.input_tokens,
            )
        )
