"""What do the arguments of ``kvjax replay`` ask for?"""

import argparse
import dataclasses
import functools
import importlib.util
import pathlib
import re
from collections.abc import Callable

from kvjax import presets
from kvjax.errors import UnsupportedError
from kvjax.geometry import DTYPE_BYTES, QUANTIZATIONS, Geometry, fit
from kvjax.plan import parse_bytes
from kvjax.replay import backends, jobs, run, trace, workload
from kvjax.replay.report import Subject
from kvjax.replay.scheduler import Settings

_SMALL_MODEL = presets.MHAModel("custom", layers=4, num_kv_heads=2, head_dim=32)
# Operations. On CPU, lending the memory out and taking it back copies all of it.
_TURN_LEN = 100
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
    model.add_argument("--model", help="as for kvjax plan")
    for option in ("--layers", "--kv-heads", "--head-dim", "--latent-dim", "--rope-dim"):
        model.add_argument(option, type=int, metavar="N")
    model.add_argument("--dtype", default="bfloat16", choices=DTYPE_BYTES)
    model.add_argument("--quantization", choices=QUANTIZATIONS, help="as for kvjax plan")

    memory = parser.add_argument_group("memory; SIZE is as in 4GiB, 500MB or 65536tokens")
    memory.add_argument("--page-size", type=int, default=16, metavar="TOKENS", help="%(default)s")
    memory.add_argument("--pool", default="256MiB", metavar="SIZE", help="%(default)s")
    memory.add_argument(
        "--host-pool", default="512MiB", metavar="SIZE", help="%(default)s; 0tokens: none"
    )

    frameworks = parser.add_argument_group("frameworks")
    frameworks.add_argument(
        "--backend",
        default="jax",
        choices=backends.NAMES,
        help="who has the rows; both do the same, and are compared bit for bit (%(default)s)",
    )
    frameworks.add_argument(
        "--share",
        nargs="?",
        type=int,
        const=_TURN_LEN,
        metavar="N",
        help="with --backend both: on one memory, taking turns of N operations (%(const)s)",
    )

    engine = parser.add_argument_group("engine")
    engine.add_argument("--concurrency", type=int, default=48, metavar="N", help="%(default)s")
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
        help=f"check {run.SAMPLED_ROWS} rows while running, 0: only at the end (%(default)s)",
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
      GeometryError: the model's rows cannot be quantised so.
      UnsupportedError: the model's layers do not all keep KV rows of one shape, or matplotlib is
        missing, or what the backend needs.
    """
    _check_numbers(args)
    backend = _backend(args)
    if args.plot is not None:
        _check_plot(args.plot)
    unit_len = jobs.unit_len(args.scale, args.page_size)
    model = _model(args)
    one_page = dataclasses.replace(
        model.geometry(args.page_size, args.page_size, args.dtype), quantization=args.quantization
    )
    geometry = _sized("--pool", args.pool, one_page)
    host_units = _host_tokens(args.host_pool, geometry) // unit_len
    if args.trace is None:
        requests = workload.generate(
            workload.NUM_REQUESTS if args.requests is None else args.requests, args.seed
        )
        source = f"{len(requests):,} requests {workload.DESCRIPTION}"
    else:
        requests = trace.read(args.trace, args.requests)
        source = f"{len(requests):,} requests of {args.trace.name}"
    work = jobs.make_jobs(requests, args.scale, args.page_size)
    settings = Settings(
        num_pages=geometry.num_pages,
        page_size=args.page_size,
        unit_len=unit_len,
        host_units=host_units,
        concurrency=min(args.concurrency, len(work)),  # arrays of this length are made
        step_ms=args.step_ms * args.scale,
        compact_every=args.compact_every,
    )
    subject = Subject(source, f"{model.name} ({model.description})", args.scale)
    output = run.Output(args.json, args.plot)
    if args.sweep is None:
        checks = run.Checks(args.verify_every, args.seed)
        backends.require(backend)
        return functools.partial(
            run.replay, subject, geometry, settings, work, backend, checks, output
        )
    sizes = [size for size in args.sweep.split(",") if size] or _sizes_around(geometry)
    geometries = [_sized("--sweep", size, one_page) for size in sizes]
    return functools.partial(run.sweep_sizes, subject, geometries, settings, work, output)


def _check_plot(path: pathlib.Path) -> None:
    """Finds out before the replay what would only go wrong after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError("--plot needs matplotlib: pip install 'kvjax[plot]'")
    if path.suffix != ".png" or not path.parent.is_dir():
        raise ValueError(f"--plot {path} must end in .png and be in a folder that exists")


def _check_numbers(args: argparse.Namespace) -> None:
    for option, value, least in (
        ("--requests", args.requests, 1),
        ("--page-size", args.page_size, 1),
        ("--concurrency", args.concurrency, 1),
        ("--step-ms", args.step_ms, 0.001),
        ("--seed", args.seed, 0),
        ("--compact-every", args.compact_every, 0),
        ("--verify-every", args.verify_every, 0),
        ("--layers", args.layers, 1),
        ("--share", args.share, 1),
    ):
        if value is not None and not least <= value < 2**63:
            raise ValueError(f"{option} {value} must be at least {least}, and less than 2**63")


def _backend(args: argparse.Namespace) -> backends.Backend:
    if args.share is not None and args.backend != "both":
        raise ValueError(f"--share needs --backend both, not {args.backend}")
    if args.sweep is not None and args.backend != "jax":
        raise ValueError(f"--sweep moves no rows; leave out --backend {args.backend}")
    return backends.Backend(args.backend, args.share)


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


def _sizes_around(geometry: Geometry) -> list[str]:
    """The SIZEs of a sweep that names none.

    Raises:
      ValueError: the smallest is less than a page.
    """
    pages = [int(geometry.num_pages * factor) for factor in _SWEEP_FACTORS]
    if pages[0] < 1:
        raise ValueError(
            f"--sweep starts at 1/8 of --pool, whose {geometry.num_pages} pages are fewer than 8; "
            f"name the sizes, or give --pool at least {8 * geometry.page_size}tokens"
        )
    return [f"{count * geometry.page_size}tokens" for count in pages]


def _sized(option: str, size: str, one_page: Geometry) -> Geometry:
    """The device tier of an option's SIZE; in bytes, the padding page is included."""
    try:
        tokens = _tokens(size)
        if tokens is None:
            return fit(one_page, parse_bytes(size))
        return dataclasses.replace(one_page, num_slots=tokens)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _host_tokens(size: str, geometry: Geometry) -> int:
    """Tokens of a host tier of a SIZE, which has no padding page."""
    try:
        tokens = _tokens(size)
        if tokens is None:
            tokens = parse_bytes(size) // geometry.bytes_per_token
    except ValueError as error:
        raise ValueError(f"--host-pool: {error}") from None
    # The pool behind it is one of the device tier's kind, and those start at this slot.
    if tokens + geometry.first_slot > 2**31 - 1:
        raise ValueError(f"--host-pool: {tokens} tokens do not fit int32 slot numbers")
    return tokens


def _tokens(size: str) -> int | None:
    match = re.fullmatch(r"([0-9]+)tokens", size)
    return None if match is None else int(match[1])
