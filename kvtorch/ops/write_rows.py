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
    numbers: list[float] = []
    tensors: list[torch.Tensor | None] = []
    if scales is not None and any(scale is not None for scale in scales):
        for scale in scales:
            is_tensor = isinstance(scale, torch.Tensor)
            numbers.append(1.0 if scale is None or is_tensor else float(scale))
            tensors.append(scale if is_tensor else None)
    _op(planes, layer, slots, rows, first_slot, numbers, tensors, implementation)


def _run(planes, layer, slots, rows, first_slot, numbers, tensors, implementation) -> None:
    run = select("write_rows", IMPLEMENTATIONS, implementation, planes, slots, rows)
    scales = [None] * len(planes)
    if numbers:  # dividing by 1 changes nothing
        pairs = zip(numbers, tensors, strict=True)
        scales = [number if tensor is None else tensor for number, tensor in pairs]
    run(planes, layer, slots, rows, first_slot, scales)


_op = library.define(
    "write_rows(Tensor(a!)[] planes, int? layer, Tensor slots, Tensor[] rows, int first_slot, "
    "float[] numbers, Tensor?[] tensors, str? implementation) -> ()",
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
):
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
    num_tokens = slots.shape[0]
    if not num_tokens:
        return
    arguments: list[Any] = []
    key: list[Any] = [slots.dtype]
    pointers = [slots, *planes]
    widths, kinds = [], []
    for plane, new, scale in zip(planes, rows, scales, strict=True):
        new = launch.in_rows(new, plane.dim() - 2)
        layer_stride, stride = (0, new.stride(0)) if layer is not None else new.stride()[:2]
        scale_tensor, number, kind = slots, 1.0, _NO_SCALE
        if scale is None or new.dtype == plane.dtype:
            pass
        elif isinstance(scale, torch.Tensor):
            scale_tensor, kind = scale, _TENSOR
            key.append(scale.dtype)
        else:
            number, kind = scale, _NUMBER
        arguments += (plane, new, layer_stride, stride, scale_tensor, number)
        pointers += (new, scale_tensor)
        width = plane.stride(1)
        widths.append(width)
        kinds.append(kind)
        key += (plane.dtype, new.dtype, width, kind, stride % 16, layer_stride % 16)
        key += (stride == 1, layer_stride == 1)
    block = launch.power_of_two(max(widths))
    tokens = max(1, min(TILE // block, launch.power_of_two(num_tokens)))
    key += (tokens, launch.alignment(*pointers))
    both = 2 // len(planes)
    launch.launch(
        _kernel,
        (-(-num_tokens // tokens), len(planes), planes[0].shape[0] if layer is None else 1),
        tuple(key),
        (
            slots,
            layer or 0,
            num_tokens,
            planes[0].shape[1],
            first_slot,
            *arguments * both,
            *widths * both,
            block,
            tokens,
            *kinds * both,
        ),
        slots.device,
    )


def _triton_why_not(planes, slots, rows) -> str | None:
    return launch.why_not_rows(planes, slots, *rows)


IMPLEMENTATIONS = {
    "triton": Implementation(_triton, _triton_why_not),
    "reference": Implementation(reference, lambda *_: None),
}
