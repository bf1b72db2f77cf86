"""What the Triton kernels share: when they can run, how rows lie in memory, how values narrow."""

import torch
import triton
import triton.language as tl

MAX_ROW_ELEMENTS = 65536
"""A program holds at least one row; a Triton tile has at most 2^20 elements."""


def why_not(*tensors: torch.Tensor) -> str | None:
    """Why no kernel can run on these tensors, or ``None``."""
    for tensor in tensors:
        if not tensor.is_cuda:
            return f"needs tensors on a CUDA device, one is on {tensor.device}"
    return None


def in_rows(values: torch.Tensor, num_row_dims: int) -> torch.Tensor:
    """``values`` with each row contiguous, so that one stride says where rows begin; a copy if not."""
    expected = 1
    for dim in range(values.dim() - 1, values.dim() - 1 - num_row_dims, -1):
        if values.shape[dim] != 1 and values.stride(dim) != expected:
            return values.contiguous()
        expected *= values.shape[dim]
    return values


@triton.jit
def divided(values, scale_ptr, scale, KIND: tl.constexpr):
    """``values / scale`` in float32, rounded once; KIND is 0 for no scale, 1 a number, 2 a tensor."""
    if KIND == 1:
        values = tl.div_rn(values.to(tl.float32), scale)
    elif KIND == 2:
        values = tl.div_rn(values.to(tl.float32), tl.load(scale_ptr).to(tl.float32))
    return values


@triton.jit
def narrowed(values, dtype: tl.constexpr):
    """``values`` in ``dtype``: fp8 saturates, NaN stays NaN."""
    if dtype == tl.float8e4nv:
        values = tl.clamp(values.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    elif dtype == tl.float8e5:
        values = tl.clamp(
            values.to(tl.float32), -57344.0, 57344.0, propagate_nan=tl.PropagateNan.ALL
        )
    return values.to(dtype)
