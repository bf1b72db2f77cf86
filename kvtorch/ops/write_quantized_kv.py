"""Writes K and V in 8 bits, each token's heads with a scale of their own, in one launch."""

# Triton's types as annotations of a kernel's numbers.
# pyright: reportInvalidTypeForm=false

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvjax.dispatch import Implementation, select
from kvtorch.ops import launch, library, quantizing, write_rows
from kvtorch.ops.narrow import narrow

LARGEST = {
    torch.int8: float(torch.iinfo(torch.int8).max),
    torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max,
}
"""What the largest number of a head is stored as."""

_NO_FRACTIONS = tl.constexpr(1.5 * 2.0**23)
"""A sum of this and a small number is a whole one: float32 has no others around it."""

# Elements a program reads or writes. One H200, 16 384 tokens of 2 x 8 heads of 128, written by 2
# warps: 26.6 us with 2 048, 27.8 with 4 096, 30.5 with 8 192; by 4 warps 31.0, 27.8 and 28.3.
TILE = 2048


def write_quantized_kv(
    planes: Sequence[torch.Tensor],
    layer: int,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    first_slot: int,
    implementation: str | None = None,
) -> None:
    """Stores each head of ``k[t]`` and ``v[t]`` in 8 bits, and its scale, at ``slots[t]``.

    In float32, every quotient rounded once: a head's scale is its largest magnitude, at least
    1e-26, over 127 or, in fp8, 448, so that the largest element is stored as that. Quotients are
    rounded to nearest even. An infinite value counts as float32's largest number. A NaN makes the
    scale NaN, with which the whole head reads as NaN; int8, which has none, stores 0.

    Slots that are not there, and repeated ones, as in ``write_rows``.

    Args:
      planes: K ``[layers, rows, heads, K]``, its scales ``[layers, rows, heads, 1]`` of float32, V
        ``[layers, rows, heads, V]``, its scales; K and V of ``int8``, or of ``float8_e4m3fn`` or
        ``uint8`` that stands for it; contiguous, changed in place.
      layer: position of the layer.
      slots: int32 or int64, ``[n]``.
      k, v: ``[n, heads, _]``, of any float dtypes of at most 32 bits, and of any strides.
      first_slot: the first slot that is there.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.

    Source: vLLM's ``int8_per_token_head`` and ``fp8_per_token_head``; the smallest amax, and what
    is infinite or NaN, as in ``write_quantized``.
    """
    _op(planes, layer, slots, k, v, first_slot, implementation)


def _run(planes, layer, slots, k, v, first_slot, implementation=None) -> None:
    planes = as_stored(planes)
    run = select("write_quantized_kv", IMPLEMENTATIONS, implementation, planes)
    run(planes, layer, slots, k, v, first_slot)


_op = library.define(
    "write_quantized_kv(Tensor(a!)[] planes, int layer, Tensor slots, Tensor k, Tensor v, "
    "int first_slot, str? implementation=None) -> ()",
    _run,
)


