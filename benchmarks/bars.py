"""What kvtorch has promised, and whether a run's figures keep it."""

import dataclasses
from collections.abc import Iterator

from benchmarks.report import Figure

WRITE, WRITE_LATENT, READ_LATENT = "write K+V", "write latent+rope", "read latent+rope"
WRITE_QUANTIZED, READ_QUANTIZED = "write quantised latent+rope", "read quantised latent+rope"
WRITE_INT8, READ_INT8 = "write quantised K+V (int8)", "read quantised K+V (int8)"
DISJOINT, OVERLAPPING, PERMUTED = "move, disjoint", "move, 1 in 50 overlaps", "move, permutation"


@dataclasses.dataclass(frozen=True)
class Bar:
    """A promise; ``passed`` is ``None`` where what it needs was not measured."""

    promise: str
    value: str
    passed: bool | None

    def __str__(self) -> str:
        verdict = {True: "pass", False: "FAIL", None: "----"}[self.passed]
        return f"{verdict}  {self.promise}: {self.value}"


def bars(figures: list[Figure]) -> list[Bar]:
    """Every promise, in the order in which they were made."""
    run = _Run(figures)
    found = [
        run.share(DISJOINT, num_tokens, least)
        for num_tokens, least in ((256, 0.80), (1024, 0.85), (4096, 0.90))
    ]
    found.append(run.device(DISJOINT, 4e-6, 16, 16))
    for case, least in ((OVERLAPPING, 0.6), (PERMUTED, 0.4)):
        promise = f"{case}: at least {least:.0%} of the disjoint speed"
        found.append(run.speed(promise, least, case, (DISJOINT, ["triton"])))
    peers = ["tokenspeed", "tokenspeed pdl"]
    for case in (WRITE_LATENT, READ_LATENT):
        found.append(run.speed(f"{case}: never slower than TokenSpeed", 1, case, (case, peers)))
    promise = f"{WRITE_LATENT}, 16384 tokens: at least 5 times SGLang's speed"
    found.append(run.speed(promise, 5, WRITE_LATENT, (WRITE_LATENT, ["sglang"]), 16384))
    promise = f"{WRITE}, 16384 tokens: at least 3 times the speed of torch's two index_put"
    found.append(run.speed(promise, 3, WRITE, (WRITE, ["torch"]), 16384))
    promise = f"{WRITE}: never slower than torch's two index_put"
    found.append(run.speed(promise, 1, WRITE, (WRITE, ["torch"])))
    for case, theirs in (
        (WRITE, WRITE),
        (WRITE_LATENT, WRITE_LATENT),
        (DISJOINT, DISJOINT),
        (OVERLAPPING, DISJOINT),
    ):
        promise = f"{case}: a call costs the host no more than SGLang's"
        found.append(run.host(promise, case, theirs))
    for case in (WRITE_QUANTIZED, READ_QUANTIZED):
        found.append(run.share(case, 16384, 0.50))
        promise = f"{case}, 16384 tokens: at least 8 times TokenSpeed's speed"
        found.append(run.speed(promise, 8, case, (case, ["tokenspeed"]), 16384))
        found.append(run.device(case, 5e-6, 1, 256))
        found.append(run.host_at_most(case, 40e-6))
    for case in (WRITE_INT8, READ_INT8):
        found.append(run.share(case, 16384, 0.50))
        found.append(run.device(case, 5e-6, 1, 256))
    return found


class _Run:
    """A run's figures, to be looked up."""

    def __init__(self, figures: list[Figure]):
        self._figures = {(f.case, f.implementation, f.num_tokens): f for f in figures}

    def _ours(self, case: str) -> Iterator[Figure]:
        for (of_case, implementation, _), figure in self._figures.items():
            if (of_case, implementation) == (case, "triton"):
                yield figure

    def share(self, case: str, num_tokens: int, least: float) -> Bar:
        """At least this share of the copy bandwidth."""
        promise = f"{case}, {num_tokens} tokens: at least {least:.0%} of the copy bandwidth"
        figure = self._figures.get((case, "triton", num_tokens))
        if figure is None or figure.share is None:
            return Bar(promise, "not measured", None)
        return Bar(promise, f"{figure.share:.1%}", figure.share >= least)

    def device(self, case: str, most: float, first: int, last: int) -> Bar:
        """At most so many seconds on the device, for any n from ``first`` to ``last``."""
        several = f"{first}" if first == last else f"{first} to {last}"
        promise = f"{case}, {several} tokens: at most {most * 1e6:.0f} us"
        found = [
            (figure.device_seconds, figure.num_tokens)
            for figure in self._ours(case)
            if first <= figure.num_tokens <= last and figure.device_seconds is not None
        ]
        return _longest(promise, most, found)

    def host_at_most(self, case: str, most: float) -> Bar:
        """At most so many seconds of host time a call, for any n."""
        promise = f"{case}: a call costs the host at most {most * 1e6:.0f} us"
        found = [(figure.eager_seconds, figure.num_tokens) for figure in self._ours(case)]
        return _longest(promise, most, found)

    def speed(
        self,
        promise: str,
        least: float,
        case: str,
        theirs: tuple[str, list[str]],
        num_tokens: int | None = None,
    ) -> Bar:
        """At least so many times the speed on the device of the fastest of others, for any n."""
        found = []
        for ours in self._ours(case):
            if num_tokens not in (None, ours.num_tokens) or ours.device_seconds is None:
                continue
            for name in theirs[1]:
                other = self._figures.get((theirs[0], name, ours.num_tokens))
                if other is not None and other.device_seconds is not None:
                    ratio = other.device_seconds / ours.device_seconds
                    found.append((ratio, name, ours.num_tokens))
        return _worst(promise, least, found)

    def host(self, promise: str, case: str, theirs: str) -> Bar:
        """At most SGLang's host time a call, for any n."""
        found = []
        for ours in self._ours(case):
            other = self._figures.get((theirs, "sglang", ours.num_tokens))
            if other is not None:
                ratio = other.eager_seconds / ours.eager_seconds
                found.append((ratio, "sglang", ours.num_tokens))
        return _worst(promise, 1, found)


def _worst(promise: str, least: float, found: list[tuple[float, str, int]]) -> Bar:
    if not found:
        return Bar(promise, "not measured", None)
    ratio, name, num_tokens = min(found)
    value = f"{ratio:.2f} times, against {name} at {num_tokens}; the worst of {len(found)}"
    return Bar(promise, value, ratio >= least)


def _longest(promise: str, most: float, found: list[tuple[float, int]]) -> Bar:
    if not found:
        return Bar(promise, "not measured", None)
    seconds, num_tokens = max(found)
    value = f"{seconds * 1e6:.2f} us, at {num_tokens}; the longest of {len(found)}"
    return Bar(promise, value, seconds <= most)
