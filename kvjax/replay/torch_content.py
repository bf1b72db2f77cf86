"""What does a row hold, bit for bit, as torch computes it?"""

import itertools
import math
from collections.abc import Sequence

import ml_dtypes
import torch

from kvjax.geometry import PlaneSpec
from kvjax.replay import content

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Signed, by bytes: torch has little arithmetic on others."""


def row_bits(
    planes: tuple[PlaneSpec, ...],
    plane_number: int,
    layer_ids: Sequence[int],
    tags: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """What ``content.row_bits`` defines, as signed integers, ``[len(layer_ids), n, *row]``.

    Arithmetic of int32 has the bits that of uint32 has, except that a shift to the right fills with
    the sign.

    Args:
      planes: of the pool.
      plane_number: which of them.
      layer_ids: the model's layer numbers.
      tags: int32, one for each row, of the bits of a uint32.
      positions: likewise.
    """
    plane = planes[plane_number]
    places = [layer_id * 64 + plane_number for layer_id in layer_ids]
    rows = _mix(_mix(tags.clone()) + positions)
    rows = _mix(rows + torch.tensor(places, dtype=torch.int32, device=tags.device)[:, None])
    width = math.prod(plane.row_shape)
    elements = torch.arange(width, dtype=torch.int32, device=tags.device) * _signed(0x9E3779B9)
    words = _mix(rows[..., None] + elements, only_high_half=plane.itemsize <= 2)
    if plane.itemsize < 4:
        words = (words >> (32 - 8 * plane.itemsize)).to(INTEGERS[plane.itemsize])
    if plane.dtype == "int8":
        words.clamp_(min=-127)
    else:
        words &= ~(1 << ml_dtypes.finfo(plane.dtype).nmant)
    return _quantized(planes, plane_number, words.view(*words.shape[:2], *plane.row_shape))


def _quantized(
    planes: tuple[PlaneSpec, ...], plane_number: int, words: torch.Tensor
) -> torch.Tensor:
    """``content``'s change of the words where the plane is one of a quantised pool, in place."""
    plane = planes[plane_number]
    if content.decides_a_scale(planes, plane_number):
        first = words[..., 0]
        lowest, highest = (
            content.number_bits(sign * content.largest(plane.dtype), plane.dtype)
            for sign in (-1, 1)
        )
        first.copy_(torch.where(first < 0, lowest - 256, highest))
    elif content.is_scale(plane):
        words >>= 16
        words &= content.NUM_SCALES - 1
        words <<= ml_dtypes.finfo(plane.dtype).nmant
        words += content.number_bits(1, plane.dtype)
    elif plane.name == "rope":
        second = 1 << (8 * words.element_size() - 3)
        opposite = (~words & second) << 1
        words &= ~(second << 1)
        words |= opposite
    return words


def values(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a model writes so that quantised planes hold these rows."""
    # Each part has a scale of its own, or all have the only one.
    pairs = zip(rows[::2], itertools.cycle(rows[1::2]), strict=False)
    return [part.float() * scale for part, scale in pairs]


def stored(
    planes: tuple[PlaneSpec, ...], parts: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """What quantised planes hold where a model reads these parts, of float32."""
    first, second = parts
    rows, scale, inverse = _heads(first, planes[0].dtype)
    if len(planes) == 3:  # a rope has the latent's scale
        return rows, scale, (second * inverse).to(getattr(torch, planes[2].dtype))
    return rows, scale, *_heads(second, planes[2].dtype)[:2]


def _heads(numbers: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is stored of heads, their scales, and one over these.

    Scales are powers of two, times which the first number of a head is the largest of its dtype.
    They are computed with as bits.
    """
    one, largest = (content.number_bits(n, "float32") for n in (1, content.largest(dtype)))
    scale = numbers[..., :1].abs().view(torch.int32) - largest + one
    inverse = (one + one - scale).view(torch.float32)
    return (numbers * inverse).to(getattr(torch, dtype)), scale.view(torch.float32), inverse


def _mix(words: torch.Tensor, *, only_high_half: bool = False) -> torch.Tensor:
    """``content``'s mixing of words, in place; the last step changes only their low halves."""
    shifted = torch.empty_like(words)

    def fold(places: int) -> None:
        torch.bitwise_right_shift(words, places, out=shifted)
        shifted.bitwise_and_((1 << (32 - places)) - 1)
        words.bitwise_xor_(shifted)

    fold(16)
    words.mul_(_signed(0x7FEB352D))
    fold(15)
    words.mul_(_signed(0x846CA68B))
    if not only_high_half:
        fold(16)
    return words


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
