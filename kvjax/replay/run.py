"""What happens between the arguments of ``kvjax replay`` and its output?"""

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from kvjax.geometry import Geometry
from kvjax.replay import backends, report, sweep
from kvjax.replay.both_backends import BackendsDiffer
from kvjax.replay.jobs import Job
from kvjax.replay.progress import Progress
from kvjax.replay.scheduler import Scheduler, Settings
from kvjax.replay.verify import Verifier

SAMPLED_ROWS = 64
"""Rows that are checked at once while requests run."""

_WRONG, _INTERRUPTED = 1, 130  # exit codes; the second is how shells report SIGINT


@dataclasses.dataclass(frozen=True)
class Checks:
    """Which rows are sampled while requests run: every so many steps (0: never), by ``seed``."""

    every: int
    seed: int


@dataclasses.dataclass(frozen=True)
class Output:
    """Whether to print JSON rather than a table, and where to draw."""

    as_json: bool
    plot_path: pathlib.Path | None


def replay(
    subject: report.Subject,
    geometry: Geometry,
    settings: Settings,
    jobs: Sequence[Job],
    backend: backends.Backend,
    checks: Checks,
    output: Output,
) -> int:
    """Serves ``jobs``, checks every row, reports; returns the exit code."""
    start = time.perf_counter()
    plane, comparison = backends.create(backend, geometry, settings)
    scheduler = Scheduler(jobs, plane, settings)
    verifier = Verifier(scheduler, plane, checks.seed)
    audit, interrupted = None, False
    try:
        _serve(scheduler, verifier, checks.every, len(jobs), compares=comparison is not None)
        if verifier.verdict.ok:
            audit = _read_back(scheduler, verifier)
    except BackendsDiffer as difference:
        verifier.verdict.messages.append(f"after step {scheduler.stats.steps}, {difference}")
    except KeyboardInterrupt:
        interrupted = True
    result = report.Report(
        subject=subject,
        geometry=geometry,
        scheduler=scheduler,
        wall_s=time.perf_counter() - start,
        interrupted=interrupted,
        verdict=verifier.verdict,
        audit=audit,
        comparison=comparison,
    )
    _print(report.to_json(result) if output.as_json else report.to_text(result))
    if output.plot_path is not None:
        from kvjax.replay import plot

        plot.save_replay(result, output.plot_path)
    if interrupted:
        return _INTERRUPTED
    return 0 if verifier.verdict.ok else _WRONG


def _serve(
    scheduler: Scheduler, verifier: Verifier, verify_every: int, num_jobs: int, *, compares: bool
) -> None:
    """Serves everything, or up to the first wrong row."""
    progress = Progress("requests", num_jobs, sys.stderr)
    stats = scheduler.stats
    for step in scheduler.steps():
        if verify_every and step % verify_every == 0:
            with stats.timed("sample"):
                verifier.sample(SAMPLED_ROWS)
                if compares:
                    verifier.read_layer()
            if not verifier.verdict.ok:
                return
        progress.show(
            stats.requests_finished + stats.requests_rejected,
            f", {stats.hit_rate:.0%} hits, {len(scheduler.batch)} running",
        )


def _read_back(scheduler: Scheduler, verifier: Verifier) -> dict[str, int]:
    settings = scheduler.settings
    index = scheduler.index
    progress = Progress(
        "tokens read back",
        (index.num_on_device + index.num_on_host) * settings.unit_len,
        sys.stderr,
    )
    with scheduler.stats.timed("read back"):
        verifier.read_back(progress.show)
        return verifier.audit()


def sweep_sizes(
    subject: report.Subject,
    geometries: Sequence[Geometry],
    settings: Settings,
    jobs: Sequence[Job],
    output: Output,
) -> int:
    """Serves ``jobs`` from pools of several sizes, without their bytes; returns the exit code."""
    progress = Progress("pool sizes", len(geometries) + 1, sys.stderr)
    points = []
    for geometry in geometries:
        sized = dataclasses.replace(settings, num_pages=geometry.num_pages)
        points.append(sweep.Point(geometry, sweep.serve(jobs, sized)))
        progress.show(len(points))
    result = sweep.Sweep(
        subject=subject,
        host_tokens=settings.host_units * settings.unit_len,
        input_tokens=sum(job.input_len for job in jobs),
        points=points,
        unlimited=sweep.serve_unlimited(jobs, settings),
    )
    progress.show(len(points) + 1)
    _print(sweep.to_json(result) if output.as_json else sweep.to_text(result))
    if output.plot_path is not None:
        from kvjax.replay import plot

        plot.save_sweep(result, output.plot_path)
    return 0


def _print(result: dict[str, Any] | str) -> None:
    print(result if isinstance(result, str) else json.dumps(result, indent=2))
