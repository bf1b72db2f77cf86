"""Whether slots that are not there raise instead of being dropped."""

import contextlib
import contextvars
import os
from collections.abc import Iterator

_EVERYWHERE = os.environ.get("KVJAX_CHECKS") == "1"
_ENABLED = contextvars.ContextVar("kvjax_checks", default=_EVERYWHERE)

ever_enabled = _EVERYWHERE
"""Whether checks mode has been on at all; cheaper to look at than ``enabled`` is to call."""


def enabled() -> bool:
    """Whether checks mode is on in this context (``KVJAX_CHECKS=1`` turns it on everywhere)."""
    return _ENABLED.get()


@contextlib.contextmanager
def checks(on: bool = True) -> Iterator[None]:
    """Turns checks mode on (or off) for the calls made inside the block.

    Reading slot values costs a host synchronisation a call, and is possible only where they are
    concrete: calls made while tracing an outer ``jit`` are not checked.
    """
    global ever_enabled
    ever_enabled |= on
    token = _ENABLED.set(on)
    try:
        yield
    finally:
        _ENABLED.reset(token)
