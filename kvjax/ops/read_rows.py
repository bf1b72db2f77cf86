"""Reads rows of planes, in one layer or all, several planes in one launch."""

import jax
import jax.numpy as jnp

from kvjax.dispatch import Implementation, select
from kvjax.ops import row_copy
from kvjax.ops.sides import Side
from kvjax.ops.types import Layer, Planes, Rows, Slots
from kvjax.slots import absent_as


def read_rows(
    planes: Planes,
    layer: Layer,
    slots: Slots,
    *,
    first_slot: int,
    implementation: str | None = None,
) -> Rows:
    """Returns the rows at ``slots``, of every plane.

    Bits are preserved. A slot below ``first_slot`` or past the end, and any slot of a layer that is
    not there, reads as zeros.

    Args:
      planes: read, not changed.
      layer: where to read; ``None`` for all layers.
      slots: which rows, in any order and as often as wanted.
      first_slot: the first slot that is there.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.

    Source: SGLang 0.4.8 ``MHATokenToKVPool.get_flat_data`` (A-MHA-9).
    """
    run = select("read_rows", IMPLEMENTATIONS, implementation, planes)
    return run(planes, layer, slots, first_slot=first_slot)


def reference(planes: Planes, layer: Layer, slots: Slots, *, first_slot: int) -> Rows:
    """The specification, in plain JAX."""
    num_layers, num_rows = planes[0].shape[:2]
    layers = jnp.arange(num_layers)[:, None] if layer is None else layer
    slots = absent_as(num_rows, slots, first_slot)
    rows = tuple(
        plane.at[layers, slots].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        for plane in planes
    )
    # Unfenced, XLA may compute the gather again after the next update of the plane, and keeps a
    # copy of the whole plane to do so.
    return jax.lax.optimization_barrier(rows)


def _mosaic_gpu(planes: Planes, layer: Layer, slots: Slots, *, first_slot: int) -> Rows:
    num_tokens = slots.shape[0]
    num_layers = planes[0].shape[0] if layer is None else 1
    sources = [row_copy.flat(plane) for plane in planes]
    rows = [
        row_copy.empty(num_layers, num_tokens, source.shape[-1], source.dtype) for source in sources
    ]
    row_copy.copy_rows(
        Side.of(rows),
        Side.of(sources, slots=slots, first_slot=first_slot, layer=layer),
        num_tokens=num_tokens,
        num_layers=num_layers,
    )
    leading = (num_layers, num_tokens) if layer is None else (num_tokens,)
    return tuple(
        jax.freeze(new).reshape(*leading, *plane.shape[2:])
        for new, plane in zip(rows, planes, strict=True)
    )


IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation(_mosaic_gpu, row_copy.why_not_rows),
    "reference": Implementation(reference, lambda *_: None),
}
