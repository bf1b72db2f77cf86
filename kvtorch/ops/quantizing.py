"""What operations share that store rows in 8 bits: their scales, and division by these."""

import torch
import triton
import triton.language as tl

from kvtorch.ops import launch

SMALLEST_AMAX = 1e-26
"""What a smaller amax counts as, so that rows of zeros have a scale. Source: TokenSpeed (B-Q)."""

_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)
_LARGEST_AMAX = tl.constexpr(torch.finfo(torch.float32).max)
_LARGER = tl.constexpr(2.0**64)


def scales_of(values: torch.Tensor, largest: float) -> torch.Tensor:
    """What makes the largest magnitude of each row of float32 values ``largest``, ``[*rows, 1]``.

    Magnitudes are at least ``SMALLEST_AMAX`` and finite; the scale of a NaN is NaN.
    """
    amax = values.abs().amax(-1, keepdim=True)
    amax = amax.clamp(SMALLEST_AMAX, torch.finfo(torch.float32).max)  # NaN stays NaN
    # By a tensor: by a number, torch multiplies with its inverse on GPU.
    return amax / torch.full((), largest, dtype=torch.float32, device=amax.device)


@triton.jit
def loaded(source, mask, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers of rows in float32; zeros in the columns that only fill a block."""
    numbers = launch.widened(tl.load(source, mask=mask, other=0.0))
    if WIDTH != BLOCK:
        # Again: of zeros that were not loaded, ptxas (with Triton 3.6) makes twos when they are fp8
        # and half of a thread's numbers.
        numbers = tl.where(column < WIDTH, numbers, 0.0)
    return numbers


@triton.jit
def amax_of(numbers):
    """The magnitudes that ``scales_of`` divides."""
    # The bits of numbers without sign are ordered as the numbers are, and NaNs come last; the
    # maximum of floats would lose them.
    magnitudes = numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.cast(tl.max(magnitudes, 1, keep_dims=True), tl.float32, bitcast=True)
    return tl.clamp(amax, _SMALLEST_AMAX, _LARGEST_AMAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quotients(numbers, amax, scale):
    """``numbers / scale``, rounded once unless they are below 2^-64, of finite numbers.

    By one reciprocal for all of a row: ``div_rn`` is some 12 instructions a number, two of them of
    the slow kind, and a branch; this is 5 (ptxas of Triton 3.6, sm_90). One H200, 16 384 tokens of
    K and V: 26.6 us instead of 29.8. The correction rounds as a division does, where its residue is
    exact, for which small numbers are made larger; a test tries every pair of mantissas whose
    quotient is so near to the middle of two numbers that it might not.

    Args:
      numbers: of magnitudes up to ``amax``.
      amax: as ``amax_of`` has it.
      scale: ``amax`` over a number from 1 to 2^9.

    Source: Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor",
    1990.
    """
    larger = tl.where(amax < 1.0, _LARGER, 1.0)
    scale = scale * larger
    # Both negated, so that zeros keep their signs.
    numbers = tl.clamp(numbers, -_LARGEST_AMAX, _LARGEST_AMAX) * -larger
    inverse = tl.div_rn(-1.0, scale)
    rough = numbers * inverse
    return tl.fma(tl.fma(rough, scale, numbers), inverse, rough)