def as_stored(planes: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """``planes`` with fp8 where ``uint8`` stands for it, sharing memory."""
    if planes[0].dtype != torch.uint8:
        return planes
    k, k_scale, v, v_scale = planes
    return k.view(torch.float8_e4m3fn), k_scale, v.view(torch.float8_e4m3fn), v_scale


def reference(
    planes: Sequence[torch.Tensor],
    layer: int,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first_slot: int,
) -> None:
    """The specification, in plain torch."""
    rows = (*_quantized(k, planes[0].dtype), *_quantized(v, planes[2].dtype))
    write_rows.reference(planes, layer, slots, rows, first_slot, (None,) * len(planes))


def _quantized(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What is stored, and the scales."""
    values = values.float()
    scale = quantizing.scales_of(values, LARGEST[dtype])
    quotients = values / scale
    if dtype == torch.int8:
        whole = quotients.round().clamp(-LARGEST[dtype], LARGEST[dtype])  # to nearest even
        return whole.nan_to_num(nan=0.0).to(dtype), scale
    return narrow(quotients, dtype), scale


@triton.jit
def _stored(quotients, scale, dtype: tl.constexpr):
    if dtype == tl.int8:
        # The lowest bits of the sum are the whole number.
        whole = (quotients + _NO_FRACTIONS).to(tl.int32, bitcast=True)
        stored = tl.where(scale == scale, whole, 0).to(dtype)
    else:
        stored = launch.narrowed(quotients, dtype)
    return stored


@triton.jit
def _write(
    plane, scales, values, stride, token, head, of_batch, row, there,
    DIM: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    # Loading does not wait for the slots.
    source = values + (token * stride + head * DIM)[:, None] + column
    numbers = quantizing.loaded(source, of_batch[:, None] & (column < DIM), column, DIM, BLOCK)
    amax = quantizing.amax_of(numbers)
    scale = tl.div_rn(amax, LARGEST)
    quotients = quantizing.quotients(numbers, amax, scale)
    stored = _stored(quotients, scale, plane.dtype.element_ty)
    target = plane + (row * DIM)[:, None] + column
    tl.store(target, stored, mask=there[:, None] & (column < DIM))
    tl.store(scales + row[:, None], scale, mask=there[:, None])


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
    k_stride: tl.int64,
    v_stride: tl.int64,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    LARGEST: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch.begin(EARLY)
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    token, head = pair // HEADS, pair % HEADS
    of_batch = token < num_tokens
    slot = tl.load(slots + token, mask=of_batch, other=-1).to(tl.int64)
    there = of_batch & (slot >= first_slot) & (slot < num_rows)
    row = (layer.to(tl.int64) * num_rows + slot) * HEADS + head
    if tl.program_id(1) == 0:
        _write(
            k_plane, k_scales, k, k_stride, token, head, of_batch, row, there,
            K_DIM, BLOCK, LARGEST,
        )  # fmt: skip
    else:
        _write(
            v_plane, v_scales, v, v_stride, token, head, of_batch, row, there,
            V_DIM, BLOCK, LARGEST,
        )  # fmt: skip


def _triton(
    planes: Sequence[torch.Tensor],
    layer: int,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first_slot: int,
) -> None:
    num_tokens = slots.shape[0]
    if not num_tokens:
        return
    k_plane, _, v_plane, _ = planes
    k, k_stride, k_key = launch.as_rows(k, k_plane.stride()[1])
    v, v_stride, v_key = launch.as_rows(v, v_plane.stride()[1])
    sizes = sizes_of(planes, num_tokens)
    launch.launch(
        _kernel,
        (-(-num_tokens * sizes[0] // sizes[-1]), 2, 1),
        (slots.dtype, k_plane.dtype, k.dtype, k_key, v.dtype, v_key, sizes),
        (slots.contiguous(), *planes, k, v),
        (
            *(layer, num_tokens, k_plane.shape[1], first_slot, k_stride, v_stride),
            *sizes,
            LARGEST[k_plane.dtype],
        ),
        4 if num_tokens <= launch.FEW_TOKENS else 2,
    )


def sizes_of(planes: Sequence[torch.Tensor], num_tokens: int) -> tuple[int, ...]:
    """Heads, widths of K's and V's, a block for the wider, and pairs of token and head a program.

    There are as many programs for V as for K.
    """
    _, _, heads, k_dim = planes[0].shape
    return _sizes(heads, k_dim, planes[2].shape[3], TILE, num_tokens <= launch.FEW_TOKENS)


@functools.lru_cache(maxsize=1024)
def _sizes(heads: int, k_dim: int, v_dim: int, tile: int, few: bool) -> tuple[int, ...]:
    block = launch.power_of_two(max(k_dim, v_dim))
    pairs = max(1, tile // block)
    # Of few tokens each has programs of its own.
    return heads, k_dim, v_dim, block, min(pairs, launch.power_of_two(heads)) if few else pairs


def triton_why_not(planes: Sequence[torch.Tensor]) -> str | None:
    """Why no kernel can run on these planes, or ``None``."""
    return launch.why_not_rows(planes)


IMPLEMENTATIONS = {
    "triton": Implementation(_triton, triton_why_not),
    "reference": Implementation(reference, lambda *_: None),
}
