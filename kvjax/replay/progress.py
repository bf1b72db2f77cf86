"""How far is it?"""

import time
from typing import TextIO

_REDRAW_S = 0.1
_NEXT_LINE_S = 5
_BAR_CELLS = 30


class Progress:
    """A bar that redraws itself on a terminal; elsewhere, a line every few seconds."""

    def __init__(self, label: str, total: int, stream: TextIO) -> None:
        self._label = label
        self._total = total
        self._stream = stream
        self._live = stream.isatty()
        self._start = self._shown = time.monotonic()

    def show(self, done: int, note: str = "") -> None:
        """Shows that ``done`` of the total are done, if it is time to, or if that is all."""
        now = time.monotonic()
        complete = done >= self._total
        if not complete and now - self._shown < (_REDRAW_S if self._live else _NEXT_LINE_S):
            return
        self._shown = now
        share = done / max(1, self._total)
        line = f"{self._label}: {done:,} of {self._total:,} in {now - self._start:.0f} s{note}"
        if self._live:
            bar = "#" * int(share * _BAR_CELLS)
            self._stream.write(f"\r\x1b[K[{bar:-<{_BAR_CELLS}}] {line}" + "\n" * complete)
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()
