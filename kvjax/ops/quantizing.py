"""What operations share that store rows in 8 bits: their scales, and division by these."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32

from kvjax.ops import row_copy
from kvjax.ops.narrow import quotient

SMALLEST_AMAX = 1e-26
"""What a row's largest magnitude is taken for where it is smaller. Source: TokenSpeed (B-Q)."""

_LARGEST_AMAX = float(jnp.finfo(jnp.float32).max)
_LARGER = 2.0**64


def block_tokens(num_tokens: int, most: int) -> int:
    """How many tokens a block takes: ``most``, or fewer where that leaves too few blocks."""
    return max(1, min(most, num_tokens // row_copy.NUM_BLOCKS))


def row_in_a_warp(vector: int) -> Any:
    """The layout in which each warp has a row, of which a lane holds ``vector`` numbers at once."""
    tiling = plgpu.Tiling(((row_copy.WARPS, row_copy.LANES * vector), (vector,)))
    return plgpu.Layout.TILED(tiling, (-3,), (-2,), -1)


def amax_of(values: Float32[Array, "*n width"]) -> Float32[Array, "*n"]:
    """Each row's largest magnitude, at least ``SMALLEST_AMAX`` and finite; NaN where there is one.

    ``scale_of`` makes a scale of it.
    """
    # As integers, NaNs are the largest; of numbers, XLA's maximum on CPU loses some.
    magnitudes = jax.lax.bitcast_convert_type(jnp.abs(values), jnp.int32)
    amax = jax.lax.bitcast_convert_type(magnitudes.max(axis=-1), jnp.float32)
    return jnp.clip(amax, SMALLEST_AMAX, _LARGEST_AMAX)


def scale_of(amax: Float32[Array, "*n"], largest: float) -> Float32[Array, "*n"]:
    """What ``amax`` is ``largest`` times of."""
    return quotient(amax, jnp.float32(largest))


def divided(
    numbers: Float32[Array, "*n width"], scale: Float32[Array, "*n"]
) -> Float32[Array, "*n width"]:
    """``numbers / scale``, rounded once."""
    return quotient(numbers, _by_row(scale, numbers))


def divided_in_kernel(
    numbers: Float32[Array, "*n width"], amax: Float32[Array, "*n"], scale: Float32[Array, "*n"]
) -> Float32[Array, "*n width"]:
    """As ``divided`` in a Mosaic kernel; quotients below 2^-64 may be rounded twice.

    By one reciprocal for all of a row: ``quotient`` takes two slow conversions a number. The
    correction rounds as a division does, where its residue is exact, for which small numbers are
    made larger. An infinite number counts as the largest finite one.

    Args:
      numbers: of magnitudes up to ``amax``, or infinite.
      amax: as ``amax_of`` has it.
      scale: ``amax`` over a number from 1 to 2^9.

    Source: Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor",
    1990.
    """
    is_small = amax < 1
    # Both the number and the inverse are negated, so that zeros keep their signs.
    factor = -jnp.where(is_small, _LARGER, 1.0).astype(jnp.float32)
    inverse = quotient(jnp.where(is_small, -1 / _LARGER, -1.0).astype(jnp.float32), scale)
    factor, scale, inverse = (
        _by_row(of_row, numbers) for of_row in (factor, scale * -factor, inverse)
    )
    numbers = jnp.clip(numbers, -_LARGEST_AMAX, _LARGEST_AMAX) * factor
    rough = numbers * inverse
    return fused(fused(rough, scale, numbers), inverse, rough)


def _by_row(
    of_row: Float32[Array, "*n"], numbers: Float32[Array, "*n width"]
) -> Float32[Array, "*n width"]:
    return jax.lax.broadcast_in_dim(of_row, numbers.shape, range(numbers.ndim - 1))


def fused(
    a: Float32[Array, "*shape"], b: Float32[Array, "*shape"], c: Float32[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """``a * b + c``, which Mosaic GPU lets the compiler round once."""
    return a * b + c
