"""Writes rows into planes, in one layer or all, K and V in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvjax.dispatch import Implementation, select
from kvtorch.ops import launch
from kvtorch.ops.narrow import Scale, bits, narrow
from kvtorch.slots import are_there

# Elements a program copies.
TILE = 4096


def write_rows(
    planes: Sequence[torch.Tensor],
    layer: int | None,
    slots: torch.Tensor,
    rows: Sequence[torch.Tensor],
    *,
    first_slot: int,
    scales: Sequence[Scale] | None = None,
    implementation: str | None = None,
) -> None:
    """Stores row t of ``rows``, narrowed to the plane's dtype, at ``slots[t]`` in every plane.

    Values narrow as ``narrow`` says; those of a plane's dtype keep their bits. A slot below
    ``first_slot`` or past the end is not written; no other memory changes. Slots that are there are
    distinct: one that repeats may end up with pieces of several rows.

    Args:
      planes: one or two, ``[layers, rows, *row]``, contiguous, changed in place.
      layer: position of the layer; ``None`` for all.
      slots: int32 or int64, ``[n]``.
      rows: for each plane ``[n, *row]``, or ``[layers, n, *row]`` for all layers; never changed.
      first_slot: the first slot that is there.
      scales: for each plane what its values are divided by before they are cast, a number or a
        float32 tensor of one element on the planes' device; ``None`` for nothing.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.

    Source: SGLang 0.4.8 ``MHATokenToKVPool.set_kv_buffer`` (A-MHA-14), ``transfer`` (A-MHA-10).
    """
    run = select("write_rows", IMPLEMENTATIONS, implementation, planes, slots, rows)
    run(planes, layer, slots, rows, first_slot, scales or [None] * len(planes))


def reference(
    planes: Sequence[torch.Tensor],
    layer: int | None,
    slots: torch.Tensor,
    rows: Sequence[torch.Tensor],
    first_slot: int,
    scales: Sequence[Scale],
) -> None:
    """The specification, in plain torch."""
    there = are_there(slots, first_slot, planes[0].shape[1])
    slots = slots[there].long()
    for plane, new, scale in zip(planes, rows, scales, strict=True):
        stored = bits(narrow(new, plane.dtype, scale))
        if layer is None:
            bits(plane)[:, slots] = stored[:, there]
        else:
            bits(plane)[layer, slots] = stored[there]


@triton.jit(do_not_specialize=["layer", "num_tokens", "num_rows", "first_slot"])
def _kernel(
    slots_ptr,
    layer,
    num_tokens,
    num_rows,
    first_slot,
    k_plane,
    k_rows,
    k_layer_stride,
    k_stride,
    k_scale_ptr,
    k_scale,
    v_plane,
    v_rows,
    v_layer_stride,
    v_stride,
    v_scale_ptr,
    v_scale,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    of_batch = token < num_tokens
    slot = tl.load(slots_ptr + token, mask=of_batch, other=-1).to(tl.int64)
    there = of_batch & (slot >= first_slot) & (slot < num_rows)
    turn = tl.program_id(2).to(tl.int64)
    row = (layer + turn) * num_rows + slot
    column = tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        mask = there[:, None] & (column < K_WIDTH)[None, :]
        source = k_rows + turn * k_layer_stride + (token * k_stride)[:, None] + column[None, :]
        values = tl.load(source, mask=mask)
        if k_rows.dtype.element_ty != k_plane.dtype.element_ty:
            values = launch.divided(values, k_scale_ptr, k_scale, K_SCALE)
            values = launch.narrowed(values, k_plane.dtype.element_ty)
        tl.store(k_plane + (row * K_WIDTH)[:, None] + column[None, :], values, mask=mask)
    else:
        mask = there[:, None] & (column < V_WIDTH)[None, :]
        source = v_rows + turn * v_layer_stride + (token * v_stride)[:, None] + column[None, :]
        values = tl.load(source, mask=mask)
        if v_rows.dtype.element_ty != v_plane.dtype.element_ty:
            values = launch.divided(values, v_scale_ptr, v_scale, V_SCALE)
            values = launch.narrowed(values, v_plane.dtype.element_ty)
        tl.store(v_plane + (row * V_WIDTH)[:, None] + column[None, :], values, mask=mask)


def _triton(
    planes: Sequence[torch.Tensor],
    layer: int | None,
    slots: torch.Tensor,
    rows: Sequence[torch.Tensor],
    first_slot: int,
    scales: Sequence[Scale],
) -> None:
    num_tokens = slots.numel()
    if not num_tokens:
        return
    all_layers = layer is None
    num_layers = planes[0].shape[0] if all_layers else 1
    arguments, widths, kinds = [], [], []
    for plane, new, scale in zip(planes, rows, scales, strict=True):
        new = launch.in_rows(new, plane.dim() - 2)
        is_tensor = isinstance(scale, torch.Tensor)
        arguments += [
            plane,
            new,
            new.stride(0) if all_layers else 0,
            new.stride(all_layers),
            scale if is_tensor else slots,
            1.0 if is_tensor or scale is None else float(scale),
        ]
        widths.append(plane[0, 0].numel())
        kinds.append(2 if is_tensor else int(scale is not None))
    block = triton.next_power_of_2(max(widths))
    tokens = max(1, min(TILE // block, triton.next_power_of_2(num_tokens)))
    grid = (triton.cdiv(num_tokens, tokens), len(planes), num_layers)
    both = 2 // len(planes)
    _kernel[grid](
        slots,
        0 if all_layers else layer,
        num_tokens,
        planes[0].shape[1],
        first_slot,
        *arguments * both,
        *widths * both,
        block,
        tokens,
        *kinds * both,
    )


def _triton_why_not(planes, slots, rows) -> str | None:
    widest = max(plane[0, 0].numel() for plane in planes)
    if len(planes) > 2:
        return f"takes one or two planes, not {len(planes)}"
    if widest > launch.MAX_ROW_ELEMENTS:
        return f"takes rows of up to {launch.MAX_ROW_ELEMENTS} elements, not {widest}"
    return launch.why_not(*planes, slots, *rows)


IMPLEMENTATIONS = {
    "triton": Implementation(_triton, _triton_why_not),
    "reference": Implementation(reference, lambda *_: None),
}
