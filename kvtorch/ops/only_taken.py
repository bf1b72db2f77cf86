"""Which of some slots somebody has."""

import torch
import triton
import triton.language as tl

from kvjax.dispatch import Implementation, select
from kvtorch.ops import launch
from kvtorch.ops.ring import Ring, is_taken

BLOCK = 1024
"""Slots of one program."""


def only_taken(
    slots: torch.Tensor, ring: Ring, *, page_size: int, implementation: str | None = None
) -> torch.Tensor:
    """Returns ``slots``, as int64, with -1 for each in a page that nobody has.

    Args:
      slots: int32 or int64, of any value; on one device with the ring.
      ring: the pages that nobody has.
      page_size: slots a page; any number.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.
    """
    run = select("only_taken", IMPLEMENTATIONS, implementation, slots, ring.pages)
    return run(slots, ring, page_size)


def reference(slots: torch.Tensor, ring: Ring, page_size: int) -> torch.Tensor:
    """The specification, in plain torch."""
    slots = slots.long()
    return slots.where(ring.is_taken(slots // page_size), -1)


# Neither sizes nor where slices begin are compiled in.
_SIZES = ["num_slots", "head", "num_free", "num_pages"]
_POINTERS = ["slots_ptr", "pages_ptr", "places_ptr", "out"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def _kernel(
    slots_ptr,
    pages_ptr,
    places_ptr,
    out,
    num_slots,
    head,
    num_free,
    num_pages,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch.begin(EARLY)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + i, mask=i < num_slots, other=-1).to(tl.int64)
    taken = is_taken(
        slot // PAGE_SIZE, i < num_slots, pages_ptr, places_ptr, head, num_free, num_pages
    )
    tl.store(out + i, tl.where(taken, slot, -1), mask=i < num_slots)


def _triton(slots: torch.Tensor, ring: Ring, page_size: int) -> torch.Tensor:
    num_slots = slots.numel()
    out = ring.pages.new_empty(num_slots)
    if not num_slots:
        return out
    launch.launch(
        _kernel,
        (-(-num_slots // BLOCK), 1, 1),
        (slots.dtype, page_size, BLOCK),
        (slots.contiguous(), ring.pages, ring.places, out),
        (num_slots, ring.head, ring.num_free, ring.num_pages, page_size, BLOCK),
    )
    return out


IMPLEMENTATIONS = {
    "triton": Implementation(_triton, launch.why_not),
    "reference": Implementation(reference, lambda *_: None),
}
