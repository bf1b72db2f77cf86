"""What does a replay, or a sweep, look like?"""

import pathlib

import matplotlib.figure
import numpy as np

from kvjax.plan import format_bytes
from kvjax.replay.report import Report
from kvjax.replay.sweep import Sweep

_DEVICE, _CACHED, _HOST, _WAITING = "#1f6f8b", "#99c4d3", "#c97b2a", "#b04a4a"
_WINDOW = 9  # samples that the recent hit rate averages


def save_replay(report: Report, path: pathlib.Path) -> None:
    """Draws occupancy, hit rate and running requests over the trace's time."""
    timeline = report.scheduler.timeline
    minutes = np.array([sample.now_ms for sample in timeline]) / 60_000
    figure = matplotlib.figure.Figure(figsize=(10, 8), layout="constrained")
    memory, hits, requests = figure.subplots(3, 1, sharex=True, height_ratios=(5, 4, 4))
    figure.suptitle(
        f"{report.subject.source}\n{report.subject.model}, lengths / {report.subject.scale}, "
        f"device tier {format_bytes(report.geometry.bytes)}, "
        f"host tier {format_bytes(report.host_bytes)}",
        fontsize="medium",
    )

    percent = 100 / report.geometry.num_slots
    used = np.array([sample.used_tokens for sample in timeline]) * percent
    idle = np.array([sample.idle_tokens for sample in timeline]) * percent
    memory.stackplot(
        minutes,
        used,
        idle,
        labels=["device: used by running requests", "device: cached prefixes, idle"],
        colors=[_DEVICE, _CACHED],
    )
    if report.host_tokens:
        host = np.array([sample.host_tokens for sample in timeline])
        memory.plot(minutes, 100 * host / report.host_tokens, color=_HOST, label="host tier")
    memory.set(ylabel="occupied, % of each tier", ylim=(0, 105))

    hit = np.array([sample.hit_tokens for sample in timeline])
    total = np.array([sample.input_tokens for sample in timeline])
    recent = slice(_WINDOW, None), slice(None, -_WINDOW)
    hits.plot(
        minutes[_WINDOW:],
        100
        * (hit[recent[0]] - hit[recent[1]])
        / np.maximum(1, total[recent[0]] - total[recent[1]]),
        color=_CACHED,
        label="recent",
    )
    hits.plot(minutes, 100 * hit / np.maximum(1, total), color=_DEVICE, label="since the start")
    hits.set(ylabel="prefix hits, % of input tokens", ylim=(0, None))

    requests.plot(minutes, [s.waiting for s in timeline], color=_WAITING, label="waiting")
    requests.plot(minutes, [s.running for s in timeline], color=_DEVICE, label="running")
    requests.set(ylabel="requests", xlabel="trace time, minutes", ylim=(0, None))
    for axes in (memory, hits, requests):
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        axes.grid(alpha=0.3)
        axes.margins(x=0)
    figure.savefig(path, dpi=120)


def save_sweep(sweep: Sweep, path: pathlib.Path) -> None:
    """Draws the hit rate against the pool's bytes."""
    sizes = [point.geometry.bytes for point in sweep.points]
    figure = matplotlib.figure.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(
        100 * sweep.hit_rate(sweep.unlimited), color="black", linestyle="--", label="unlimited pool"
    )
    if sweep.host_tokens:
        axes.plot(
            sizes,
            [100 * sweep.hit_rate(point.stats) for point in sweep.points],
            color=_HOST,
            marker="o",
            label="either tier",
        )
    axes.plot(
        sizes,
        [100 * sweep.device_hit_rate(point.stats) for point in sweep.points],
        color=_DEVICE,
        marker="o",
        label="device tier",
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda amount, _: format_bytes(amount))
    figure.suptitle(
        f"{sweep.subject.source}\n{sweep.subject.model}, lengths / {sweep.subject.scale}, "
        f"host tier of {sweep.host_tokens:,} tokens; scheduling only",
        fontsize="medium",
    )
    axes.set(
        xlabel="size of the pool",
        ylabel="prefix hits, % of input tokens",
        ylim=(0, None),
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
