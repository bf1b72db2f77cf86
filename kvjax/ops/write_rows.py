"""Writes rows into planes, in one layer or all, several planes in one launch."""

import jax.numpy as jnp

from kvjax.dispatch import Implementation, select
from kvjax.ops import row_copy
from kvjax.ops.sides import Side
from kvjax.ops.types import Layer, Planes, Rows, Slots
from kvjax.slots import absent_as


def write_rows(
    planes: Planes,
    layer: Layer,
    slots: Slots,
    rows: Rows,
    *,
    first_slot: int,
    implementation: str | None = None,
) -> Planes:
    """Returns ``planes`` with row t of ``rows`` stored at ``slots[t]``, in every plane.

    Bits are preserved. A slot below ``first_slot`` or past the end is not written, nor is a layer
    that is not there; no other memory changes. Slots that are there are distinct: one that repeats
    may end up with pieces of several rows.

    Args:
      planes: updated in place where they are donated.
      layer: where to write; ``None`` for all layers.
      slots: where each row goes.
      rows: in the planes' dtypes.
      first_slot: the first slot that is there.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.

    Source: SGLang 0.4.8 ``MHATokenToKVPool.set_kv_buffer`` (A-MHA-14), ``transfer`` (A-MHA-10).
    """
    run = select("write_rows", IMPLEMENTATIONS, implementation, planes)
    return run(planes, layer, slots, rows, first_slot=first_slot)


def reference(planes: Planes, layer: Layer, slots: Slots, rows: Rows, *, first_slot: int) -> Planes:
    """The specification, in plain JAX."""
    num_layers, num_rows = planes[0].shape[:2]
    layers = jnp.arange(num_layers)[:, None] if layer is None else layer
    slots = absent_as(num_rows, slots, first_slot)
    return tuple(
        # Without wrap_negative_indices=False, layer -1 would be the last one even under "drop".
        plane.at[layers, slots].set(new, mode="drop", wrap_negative_indices=False)
        for plane, new in zip(planes, rows, strict=True)
    )


def _mosaic_gpu(
    planes: Planes, layer: Layer, slots: Slots, rows: Rows, *, first_slot: int
) -> Planes:
    num_tokens = slots.shape[0]
    num_layers = planes[0].shape[0] if layer is None else 1
    refs = row_copy.as_refs(planes)
    pairs = zip(rows, refs, strict=True)
    row_copy.copy_rows(
        Side.of(refs, slots=slots, first_slot=first_slot, layer=layer),
        Side.of([new.reshape(num_layers, num_tokens, ref.shape[-1]) for new, ref in pairs]),
        num_tokens=num_tokens,
        num_layers=num_layers,
    )
    return row_copy.frozen(refs, planes)


IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation(_mosaic_gpu, row_copy.why_not_rows),
    "reference": Implementation(reference, lambda *_: None),
}
