"""Which slot each new token of a batch gets, given the pages that may be used."""

import torch
import triton
import triton.language as tl

from kvjax.dispatch import Implementation, select
from kvtorch.ops import launch

BLOCK = 1024
"""Tokens of one sequence, or sequences before it, that a program looks at together."""

MAX_PROGRAMS = 2112
"""How far long sequences are split: the programs that one H200 (132 x 16) holds at a time."""


def assign_slots(
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    last_slots: torch.Tensor,
    starts: torch.Tensor,
    new_pages: torch.Tensor,
    *,
    page_size: int,
    num_tokens: int,
    taken: torch.Tensor | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Returns a slot, int64, for each of the ``extend_len`` tokens that follow every prefix.

    A sequence first fills the page that its last token is in, then takes as many of ``new_pages``
    as it needs, in order, after those that the sequences before it take. Where these are fewer than
    needed, the tokens without a page get -1; memory past them is never read.

    Args:
      prefix_lens: tokens each sequence has, ``[sequences]``; all arguments are on one device, of
        integers of any width.
      extend_lens: tokens it gets, ``[sequences]``; may be 0, and is 0 where ``prefix_len`` is
        negative.
      last_slots: the slot of each prefix's last token, used where the prefix ends inside a page.
        One that is negative or not at that place of a page gives -1, never a slot of some other.
      starts: the place in the result of each sequence's first new token; ascending from 0, so
        that the tokens of two sequences do not meet.
      new_pages: ``[pages]``; may be empty.
      page_size: slots a page; any number.
      num_tokens: length of the result, which is -1 where no token is.
      taken: for each page that there is, as bools, whether somebody has it; a last slot in another
        page gives -1. ``None`` if all are whose they should be.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.

    Source: SGLang 0.4.8 ``alloc_extend_kernel`` and ``alloc_decode_kernel`` (A-PG-3, A-PG-4),
    without their limits on tokens (AL6) and page size, nor their reads past the pages (AL1).
    """
    tensors = (prefix_lens, extend_lens, last_slots, starts, new_pages)
    run = select("assign_slots", IMPLEMENTATIONS, implementation, *tensors)
    return run(*tensors, page_size, num_tokens, taken)


def reference(
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    last_slots: torch.Tensor,
    starts: torch.Tensor,
    new_pages: torch.Tensor,
    page_size: int,
    num_tokens: int,
    taken: torch.Tensor | None,
) -> torch.Tensor:
    """The specification, in plain torch."""
    device = new_pages.device
    if not starts.numel() or not num_tokens:
        return torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
    prefix_lens, extend_lens, last_slots, starts = (
        x.long() for x in (prefix_lens, extend_lens, last_slots, starts)
    )
    old_pages = _pages(prefix_lens, page_size)
    needed = _pages(prefix_lens + extend_lens, page_size) - old_pages
    taken_before = needed.cumsum(0) - needed
    continues = (last_slots >= 0) & ((last_slots + 1) % page_size == prefix_lens % page_size)
    if taken is not None:
        page = last_slots // page_size
        continues &= (page < taken.numel()) & taken[page.clamp(0, taken.numel() - 1)]

    token = torch.arange(num_tokens, device=device)
    sequence = torch.searchsorted(starts, token, right=True) - 1
    offset = token - starts[sequence]
    position = prefix_lens[sequence] + offset
    page = position // page_size - old_pages[sequence]
    in_last_page = torch.where(continues, last_slots + 1, -1)[sequence]
    in_last_page = torch.where(in_last_page >= 0, in_last_page + offset, -1)
    # One more than there are, for those that are not there.
    new_pages = torch.cat((new_pages.long(), new_pages.new_full((1,), -1, dtype=torch.int64)))
    index = taken_before[sequence] + page
    new_page = new_pages[torch.where(page >= 0, index, 0).clamp(max=new_pages.numel() - 1)]
    in_new_page = torch.where(new_page >= 0, new_page * page_size + position % page_size, -1)
    slots = torch.where(page < 0, in_last_page, in_new_page)
    return torch.where(offset < extend_lens[sequence], slots, -1)


def _pages(num_tokens: torch.Tensor, page_size: int) -> torch.Tensor:
    return -(-num_tokens // page_size)


# Neither sizes nor where slices begin are compiled in.
_SIZES = ["num_sequences", "num_new_pages", "num_pages", "num_tokens"]
_POINTERS = ["prefix_ptr", "extend_ptr", "last_ptr", "starts_ptr", "pages_ptr", "taken_ptr", "out"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def _kernel(
    prefix_ptr,
    extend_ptr,
    last_ptr,
    starts_ptr,
    pages_ptr,
    taken_ptr,
    out,
    num_sequences,
    num_new_pages,
    num_pages,
    num_tokens,
    PAGE_SIZE: tl.constexpr,
    HAS_TAKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch.begin(EARLY)
    sequence = tl.program_id(0)
    step = tl.arange(0, BLOCK)

    # The pages that the sequences before this one take.
    needed = tl.zeros((BLOCK,), tl.int64)
    first = 0
    while first < sequence:  # the interpreter has no range() of tensors
        before = first + step
        mask = before < sequence
        prefix_len = tl.load(prefix_ptr + before, mask=mask, other=0).to(tl.int64)
        extend_len = tl.load(extend_ptr + before, mask=mask, other=0).to(tl.int64)
        old_pages = (prefix_len + (PAGE_SIZE - 1)) // PAGE_SIZE
        pages = (prefix_len + extend_len + (PAGE_SIZE - 1)) // PAGE_SIZE
        needed += tl.where(extend_len > 0, pages - old_pages, 0)
        first += BLOCK
    taken_before = tl.sum(needed, axis=0)

    prefix_len = tl.load(prefix_ptr + sequence).to(tl.int64)
    extend_len = tl.load(extend_ptr + sequence).to(tl.int64)
    last_slot = tl.load(last_ptr + sequence).to(tl.int64)
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    # Up to where the next one begins, so that every place of the result is written once.
    is_last = sequence + 1 == num_sequences
    stop = tl.load(starts_ptr + sequence + 1, mask=sequence + 1 < num_sequences, other=0)
    stop = tl.where(is_last, num_tokens, tl.minimum(stop.to(tl.int64), num_tokens))

    continues = (last_slot >= 0) & ((last_slot + 1) % PAGE_SIZE == prefix_len % PAGE_SIZE)
    if HAS_TAKEN:
        last_page = last_slot // PAGE_SIZE
        there = (last_slot >= 0) & (last_page < num_pages)
        continues &= tl.load(taken_ptr + last_page, mask=there, other=0) != 0

    old_pages = (prefix_len + (PAGE_SIZE - 1)) // PAGE_SIZE
    first_token = start + tl.program_id(1).to(tl.int64) * BLOCK
    while first_token < stop:
        token = first_token + step
        offset = token - start
        has_token = (token < stop) & (offset < extend_len)
        position = prefix_len + offset
        page = position // PAGE_SIZE - old_pages
        index = taken_before + page
        in_new_page = has_token & (page >= 0) & (index < num_new_pages)
        new_page = tl.load(pages_ptr + index, mask=in_new_page, other=0).to(tl.int64)
        slot = tl.where(in_new_page, new_page * PAGE_SIZE + position % PAGE_SIZE, -1)
        slot = tl.where(has_token & (page < 0) & continues, last_slot + 1 + offset, slot)
        tl.store(out + token, slot, mask=token < stop)
        first_token += BLOCK * tl.num_programs(1)


def _triton(
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    last_slots: torch.Tensor,
    starts: torch.Tensor,
    new_pages: torch.Tensor,
    page_size: int,
    num_tokens: int,
    taken: torch.Tensor | None,
) -> torch.Tensor:
    num_sequences = starts.numel()
    if not num_sequences or not num_tokens:
        return torch.full((num_tokens,), -1, dtype=torch.int64, device=new_pages.device)
    out = torch.empty(num_tokens, dtype=torch.int64, device=new_pages.device)
    chunks = min(-(-num_tokens // BLOCK), max(MAX_PROGRAMS // num_sequences, 1))
    tensors = [x.contiguous() for x in (prefix_lens, extend_lens, last_slots, starts, new_pages)]
    constants = (page_size, taken is not None, BLOCK)
    launch.launch(
        _kernel,
        (num_sequences, chunks, 1),
        (*(x.dtype for x in tensors), constants),
        (*tensors, out if taken is None else taken, out),
        (
            num_sequences,
            new_pages.numel(),
            0 if taken is None else taken.numel(),
            num_tokens,
            *constants,
        ),
    )
    return out


IMPLEMENTATIONS = {
    "triton": Implementation(_triton, launch.why_not),
    "reference": Implementation(reference, lambda *_: None),
}
