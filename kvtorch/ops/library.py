"""Operations as torch's custom ops, which say what they change: graphs and compilers see it."""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("kvtorch", "DEF")


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    *,
    packed: Callable[..., Any] | None = None,
    unpacked: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Defines ``torch.ops.kvtorch.<name>`` and returns how to call it.

    The call goes through the op where someone looks at operations: a compiler, or a dispatch mode
    such as that of fake tensors. Else it goes straight to ``run``: the way through torch's
    dispatcher takes 5 us of host time (``torch.library.custom_op`` 15; H200 host, torch 2.11), as
    much as the launch of a kernel.

    Args:
      schema: as torch writes it; ``Tensor(a!)`` is changed in place.
      run: what it does, on any device.
      fake: what it returns, given tensors without contents; ``None`` if it returns nothing.
      packed: makes of ``run``'s arguments what a schema can say, where that is not the same.
      unpacked: makes ``run``'s arguments of that again.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    behind = run if unpacked is None else lambda *args: run(*unpacked(*args))
    _LIBRARY.impl(name, behind, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kvtorch::{name}", fake or _returns_nothing, lib=_LIBRARY)
    op = getattr(torch.ops.kvtorch, name).default

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return op(*args) if packed is None else op(*packed(*args))
        return run(*args)

    return call


def _returns_nothing(*_: Any, **__: Any) -> None:
    pass
