"""How a block holds the heads of its tokens, in shared memory and in a warpgroup's registers."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.ops import quantizing
from kvjax.ops.row_copy import LANES, MAX_SHARED_BYTES, WARPS
from kvjax.ops.sides import COPY_BYTES

# One H200, 16 384 tokens of 2 x 8 heads of 128, read from int8: 28.0 us with 2 tokens a block, 28.5
# with 1, 29.1 with 4, 34.7 with 8; 256 tokens: 1.8 us with 1, 2.1 with 2.
_MAX_TOKENS = 2

# Chosen: with as many, ptxas gives a thread of the kernels for sm_90a 72 registers at most if heads
# have 64, 128 or 256 numbers, 207 whatever they have, and spills none.
_NUMBERS_OF_THREAD = 16

_VECTOR = 4  # numbers that a lane loads at once: 16 bytes, where they are float32
_ALIGNMENT = 1024  # of an array in shared memory

Heads = tuple[int, int, Any]
"""Of a token, how many, numbers of each, and their dtype."""


def of(*arrays: Any) -> list[Heads]:
    """The heads of arrays ``[..., heads, head_dim]``."""
    return [(*array.shape[-2:], array.dtype) for array in arrays]


def registers(head_dim: int) -> Any:
    """Which thread has which numbers of ``[heads, head_dim]``; a head is all in one warp."""
    lanes = _lanes(head_dim)
    heads, columns = LANES // lanes, lanes * _VECTOR  # of a warp
    if heads == 1:
        return quantizing.row_in_a_warp(_VECTOR)
    tiling = plgpu.Tiling(((WARPS * heads, columns), (heads, columns), (_VECTOR,)))
    return plgpu.Layout.TILED(tiling, (-5,), (-3, -2), -1)


def _lanes(head_dim: int) -> int:
    """How many lanes share a head: as many as have the same number of vectors of it."""
    return math.gcd(head_dim // _VECTOR, LANES)


def _padded(num_heads: int, head_dim: int) -> int:
    """The heads that a token is computed with: as many for each warp."""
    at_once = WARPS * LANES // _lanes(head_dim)
    return pl.cdiv(num_heads, at_once) * at_once


def chunks(num_heads: int, head_dim: int) -> Iterator[Any]:
    """A token's heads, and those that are there for the warps alone, some at a time."""
    padded = _padded(num_heads, head_dim)
    step = _padded(pl.cdiv(_NUMBERS_OF_THREAD * WARPS * LANES, head_dim), head_dim)
    for first in range(0, padded, step):
        yield pl.ds(first, min(step, padded - first))


def staged(num_tokens: int, heads: Heads) -> Any:
    """Shared memory for the heads of some tokens, each head where a bulk copy puts it."""
    num_heads, head_dim, dtype = heads
    shape = (num_tokens, _padded(num_heads, head_dim), head_dim)
    # Left to itself, JAX swizzles what is not one-dimensional, and copies by tensor maps.
    by_head: Any = plgpu.TilingTransform
    return plgpu.SMEM(shape, dtype, transforms=(by_head((1, head_dim)),))


def staged_scales(num_tokens: int, heads: Heads) -> Any:
    """Shared memory for a number of each of those heads."""
    return plgpu.SMEM((num_tokens, _padded(*heads[:2])), "float32")


def block_tokens(arrays: Sequence[Heads], num_tokens: int) -> int:
    """How many of these tokens a block stages, in these arrays and as many of scales."""

    def num_bytes(num_tokens: int) -> int:
        sizes = [
            num_tokens * _padded(num_heads, head_dim) * row_bytes
            for num_heads, head_dim, dtype in arrays
            for row_bytes in (head_dim * jnp.dtype(dtype).itemsize, 4)
        ]
        return sum(pl.cdiv(size, _ALIGNMENT) * _ALIGNMENT for size in sizes)

    most = quantizing.block_tokens(num_tokens, _MAX_TOKENS)
    return max(n for n in range(most + 1) if num_bytes(n) <= MAX_SHARED_BYTES)


def cannot_stage(arrays: Sequence[Heads]) -> str | None:
    """Why a block cannot stage a token in these arrays, whatever the machine, or ``None``."""
    for _, head_dim, _ in arrays:
        if head_dim % COPY_BYTES:
            return f"a head of {head_dim} numbers in 8 bits is not a multiple of {COPY_BYTES} bytes"
    if block_tokens(arrays, num_tokens=1) < 1:
        shapes = " and ".join(dict.fromkeys(f"{heads} x {dim}" for heads, dim, _ in arrays))
        return f"a token's heads, {shapes} numbers, are more than a block can stage"
    return None


def are_copied(num_heads: int) -> bool:
    """Whether a bulk copy can be made of a token's scales; else they are loaded and stored."""
    return num_heads * 4 % COPY_BYTES == 0
