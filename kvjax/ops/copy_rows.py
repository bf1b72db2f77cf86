"""Copies rows of some planes to rows of others, of either tier."""

from kvjax.dispatch import Implementation, select
from kvjax.ops import read_rows, row_copy, write_rows
from kvjax.ops.sides import Side
from kvjax.ops.types import Layer, Planes, Slots, SourcePlanes


def copy_rows(
    target: Planes,
    target_slots: Slots,
    source: SourcePlanes,
    source_slots: Slots,
    *,
    target_first: int,
    source_first: int,
    target_layer: Layer = None,
    source_layer: Layer = None,
    implementation: str | None = None,
) -> Planes:
    """Returns ``target`` with ``source``'s row ``source_slots[t]`` at ``target_slots[t]``.

    Bits are preserved. A target slot that is not there is skipped; a source slot that is not there
    is a row of zeros. Target slots that are there are distinct, as in ``write_rows``.

    Args:
      target: updated in place where it is donated; no array of it is one of ``source``.
      target_slots: where each row goes.
      source: planes with the rows and dtypes of ``target``; read, not changed.
      source_slots: where each row comes from.
      target_first: the first slot of ``target`` that is there.
      source_first: the first slot of ``source`` that is there.
      target_layer: where to write, with ``source_layer``; ``None`` for all layers.
      source_layer: where to read.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.
    """
    run = select("copy_rows", IMPLEMENTATIONS, implementation, target)
    return run(
        target,
        target_slots,
        source,
        source_slots,
        target_first=target_first,
        source_first=source_first,
        target_layer=target_layer,
        source_layer=source_layer,
    )


def reference(
    target: Planes,
    target_slots: Slots,
    source: SourcePlanes,
    source_slots: Slots,
    *,
    target_first: int,
    source_first: int,
    target_layer: Layer,
    source_layer: Layer,
) -> Planes:
    """The specification, in plain JAX."""
    rows = read_rows.reference(source, source_layer, source_slots, first_slot=source_first)
    return write_rows.reference(target, target_layer, target_slots, rows, first_slot=target_first)


def _mosaic_gpu(
    target: Planes,
    target_slots: Slots,
    source: SourcePlanes,
    source_slots: Slots,
    *,
    target_first: int,
    source_first: int,
    target_layer: Layer,
    source_layer: Layer,
) -> Planes:
    refs = row_copy.as_refs(target)
    row_copy.copy_rows(
        Side.of(refs, slots=target_slots, first_slot=target_first, layer=target_layer),
        Side.of(
            [row_copy.flat(plane) for plane in source],
            slots=source_slots,
            first_slot=source_first,
            layer=source_layer,
        ),
        num_tokens=target_slots.shape[0],
        num_layers=target[0].shape[0] if target_layer is None else 1,
    )
    return row_copy.frozen(refs, target)


IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation(_mosaic_gpu, row_copy.why_not_rows),
    "reference": Implementation(reference, lambda *_: None),
}
