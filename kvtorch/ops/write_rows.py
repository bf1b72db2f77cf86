"""Writes rows into planes, in one layer or all, K and V in one launch."""

# Triton's types as annotations of a kernel's numbers.
# pyright: reportInvalidTypeForm=false

import functools
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

# Elements a program copies. One H200, bfloat16, 16 384 tokens: 34.5 us with 2 048 and 8 warps, 35.0
# with 4, 35.3 with 4 096 and 8, 40 with 1 024. Where each token is a program, 2 warps are 0.1 us
# faster than 4.
TILE = 2048


def write_rows(
    planes: Sequence[torch.Tensor],
    layer: int | None,
    slots: torch.Tensor,
    rows: Sequence[torch.Tensor],
    *,
    first_slot: int,
    scales: Sequence[Scale] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    implementation: str | None = None,
) -> None:
    """Stores row t of ``rows``, narrowed to the plane's dtype, at ``slots[t]`` in every plane.

    Values narrow as ``narrow`` says; those of a plane's dtype keep their bits. A slot below
    ``first_slot`` or past the end is not written; no other memory changes. Slots that are there are
    distinct: one that repeats may end up with pieces of several rows. One launch writes two planes.

    Args:
      planes: ``[layers, rows, *row]``, contiguous, changed in place.
      layer: position of the layer; ``None`` for all.
      slots: int32 or int64, ``[n]``.
      rows: for each plane ``[n, *row]``, or ``[layers, n, *row]`` for all layers; never changed.
      first_slot: the first slot that is there.
      scales: for each plane what its values are divided by before they are cast, a number or a
        float32 tensor of one element on the planes' device; ``None`` for nothing.
      dtypes: what the planes hold, where they are ``uint8`` that stands for fp8; else their own.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.

    Source: SGLang 0.4.8 ``MHATokenToKVPool.set_kv_buffer`` (A-MHA-14), ``transfer`` (A-MHA-10).
    """
    _op(planes, layer, slots, rows, first_slot, scales, dtypes, implementation)


def _run(planes, layer, slots, rows, first_slot, scales, dtypes, implementation) -> None:
    if dtypes is not None:
        planes = [plane.view(dtype) for plane, dtype in zip(planes, dtypes, strict=True)]
    run = select("write_rows", IMPLEMENTATIONS, implementation, planes)
    scales = (None,) * len(planes) if scales is None else scales
    run(planes, layer, slots, rows, first_slot, scales)


def _packed(planes, layer, slots, rows, first_slot, scales, dtypes, implementation):
    """A scale is a number or a tensor; and dtypes are no dtypes any more behind a list."""
    scales = scales or ()
    tensors = [scale if isinstance(scale, torch.Tensor) else None for scale in scales]
    numbers = [None if isinstance(scale, torch.Tensor) else scale for scale in scales]
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes or ()]
    return planes, layer, slots, rows, first_slot, numbers, tensors, names, implementation


def _unpacked(planes, layer, slots, rows, first_slot, numbers, tensors, names, implementation=None):
    pairs = zip(numbers, tensors, strict=True)
    scales = [number if tensor is None else tensor for number, tensor in pairs] or None
    dtypes = [getattr(torch, name) for name in names] or None
    return planes, layer, slots, rows, first_slot, scales, dtypes, implementation


