"""How far is it?"""

import time
from typing import TextIO

_REDRAW_S = 0.1
_BAR_CELLS = 30


class Progress:
    """A bar that redraws itself on a terminal; elsewhere, a line at every tenth of the way."""

    def __init__(self, label: str, total: int, stream: TextIO) -> None:
        self._label = label
        self._total = total
        self._stream = stream
        self._live = stream.isatty()
        self._start = time.monotonic()
        self._drawn = 0.0
        self._tenths = 0

    def show(self, done: int, note: str = "") -> None:
        """Shows that ``done`` of the total are done."""
        now = time.monotonic()
        line = (
            f"{self._label} {done:,} of {self._total:,} "
            f"({done / max(1, self._total):.0%}) in {now - self._start:.0f} s{note}"
        )
        complete = done >= self._total
        if self._live:
            if complete or now - self._drawn >= _REDRAW_S:
                self._drawn = now
                cells = _BAR_CELLS * done // max(1, self._total)
                bar = "#" * cells + "-" * (_BAR_CELLS - cells)
                end = "\n" if complete else ""
                self._stream.write(f"\r\x1b[K[{bar}] {line}{end}")
        elif (tenths := 10 * done // max(1, self._total)) > self._tenths:
            self._tenths = tenths
            self._stream.write(f"{line}\n")
        self._stream.flush()
