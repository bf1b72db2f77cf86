"""Measures each operation of kvjax on a GPU, XLA's way beside ours."""

import itertools
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import kvjax
from benchmarks.cases import CASES, Case
from benchmarks.command import options, parse, print_conditions, print_row
from benchmarks.device_time import seconds_of_call, seconds_on_device
from benchmarks.report import HEADER, Figure, conditions, row, save

REPETITIONS = 10


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


def main(words: Sequence[str]) -> int:
    """Runs the chosen cases, prints a line for each figure as it comes, saves all."""
    parser = options(
        "python -m benchmarks [jax]", __doc__, "python -m benchmarks torch --help: kvtorch's"
    )
    arguments, names = parse(parser, words, [case.name for case in CASES])
    if jax.default_backend() != "gpu":
        print("benchmarks measure a GPU, and JAX sees none here", file=sys.stderr)
        return 2

    cases = [case for case in CASES if case.name in names]
    figures: list[Figure] = []
    bandwidth, about = 0.0, {}
    try:
        for geometry in dict.fromkeys(case.geometry for case in cases):
            pool = kvjax.create(geometry)
            if not about:
                bandwidth = copy_bandwidth(pool.planes[0])
                versions = {"jax": f"{jax.__version__}, jaxlib {jaxlib.__version__}"}
                about = conditions(jax.devices()[0].device_kind, bandwidth, versions)
                print_conditions(about)
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