_op = library.define(
    "write_rows(Tensor(a!)[] planes, int? layer, Tensor slots, Tensor[] rows, int first_slot, "
    "float?[] numbers, Tensor?[] tensors, str[] names, str? implementation=None) -> ()",
    _run,
    packed=_packed,
    unpacked=_unpacked,
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
    plane, rows, layer_stride, stride, scale, turn, token, of_batch, row, there,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    # Loading does not wait for the slots.
    source = rows + turn * layer_stride + (token * stride)[:, None] + column
    values = tl.load(source, mask=of_batch[:, None] & (column < WIDTH))
    if rows.dtype.element_ty != plane.dtype.element_ty:
        values = launch.divided(values, scale, SCALE)
        values = launch.narrowed(values, plane.dtype.element_ty)
    target = plane + (row * WIDTH)[:, None] + column
    tl.store(target, values, mask=there[:, None] & (column < WIDTH))


@triton.jit(
    do_not_specialize=["layer", "num_tokens", "num_rows", "first_slot", "k_scale", "v_scale"]
)
def _kernel(
    slots,
    k_plane,
    k_rows,
    v_plane,
    v_rows,
    layer,
    num_tokens,
    num_rows,
    first_slot,
    k_layer_stride: tl.int64,
    k_stride: tl.int64,
    k_scale,
    v_layer_stride: tl.int64,
    v_stride: tl.int64,
    v_scale,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch.begin(EARLY)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    of_batch = token < num_tokens
    slot = tl.load(slots + token, mask=of_batch, other=-1).to(tl.int64)
    there = of_batch & (slot >= first_slot) & (slot < num_rows)
    turn = tl.program_id(2).to(tl.int64)
    row = (layer + turn) * num_rows + slot
    if tl.program_id(1) == 0:
        _write(
            k_plane, k_rows, k_layer_stride, k_stride, k_scale, turn, token, of_batch, row, there,
            K_WIDTH, BLOCK, K_SCALE,
        )  # fmt: skip
    else:
        _write(
            v_plane, v_rows, v_layer_stride, v_stride, v_scale, turn, token, of_batch, row, there,
            V_WIDTH, BLOCK, V_SCALE,
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
    slots = slots.contiguous()
    few = num_tokens <= launch.FEW_TOKENS
    for i in range(0, len(planes), 2):
        # One plane stands for both, and has one program in the grid.
        j = min(i + 1, len(planes) - 1)
        k, v = planes[i], planes[j]
        k_width, v_width = k.stride()[1], v.stride()[1]
        k_rows, k_numbers, k_key = _source(k, k_width, rows[i], scales[i], layer is None)
        v_rows, v_numbers, v_key = _source(v, v_width, rows[j], scales[j], layer is None)
        sizes = _sizes(k_width, v_width, TILE, few)
        constants = (*k_numbers, *v_numbers, k_key[0], v_key[0], *sizes)
        launch.launch(
            _kernel,
            (-(-num_tokens // sizes[-1]), j - i + 1, k.shape[0] if layer is None else 1),
            (slots.dtype, k_key, v_key, sizes),
            (slots, k, k_rows, v, v_rows),
            (layer or 0, num_tokens, k.shape[1], first_slot, *constants),
            2 if few else 8,
        )


@functools.lru_cache(maxsize=1024)
def _sizes(k_width: int, v_width: int, tile: int, few: bool) -> tuple[int, ...]:
    block = launch.power_of_two(max(k_width, v_width))
    return k_width, v_width, block, 1 if few else max(1, tile // block)


def _source(plane, width, rows, scale, all_layers) -> tuple[Any, ...]:
    """A plane's rows; their strides and scale; and what a kernel is compiled for."""
    dtypes = plane.dtype, rows.dtype
    if scale is None or dtypes[0] == dtypes[1]:
        kind, scale = _NO_SCALE, 1.0
    else:
        kind = _TENSOR if isinstance(scale, torch.Tensor) else _NUMBER
    layer_stride = 0
    if all_layers:
        rows = launch.in_rows(rows, plane.dim() - 2)
        layer_stride, stride = rows.stride()[:2]
        lie = (layer_stride % 16, layer_stride == 1, stride % 16, stride == 1)
    else:
        rows, stride, lie = launch.as_rows(rows, width)
    return rows, (layer_stride, stride, scale), (kind, dtypes, lie)


def _triton_why_not(planes) -> str | None:
    return launch.why_not_rows(planes)


IMPLEMENTATIONS = {
    "triton": Implementation(_triton, _triton_why_not),
    "reference": Implementation(reference, lambda *_: None),
}
