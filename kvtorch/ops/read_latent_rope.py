"""Reads latent rows as their two parts, latent and rope, in one launch."""

import torch
import triton
import triton.language as tl

from kvjax.dispatch import Implementation, select
from kvtorch.ops import launch, library, read_rows
from kvtorch.ops.narrow import narrow

# Latents a program copies. One H200, 512 + 64 bfloat16, 16 384 tokens in a chain of dependent
# launches, by elements and warps: 11.1 us with 2 048 and 2, 11.3 with 2 048 and 4, 11.4 to 14 with
# others; 4 warps are the fastest where each token is a program.
TILE = 2048


def read_latent_rope(
    plane: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    latent_dim: int,
    *,
    first_slot: int,
    dtype: torch.dtype | None = None,
    stored_dtype: torch.dtype | None = None,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows at ``slots``, cut behind column ``latent_dim``, cast to ``dtype``.

    Values of the plane's dtype keep their bits, others are cast as ``narrow`` says. Slots that are
    not there read as zeros.

    Args:
      plane: ``[layers, rows, 1, width]``, contiguous, not changed.
      layer: position of the layer.
      slots: int32 or int64, ``[n]``, in any order and as often as wanted.
      latent_dim: columns of the first part; the second has the rest, which may be none.
      first_slot: the first slot that is there.
      dtype: of the result; that of the plane's values if ``None``.
      stored_dtype: what the plane holds, where it is ``uint8`` that stands for fp8; else its own.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.

    Source: TokenSpeed ``get_mla_kv_buffer_triton`` (B-K-2).
    """
    stored_dtype = plane.dtype if stored_dtype is None else stored_dtype
    dtype = stored_dtype if dtype is None else dtype
    return _op(plane, layer, slots, latent_dim, first_slot, dtype, stored_dtype, implementation)


def _run(plane, layer, slots, latent_dim, first_slot, dtype, stored_dtype, implementation=None):
    plane = plane if stored_dtype == plane.dtype else plane.view(stored_dtype)
    run = select("read_latent_rope", IMPLEMENTATIONS, implementation, plane)
    return run(plane, layer, slots, latent_dim, first_slot, dtype)


def _empty(plane, layer, slots, latent_dim, first_slot, dtype, *_):
    rope_dim, device = plane.shape[-1] - latent_dim, plane.device
    return (
        torch.empty((slots.shape[0], 1, latent_dim), dtype=dtype, device=device),
        torch.empty((slots.shape[0], 1, rope_dim), dtype=dtype, device=device),
    )


_op = library.define(
    "read_latent_rope(Tensor plane, int layer, Tensor slots, int latent_dim, int first_slot, "
    "ScalarType dtype, ScalarType stored_dtype, str? implementation=None) -> (Tensor, Tensor)",
    _run,
    _empty,
)


def reference(
    plane: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    latent_dim: int,
    first_slot: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification, in plain torch."""
    (rows,) = read_rows.reference((plane,), layer, slots, first_slot)
    rows = narrow(rows, dtype)
    return rows[..., :latent_dim].contiguous(), rows[..., latent_dim:].contiguous()


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
    there = ((slot >= first_slot) & (slot < num_rows))[:, None]
    row = plane + ((layer * num_rows.to(tl.int64) + slot) * (LATENT + ROPE))[:, None]
    column = tl.arange(0, LATENT_BLOCK)[None, :]
    rope_column = tl.arange(0, ROPE_BLOCK)[None, :]
    latent_row = tl.load(row + column, mask=there & (column < LATENT), other=0.0)
    rope_row = tl.load(row + LATENT + rope_column, mask=there & (rope_column < ROPE), other=0.0)
    dtype = latent.dtype.element_ty
    if plane.dtype.element_ty != dtype:
        latent_row = launch.narrowed(latent_row, dtype)
        rope_row = launch.narrowed(rope_row, dtype)
    mask = of_batch[:, None]
    tl.store(latent + (token * LATENT)[:, None] + column, latent_row, mask=mask & (column < LATENT))
    tl.store(
        rope + (token * ROPE)[:, None] + rope_column, rope_row, mask=mask & (rope_column < ROPE)
    )


def _triton(
    plane: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    latent_dim: int,
    first_slot: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    latent, rope = _empty(plane, layer, slots, latent_dim, first_slot, dtype)
    num_tokens = slots.shape[0]
    if not num_tokens:
        return latent, rope
    rope_dim = plane.shape[-1] - latent_dim
    few = num_tokens <= launch.FEW_TOKENS
    constants = launch.of_parts(latent_dim, rope_dim, TILE, few)
    launch.launch(
        _kernel,
        (-(-num_tokens // constants[-1]), 1, 1),
        (slots.dtype, plane.dtype, dtype, constants),
        (slots.contiguous(), plane, latent, rope),
        (layer, num_tokens, plane.shape[1], first_slot, *constants),
        4 if few else 2,
    )
    return latent, rope


def _triton_why_not(plane) -> str | None:
    return launch.why_not_rows((plane,))


IMPLEMENTATIONS = {
    "triton": Implementation(_triton, _triton_why_not),
    "reference": Implementation(reference, lambda *_: None),
}
