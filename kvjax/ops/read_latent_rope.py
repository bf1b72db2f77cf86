"""Reads latent rows as their two parts, latent and rope, in one launch."""

import jax
from jaxtyping import Array, Shaped

from kvjax.dispatch import Implementation, select
from kvjax.ops import read_rows, row_copy
from kvjax.ops.sides import Side
from kvjax.ops.types import Layer, Slots

Plane = Shaped[Array, "layers rows 1 width"]
Part = Shaped[Array, "n 1 _"]


def read_latent_rope(
    plane: Plane,
    layer: Layer,
    slots: Slots,
    latent_dim: int,
    *,
    first_slot: int,
    implementation: str | None = None,
) -> tuple[Part, Part]:
    """Returns the rows at ``slots``, cut behind column ``latent_dim``.

    Bits are preserved. Slots and layers that are not there read as zeros, as in ``read_rows``.

    Args:
      plane: read, not changed.
      layer: position of the layer, traced or not.
      slots: which rows, in any order and as often as wanted.
      latent_dim: columns of the first part; the second has the rest, which may be none.
      first_slot: the first slot that is there.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.

    Source: TokenSpeed ``get_mla_kv_buffer_triton`` (B-K-2).
    """
    run = select("read_latent_rope", IMPLEMENTATIONS, implementation, plane, latent_dim)
    return run(plane, layer, slots, latent_dim, first_slot=first_slot)


def reference(
    plane: Plane, layer: Layer, slots: Slots, latent_dim: int, *, first_slot: int
) -> tuple[Part, Part]:
    """The specification, in plain JAX."""
    (rows,) = read_rows.reference((plane,), layer, slots, first_slot=first_slot)
    return rows[..., :latent_dim], rows[..., latent_dim:]


def _mosaic_gpu(
    plane: Plane, layer: Layer, slots: Slots, latent_dim: int, *, first_slot: int
) -> tuple[Part, Part]:
    num_tokens = slots.shape[0]
    widths = (latent_dim, plane.shape[-1] - latent_dim)
    parts = [row_copy.empty(1, num_tokens, width, plane.dtype) for width in widths]
    row_copy.copy_rows(
        Side.of([part for part in parts if part.size]),
        Side.cut(row_copy.flat(plane), *widths, slots=slots, first_slot=first_slot, layer=layer),
        num_tokens=num_tokens,
        num_layers=1,
    )
    latent, rope = (jax.freeze(part).reshape(num_tokens, 1, part.shape[-1]) for part in parts)
    return latent, rope


def _mosaic_gpu_why_not(plane: Plane, latent_dim: int) -> str | None:
    return row_copy.why_not((plane,), latent_dim, plane.shape[-1] - latent_dim)


IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation(_mosaic_gpu, _mosaic_gpu_why_not),
    "reference": Implementation(reference, lambda *_: None),
}
