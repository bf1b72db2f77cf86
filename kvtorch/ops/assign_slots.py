"""Which slot each new token of a batch gets, given the pages that may be used."""

import torch
import triton
import triton.language as tl

from kvjax.dispatch import Implementation, select
from kvtorch.ops import launch
from kvtorch.ops.ring import Ring, is_taken

BLOCK = 1024
"""Tokens of one sequence, or sequences before it, that a program looks at together."""

MAX_PROGRAMS = 2112
"""How far long sequences are split: the programs that one H200 (132 x 16) holds at a time."""

_NONE = -(1 << 60)
"""Added to anything, no slot."""


def assign_slots(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_slots: torch.Tensor,
    ring: Ring,
    *,
    page_size: int,
    num_new_pages: int,
    num_tokens: int,
    implementation: str | None = None,
) -> torch.Tensor:
    """Returns a slot, int64, for tokens ``prefix_len`` to ``seq_len - 1`` of each sequence in turn.

    A sequence first fills the page that its last token is in, then takes as many pages of ``ring``
    as it needs, in order, after those that the sequences before it take. The ring stays as it is.
    Tokens for which ``num_new_pages`` are not enough get -1.

    Args:
      prefix_lens: tokens each sequence has, ``[sequences]``; all arguments are on one device, of
        int32 or int64.
      seq_lens: tokens it is to have, ``[sequences]``. It gets none if that is not more, or if
        ``prefix_len`` is negative.
      last_slots: the slot of each prefix's last token, used where the prefix ends inside a page.
        One that is not at that place of a page, or of a page that nobody has, gives -1.
      ring: the pages that nobody has.
      page_size: slots a page; any number.
      num_new_pages: how many of the ring's pages may be used; at most those that are free.
      num_tokens: length of the result, which is -1 where no token is; tokens past it get no slot.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.

    Source: SGLang 0.4.8 ``alloc_extend_kernel`` (A-PG-3), without its limits on tokens (AL6) and
    page size, nor its reads past the pages (AL1).
    """
    tensors = (prefix_lens, seq_lens, last_slots)
    run = select("assign_slots", IMPLEMENTATIONS, implementation, *tensors, ring.pages)
    return run(*tensors, ring, page_size, num_new_pages, num_tokens)


