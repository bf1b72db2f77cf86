"""Sets rows of planes to zero, in all layers and planes in one launch."""

from kvjax.dispatch import Implementation, select
from kvjax.ops import row_copy
from kvjax.ops.sides import Side
from kvjax.ops.types import Planes, Slots
from kvjax.slots import absent_as


def zero_rows(
    planes: Planes, slots: Slots, *, first_slot: int, implementation: str | None = None
) -> Planes:
    """Returns ``planes`` with zero bits at ``slots``, in every layer and plane.

    A slot below ``first_slot`` or past the end does nothing; a repeated one does no harm.

    Raises:
      UnsupportedError: the named implementation cannot run.
    """
    run = select("zero_rows", IMPLEMENTATIONS, implementation, planes)
    return run(planes, slots, first_slot=first_slot)


def reference(planes: Planes, slots: Slots, *, first_slot: int) -> Planes:
    """The specification, in plain JAX."""
    slots = absent_as(planes[0].shape[1], slots, first_slot)
    return tuple(plane.at[:, slots].set(0, mode="drop") for plane in planes)


def _mosaic_gpu(planes: Planes, slots: Slots, *, first_slot: int) -> Planes:
    refs = row_copy.as_refs(planes)
    row_copy.copy_rows(
        Side.of(refs, slots=slots, first_slot=first_slot),
        num_tokens=slots.shape[0],
        num_layers=planes[0].shape[0],
    )
    return row_copy.frozen(refs, planes)


IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation(_mosaic_gpu, row_copy.why_not_rows),
    "reference": Implementation(reference, lambda *_: None),
}
