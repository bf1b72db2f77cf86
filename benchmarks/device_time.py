"""What a GPU did, and for how long, as JAX's profiler saw it."""

import collections
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax


def kernels(run: Callable[[], Any]) -> dict[str, tuple[int, float]]:
    """Runs ``run`` and returns how often each kernel or copy ran, and its seconds in all."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
        found: dict[str, tuple[int, float]] = collections.defaultdict(lambda: (0, 0.0))
        for plane in profile.planes:
            for line in plane.lines:
                # A device's other lines say again, in XLA's terms, what its streams did.
                if plane.name.startswith("/device:GPU") and line.name.startswith("Stream"):
                    for event in line.events:
                        count, seconds = found[event.name]
                        found[event.name] = (count + 1, seconds + event.duration_ns * 1e-9)
    if not found:
        raise RuntimeError("the profiler saw no work on a GPU")
    return dict(found)


def seconds_on_device(run: Callable[[], Any], repetitions: int) -> float:
    """Device seconds of one of ``repetitions`` repetitions that ``run`` makes, gaps left out."""
    return sum(seconds for _, seconds in kernels(run).values()) / repetitions


def seconds_of_call(run: Callable[[], Any], repetitions: int) -> float:
    """Wall seconds, host included, of one of ``repetitions`` repetitions that ``run`` makes."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return (time.perf_counter() - start) / repetitions