def reference(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_slots: torch.Tensor,
    ring: Ring,
    page_size: int,
    num_new_pages: int,
    num_tokens: int,
) -> torch.Tensor:
    """The specification, in plain torch."""
    if not prefix_lens.numel() or not num_tokens:
        return ring.pages.new_full((num_tokens,), -1)
    prefix_lens, seq_lens, last_slots = (x.long() for x in (prefix_lens, seq_lens, last_slots))
    seq_lens = torch.where(prefix_lens < 0, prefix_lens, torch.maximum(prefix_lens, seq_lens))
    stops = (seq_lens - prefix_lens).cumsum(0)
    old_pages, pages = _pages(prefix_lens, page_size), _pages(seq_lens, page_size)
    index_of_first = (pages - old_pages).cumsum(0).sub_(pages)
    in_old = last_slots + 1 - prefix_lens
    continues = (in_old % page_size == 0).logical_and_(ring.is_taken(last_slots // page_size))
    in_old = torch.where(continues, in_old, _NONE)

    token = torch.arange(num_tokens, device=ring.pages.device)
    sequence = torch.searchsorted(stops, token, right=True).clamp_(max=stops.numel() - 1)
    position = (seq_lens - stops).index_select(0, sequence).add_(token)
    page = position // page_size
    index = index_of_first.index_select(0, sequence).add_(page).clamp_(0, num_new_pages)
    none = ring.pages.new_full((1,), _NONE)
    new_pages = torch.cat((ring.window(ring.head, num_new_pages) * page_size, none))
    in_new = new_pages.index_select(0, index).sub_(page * page_size)
    is_new = page >= old_pages.index_select(0, sequence)
    slots = torch.where(is_new, in_new, in_old.index_select(0, sequence)).add_(position)
    return slots.clamp_(min=-1).masked_fill_(token >= stops[-1], -1)


def _pages(num_tokens: torch.Tensor, page_size: int) -> torch.Tensor:
    return (num_tokens + (page_size - 1)) // page_size


# Neither sizes nor where slices begin are compiled in.
_SIZES = ["head", "num_free", "num_pages", "num_new_pages", "num_sequences", "num_tokens"]
_POINTERS = ["prefix_ptr", "seq_ptr", "last_ptr", "pages_ptr", "places_ptr", "out"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def _kernel(
    prefix_ptr,
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
    num_tokens,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch.begin(EARLY)
    sequence = tl.program_id(0)
    step = tl.arange(0, BLOCK)

    # What the sequences before this one get.
    tokens = tl.zeros((BLOCK,), tl.int64)
    taken = tl.zeros((BLOCK,), tl.int64)
    first = 0
    while first < sequence:  # the interpreter has no range() of tensors
        before = first + step
        mask = before < sequence
        prefix_len = tl.load(prefix_ptr + before, mask=mask, other=0).to(tl.int64)
        seq_len = tl.load(seq_ptr + before, mask=mask, other=0).to(tl.int64)
        seq_len = _grown(prefix_len, seq_len)
        tokens += seq_len - prefix_len
        old_pages = (prefix_len + (PAGE_SIZE - 1)) // PAGE_SIZE
        taken += (seq_len + (PAGE_SIZE - 1)) // PAGE_SIZE - old_pages
        first += BLOCK
    start = tl.sum(tokens, axis=0)
    taken_before = tl.sum(taken, axis=0)

    prefix_len = tl.load(prefix_ptr + sequence).to(tl.int64)
    seq_len = _grown(prefix_len, tl.load(seq_ptr + sequence).to(tl.int64))
    last_slot = tl.load(last_ptr + sequence).to(tl.int64)
    grow = seq_len - prefix_len
    # The last one also writes where no token is, so that every place is written once.
    is_last = sequence + 1 == num_sequences
    stop = tl.where(is_last, num_tokens, tl.minimum(start + grow, num_tokens))

    continues = (last_slot + 1) % PAGE_SIZE == prefix_len % PAGE_SIZE
    last_page = last_slot // PAGE_SIZE
    continues = is_taken(last_page, continues, pages_ptr, places_ptr, head, num_free, num_pages)

    old_pages = (prefix_len + (PAGE_SIZE - 1)) // PAGE_SIZE
    first_token = start + tl.program_id(1).to(tl.int64) * BLOCK
    while first_token < stop:
        token = first_token + step
        offset = token - start
        has_token = (token < stop) & (offset < grow)
        position = prefix_len + offset
        page = position // PAGE_SIZE - old_pages
        index = taken_before + page
        is_new = has_token & (page >= 0) & (index < num_new_pages)
        place = head + index
        place = tl.where(place >= num_pages, place - num_pages, place)
        new_page = tl.load(pages_ptr + place, mask=is_new, other=0)
        slot = tl.where(is_new, new_page * PAGE_SIZE + position % PAGE_SIZE, -1)
        slot = tl.where(has_token & (page < 0) & continues, last_slot + 1 + offset, slot)
        tl.store(out + token, slot, mask=token < stop)
        first_token += BLOCK * tl.num_programs(1)


@triton.jit
def _grown(prefix_len, seq_len):
    return tl.where(prefix_len < 0, prefix_len, tl.maximum(prefix_len, seq_len))


def _triton(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_slots: torch.Tensor,
    ring: Ring,
    page_size: int,
    num_new_pages: int,
    num_tokens: int,
) -> torch.Tensor:
    num_sequences = prefix_lens.numel()
    if not num_sequences or not num_tokens:
        return ring.pages.new_full((num_tokens,), -1)
    out = ring.pages.new_empty(num_tokens)
    chunks = min(-(-num_tokens // BLOCK), max(MAX_PROGRAMS // num_sequences, 1))
    launch.launch(
        _kernel,
        (num_sequences, chunks, 1),
        (prefix_lens.dtype, seq_lens.dtype, last_slots.dtype, page_size, BLOCK),
        (
            prefix_lens.contiguous(),
            seq_lens.contiguous(),
            last_slots.contiguous(),
            ring.pages,
            ring.places,
            out,
        ),
        (
            ring.head,
            ring.num_free,
            ring.num_pages,
            num_new_pages,
            num_sequences,
            num_tokens,
            page_size,
            BLOCK,
        ),
    )
    return out


IMPLEMENTATIONS = {
    "triton": Implementation(_triton, launch.why_not),
    "reference": Implementation(reference, lambda *_: None),
}
