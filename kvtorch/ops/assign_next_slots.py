"""Which slot each sequence's newest token gets, given the pages that may be used."""

import torch
import triton
import triton.language as tl

from kvjax.dispatch import Implementation, select
from kvtorch.ops import launch
from kvtorch.ops.ring import Ring, is_taken

BLOCK = 256
"""Sequences of one program, and sequences before them that it looks at together."""


def assign_next_slots(
    seq_lens: torch.Tensor,
    last_slots: torch.Tensor,
    ring: Ring,
    *,
    page_size: int,
    num_new_pages: int,
    implementation: str | None = None,
) -> torch.Tensor:
    """Returns a slot, int64, for token ``seq_len - 1`` of each sequence.

    That is the one after ``last_slot`` or, where this ends a page, the first of the next page of
    ``ring``. The ring stays as it is. Tokens for which ``num_new_pages`` are not enough get -1.

    Args:
      seq_lens: tokens each sequence has, with the new one, ``[sequences]``; -1 if there are none.
        All arguments are on one device, of int32 or int64.
      last_slots: the slot of each sequence's token before; else as ``assign_slots``, as are
        ``ring``, ``page_size``, ``num_new_pages`` and ``implementation``.

    Raises:
      UnsupportedError: the named implementation cannot run.

    Source: SGLang 0.4.8 ``alloc_decode_kernel`` (A-PG-4), without its reads past the pages (AL1).
    """
    tensors = (seq_lens, last_slots)
    run = select("assign_next_slots", IMPLEMENTATIONS, implementation, *tensors, ring.pages)
    return run(*tensors, ring, page_size, num_new_pages)


def reference(
    seq_lens: torch.Tensor,
    last_slots: torch.Tensor,
    ring: Ring,
    page_size: int,
    num_new_pages: int,
) -> torch.Tensor:
    """The specification, in plain torch."""
    prefix_lens, last_slots = seq_lens.long() - 1, last_slots.long()
    in_page = prefix_lens % page_size
    has_token = prefix_lens >= 0
    takes_page = (in_page == 0).logical_and_(has_token)
    next_slots = last_slots + 1
    continues = (next_slots % page_size == in_page).logical_and_(has_token)
    continues &= ring.is_taken(last_slots // page_size)
    slots = torch.where(continues, next_slots, -1)
    index = takes_page.cumsum(0).sub_(1).clamp_(0, num_new_pages)
    first = ring.window(ring.head, num_new_pages) * page_size
    first = torch.cat((first, ring.pages.new_full((1,), -1)))
    return torch.where(takes_page, first.index_select(0, index), slots)


# Neither sizes nor where slices begin are compiled in.
_SIZES = ["head", "num_free", "num_pages", "num_new_pages", "num_sequences"]
_POINTERS = ["seq_ptr", "last_ptr", "pages_ptr", "places_ptr", "out"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def _kernel(
    seq_ptr,
    last_ptr,
    pages_ptr,
    places_ptr,
    out,
    head,
    num_free,
    num_pages,
    num_new_pages,
    num_sequences,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch.begin(EARLY)
    start = tl.program_id(0) * BLOCK
    step = tl.arange(0, BLOCK)

    # The pages that the sequences of the programs before this one take.
    taken = tl.zeros((BLOCK,), tl.int32)
    first = 0
    while first < start:  # the interpreter has no range() of tensors
        taken += _takes_page(tl.load(seq_ptr + first + step), PAGE_SIZE)
        first += BLOCK

    sequence = start + step
    mask = sequence < num_sequences
    seq_len = tl.load(seq_ptr + sequence, mask=mask, other=0).to(tl.int64)
    last_slot = tl.load(last_ptr + sequence, mask=mask, other=-1).to(tl.int64)
    takes_page = _takes_page(seq_len, PAGE_SIZE)
    index = tl.sum(taken, axis=0) + tl.cumsum(takes_page, axis=0) - 1
    is_new = (takes_page != 0) & (index < num_new_pages)
    place = head + index
    place = tl.where(place >= num_pages, place - num_pages, place)
    new_page = tl.load(pages_ptr + place, mask=is_new, other=0)

    continues = (seq_len > 0) & (takes_page == 0)
    continues &= (last_slot + 1) % PAGE_SIZE == (seq_len - 1) % PAGE_SIZE
    last_page = last_slot // PAGE_SIZE
    continues = is_taken(last_page, continues, pages_ptr, places_ptr, head, num_free, num_pages)
    slot = tl.where(is_new, new_page * PAGE_SIZE, tl.where(continues, last_slot + 1, -1))
    tl.store(out + sequence, slot, mask=mask)


@triton.jit
def _takes_page(seq_len, PAGE_SIZE: tl.constexpr):
    return ((seq_len > 0) & ((seq_len - 1) % PAGE_SIZE == 0)).to(tl.int32)


def _triton(
    seq_lens: torch.Tensor,
    last_slots: torch.Tensor,
    ring: Ring,
    page_size: int,
    num_new_pages: int,
) -> torch.Tensor:
    num_sequences = seq_lens.numel()
    out = ring.pages.new_empty(num_sequences)
    if not num_sequences:
        return out
    launch.launch(
        _kernel,
        (-(-num_sequences // BLOCK), 1, 1),
        (seq_lens.dtype, last_slots.dtype, page_size, BLOCK),
        (seq_lens.contiguous(), last_slots.contiguous(), ring.pages, ring.places, out),
        (ring.head, ring.num_free, ring.num_pages, num_new_pages, num_sequences, page_size, BLOCK),
    )
    return out


IMPLEMENTATIONS = {
    "triton": Implementation(_triton, launch.why_not),
    "reference": Implementation(reference, lambda *_: None),
}
