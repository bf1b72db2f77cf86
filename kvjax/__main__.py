"""The command line: ``python -m kvjax plan | replay | bench``."""

import argparse
import importlib.util
import runpy
import sys
from collections.abc import Callable, Sequence

from kvjax import plan
from kvjax.errors import UnsupportedError
from kvjax.replay import cli as replay


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code.

    2: input that is refused or asks for more memory than there is, with the reason;
    130: interrupted, as shells say it.
    """
    parser = argparse.ArgumentParser(prog="kvjax", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for module, name, text in (
        (plan, "plan", "how many tokens fit into a memory budget"),
        (replay, "replay", "serve a request trace through a pool and check every row"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        module.add_arguments(command)
        command.set_defaults(prepare=module.prepare)
    bench = commands.add_parser("bench", help="python -m benchmarks, same options", add_help=False)
    bench.set_defaults(prepare=_prepare_bench)
    args, args.rest = parser.parse_known_args(argv)
    if args.rest and args.command != "bench":
        parser.error(f"unrecognized arguments: {' '.join(args.rest)}")
    try:
        # Whatever the user can get wrong is found here; an error in the work itself is a bug of
        # ours and keeps its traceback.
        work = args.prepare(args)
    except (ValueError, OSError, MemoryError, UnsupportedError) as error:
        return _refused(args.command, error)
    try:
        return work()
    except MemoryError as error:
        return _refused(args.command, error)
    except KeyboardInterrupt:
        return 130


def _refused(name: str, reason: Exception) -> int:
    print(f"kvjax {name}: {str(reason) or 'out of memory'}", file=sys.stderr)
    return 2


def _prepare_bench(args: argparse.Namespace) -> Callable[[], int]:
    if importlib.util.find_spec("benchmarks") is None:
        raise UnsupportedError(
            "there is no package named benchmarks here; run this in a clone of the repository"
        )

    def work() -> int:
        sys.argv = ["python -m benchmarks", *args.rest]
        runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
        return 0

    return work


if __name__ == "__main__":
    sys.exit(main())
