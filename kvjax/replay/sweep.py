"""How does the hit rate depend on the size of the pool?"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from kvjax.geometry import Geometry
from kvjax.plan import format_bytes
from kvjax.replay.jobs import Job
from kvjax.replay.null_plane import NullPlane
from kvjax.replay.report import Subject
from kvjax.replay.scheduler import Scheduler, Settings
from kvjax.replay.stats import Stats

NOTE = (
    "scheduling only: the scheduler and prefix index of a replay, over pages without bytes; "
    "no row is written or verified"
)


@dataclasses.dataclass(frozen=True)
class Point:
    """What came of one pool size."""

    geometry: Geometry
    stats: Stats


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What came of several pool sizes, and of a pool in which nothing is ever evicted."""

    subject: Subject
    host_tokens: int
    input_tokens: int
    points: list[Point]
    unlimited: Stats

    def hit_rate(self, stats: Stats) -> float:
        """The share of all input found in either tier.

        Of all, so that sizes compare: a pool too small for a request has missed it.
        """
        return stats.hit_tokens / self.input_tokens

    def device_hit_rate(self, stats: Stats) -> float:
        """The share of all input found in the device tier."""
        return stats.device_hit_tokens / self.input_tokens


def serve(jobs: Sequence[Job], settings: Settings) -> Stats:
    """Serves ``jobs`` without moving a byte."""
    plane = NullPlane(settings.num_pages, settings.page_size)
    scheduler = Scheduler(jobs, plane, settings)
    for _ in scheduler.steps():
        pass
    return scheduler.stats


def serve_unlimited(jobs: Sequence[Job], settings: Settings) -> Stats:
    """Serves ``jobs`` from a pool with room for all of them together, without moving a byte."""
    tokens = sum(job.input_len + job.output_len for job in jobs)
    # Each sequence may leave most of its last page empty.
    num_pages = tokens // settings.page_size + len(jobs)
    return serve(jobs, dataclasses.replace(settings, num_pages=num_pages))


def to_json(sweep: Sweep) -> dict[str, Any]:
    """The sweep as plain data; sizes in bytes and tokens."""
    return {
        **dataclasses.asdict(sweep.subject),
        "host_tokens": sweep.host_tokens,
        "note": NOTE,
        "points": [
            {
                "pool_tokens": point.geometry.num_slots,
                "pool_bytes": point.geometry.bytes,
                "hit_rate": sweep.hit_rate(point.stats),
                "device_hit_rate": sweep.device_hit_rate(point.stats),
                "evicted_units": point.stats.evicted_units,
                "requests_rejected": point.stats.requests_rejected,
            }
            for point in sweep.points
        ],
        "unlimited_hit_rate": sweep.hit_rate(sweep.unlimited),
    }


def to_text(sweep: Sweep) -> str:
    """The sweep as a table for people."""
    lines = [
        sweep.subject.source,
        f"{sweep.subject.model}, lengths / {sweep.subject.scale}, "
        f"host tier of {sweep.host_tokens:,} tokens",
        NOTE,
        "",
        f"{'pool':>10}  {'tokens':>13}  {'hits':>6}  {'on device':>9}  {'rejected':>8}",
    ]
    lines += [
        f"{format_bytes(point.geometry.bytes):>10}  {point.geometry.num_slots:>13,}  "
        f"{sweep.hit_rate(point.stats):>6.1%}  {sweep.device_hit_rate(point.stats):>9.1%}  "
        f"{point.stats.requests_rejected:>8,}"
        for point in sweep.points
    ]
    lines.append(f"{'unlimited':>10}  {'':>13}  {sweep.hit_rate(sweep.unlimited):>6.1%}")
    return "\n".join(lines)
