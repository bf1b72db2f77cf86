"""What does a row hold, bit for bit?

A row's content is a hash of what it belongs to (``tags``: a cached unit or a request), its position
in the sequence, its layer and its plane. It is computed twice from this one definition, by JAX
where rows are written and by NumPy where they are checked, so any row can be checked at any time.
"""

from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from kvjax.geometry import PlaneSpec

_WORD_BITS = 32
NUM_SCALES = 16
"""Of a quantised pool: powers of two, from 1 on."""


def unit_tags(keys: np.ndarray) -> np.ndarray:
    """The tags of rows that belong to cached units; they differ from every request's."""
    return (2 * keys).astype(np.uint32)


def request_tags(numbers: np.ndarray) -> np.ndarray:
    """The tags of rows that belong to one request alone."""
    return (2 * numbers + 1).astype(np.uint32)


def describe_tag(tag: int) -> str:
    """What a tag's rows belong to, in words."""
    return f"request {tag // 2}" if tag % 2 else f"cached unit {tag // 2}"


def bits_dtype(dtype: str) -> str:
    """The unsigned integer as wide as a storage dtype."""
    return f"uint{8 * np.dtype(dtype).itemsize}"


def number_bits(number: Any, dtype: str) -> int:
    """The bit pattern of a number that a storage dtype has."""
    return int(np.float32(number).astype(dtype).view(bits_dtype(dtype)))


def largest(dtype: str) -> float:
    """The largest number that a write stores."""
    return float((np.iinfo if dtype == "int8" else ml_dtypes.finfo)(dtype).max)


def is_scale(plane: PlaneSpec) -> bool:
    """Whether the plane is of what others were divided by."""
    return plane.name.endswith("scale")


def are_quantized(planes: tuple[PlaneSpec, ...]) -> bool:
    """Whether a pool is quantised, of its planes."""
    return any(map(is_scale, planes))


def decides_a_scale(planes: tuple[PlaneSpec, ...], plane_number: int) -> bool:
    """Whether a plane is one whose largest numbers decide the scales, which the next plane has."""
    return any(map(is_scale, planes[plane_number + 1 : plane_number + 2]))


def row_bits(
    xp: ModuleType,
    planes: tuple[PlaneSpec, ...],
    plane_number: int,
    layer_id: Any,
    tags: Any,
    positions: Any,
) -> Any:
    """The bit patterns of one plane's rows in one layer, ``[len(tags), *plane.row_shape]``.

    All of them are finite numbers of the plane's dtype, subnormals and -0.0 among them. Those of a
    quantised pool are what its writes can make, and scales are powers of two, so that numbers times
    their scale are exact: they come back bit for bit.

    Args:
      xp: ``numpy`` or ``jax.numpy``.
      planes, plane_number: of the pool, and which of them.
      layer_id: the model's layer number; an array or a traced scalar under JAX.
      tags, positions: uint32, one for each row.
    """
    plane = planes[plane_number]
    u32 = xp.uint32
    place = xp.asarray(layer_id).astype(u32) * u32(64) + u32(plane_number)
    rows = _mix(_mix(_mix(tags) + positions) + place)
    width = int(np.prod(plane.row_shape))
    # 2^32 / golden ratio: spreads consecutive elements over all words.
    elements = xp.arange(width, dtype=u32) * u32(0x9E3779B9)
    words = _mix(rows[:, None] + elements).reshape(-1, *plane.row_shape)
    bits = (words >> u32(_WORD_BITS - 8 * plane.itemsize)).astype(bits_dtype(plane.dtype))
    unsigned = bits.dtype.type
    if plane.dtype == "int8":  # -128 is stored by no write
        bits = xp.where(bits == unsigned(0x80), unsigned(0x81), bits)
    else:
        # An exponent whose lowest bit is 0 is never the all-ones one of infinities and NaNs.
        bits = bits & ~unsigned(1 << ml_dtypes.finfo(plane.dtype).nmant)
    return _quantized(xp, planes, plane_number, bits)


def _quantized(xp: ModuleType, planes: tuple[PlaneSpec, ...], plane_number: int, bits: Any) -> Any:
    """The bits, changed where the plane is one of a quantised pool."""
    plane, unsigned = planes[plane_number], bits.dtype.type
    if decides_a_scale(planes, plane_number):  # by one number of each head, as large as can be
        ends = (number_bits(sign * largest(plane.dtype), plane.dtype) for sign in (-1, 1))
        first = xp.where(bits & unsigned(0x80), *map(unsigned, ends))
        return xp.where(xp.arange(bits.shape[-1]) == 0, first, bits)
    if is_scale(plane):
        exponents = (bits >> unsigned(_WORD_BITS // 2)) % unsigned(NUM_SCALES)
        one = unsigned(number_bits(1, plane.dtype))
        return (exponents << unsigned(ml_dtypes.finfo(plane.dtype).nmant)) + one
    if plane.name == "rope":  # of a quantised pool, whose scale another plane decides
        # No subnormals, which XLA on CPU takes for zeros, and none near the largest.
        second = unsigned(1 << (8 * bits.dtype.itemsize - 3))
        first = second + second
        return bits & ~first | (~bits & second) << unsigned(1)
    return bits


def _mix(words: Any) -> Any:
    """A bijection of uint32 in which every input bit moves every output bit.

    Source: C. Wellons, "Prospecting for Hash Functions", ``lowbias32``.
    """
    dtype = words.dtype.type
    words = (words ^ (words >> dtype(16))) * dtype(0x7FEB352D)
    words = (words ^ (words >> dtype(15))) * dtype(0x846CA68B)
    return words ^ (words >> dtype(16))


def expected_rows(
    planes: tuple[PlaneSpec, ...], layer_ids: range, tags: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, ...]:
    """The bits that every plane should hold, ``[len(layer_ids), len(tags), *row]`` each."""
    return tuple(
        np.stack([row_bits(np, planes, number, id_, tags, positions) for id_ in layer_ids])
        for number in range(len(planes))
    )
