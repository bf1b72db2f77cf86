"""Which implementation of an operation runs. Standard library only."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.errors import UnsupportedError


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to run an operation; ``why_not`` takes its arguments and says what stands against it.

    ``why_not`` returns ``None`` when the implementation can run.
    """

    run: Callable[..., Any]
    why_not: Callable[..., str | None]


def select(
    operation: str,
    implementations: Mapping[str, Implementation],
    name: str | None,
    *args: Any,
    **kwargs: Any,
) -> Callable[..., Any]:
    """The implementation to run for these arguments.

    Args:
      operation: what messages call it.
      implementations: the candidates, fastest first.
      name: ``None`` for the fastest that can run; a named one is never replaced by another.
      *args, **kwargs: the operation's arguments, for ``why_not``.

    Raises:
      ValueError: no implementation has that name.
      UnsupportedError: the named one, or every one, cannot run; the message has each reason.
    """
    if name is not None and name not in implementations:
        raise ValueError(
            f"{operation} has no implementation {name!r}; it has {', '.join(implementations)}"
        )
    candidates = implementations if name is None else {name: implementations[name]}
    reasons = []
    for candidate, implementation in candidates.items():
        reason = implementation.why_not(*args, **kwargs)
        if reason is None:
            return implementation.run
        reasons.append(f"{candidate}: {reason}")
    raise UnsupportedError(f"{operation} cannot run; {'; '.join(reasons)}")
