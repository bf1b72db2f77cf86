"""What may be written: values of exactly the right shape, and the scales that divide them."""

import numbers
from typing import Any

import torch

from kvjax.errors import GeometryError
from kvtorch.ops.narrow import FP8, Scale

_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, *FP8))
_SMALLEST, _LARGEST = 2.0**-149, torch.finfo(torch.float32).max  # of float32, but for 0 and inf


def as_values(name: str, values: Any, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """``values`` if they are of that shape and on that device; nothing is broadcast.

    Raises:
      TypeError: not a tensor, or not of floating-point numbers of at most 32 bits.
      GeometryError: another shape.
      ValueError: on another device.
    """
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"{name} is {type(values)}, need a tensor")
    if values.dtype not in _DTYPES:
        raise TypeError(f"{name} has dtype {values.dtype}, need float32, a 16-bit float or fp8")
    if values.shape != shape:
        raise GeometryError(f"{name} has shape {list(values.shape)}, need {list(shape)}")
    if values.device != device:
        raise ValueError(f"{name} is on {values.device}, need {device}, where the pool is")
    return values.detach() if values.requires_grad else values  # else the pool joined a graph


def as_scale(name: str, scale: Any, device: torch.device) -> Scale:
    """``scale`` as operations take it: ``None``, a number, or a float32 tensor on the device.

    A tensor on a GPU is not looked at, which would wait for it.

    Raises:
      TypeError: no number.
      ValueError: not a single number, one on another GPU or, where it can be seen, one that is 0,
        infinite or NaN in float32.
    """
    if scale is None:
        return None
    if isinstance(scale, torch.Tensor):
        if scale.numel() != 1 or scale.dim() > 1:
            raise ValueError(f"{name} has shape {list(scale.shape)}, need a single number")
        if not scale.is_cpu:
            if scale.device != device:
                raise ValueError(f"{name} is on {scale.device}, need {device}, where the pool is")
            return scale.detach().float()
        scale = scale.item()
    elif not isinstance(scale, numbers.Real):
        raise TypeError(f"{name} is {type(scale)}, need a number or a tensor of one")
    scale = float(scale)
    if not _SMALLEST <= abs(scale) <= _LARGEST:
        raise ValueError(f"{name}={scale} cannot be divided by in float32")
    return scale
