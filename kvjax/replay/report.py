"""What came out of a replay, as a table for people and as plain data?"""

import dataclasses
from typing import Any

from kvjax.geometry import Geometry
from kvjax.plan import format_bytes
from kvjax.replay.both_backends import Comparison
from kvjax.replay.scheduler import Scheduler
from kvjax.replay.verify import Verdict

_REJECTED_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Subject:
    """What was served: ``source`` and ``model`` in words, every length divided by ``scale``."""

    source: str
    model: str
    scale: int


@dataclasses.dataclass(frozen=True)
class Report:
    """One replay.

    ``audit`` is ``None`` where it ended early, and not everything was read back; ``comparison``,
    where there was only one backend.
    """

    subject: Subject
    geometry: Geometry
    scheduler: Scheduler
    wall_s: float
    interrupted: bool
    verdict: Verdict
    audit: dict[str, int] | None
    comparison: Comparison | None

    @property
    def host_bytes(self) -> int:
        """Bytes of the host tier."""
        return self.host_tokens * self.geometry.bytes_per_token

    @property
    def host_tokens(self) -> int:
        """Tokens that the host tier has room for."""
        settings = self.scheduler.settings
        return settings.host_units * settings.unit_len

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time by operation; ``scheduling`` is all that is none of the others."""
        seconds = dict(self.scheduler.stats.seconds)
        return seconds | {"scheduling": self.wall_s - sum(seconds.values())}


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain data; sizes in bytes and tokens, times in seconds."""
    scheduler, geometry = report.scheduler, report.geometry
    stats = dataclasses.asdict(scheduler.stats)
    del stats["seconds"]
    return {
        **dataclasses.asdict(report.subject),
        "dtypes": [plane.dtype for plane in geometry.planes],
        "pool": {"tokens": geometry.num_slots, "bytes": geometry.bytes},
        "host_pool": {"tokens": report.host_tokens, "bytes": report.host_bytes},
        "settings": dataclasses.asdict(scheduler.settings),
        "interrupted": report.interrupted,
        "hit_rate": scheduler.stats.hit_rate,
        **stats,
        "dropped_units": scheduler.index.num_dropped,
        "rejected_requests": [job.number + 1 for job in scheduler.rejected],
        "seconds": report.seconds,
        "wall_seconds": report.wall_s,
        "comparison": report.comparison and dataclasses.asdict(report.comparison),
        "pages": report.audit,
        "verification": {"ok": report.verdict.ok, **dataclasses.asdict(report.verdict)},
    }


def to_text(report: Report) -> str:
    """The report as a table for people."""
    rows = [*_setup(report), ("", ""), *_traffic(report), ("", ""), *_checks(report)]
    return "\n".join(f"{name:<12}  {value}".rstrip() for name, value in rows)


def _setup(report: Report) -> list[tuple[str, str]]:
    geometry, settings = report.geometry, report.scheduler.settings
    dtypes = " and ".join(dict.fromkeys(plane.dtype for plane in geometry.planes))
    return [
        ("trace", report.subject.source),
        (
            "lengths",
            f"divided by {report.subject.scale}; prefixes cached by {settings.unit_len} tokens",
        ),
        ("model", f"{report.subject.model}, {dtypes}"),
        (
            "device tier",
            f"{geometry.num_slots:,} tokens in pages of {geometry.page_size}, "
            f"{format_bytes(geometry.bytes)}",
        ),
        ("host tier", f"{report.host_tokens:,} tokens, {format_bytes(report.host_bytes)}"),
    ]


def _traffic(report: Report) -> list[tuple[str, str]]:
    stats = report.scheduler.stats
    unit_len = report.scheduler.settings.unit_len
    share = 100 / max(1, stats.input_tokens)
    rows = [
        (
            "served",
            f"{stats.requests_finished:,} requests in {stats.steps:,} steps, "
            f"at most {stats.peak_running} at once",
        ),
        (
            "prefix hits",
            f"{stats.hit_rate:.1%} of {stats.input_tokens:,} input tokens "
            f"({stats.device_hit_tokens * share:.1f}% device, "
            f"{stats.host_hit_tokens * share:.1f}% host)",
        ),
        ("written", f"{stats.prefill_tokens:,} prefilled + {stats.decode_tokens:,} decoded tokens"),
        (
            "evicted",
            f"{stats.evicted_units * unit_len:,} tokens, {stats.offloaded_tokens:,} of them "
            f"offloaded; {report.scheduler.index.num_dropped * unit_len:,} dropped for good",
        ),
        ("restored", f"{stats.restored_tokens:,} tokens"),
        ("moved", f"{stats.moved_tokens:,} tokens in {stats.compactions} compactions"),
        (
            "time",
            f"{report.wall_s:.1f} s, compilation included: " + _seconds(report.seconds),
        ),
    ]
    if report.comparison is not None:
        rows.append(("by backend", _seconds(report.comparison.seconds)))
    if rejected := report.scheduler.rejected:
        shown = ", ".join(f"{job.number + 1}" for job in rejected[:_REJECTED_SHOWN])
        more = ", ..." if len(rejected) > _REJECTED_SHOWN else ""
        rows.append(
            ("rejected", f"{len(rejected):,} requests larger than the pool: number {shown}{more}")
        )
    return rows


def _checks(report: Report) -> list[tuple[str, str]]:
    verdict = report.verdict
    rows = [("sampled", f"{verdict.sampled_rows:,} rows while running")]
    if (comparison := report.comparison) is not None:
        compared = f"{comparison.slots:,} slots handed out, {comparison.rows:,} rows, bit for bit"
        if comparison.turns:
            compared += f"; one memory, {comparison.turns:,} changes of hands"
        rows.append(("compared", compared))
    if report.audit is not None:
        free, used, cached, total = (
            report.audit[name] for name in ("free", "used", "cached", "total")
        )
        rows += [
            ("pages", f"{free:,} free + {used:,} used + {cached:,} cached = {total:,} in all"),
            (
                "read back",
                f"every live row: {verdict.device_rows:,} of the device tier, "
                f"{verdict.host_rows:,} of the host tier",
            ),
        ]
    rows += [("WRONG", message) for message in verdict.messages]
    if report.interrupted:
        rows.append(("result", "interrupted; nothing was read back"))
    elif verdict.ok:
        rows.append(("result", "verified, bit for bit"))
    elif verdict.wrong_rows:
        rows.append(("result", f"FAILED: {verdict.wrong_rows:,} wrong rows"))
    else:
        rows.append(("result", "FAILED"))
    return rows


def _seconds(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {spent:.1f}" for name, spent in seconds.items())
