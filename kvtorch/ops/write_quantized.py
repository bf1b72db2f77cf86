"""Writes latent rows in fp8, each with a scale of its own, in one launch."""

# Triton's types as annotations of a kernel's numbers.
# pyright: reportInvalidTypeForm=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvjax.dispatch import Implementation, select
from kvtorch.ops import launch, library, quantizing, write_rows
from kvtorch.ops.narrow import narrow

STORED = torch.float8_e4m3fn
_LARGEST_ROPE = {dtype: torch.finfo(dtype).max for dtype in (torch.float32, torch.bfloat16)}

# Latents a program writes. One H200, 512 + 64 bfloat16, 16 384 tokens: 9.7 us with 2 048 and 4
# warps, 9.8 with 2; with 1 024 10.5 with 2 warps, 12.2 with 4.
TILE = 2048


def write_quantized(
    planes: Sequence[torch.Tensor],
    layer: int,
    slots: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    *,
    first_slot: int,
    implementation: str | None = None,
) -> None:
    """Stores ``latent[t]`` in fp8, its scale, and ``rope[t]`` divided by the same, at ``slots[t]``.

    In float32, every quotient rounded once: the scale is the largest ``|latent|`` of the token, at
    least 1e-26, over 448, so that the largest element is stored as 448. What does not fit a
    plane's dtype saturates at the largest finite value; casts round to nearest even. An infinite
    latent counts as float32's largest number. A NaN in the latent makes the whole row NaN; one in
    the rope stays where it is.

    Slots that are not there, and repeated ones, as in ``write_rows``.

    Args:
      planes: latent ``[layers, rows, 1, R]`` of ``float8_e4m3fn``, or ``uint8`` that stands for it,
        scale ``[layers, rows, 1, 1]`` of float32, and rope ``[layers, rows, 1, r]``; contiguous,
        changed in place.
      layer: position of the layer.
      slots: int32 or int64, ``[n]``.
      latent, rope: ``[n, 1, _]`` or ``[n, _]``, of any float dtypes and row strides.
      first_slot: the first slot that is there.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.

    Source: TokenSpeed ``set_mla_kv_buffer`` of quantised pools (B-Q), its faults excepted.
    """
    _op(planes, layer, slots, latent, rope, first_slot, implementation)


def _run(planes, layer, slots, latent, rope, first_slot, implementation=None) -> None:
    planes = as_stored(planes)
    run = select("write_quantized", IMPLEMENTATIONS, implementation, planes)
    run(planes, layer, slots, latent, rope, first_slot)


_op = library.define(
    "write_quantized(Tensor(a!)[] planes, int layer, Tensor slots, Tensor latent, Tensor rope, "
    "int first_slot, str? implementation=None) -> ()",
    _run,
)


def as_stored(planes: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """``planes`` with the latents in fp8, sharing memory."""
    latents, *others = planes
    return planes if latents.dtype == STORED else (latents.view(STORED), *others)


def reference(
    planes: Sequence[torch.Tensor],
    layer: int,
    slots: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    first_slot: int,
) -> None:
    """The specification, in plain torch."""
    latents, _, ropes = planes
    latent, rope = latent.flatten(1).float(), rope.flatten(1).float()
    scale = quantizing.scales_of(latent, torch.finfo(STORED).max)
    largest = torch.finfo(ropes.dtype).max
    rows = (
        narrow(latent / scale, latents.dtype),
        scale,
        (rope / scale).clamp(-largest, largest).to(ropes.dtype),
    )
    rows = [row[:, None] for row in rows]
    write_rows.reference(planes, layer, slots, rows, first_slot, (None, None, None))


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
    latent_stride: tl.int64,
    rope_stride: tl.int64,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    LARGEST_ROPE: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch.begin(EARLY)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    of_batch = token < num_tokens
    slot = tl.load(slots + token, mask=of_batch, other=-1).to(tl.int64)
    # Loading does not wait for the slots.
    column = tl.arange(0, LATENT_BLOCK)[None, :]
    mask = of_batch[:, None] & (column < LATENT)
    source = latent + (token * latent_stride)[:, None] + column
    latent_row = quantizing.loaded(source, mask, column, LATENT, LATENT_BLOCK)
    rope_column = tl.arange(0, ROPE_BLOCK)[None, :]
    mask = of_batch[:, None] & (rope_column < ROPE)
    source = rope + (token * rope_stride)[:, None] + rope_column
    rope_row = quantizing.loaded(source, mask, rope_column, ROPE, ROPE_BLOCK)
    amax = quantizing.amax_of(latent_row)
    scale = tl.div_rn(amax, launch.E4M3FN_MAX)
    latent_row = quantizing.quotients(latent_row, amax, scale)
    latent_row = launch.narrowed(latent_row, latents.dtype.element_ty)
    rope_row = tl.div_rn(rope_row, scale)
    rope_row = tl.clamp(
        rope_row, -LARGEST_ROPE, LARGEST_ROPE, propagate_nan=tl.PropagateNan.ALL
    ).to(ropes.dtype.element_ty)
    there = (of_batch & (slot >= first_slot) & (slot < num_rows))[:, None]
    row = (layer.to(tl.int64) * num_rows + slot)[:, None]
    tl.store(latents + row * LATENT + column, latent_row, mask=there & (column < LATENT))
    tl.store(scales + row, scale, mask=there)
    tl.store(ropes + row * ROPE + rope_column, rope_row, mask=there & (rope_column < ROPE))


def _triton(
    planes: Sequence[torch.Tensor],
    layer: int,
    slots: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    first_slot: int,
) -> None:
    num_tokens = slots.shape[0]
    if not num_tokens:
        return
    latents, scales, ropes = planes
    latent_dim, rope_dim = latent.shape[-1], rope.shape[-1]
    latent, latent_stride, latent_key = launch.as_rows(latent, latent_dim)
    rope, rope_stride, rope_key = launch.as_rows(rope, rope_dim)
    few = num_tokens <= launch.FEW_TOKENS
    constants = launch.of_parts(latent_dim, rope_dim, TILE, few)
    strides = latent_stride, rope_stride
    launch.launch(
        _kernel,
        (-(-num_tokens // constants[-1]), 1, 1),
        (slots.dtype, ropes.dtype, latent.dtype, latent_key, rope.dtype, rope_key, constants),
        (slots.contiguous(), latents, scales, ropes, latent, rope),
        (
            *(layer, num_tokens, latents.shape[1], first_slot, *strides),
            *constants,
            _LARGEST_ROPE[ropes.dtype],
        ),
    )


def triton_why_not(planes: Sequence[torch.Tensor]) -> str | None:
    """Why no kernel can run on these planes, or ``None``."""
    ropes = planes[2].dtype
    if ropes not in _LARGEST_ROPE:
        return f"takes ropes of float32 or bfloat16, not {ropes}"
    return launch.why_not_rows(planes)


IMPLEMENTATIONS = {
    "triton": Implementation(_triton, triton_why_not),
    "reference": Implementation(reference, lambda *_: None),
}
