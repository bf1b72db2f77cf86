"""How long calls take the GPU, and how long they take the host."""

import dataclasses
import gc
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

COPIED_BYTES = 2**31
TRIALS = 3
# Replays follow each other for so long, or at most so many.
TRIAL_SECONDS = 2e-3
MOST_REPLAYS = 50

# Eager calls between two synchronizations: so few that the queue of launches (about 1 000) never
# fills, which would make the host wait for the device.
BATCH_CALLS = 50
BATCH_DEVICE_SECONDS = 2e-3
ROUNDS = 20


@dataclasses.dataclass(frozen=True)
class Eager:
    """What is called eagerly to see how long the host takes.

    Attributes:
      call: called before already, so that it is compiled.
      inputs: for a call each, round and round.
      device_seconds: of one call, so that long ones are called less often at once.
      before: called before each batch, not timed.
    """

    call: Callable[..., Any]
    inputs: Sequence[tuple[Any, ...]]
    device_seconds: float = 0.0
    before: Callable[[], None] = lambda: None

    @property
    def calls_at_once(self) -> int:
        """Calls of a batch."""
        if not self.device_seconds:
            return BATCH_CALLS
        return max(5, min(BATCH_CALLS, int(BATCH_DEVICE_SECONDS / self.device_seconds)))


class Clock:
    """Times calls on the current CUDA device."""

    def __init__(self, device: str = "cuda"):
        self.device = device

    def device_name(self) -> str:
        """The GPU's model."""
        return torch.cuda.get_device_name()

    def copy_bandwidth(self) -> float:
        """Bytes a second, read and written, of copying 2 GiB of bfloat16 within the device.

        By a kernel that does next to nothing, which is faster than the driver's copy.
        """
        source = torch.ones(COPIED_BYTES // 2, dtype=torch.bfloat16, device=self.device)
        target = torch.empty_like(source)

        def copies() -> None:
            for _ in range(10):
                torch.neg(source, out=target)

        copies()
        return 2 * COPIED_BYTES * 10 / min(_elapsed(copies) for _ in range(TRIALS))

    def on_device(
        self, call: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], prepare: Any
    ) -> float:
        """Device seconds of one call: of a CUDA graph of a call for each of ``inputs``, its share.

        Gaps between the kernels of a graph count. Results are kept, so that each call has memory
        of its own to write them to.

        Args:
          call: what is timed.
          inputs: for each call.
          prepare: called with whether a graph captures the calls that follow.
        """
        prepare(False)
        for arguments in inputs:  # compiles; not while capturing
            call(*arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        prepare(True)
        try:
            with torch.cuda.graph(graph):
                results = [call(*arguments) for arguments in inputs]
        finally:
            prepare(False)
        graph.replay()
        once = _elapsed(graph.replay)
        replays = max(1, min(MOST_REPLAYS, math.ceil(TRIAL_SECONDS / once)))

        def replay() -> None:
            for _ in range(replays):
                graph.replay()

        best = min(_elapsed(replay) for _ in range(TRIALS))
        del results
        return best / (replays * len(inputs))

    def on_host(self, contenders: Mapping[str, Eager]) -> dict[str, float]:
        """Host seconds of one call that does not wait for the device, of each contender.

        They take turns, a batch of calls each, so that whatever slows the host down for a while
        slows all of them; the fastest batch counts, as ``timeit`` says why.
        """
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        turns = {name: itertools.cycle(eager.inputs) for name, eager in contenders.items()}
        collects = gc.isenabled()
        gc.disable()
        try:
            for _ in range(ROUNDS + 1):  # the first warms up
                for name, eager in contenders.items():
                    arguments = list(itertools.islice(turns[name], eager.calls_at_once))
                    seconds[name].append(_batch_seconds(eager, arguments))
        finally:
            if collects:
                gc.enable()
        return {name: min(found[1:]) for name, found in seconds.items()}


def _batch_seconds(eager: Eager, arguments: list[tuple[Any, ...]]) -> float:
    eager.before()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for each in arguments:
        eager.call(*each)
    seconds = (time.perf_counter() - start) / len(arguments)
    torch.cuda.synchronize()
    return seconds


def _elapsed(run: Callable[[], None]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3
