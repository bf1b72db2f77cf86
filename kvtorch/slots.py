"""What engines may pass as slots, and which slots are there."""

import torch

from kvjax import checks_mode


def as_slots(slots: torch.Tensor, device: torch.device, *, name: str = "slots") -> torch.Tensor:
    """``slots`` if operations can take it.

    Args:
      slots: one-dimensional, int32 or int64; an empty one may have any dtype.
      device: where the planes are.
      name: what messages call the argument.

    Raises:
      TypeError: not a tensor, or not of int32 or int64.
      ValueError: not one-dimensional, or on another device.
    """
    if not isinstance(slots, torch.Tensor):
        raise TypeError(f"{name} is {type(slots)}, need a tensor")
    if slots.dim() != 1:
        raise ValueError(f"{name} has shape {list(slots.shape)}, need one dimension")
    if slots.dtype not in (torch.int32, torch.int64):
        if slots.numel():
            raise TypeError(f"{name} has dtype {slots.dtype}, need int32 or int64")
        return slots.to(torch.int64)
    if slots.device != device:
        raise ValueError(f"{name} is on {slots.device}, need {device}, where the pool is")
    return slots


def are_there(slots: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """Whether each slot is one of ``first`` up to, not including, ``stop``."""
    return (slots >= first) & (slots < stop)


def check(
    slots: torch.Tensor, first: int, stop: int, *, name: str = "slots", distinct: bool = False
) -> None:
    """In checks mode, raises if a slot is not there or, on request, if one repeats.

    A call in a compiled function, or made while a CUDA graph is captured, is not checked: neither
    can wait for what its slots are.

    Raises:
      IndexError: names the first slot that is not there, and its position.
      ValueError: names the first slot that repeats, and its position.
    """
    if not checks_mode.ever_enabled or torch.compiler.is_compiling() or not checks_mode.enabled():
        return
    if slots.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    seen: dict[int, int] = {}
    for position, slot in enumerate(slots.tolist()):
        if not first <= slot < stop:
            raise IndexError(
                f"{name}[{position}]={slot} is not there; slots are {first}..{stop - 1}"
            )
        if distinct and seen.setdefault(slot, position) != position:
            raise ValueError(f"{name}[{position}]={slot} repeats; need distinct {name}")
