"""NumPy's arrays as torch's tensors and back, bit by bit, and ways to lay a tensor out."""

import math

import ml_dtypes  # noqa: F401  so that NumPy knows bfloat16 and fp8 by name
import numpy as np
import torch

from tests import oracles


def to_torch(array, device="cpu"):
    """A tensor with the array's bits, in memory of its own."""
    bits = torch.from_numpy(np.ascontiguousarray(oracles.bits(array)).copy())
    return bits.view(getattr(torch, array.dtype.name)).to(device)


def to_numpy(tensor):
    """An array with the tensor's bits, in memory of its own."""
    bits = getattr(torch, f"uint{8 * tensor.element_size()}")
    array = tensor.cpu().contiguous().view(bits).numpy().copy()
    return array.view(str(tensor.dtype).removeprefix("torch."))


def whole(tensor, _):
    return tensor


def cut_out_of_tokens(tensor, num_row_dims):
    """Rows in one piece, but not one after the other: slices of wider ones, as of Q, K and V."""
    leading, row = np.split(tensor.shape, [tensor.dim() - num_row_dims])
    width = math.prod(row)
    wide = tensor.new_zeros((*leading, width + 7))
    part = wide[..., 3 : 3 + width].unflatten(-1, row.tolist())
    return part.copy_(tensor)


def cut_out_of_heads(tensor, _):
    """Slices of wider heads, so that rows of several heads have gaps."""
    wide = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + 8))
    return wide[..., 8:].copy_(tensor)


def transposed(tensor, _):
    return tensor.mT.contiguous().mT


def tokens_last(tensor, num_row_dims):
    token = tensor.dim() - num_row_dims - 1
    return tensor.movedim(token, -1).contiguous().movedim(-1, token)


def every_other_token(tensor, num_row_dims):
    token = tensor.dim() - num_row_dims - 1
    return tensor.repeat_interleave(2, token)[(slice(None),) * token + (slice(None, None, 2),)]


def unaligned(tensor, _):
    """One after the other, but from an address on that no wide load can start at."""
    return tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


LAYOUTS = [
    whole,
    cut_out_of_tokens,
    cut_out_of_heads,
    transposed,
    tokens_last,
    every_other_token,
    unaligned,
]
"""Functions of a tensor and of how many of its last dimensions a row has: the same numbers."""
