"""Measures each operation of kvtorch on a GPU, beside torch's own indexing and other projects'."""

import argparse
import functools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton

from benchmarks import bars, peers
from benchmarks.command import options, parse, print_conditions, print_row
from benchmarks.report import HEADER, Figure, conditions, row, save
from benchmarks.torch_allocations import NAMES, allocations
from benchmarks.torch_cases import CASES, KINDS, Case, Contender, Sizes, contenders
from benchmarks.torch_time import Clock, Eager

REPETITIONS = 10
EPILOG = """
Device time is that of CUDA graphs of ten calls, each with its own slots and values; eager time is
the host's for one call, waiting for the device only where the call itself does: the mean of the
fastest of twenty batches, which contenders take in turns. Nothing of other
projects is installed or copied; their modules are imported from the folders given.
"""


class Bench:
    """One run: what it measures with, and what it has found."""

    def __init__(
        self,
        clock: Any,
        sizes: Sizes,
        found_peers: dict[str, peers.Peer],
        most_moved_by_peers: int | None = None,
    ):
        self.clock, self.device, self.sizes, self.peers = clock, clock.device, sizes, found_peers
        self.most_moved_by_peers = most_moved_by_peers
        self.bandwidth: float = clock.copy_bandwidth()
        self.figures: list[Figure] = []
        self.failures: list[str] = []

    def run(self, names: Sequence[str], tokens: Sequence[int]) -> None:
        """Measures the cases of these names, prints a line for each figure."""
        for kind in KINDS:
            cases = [case for case in CASES if case.kind == kind and case.name in names]
            wanted = dict.fromkeys(name for case in cases for name in case.contenders)
            pools = contenders(kind, self.sizes, self.device, self.peers, wanted)
            for case in cases:
                for num_tokens in tokens:
                    self._run_case(case, num_tokens, pools)
        self._run_allocations([name for name in NAMES if name in names])

    def _run_case(self, case: Case, num_tokens: int, pools: list[Contender]) -> None:
        rng = np.random.default_rng(num_tokens)
        inputs = [
            case.inputs(self.sizes, rng, num_tokens, repetition, self.device)
            for repetition in range(REPETITIONS)
        ]
        measured: dict[str, Eager] = {}
        for contender in pools:
            if contender.name not in case.contenders or not self._can(case, contender, num_tokens):
                continue
            call = case.call_of(contender)
            try:
                device_seconds = self.clock.on_device(call, inputs, contender.prepare)
            except Exception as error:  # whatever a peer's kernel or its compilation raises
                self._fail(case.name, contender.name, num_tokens, error)
                continue
            before = functools.partial(contender.prepare, False)
            measured[contender.name] = Eager(call, inputs, device_seconds, before)
        for name, eager_seconds in self.clock.on_host(measured).items():
            self._found(
                case=case.name,
                num_tokens=num_tokens,
                implementation=name,
                device_seconds=measured[name].device_seconds,
                eager_seconds=eager_seconds,
                bytes_moved=case.bytes_moved(self.sizes, num_tokens),
            )

    def _can(self, case: Case, contender: Contender, num_tokens: int) -> bool:
        most = case.most_tokens.get(contender.name)
        if most is None:
            return True
        if contender.name == "tokenspeed" and num_tokens & (num_tokens - 1):
            return False  # its move takes powers of two
        return num_tokens <= (self.most_moved_by_peers or most)

    def _run_allocations(self, names: Sequence[str]) -> None:
        if not names:
            return
        found = allocations(self.device, self.peers)
        for case in names:
            measured: dict[str, Eager] = {}
            for each in found:
                if each.case != case:
                    continue
                try:
                    each.reset()
                    each.call()
                except Exception as error:
                    self._fail(case, each.name, each.num_tokens, error)
                    continue
                measured[each.name] = Eager(each.call, [()], before=each.reset)
            (num_tokens,) = {each.num_tokens for each in found if each.case == case}
            for name, eager_seconds in self.clock.on_host(measured).items():
                self._found(
                    case=case,
                    num_tokens=num_tokens,
                    implementation=name,
                    device_seconds=None,
                    eager_seconds=eager_seconds,
                    bytes_moved=0,
                )

    def _found(self, **what: Any) -> None:
        figure = Figure(**what, copy_bandwidth=self.bandwidth)
        self.figures.append(figure)
        print_row(row(figure))

    def _fail(self, case: str, name: str, num_tokens: int, error: Exception) -> None:
        (first, *_) = str(error).strip().splitlines() or [""]
        message = f"{case}, {num_tokens} tokens, {name}: {type(error).__name__}: {first}"
        self.failures.append(message)
        print(f"left out: {message}", flush=True)


def load_peers(arguments: argparse.Namespace) -> dict[str, peers.Peer]:
    """Those whose folders are given and can be loaded; says of others why not."""
    found = {}
    for name, load in (("sglang", peers.sglang), ("tokenspeed", peers.tokenspeed)):
        folder = getattr(arguments, name)
        if folder is None:
            continue
        try:
            found[name] = load(folder)
        except peers.PeerError as error:
            print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
    return found


def run(arguments: argparse.Namespace, names: Sequence[str], sizes: Sizes, clock: Any) -> int:
    """Measures, prints figures as they come, then the bars; saves all."""
    found_peers = load_peers(arguments)
    bench = Bench(clock, sizes, found_peers, arguments.most_moved_by_peers)
    versions = {
        "torch": f"{torch.__version__}, triton {triton.__version__}",
        **{name: peer.version for name, peer in found_peers.items()},
    }
    about = conditions(clock.device_name(), bench.bandwidth, versions)
    print_conditions(about)
    print_row(HEADER)
    try:
        bench.run(names, arguments.tokens)
    finally:
        verdicts = [str(bar) for bar in bars.bars(bench.figures)]
        print("bars:", *verdicts, sep="\n", flush=True)
        if arguments.save and bench.figures:
            print("saved", *save(arguments.save, bench.figures, about, verdicts), flush=True)
    return 1 if bench.failures else 0


def main(words: Sequence[str]) -> int:
    """Measures the chosen cases on the current GPU."""
    parser = options("python -m benchmarks torch", __doc__, EPILOG)
    parser.add_argument(
        "--sglang", type=pathlib.Path, metavar="FOLDER", help="SGLang 0.4.8's unpacked wheel"
    )
    parser.add_argument(
        "--tokenspeed",
        type=pathlib.Path,
        metavar="FOLDER",
        help="a checkout of github.com/lightseekorg/tokenspeed at its first release, 205c53c4",
    )
    parser.add_argument(
        "--most-moved-by-peers",
        type=int,
        metavar="N",
        help="their moves compile for minutes beyond the 256 tokens they are measured to, "
        "and not at all beyond 8192",
    )
    arguments, names = parse(parser, words, [*(case.name for case in CASES), *NAMES])
    if not torch.cuda.is_available():
        print("benchmarks measure a GPU, and torch sees none here", file=sys.stderr)
        return 2
    return run(arguments, names, Sizes(), Clock())
