"""Writes the two parts of latent rows, latent and rope, in one launch."""

# Triton's types as annotations of a kernel's numbers.
# pyright: reportInvalidTypeForm=false

import torch
import triton
import triton.language as tl

from kvjax.dispatch import Implementation, select
from kvtorch.ops import launch, library, write_rows
from kvtorch.ops.narrow import bits, narrow

# Latents a program copies. One H200, 512 + 64 bfloat16, 16 384 tokens in a chain of dependent
# launches, by elements and warps: 11.0 us with 2 048 and 1, 11.3 with 2 048 and 4 or 4 096 and 8,
# 11.4 to 13 with others; torch's copy_ of as many bytes in one piece takes 10.9. Up to 4 096 tokens
# 4 warps are as fast or faster.
TILE = 2048
MANY_TOKENS = 8192


def write_latent_rope(
    plane: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    *,
    first_slot: int,
    dtype: torch.dtype | None = None,
    implementation: str | None = None,
) -> None:
    """Stores ``latent[t]``, then ``rope[t]``, each narrowed by itself, as the row at ``slots[t]``.

    Slots that are not there, and repeated ones, as in ``write_rows``. The two parts may have any
    widths that add up to the row's, also zero.

    Args:
      plane: ``[layers, rows, 1, width]``, contiguous, changed in place.
      layer: position of the layer.
      slots: int32 or int64, ``[n]``.
      latent, rope: ``[n, 1, _]`` or ``[n, _]``, of any float dtypes and row strides.
      first_slot: the first slot that is there.
      dtype: what the plane holds, where it is ``uint8`` that stands for fp8; else its own.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.

    Source: SGLang 0.4.8 ``set_mla_kv_buffer_triton`` (A-MLA-1, A-MLA-2), its faults excepted.
    """
    _op(plane, layer, slots, latent, rope, first_slot, dtype, implementation)


def _run(plane, layer, slots, latent, rope, first_slot, dtype=None, implementation=None) -> None:
    plane = plane if dtype is None else plane.view(dtype)
    run = select("write_latent_rope", IMPLEMENTATIONS, implementation, plane)
    run(plane, layer, slots, latent, rope, first_slot)


_op = library.define(
    "write_latent_rope(Tensor(a!) plane, int layer, Tensor slots, Tensor latent, Tensor rope, "
    "int first_slot, ScalarType? dtype=None, str? implementation=None) -> ()",
    _run,
)


def reference(
    plane: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    first_slot: int,
) -> None:
    """The specification, in plain torch."""
    parts = [bits(narrow(part, plane.dtype)).flatten(1) for part in (latent, rope)]
    rows = torch.cat(parts, -1).view(plane.dtype).reshape(-1, *plane.shape[2:])
    write_rows.reference((plane,), layer, slots, (rows,), first_slot, (None,))


@triton.jit(do_not_specialize=["layer", "num_tokens", "num_rows", "first_slot"])
def _kernel(
    slots,
    plane,
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
    EARLY: tl.constexpr,
):
    launch.begin(EARLY)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    of_batch = token < num_tokens
    slot = tl.load(slots + token, mask=of_batch, other=-1).to(tl.int64)
    # Loading does not wait for the slots.
    column = tl.arange(0, LATENT_BLOCK)[None, :]
    mask = of_batch[:, None] & (column < LATENT)
    latent_row = tl.load(latent + (token * latent_stride)[:, None] + column, mask=mask)
    rope_column = tl.arange(0, ROPE_BLOCK)[None, :]
    mask = of_batch[:, None] & (rope_column < ROPE)
    rope_row = tl.load(rope + (token * rope_stride)[:, None] + rope_column, mask=mask)
    dtype = plane.dtype.element_ty
    if latent.dtype.element_ty != dtype:
        latent_row = launch.narrowed(latent_row, dtype)
    if rope.dtype.element_ty != dtype:
        rope_row = launch.narrowed(rope_row, dtype)
    there = (of_batch & (slot >= first_slot) & (slot < num_rows))[:, None]
    row = plane + ((layer * num_rows.to(tl.int64) + slot) * (LATENT + ROPE))[:, None]
    tl.store(row + column, latent_row, mask=there & (column < LATENT))
    tl.store(row + LATENT + rope_column, rope_row, mask=there & (rope_column < ROPE))


def _triton(
    plane: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    first_slot: int,
) -> None:
    num_tokens = slots.shape[0]
    if not num_tokens:
        return
    latent_dim, rope_dim = latent.shape[-1], rope.shape[-1]
    latent, latent_stride, latent_key = launch.as_rows(latent, latent_dim)
    rope, rope_stride, rope_key = launch.as_rows(rope, rope_dim)
    few = num_tokens <= launch.FEW_TOKENS
    constants = launch.of_parts(latent_dim, rope_dim, TILE, few)
    launch.launch(
        _kernel,
        (-(-num_tokens // constants[-1]), 1, 1),
        (slots.dtype, plane.dtype, latent.dtype, latent_key, rope.dtype, rope_key, constants),
        (slots.contiguous(), plane, latent, rope),
        (layer, num_tokens, plane.shape[1], first_slot, latent_stride, rope_stride, *constants),
        4 if num_tokens < MANY_TOKENS else 1,
    )


def _triton_why_not(plane) -> str | None:
    return launch.why_not_rows((plane,))


IMPLEMENTATIONS = {
    "triton": Implementation(_triton, _triton_why_not),
    "reference": Implementation(reference, lambda *_: None),
}
