"""Reads latent rows that are stored in fp8, each with a scale of its own, in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvjax.dispatch import Implementation, select
from kvtorch.ops import launch, library, read_rows, write_quantized
from kvtorch.ops.narrow import narrow

# Latents a program reads. One H200, 512 + 64 bfloat16, 16 384 tokens: 9.8 us with 2 048 and 4
# warps, 10.2 with 8; with 1 024 11.3.
TILE = 2048


def read_quantized(
    planes: Sequence[torch.Tensor],
    layer: int,
    slots: torch.Tensor,
    *,
    first_slot: int,
    dtype: torch.dtype | None = None,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns latents ``[n, 1, R]`` and ropes ``[n, 1, r]`` at ``slots``, times their scales.

    The products are in float32, and cast to ``dtype`` as ``narrow`` says. Slots that are not there
    read as zeros.

    Args:
      planes: as ``write_quantized`` takes them; not changed.
      layer: position of the layer.
      slots: int32 or int64, ``[n]``, in any order and as often as wanted.
      first_slot: the first slot that is there.
      dtype: of the result; that of the rope's plane, which is the model's, if ``None``.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.

    Source: TokenSpeed ``get_mla_kv_buffer`` of quantised pools (B-M-17).
    """
    dtype = planes[2].dtype if dtype is None else dtype
    return _op(planes, layer, slots, first_slot, dtype, implementation)


def _run(planes, layer, slots, first_slot, dtype, implementation=None):
    planes = write_quantized.as_stored(planes)
    run = select("read_quantized", IMPLEMENTATIONS, implementation, planes)
    return run(planes, layer, slots, first_slot, dtype)


def _empty(planes, layer, slots, first_slot, dtype, *_):
    return tuple(
        torch.empty((slots.shape[0], 1, plane.shape[-1]), dtype=dtype, device=plane.device)
        for plane in (planes[0], planes[2])
    )


_op = library.define(
    "read_quantized(Tensor[] planes, int layer, Tensor slots, int first_slot, ScalarType dtype, "
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
    latent, scale, rope = read_rows.reference(planes, layer, slots, first_slot)
    return narrow(latent.float() * scale, dtype), narrow(rope.float() * scale, dtype)


@triton.jit(do_not_specialize=["layer", "num_tokens", "num_rows", "first_slot"])
def _kernel(
    slots,
    latents,
    scales,
    ropes,
    latent,
    rope,
    layer,
    num_tokens,
    num_rows,
    first_slot,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch.begin(EARLY)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    of_batch = token < num_tokens
    slot = tl.load(slots + token, mask=of_batch, other=-1).to(tl.int64)
    there = (slot >= first_slot) & (slot < num_rows)
    row = layer.to(tl.int64) * num_rows + slot
    # Loaded before they get another dimension, along which each thread would load one again.
    scale = tl.load(scales + row, mask=there, other=0.0)[:, None]
    row, there = row[:, None], there[:, None]
    column = tl.arange(0, LATENT_BLOCK)[None, :]
    stored = latents + row * LATENT + column
    latent_row = tl.load(stored, mask=there & (column < LATENT), other=0.0)
    latent_row = launch.widened(latent_row) * scale
    rope_column = tl.arange(0, ROPE_BLOCK)[None, :]
    stored = ropes + row * ROPE + rope_column
    rope_row = tl.load(stored, mask=there & (rope_column < ROPE), other=0.0)
    rope_row = rope_row.to(tl.float32) * scale
    latent_row = launch.narrowed(latent_row, latent.dtype.element_ty)
    rope_row = launch.narrowed(rope_row, rope.dtype.element_ty)
    mask = of_batch[:, None]
    tl.store(latent + (token * LATENT)[:, None] + column, latent_row, mask=mask & (column < LATENT))
    tl.store(
        rope + (token * ROPE)[:, None] + rope_column, rope_row, mask=mask & (rope_column < ROPE)
    )


def _triton(
    planes: Sequence[torch.Tensor],
    layer: int,
    slots: torch.Tensor,
    first_slot: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    latent, rope = _empty(planes, layer, slots, first_slot, dtype)
    num_tokens = slots.shape[0]
    if not num_tokens:
        return latent, rope
    latents, scales, ropes = planes
    few = num_tokens <= launch.FEW_TOKENS
    constants = launch.of_parts(latents.shape[-1], ropes.shape[-1], TILE, few)
    launch.launch(
        _kernel,
        (-(-num_tokens // constants[-1]), 1, 1),
        (slots.dtype, ropes.dtype, dtype, constants),
        (slots.contiguous(), latents, scales, ropes, latent, rope),
        (layer, num_tokens, latents.shape[1], first_slot, *constants),
    )
    return latent, rope


IMPLEMENTATIONS = {
    "triton": Implementation(_triton, write_quantized.triton_why_not),
    "reference": Implementation(reference, lambda *_: None),
}
