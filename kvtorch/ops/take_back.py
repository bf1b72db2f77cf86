"""How pages that come back get into the ring of pages that nobody has."""

import torch
import triton
import triton.language as tl

from kvjax.dispatch import Implementation, select
from kvtorch.ops import launch
from kvtorch.ops.ring import Ring, is_taken

BLOCK = 1024
"""Slots that the kernel looks at together, and pages that it can sort."""

MAX_SLOTS = 1 << 16
"""The kernel is one program, which takes them a block after the other; torch sorts more of them."""


def take_back(
    slots: torch.Tensor,
    ring: Ring,
    *,
    page_size: int,
    first: bool,
    implementation: str | None = None,
) -> int:
    """Puts the pages that ``slots`` are in into ``ring``, and returns how many these are.

    In place: the pages come into the places before the free ones, or after them; which places are
    free is for the caller to remember. Pages that nobody has, or that came earlier in ``slots``,
    are ignored. Waits for the device once.

    Args:
      slots: int32 or int64, of any value; on one device with the ring.
      ring: the pages that nobody has.
      page_size: slots a page; any number.
      first: the pages come before the free ones, in ascending order; else after them, in the order
        of ``slots``.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.

    Source: SGLang 0.4.8 ``free`` of both allocators (A-RM-4, A-PG-5), without two owners of a page
    that comes back twice (AL4, AL5).
    """
    run = select("take_back", IMPLEMENTATIONS, implementation, slots, ring)
    return run(slots, ring, page_size, first)


def reference(slots: torch.Tensor, ring: Ring, page_size: int, first: bool) -> int:
    """The specification, in plain torch."""
    pages = slots.long()
    if page_size > 1:
        pages = pages // page_size
    taken = ring.is_taken(pages)
    # Each slot claims its page, those that are not taken page 0; the first of a page gets it. Such
    # claims are no places, and pages that are taken have none to lose.
    claims = torch.arange(-pages.numel(), 0, device=pages.device)
    claimed = torch.where(taken, pages, 0)
    ring.places.scatter_reduce_(0, claimed, claims, "amin")
    pages = pages[taken.logical_and_(ring.places.index_select(0, claimed) == claims)]
    if first:
        pages = pages.sort().values
    count = pages.numel()
    if count:
        ring.store(pages, _start(ring, count, first))
    return count


def _start(ring: Ring, count: int, first: bool) -> int:
    return ring.head - count if first else ring.head + ring.num_free


# Neither sizes nor where slices begin are compiled in.
_SIZES = ["num_slots", "head", "num_free", "num_pages"]
_POINTERS = ["slots_ptr", "pages_ptr", "places_ptr", "count_ptr"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def _kernel(
    slots_ptr,
    pages_ptr,
    places_ptr,
    count_ptr,
    num_slots,
    head,
    num_free,
    num_pages,
    PAGE_SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch.begin(EARLY)
    step = tl.arange(0, BLOCK)

    # As in the reference, with a negative place for a claim; who comes first here counts the page.
    counted = tl.zeros((BLOCK,), tl.int32)
    start = 0
    while start < num_slots:  # the interpreter has no range() of tensors
        i = start + step
        page = tl.load(slots_ptr + i, mask=i < num_slots, other=-1).to(tl.int64) // PAGE_SIZE
        mask = i < num_slots
        mask = is_taken(page, mask, pages_ptr, places_ptr, head, num_free, num_pages)
        claim = (i - num_slots).to(tl.int64)
        before = tl.atomic_min(places_ptr + page, claim, mask=mask, sem="relaxed")
        counted += (mask & (before >= 0)).to(tl.int32)
        start += BLOCK
    count = tl.sum(counted, axis=0)
    tl.debug_barrier()

    if FIRST:
        target = head - count
        target = tl.where(target < 0, target + num_pages, target)
    else:
        target = head + num_free
    done = 0
    start = 0
    while start < num_slots:
        i = start + step
        page = tl.load(slots_ptr + i, mask=i < num_slots, other=-1).to(tl.int64) // PAGE_SIZE
        is_there = (page >= 1) & (page <= num_pages)
        # Not from a cache that atomic operations pass by.
        claim = tl.load(places_ptr + page, mask=is_there, other=0, cache_modifier=".cg")
        is_first = is_there & (claim == i - num_slots)
        index = done + tl.cumsum(is_first.to(tl.int32), axis=0)
        place = target + index - 1
        place = tl.where(place >= num_pages, place - num_pages, place)
        tl.store(pages_ptr + place, page, mask=is_first)
        tl.store(places_ptr + page, place.to(tl.int64), mask=is_first)
        done += tl.sum(is_first.to(tl.int32), axis=0)  # pyright: ignore[reportOperatorIssue]
        start += BLOCK

    if FIRST:
        tl.debug_barrier()
        if count <= BLOCK:
            place = target + step
            place = tl.where(place >= num_pages, place - num_pages, place)
            mask = step < count
            page = tl.load(pages_ptr + place, mask=mask, other=2**31 - 1, cache_modifier=".cg")
            page = tl.sort(page.to(tl.int32)).to(tl.int64)
            tl.debug_barrier()
            tl.store(pages_ptr + place, page, mask=mask)
            tl.store(places_ptr + page, place.to(tl.int64), mask=mask)
    tl.store(count_ptr, count.to(tl.int64))


def _triton(slots: torch.Tensor, ring: Ring, page_size: int, first: bool) -> int:
    number = ring.pages.new_empty(1)
    launch.launch(
        _kernel,
        (1, 1, 1),
        (slots.dtype, page_size, first, BLOCK),
        (slots.contiguous(), ring.pages, ring.places, number),
        (slots.numel(), ring.head, ring.num_free, ring.num_pages, page_size, first, BLOCK),
        num_warps=8,
    )
    count = int(number)
    if first and count > BLOCK:  # more than the kernel sorts
        start = _start(ring, count, first) % ring.num_pages
        ring.store(ring.window(start, count).sort().values, start)
    return count


def _triton_why_not(slots: torch.Tensor, ring: Ring) -> str | None:
    if slots.numel() > MAX_SLOTS:
        return f"takes up to {MAX_SLOTS} slots, not {slots.numel()}"
    return launch.why_not(slots, ring.pages)


IMPLEMENTATIONS = {
    "triton": Implementation(_triton, _triton_why_not),
    "reference": Implementation(reference, lambda *_: None),
}
