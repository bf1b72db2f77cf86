"""Writes the two parts of latent rows, latent and rope, in one launch."""

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from kvjax.dispatch import Implementation, select
from kvjax.ops import row_copy, write_rows
from kvjax.ops.sides import Side
from kvjax.ops.types import Layer, Slots

Plane = Shaped[Array, "layers rows 1 width"]
Part = Shaped[Array, "n 1 _"]


def write_latent_rope(
    plane: Plane,
    layer: Layer,
    slots: Slots,
    latent: Part,
    rope: Part,
    *,
    first_slot: int,
    implementation: str | None = None,
) -> Plane:
    """Returns ``plane`` with ``latent[t]``, then ``rope[t]``, stored as the row at ``slots[t]``.

    Bits are preserved; slots and layers that are not there, and repeated slots, as in
    ``write_rows``. The two parts may have any widths that add up to the row's, also zero.

    Args:
      plane: updated in place where it is donated.
      layer: position of the layer, traced or not.
      slots: where each row goes.
      latent: the first part of each row, in the plane's dtype.
      rope: the rest of each row, in the plane's dtype.
      first_slot: the first slot that is there.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.

    Source: SGLang 0.4.8 ``set_mla_kv_buffer_triton`` (A-MLA-1, A-MLA-2).
    """
    run = select("write_latent_rope", IMPLEMENTATIONS, implementation, plane, latent, rope)
    return run(plane, layer, slots, latent, rope, first_slot=first_slot)


def reference(
    plane: Plane, layer: Layer, slots: Slots, latent: Part, rope: Part, *, first_slot: int
) -> Plane:
    """The specification, in plain JAX."""
    rows = jnp.concatenate([latent, rope], axis=-1)
    (plane,) = write_rows.reference((plane,), layer, slots, (rows,), first_slot=first_slot)
    return plane


def _mosaic_gpu(
    plane: Plane, layer: Layer, slots: Slots, latent: Part, rope: Part, *, first_slot: int
) -> Plane:
    num_tokens = slots.shape[0]
    refs = row_copy.as_refs((plane,))
    widths = (latent.shape[-1], rope.shape[-1])
    row_copy.copy_rows(
        Side.cut(*refs, *widths, slots=slots, first_slot=first_slot, layer=layer),
        Side.of([part.reshape(1, num_tokens, -1) for part in (latent, rope) if part.size]),
        num_tokens=num_tokens,
        num_layers=1,
    )
    (plane,) = row_copy.frozen(refs, (plane,))
    return plane


def _mosaic_gpu_why_not(plane: Plane, latent: Part, rope: Part) -> str | None:
    return row_copy.why_not((plane,), latent.shape[-1], rope.shape[-1])


IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation(_mosaic_gpu, _mosaic_gpu_why_not),
    "reference": Implementation(reference, lambda *_: None),
}
