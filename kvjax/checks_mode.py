"""Whether slots that are not there raise instead of being dropped."""

import contextlib
import contextvars
import os
from collections.abc import Iterator

_ENABLED = contextvars.ContextVar("kvjax_checks", default=os.environ.get("KVJAX_CHECKS") == "1")


def enabled() -> bool:
    """Whether checks mode is on in this context (``KVJAX_CHECKS=1`` turns it on everywhere)."""
    return _ENABLED.get()


@contextlib.contextmanager
def checks(on: bool = True) -> Iterator[None]:
    """Turns checks mode on (or off) for the calls made inside the block.

    Reading slot values costs a host synchronisation a call, and is possible only where they are
    concrete: calls made while tracing an outer ``jit`` are not checked.
    """
    token = _ENABLED.set(on)
    try:
        yield
    finally:
        _ENABLED.reset(token)
