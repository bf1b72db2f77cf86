"""The arguments of ``kvjax replay``, and what is done with them."""

import argparse
import dataclasses
import functools
import importlib.util
import json
import pathlib
import re
import sys
import time
from collections.abc import Callable, Sequence

from kvjax import presets
from kvjax.errors import UnsupportedError
from kvjax.geometry import DTYPE_BYTES, Geometry, fit
from kvjax.plan import parse_bytes
from kvjax.replay import jobs, report, sweep, trace, workload
from kvjax.replay.progress import Progress
from kvjax.replay.scheduler import Scheduler, Settings
from kvjax.replay.verify import Verifier

_INTERRUPTED = 130  # as shells report SIGINT
_SAMPLED_ROWS = 64  # rows checked at once while running
_SMALL_MODEL = presets.MHAModel("custom", layers=4, num_kv_heads=2, head_dim=32)
_SWEEP_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares ``kvjax replay``."""
    add = parser.add_argument
    add(
        "trace",
        nargs="?",
        type=pathlib.Path,
        metavar="TRACE",
        help="JSON lines as in the Mooncake traces; without it, a workload is generated",
    )
    add("--requests", type=int, metavar="N", help="serve the first N requests only")
    add("--scale", type=int, default=16, metavar="N", help="divide lengths by N (%(default)s)")
    add("--seed", type=int, default=0, help="of generated workloads and of which rows are sampled")

    model = parser.add_argument_group("model, by default a small one")
    model.add_argument("--model", help="a preset's name, or the path of a config.json")
    for option in ("--layers", "--kv-heads", "--head-dim", "--latent-dim", "--rope-dim"):
        model.add_argument(option, type=int, metavar="N")
    model.add_argument("--dtype", default="bfloat16", choices=DTYPE_BYTES)

    memory = parser.add_argument_group("memory; SIZE is as in 4GiB, 500MB or 65536tokens")
    memory.add_argument("--page-size", type=int, default=16, metavar="TOKENS", help="%(default)s")
    memory.add_argument("--pool", default="256MiB", metavar="SIZE", help="%(default)s")
    memory.add_argument(
        "--host-pool", default="512MiB", metavar="SIZE", help="%(default)s; 0tokens: none"
    )

    engine = parser.add_argument_group("engine")
    engine.add_argument("--concurrency", type=int, default=64, metavar="N", help="%(default)s")
    engine.add_argument(
        "--step-ms",
        type=float,
        default=30.0,
        metavar="MS",
        help="trace time that one engine step takes at scale 1; at scale N it takes N times as "
        "long, so that a request runs as long as at full length (%(default)s)",
    )
    engine.add_argument(
        "--compact-every", type=int, default=500, metavar="STEPS", help="0: never (%(default)s)"
    )
    engine.add_argument(
        "--verify-every",
        type=int,
        default=50,
        metavar="STEPS",
        help=f"check {_SAMPLED_ROWS} rows while running, 0: only at the end (%(default)s)",
    )

    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")
    output.add_argument("--plot", type=pathlib.Path, metavar="PNG", help="draw the replay")
    output.add_argument(
        "--sweep",
        nargs="?",
        const="",
        metavar="SIZE,SIZE,...",
        help="hit rate at several pool sizes, without moving bytes; by default 1/8 to 8 times "
        "--pool",
    )


def prepare(args: argparse.Namespace) -> Callable[[], int]:
    """Reads the trace and sizes the pools; the result serves, reports, and gives the exit code.

    Raises:
      OSError: a file cannot be read.
      ValueError: an argument or a line of the trace makes no sense.
      UnsupportedError: the model has layers that keep no KV rows, or matplotlib is missing.
    """
    _check_numbers(args)
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError("--plot needs matplotlib: pip install 'kvjax[plot]'")
    unit_len = jobs.unit_len(args.scale, args.page_size)
    model = _model(args)
    one_page = model.geometry(args.page_size, args.page_size, args.dtype)
    geometry = _sized(one_page, args.pool)
    settings = Settings(
        num_pages=geometry.num_pages,
        page_size=args.page_size,
        unit_len=unit_len,
        host_units=_host_tokens(args.host_pool, geometry.bytes_per_token) // unit_len,
        concurrency=args.concurrency,
        step_ms=args.step_ms * args.scale,
        compact_every=args.compact_every,
    )
    if args.trace is None:
        requests = workload.generate(
            workload.NUM_REQUESTS if args.requests is None else args.requests, args.seed
        )
        source = f"{len(requests):,} requests {workload.DESCRIPTION}"
    else:
        requests = trace.read(args.trace, args.requests)
        source = f"{len(requests):,} requests of {args.trace.name}"
    work = jobs.make_jobs(requests, args.scale, args.page_size)
    description = f"{model.name} ({model.description})"
    if args.sweep is None:
        return functools.partial(_replay, args, source, description, geometry, settings, work)
    sizes = (
        args.sweep.split(",")
        if args.sweep
        else [
            f"{int(geometry.num_pages * factor) * args.page_size}tokens"
            for factor in _SWEEP_FACTORS
        ]
    )
    geometries = [_sized(one_page, size) for size in sizes]
    return functools.partial(_sweep, args, source, description, geometries, settings, work)


def _check_numbers(args: argparse.Namespace) -> None:
    for option, value, least in (
        ("--requests", args.requests, 1),
        ("--page-size", args.page_size, 1),
        ("--concurrency", args.concurrency, 1),
        ("--step-ms", args.step_ms, 0.001),
        ("--seed", args.seed, 0),
        ("--compact-every", args.compact_every, 0),
        ("--verify-every", args.verify_every, 0),
    ):
        if value is not None and not least <= value < float("inf"):
            raise ValueError(f"{option} {value} must be at least {least}")


def _model(args: argparse.Namespace) -> presets.Model:
    heads = {"--kv-heads": args.kv_heads, "--head-dim": args.head_dim}
    latent = {"--latent-dim": args.latent_dim, "--rope-dim": args.rope_dim}
    given = [
        option
        for option, value in ({"--layers": args.layers} | heads | latent).items()
        if value is not None
    ]
    if args.model is not None:
        if given:
            raise ValueError(f"--model has sizes of its own; leave out {', '.join(given)}")
        return presets.load(args.model)
    layers = _SMALL_MODEL.layers if args.layers is None else args.layers
    if set(given) & set(latent):
        if set(given) & set(heads) or args.latent_dim is None:
            raise ValueError(
                f"{', '.join(given)}: a model has --kv-heads and --head-dim, or --latent-dim and "
                f"perhaps --rope-dim"
            )
        rope_dim = 0 if args.rope_dim is None else args.rope_dim
        return presets.MLAModel("custom", layers, args.latent_dim, rope_dim)
    return presets.MHAModel(
        "custom",
        layers,
        _SMALL_MODEL.num_kv_heads if args.kv_heads is None else args.kv_heads,
        _SMALL_MODEL.head_dim if args.head_dim is None else args.head_dim,
    )


def _sized(one_page: Geometry, size: str) -> Geometry:
    """The device tier of a SIZE; in bytes, the padding page is included."""
    tokens = _tokens(size)
    if tokens is None:
        return fit(one_page, parse_bytes(size))
    return dataclasses.replace(one_page, num_slots=tokens)


def _host_tokens(size: str, bytes_per_token: int) -> int:
    """Tokens of a host tier of a SIZE, which has no padding page."""
    tokens = _tokens(size)
    return parse_bytes(size) // bytes_per_token if tokens is None else tokens


def _tokens(size: str) -> int | None:
    match = re.fullmatch(r"([0-9]+)tokens", size)
    return None if match is None else int(match[1])


def _replay(
    args: argparse.Namespace,
    source: str,
    model: str,
    geometry: Geometry,
    settings: Settings,
    work: Sequence[jobs.Job],
) -> int:
    from kvjax.replay.kvjax_plane import KvjaxPlane  # loads JAX, which refusing input does not need

    start = time.perf_counter()
    plane = KvjaxPlane(geometry, settings)
    scheduler = Scheduler(work, plane, settings)
    verifier = Verifier(scheduler, plane, args.seed)
    audit, interrupted = None, False
    try:
        _serve(scheduler, verifier, args.verify_every, len(work))
        if verifier.verdict.ok:
            audit = _read_back(scheduler, verifier)
    except KeyboardInterrupt:
        interrupted = True
    result = report.Report(
        source=source,
        model=model,
        scale=args.scale,
        geometry=geometry,
        scheduler=scheduler,
        wall_s=time.perf_counter() - start,
        interrupted=interrupted,
        verdict=verifier.verdict,
        audit=audit,
    )
    print(json.dumps(report.to_json(result), indent=2) if args.json else report.to_text(result))
    if args.plot is not None:
        from kvjax.replay import plot

        plot.save_replay(result, args.plot)
    if interrupted:
        return _INTERRUPTED
    return 0 if verifier.verdict.ok else 1


def _serve(scheduler: Scheduler, verifier: Verifier, verify_every: int, num_jobs: int) -> None:
    """Serves everything, or up to the first wrong row."""
    progress = Progress("requests", num_jobs, sys.stderr)
    stats = scheduler.stats
    for step in scheduler.steps():
        if verify_every and step % verify_every == 0:
            with stats.timed("sample"):
                verifier.sample(_SAMPLED_ROWS)
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


def _sweep(
    args: argparse.Namespace,
    source: str,
    model: str,
    geometries: Sequence[Geometry],
    settings: Settings,
    work: Sequence[jobs.Job],
) -> int:
    progress = Progress("pool sizes", len(geometries) + 1, sys.stderr)
    points = []
    for geometry in geometries:
        sized = dataclasses.replace(settings, num_pages=geometry.num_pages)
        points.append(sweep.Point(geometry, sweep.serve(work, sized)))
        progress.show(len(points))
    result = sweep.Sweep(
        source=source,
        model=model,
        scale=args.scale,
        host_tokens=settings.host_units * settings.unit_len,
        input_tokens=sum(job.input_len for job in work),
        points=points,
        unlimited=sweep.serve_unlimited(work, settings),
    )
    progress.show(len(points) + 1)
    print(json.dumps(sweep.to_json(result), indent=2) if args.json else sweep.to_text(result))
    if args.plot is not None:
        from kvjax.replay import plot

        plot.save_sweep(result, args.plot)
    return 0
