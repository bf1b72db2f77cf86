"""What happened during a replay, in numbers?"""

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator


@dataclasses.dataclass
class Stats:
    """Counts of a replay so far. Tokens unless the name says otherwise.

    ``seconds`` has the time of each kind of operation, all calls together.
    """

    requests_finished: int = 0
    requests_rejected: int = 0
    steps: int = 0
    input_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    offloaded_tokens: int = 0
    restored_tokens: int = 0
    moved_tokens: int = 0
    evicted_units: int = 0
    compactions: int = 0
    peak_running: int = 0
    seconds: defaultdict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))

    @property
    def hit_tokens(self) -> int:
        """Input tokens found in either tier."""
        return self.device_hit_tokens + self.host_hit_tokens

    @property
    def hit_rate(self) -> float:
        """The share of admitted input tokens found in either tier."""
        return self.hit_tokens / max(1, self.input_tokens)

    @contextlib.contextmanager
    def timed(self, operation: str) -> Iterator[None]:
        """Adds the time that the block takes to ``seconds[operation]``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[operation] += time.perf_counter() - start


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """The state at one moment of trace time; hits and input count from the start.

    ``used_tokens`` are those of the device tier that running requests use, shared or not;
    ``idle_tokens`` are cached there for whoever comes.
    """

    now_ms: float
    running: int
    waiting: int
    used_tokens: int
    idle_tokens: int
    host_tokens: int
    hit_tokens: int
    input_tokens: int
