"""Writes rows into planes, in one layer or all, K and V in one launch."""

# Triton's types as annotations of a kernel's numbers.
# pyright: reportInvalidTypeForm=false

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kvjax.dispatch import Implementation, select
from kvtorch.ops import launch, library
from kvtorch.ops.narrow import Scale, bits, narrow
from kvtorch.slots import are_there

# What a plane's values are divided by, as kernels are told.
_NO_SCALE, _NUMBER, _TENSOR = range(3)

# Elements a program copies. One H200, bfloat16, 16 384 tokens: 36.2 us with 2 048, 36.6 with 4 096,
# 38.5 with 1 024; 256 tokens: 2.0 us with any.
TILE = 2048


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
    both = (*planes[1:], *rows[1:]) or (None, None)
    scaled = scales is not None and any(scale is not None for scale in scales)
    # What has its default costs nothing on the way through torch's dispatcher.
    rest = (*_by_type(scales), implementation) if scaled or implementation else ()
    _op(planes[0], slots, rows[0], first_slot, layer, *both, *rest)


def _by_type(scales: Sequence[Scale] | None) -> tuple[Any, ...]:
    """Of K and V, the scales that are numbers, and those that are tensors."""
    pair = (*(scales or ()), None, None)[:2]
    tensors = [scale if isinstance(scale, torch.Tensor) else None for scale in pair]
    numbers = [
        scale if tensor is None else None for scale, tensor in zip(pair, tensors, strict=True)
    ]
    return *numbers, *tensors


def _run(
    k,
    slots,
    k_rows,
    first_slot,
    layer=None,
    v=None,
    v_rows=None,
    k_scale=None,
    v_scale=None,
    k_scale_tensor=None,
    v_scale_tensor=None,
    implementation=None,
) -> None:
    planes, rows = ((k,), (k_rows,)) if v is None else ((k, v), (k_rows, v_rows))
    run = select("write_rows", IMPLEMENTATIONS, implementation, planes)
    scales = (
        k_scale if k_scale_tensor is None else k_scale_tensor,
        v_scale if v_scale_tensor is None else v_scale_tensor,
    )
    run(planes, layer, slots, rows, first_slot, scales[: len(planes)])


_op = library.define(
    "write_rows(Tensor(a!) k, Tensor slots, Tensor k_rows, int first_slot, int? layer=None, "
    "Tensor(b!)? v=None, Tensor? v_rows=None, float? k_scale=None, float? v_scale=None, "
    "Tensor? k_scale_tensor=None, Tensor? v_scale_tensor=None, str? implementation=None) -> ()",
    _run,
)


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


@triton.jit
def _write(
    plane,
    rows,
    layer_stride,
    stride,
    scale_ptr,
    scale,
    turn,
    token,
    row,
    there,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
):
    column = tl.arange(0, BLOCK)[None, :]
    mask = there[:, None] & (column < WIDTH)
    source = rows + turn * layer_stride + (token * stride)[:, None] + column
    values = tl.load(source, mask=mask)
    if rows.dtype.element_ty != plane.dtype.element_ty:
        values = launch.divided(values, scale_ptr, scale, SCALE)
        values = launch.narrowed(values, plane.dtype.element_ty)
    tl.store(plane + (row * WIDTH)[:, None] + column, values, mask=mask)


@triton.jit(do_not_specialize=["layer", "num_tokens", "num_rows", "first_slot"])
def _kernel(
    slots,
    layer,
    num_tokens,
    num_rows,
    first_slot,
    k_plane,
    k_rows,
    k_layer_stride: tl.int64,
    k_stride: tl.int64,
    k_scale_ptr,
    k_scale: tl.float32,
    v_plane,
    v_rows,
    v_layer_stride: tl.int64,
    v_stride: tl.int64,
    v_scale_ptr,
    v_scale: tl.float32,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch.begin(EARLY)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1).to(tl.int64)
    there = (slot >= first_slot) & (slot < num_rows) & (token < num_tokens)
    turn = tl.program_id(2).to(tl.int64)
    row = (layer + turn) * num_rows + slot
    if tl.program_id(1) == 0:
        _write(
            k_plane, k_rows, k_layer_stride, k_stride, k_scale_ptr, k_scale,
            turn, token, row, there, K_WIDTH, BLOCK, K_SCALE,
        )  # fmt: skip
    else:
        _write(
            v_plane, v_rows, v_layer_stride, v_stride, v_scale_ptr, v_scale,
            turn, token, row, there, V_WIDTH, BLOCK, V_SCALE,
        )  # fmt: skip


def _triton(
    planes: Sequence[torch.Tensor],
    layer: int | None,
    slots: torch.Tensor,
    rows: Sequence[torch.Tensor],
    first_slot: int,
    scales: Sequence[Scale],
) -> None:
    num_tokens, slots = slots.shape[0], slots.contiguous()
    if not num_tokens:
        return
    sides = [
        _side(plane, new, scale, layer is None, slots)
        for plane, new, scale in zip(planes, rows, scales, strict=True)
    ]
    (k, k_key), (v, v_key) = sides[0], sides[-1]
    k_width, v_width = planes[0].stride(1), planes[-1].stride(1)
    block = launch.power_of_two(max(k_width, v_width))
    tokens = max(1, min(TILE // block, launch.power_of_two(num_tokens)))
    aligned = launch.alignment(slots, k[0], k[1], v[0], v[1], k[4], v[4])
    launch.launch(
        _kernel,
        (-(-num_tokens // tokens), len(planes), planes[0].shape[0] if layer is None else 1),
        (slots.dtype, k_key, v_key, k_width, v_width, tokens, aligned),
        (
            slots,
            layer or 0,
            num_tokens,
            planes[0].shape[1],
            first_slot,
            *k,
            *v,
            k_width,
            v_width,
            block,
            tokens,
            k_key[-1],
            v_key[-1],
        ),
        slots.device,
    )


def _side(plane, new, scale, all_layers, slots) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The kernel's arguments for one plane, and what of them it is compiled for."""
    new = launch.in_rows(new, plane.dim() - 2)
    layer_stride, stride = new.stride()[:2] if all_layers else (0, new.stride(0))
    kind, number, tensor = _NO_SCALE, 1.0, slots
    if scale is not None and new.dtype != plane.dtype:
        if isinstance(scale, torch.Tensor):
            kind, tensor = _TENSOR, scale
        else:
            kind, number = _NUMBER, scale
    alike = (layer_stride % 16, stride % 16, layer_stride == 1, stride == 1)
    return (
        (plane, new, layer_stride, stride, tensor, number),
        (plane.dtype, new.dtype, tensor.dtype, alike, kind),
    )


def _triton_why_not(planes) -> str | None:
    return launch.why_not_rows(planes)


IMPLEMENTATIONS = {
    "triton": Implementation(_triton, _triton_why_not),
    "reference": Implementation(reference, lambda *_: None),
}
