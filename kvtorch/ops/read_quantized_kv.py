"""Reads K and V that are stored in 8 bits, heads with a scale of their own, in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvjax.dispatch import Implementation, select
from kvtorch.ops import launch, library, read_rows, write_quantized_kv
from kvtorch.ops.narrow import narrow


def read_quantized_kv(
    planes: Sequence[torch.Tensor],
    layer: int,
    slots: torch.Tensor,
    *,
    first_slot: int,
    dtype: torch.dtype,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns K ``[n, heads, K]`` and V ``[n, heads, V]`` at ``slots``, times their scales.

    The products are in float32, and cast to ``dtype`` as ``narrow`` says. Slots that are not there
    read as zeros.

    Args:
      planes: as ``write_quantized_kv`` takes them; not changed.
      layer: position of the layer.
      slots: int32 or int64, ``[n]``, in any order and as often as wanted.
      first_slot: the first slot that is there.
      dtype: of the result.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.
    """
    return _op(planes, layer, slots, first_slot, dtype, implementation)


def _run(planes, layer, slots, first_slot, dtype, implementation=None):
    planes = write_quantized_kv.as_stored(planes)
    run = select("read_quantized_kv", IMPLEMENTATIONS, implementation, planes)
    return run(planes, layer, slots, first_slot, dtype)


def _empty(planes, layer, slots, first_slot, dtype, *_):
    return tuple(
        torch.empty((slots.shape[0], *plane.shape[2:]), dtype=dtype, device=plane.device)
        for plane in (planes[0], planes[2])
    )


_op = library.define(
    "read_quantized_kv(Tensor[] planes, int layer, Tensor slots, int first_slot, ScalarType dtype, "
    "str? implementation=None) -> (Tensor, Tensor)",
    _run,
    _empty,
)


def reference(
    planes: Sequence[torch.Tensor],
    layer: int,
    slots: torch.Tensor,
    first_slot: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification, in plain torch."""
    k, k_scale, v, v_scale = read_rows.reference(planes, layer, slots, first_slot)
    return narrow(k.float() * k_scale, dtype), narrow(v.float() * v_scale, dtype)


@triton.jit
def _read(
    plane, scales, values, pair, of_batch, row, there, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(scales + row, mask=there, other=0.0)[:, None]
    source = plane + (row * DIM)[:, None] + column
    stored = tl.load(source, mask=there[:, None] & (column < DIM), other=0.0)
    numbers = launch.narrowed(launch.widened(stored) * scale, values.dtype.element_ty)
    target = values + (pair * DIM)[:, None] + column
    tl.store(target, numbers, mask=of_batch[:, None] & (column < DIM))


@triton.jit(do_not_specialize=["layer", "num_tokens", "num_rows", "first_slot"])
def _kernel(
    slots,
    k_plane,
    k_scales,
    v_plane,
    v_scales,
    k,
    v,
    layer,
    num_tokens,
    num_rows,
    first_slot,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch.begin(EARLY)
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    token, head = pair // HEADS, pair % HEADS
    of_batch = token < num_tokens
    slot = tl.load(slots + token, mask=of_batch, other=-1).to(tl.int64)
    there = (slot >= first_slot) & (slot < num_rows)
    row = (layer.to(tl.int64) * num_rows + slot) * HEADS + head
    if tl.program_id(1) == 0:
        _read(k_plane, k_scales, k, pair, of_batch, row, there, K_DIM, BLOCK)
    else:
        _read(v_plane, v_scales, v, pair, of_batch, row, there, V_DIM, BLOCK)


def _triton(
    planes: Sequence[torch.Tensor],
    layer: int,
    slots: torch.Tensor,
    first_slot: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = _empty(planes, layer, slots, first_slot, dtype)
    num_tokens = slots.shape[0]
    if not num_tokens:
        return k, v
    sizes = write_quantized_kv.sizes_of(planes, num_tokens)
    launch.launch(
        _kernel,
        (-(-num_tokens * sizes[0] // sizes[-1]), 2, 1),
        (slots.dtype, planes[0].dtype, dtype, sizes),
        (slots.contiguous(), *planes, k, v),
        (layer, num_tokens, planes[0].shape[1], first_slot, *sizes),
    )
    return k, v


IMPLEMENTATIONS = {
    "triton": Implementation(_triton, write_quantized_kv.triton_why_not),
    "reference": Implementation(reference, lambda *_: None),
}
