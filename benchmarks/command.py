"""What the commands of both sides take and print."""

import argparse
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

NUM_TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
WIDTHS = (28, 7, 14, 11, 7, 8, 10)


def options(command: str, description: str | None, epilog: str) -> argparse.ArgumentParser:
    """A parser of the options that both have."""
    parser = argparse.ArgumentParser(prog=command, description=description, epilog=epilog)
    parser.add_argument("only", nargs="*", help="words that a case's name has to contain one of")
    parser.add_argument("--tokens", type=int, nargs="+", default=NUM_TOKENS, metavar="N")
    parser.add_argument("--save", type=pathlib.Path, metavar="FOLDER", help="keep figures and plot")
    return parser


def parse(
    parser: argparse.ArgumentParser, words: Sequence[str], names: Iterable[str]
) -> tuple[argparse.Namespace, list[str]]:
    """The options, and which of the cases' ``names`` are to be measured; exits if none is."""
    arguments, names = parser.parse_args(words), list(names)
    if min(arguments.tokens) < 1:
        parser.error(f"--tokens {min(arguments.tokens)}: there is nothing to measure below 1")
    chosen = [
        name for name in names if not arguments.only or any(w in name for w in arguments.only)
    ]
    if not chosen:
        parser.error(f"no case has a name like that; there are {names}")
    return arguments, chosen


def print_conditions(about: dict[str, str]) -> None:
    """Prints what a run depends on."""
    print(*(f"{name}: {value}" for name, value in about.items()), sep="\n", flush=True)


def print_row(cells: Sequence[Any]) -> None:
    """Prints one line of the table."""
    first, *rest = (
        cell.ljust(width) if i in (0, 2) else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))
    )
    print(first, *rest, flush=True)
