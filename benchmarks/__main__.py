"""Measures each operation on a GPU, XLA's way beside ours: ``python -m benchmarks --help``."""

import argparse
import itertools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks.cases import CASES, Case
from benchmarks.device_time import seconds_of_call, seconds_on_device
from benchmarks.report import HEADER, Figure, conditions, row, save

NUM_TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
REPETITIONS = 10
WIDTHS = (24, 7, 14, 11, 7, 8, 10)


def copy_bandwidth(array: jax.Array) -> float:
    """Bytes a second, read and written, of copying ``array`` within the device."""

    def copies():
        for _ in range(3):
            jnp.copy(array).block_until_ready()

    copies()
    return 2 * array.nbytes / seconds_on_device(copies, 3)


def measure(
    case: Case, pool: kvjax.Pool, num_tokens: int, implementation: str, bandwidth: float
) -> tuple[Figure, kvjax.Pool]:
    """The figure, and the pool to go on with."""
    rng = np.random.default_rng(num_tokens)
    calls = [case.inputs(rng, num_tokens, repetition) for repetition in range(REPETITIONS)]

    def run():
        nonlocal pool
        results = []
        for inputs in calls:
            result, pool = case.call(pool, *inputs, implementation=implementation)
            results.append(result)
        return results, pool

    jax.block_until_ready(run())  # compiles
    figure = Figure(
        case=case.name,
        num_tokens=num_tokens,
        implementation=implementation,
        device_seconds=seconds_on_device(run, REPETITIONS),
        eager_seconds=min(seconds_of_call(run, REPETITIONS) for _ in range(3)),
        bytes_moved=case.bytes_moved(num_tokens),
        copy_bandwidth=bandwidth,
    )
    return figure, pool


def print_row(cells: list[str]) -> None:
    """Prints one line of the table."""
    first, *rest = (
        cell.ljust(width) if i in (0, 2) else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))
    )
    print(first, *rest, flush=True)


def main() -> int:
    """Runs the chosen cases, prints a line for each figure as it comes, saves all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("only", nargs="*", help="words that a case's name has to contain one of")
    parser.add_argument("--tokens", type=int, nargs="+", default=NUM_TOKENS, metavar="N")
    parser.add_argument("--save", type=pathlib.Path, metavar="FOLDER", help="keep figures and plot")
    arguments = parser.parse_args()
    cases = [
        case for case in CASES if not arguments.only or any(w in case.name for w in arguments.only)
    ]
    if not cases:
        parser.error(f"no case has a name like that; there are {[case.name for case in CASES]}")
    if jax.default_backend() != "gpu":
        print("benchmarks measure a GPU, and JAX sees none here", file=sys.stderr)
        return 2

    figures: list[Figure] = []
    bandwidth, about = 0.0, {}
    try:
        for geometry in dict.fromkeys(case.geometry for case in cases):
            pool = kvjax.create(geometry)
            if not about:
                bandwidth = copy_bandwidth(pool.planes[0])
                about = conditions(bandwidth)
                print(*(f"{name}: {value}" for name, value in about.items()), sep="\n")
                print_row(HEADER)
            for case in (case for case in cases if case.geometry == geometry):
                for num_tokens, name in itertools.product(arguments.tokens, case.implementations):
                    figure, pool = measure(case, pool, num_tokens, name, bandwidth)
                    figures.append(figure)
                    print_row(row(figure))
            del pool
    finally:
        if arguments.save and figures:
            print("saved", *save(arguments.save, figures, about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
