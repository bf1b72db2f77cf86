"""How a block holds latent rows, in shared memory and in a warpgroup's registers."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32

from kvjax.ops import quantizing
from kvjax.ops.row_copy import LANES, MAX_SHARED_BYTES, WARPS

# As many as there are warps, each of which has a row to itself. One H200, 512 + 64: 4 096 tokens
# are written in 4.0 us, in 4.2 with 8 and 6.0 with 2; 16 384 in 12.2, 11.3 and 19.3.
_MAX_TOKENS = 4


def block_tokens(num_tokens: int) -> int:
    """How many of these tokens a block takes."""
    return quantizing.block_tokens(num_tokens, _MAX_TOKENS)


def without_padding(
    numbers: Float32[Array, "rows padded"], width: int
) -> Float32[Array, "rows padded"]:
    """``numbers``, zeros in place of the columns that are there for the lanes alone."""
    if width == numbers.shape[-1]:
        return numbers
    columns = plgpu.broadcasted_iota(jnp.int32, numbers.shape, 1, layout=registers(width))
    return jnp.where(columns < width, numbers, 0.0)


def staged(num_tokens: int, array: Any) -> Any:
    """Shared memory for rows of ``array``, and for those that are there for the warps alone."""
    # Eight rows that are loaded at once, JAX would swizzle, and copy by tensor maps.
    return plgpu.SMEM((turns(num_tokens), WARPS, _padded(array.shape[-1])), array.dtype)


def turns(num_tokens: int) -> int:
    """How often the warps take a row each."""
    return pl.cdiv(num_tokens, WARPS)


def row_of(token: int) -> tuple[int, int]:
    """The turn and the warp that a token of a block has its ``staged`` row in."""
    return divmod(token, WARPS)


def registers(width: int) -> Any:
    """Which thread has which numbers of the rows of a turn; a row is all in one warp."""
    return quantizing.row_in_a_warp(_vector(width))


def _vector(width: int) -> int:
    """How many numbers a lane loads at once."""
    return 2 if width <= 2 * LANES else 4


def _padded(width: int) -> int:
    """The columns that a row is computed with: as many for each lane."""
    at_once = LANES * _vector(width)
    return pl.cdiv(width, at_once) * at_once


def cannot_stage(latent_dim: int, rope_dim: int) -> str | None:
    """Why a block cannot hold such rows twice, the latent's in 8 bits once, with 32 bits else."""
    num_rows = turns(_MAX_TOKENS) * WARPS
    num_bytes = num_rows * ((4 + 1) * _padded(latent_dim) + (4 + 4) * _padded(rope_dim))
    if num_bytes > MAX_SHARED_BYTES:
        return f"rows of {latent_dim + rope_dim} numbers are more than a block can stage"
    return None
