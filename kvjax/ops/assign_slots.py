"""Which slot each new token of a batch gets, given the pages that may be used."""

import jax.numpy as jnp
from jaxtyping import Array, Int32

from kvjax.dispatch import Implementation, select

PerSequence = Int32[Array, " sequences"]


def pages_needed(
    prefix_lens: PerSequence, extend_lens: PerSequence, *, page_size: int
) -> PerSequence:
    """How many pages each sequence needs beside those that hold its prefix."""
    return _pages(prefix_lens + extend_lens, page_size) - _pages(prefix_lens, page_size)


def assign_slots(
    prefix_lens: PerSequence,
    extend_lens: PerSequence,
    last_slots: PerSequence,
    starts: PerSequence,
    new_pages: Int32[Array, " pages"],
    *,
    page_size: int,
    num_tokens: int,
    implementation: str | None = None,
) -> Int32[Array, "{num_tokens}"]:
    """Returns a slot for each of the ``extend_len`` tokens that follow every sequence's prefix.

    A sequence first fills the page that its last token is in, then takes as many of ``new_pages``
    as it needs (``pages_needed``), in order, after those that the sequences before it take.

    Args:
      prefix_lens: tokens each sequence has.
      extend_lens: tokens it gets; may be 0.
      last_slots: the slot of each prefix's last token, used where the prefix ends inside a page.
        One that is negative or not at that place of a page gives -1, never a slot of some other.
      starts: the place in the result of each sequence's first new token; ascending from 0, so
        that the tokens of two sequences do not meet.
      new_pages: at least one, and at least as many as are needed.
      page_size: slots a page; any number.
      num_tokens: length of the result, which is -1 where no token is.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Source: SGLang 0.4.8 ``alloc_extend_kernel`` and ``alloc_decode_kernel`` (A-PG-3, A-PG-4),
    without their limits on tokens (AL6) and page size.
    """
    run = select("assign_slots", IMPLEMENTATIONS, implementation)
    return run(
        prefix_lens,
        extend_lens,
        last_slots,
        starts,
        new_pages,
        page_size=page_size,
        num_tokens=num_tokens,
    )


def reference(
    prefix_lens: PerSequence,
    extend_lens: PerSequence,
    last_slots: PerSequence,
    starts: PerSequence,
    new_pages: Int32[Array, " pages"],
    *,
    page_size: int,
    num_tokens: int,
) -> Int32[Array, "{num_tokens}"]:
    """The specification, in plain JAX."""
    if not starts.size or not num_tokens:
        return jnp.full(num_tokens, -1, jnp.int32)
    needed = pages_needed(prefix_lens, extend_lens, page_size=page_size)
    taken_before = jnp.cumsum(needed, dtype=jnp.int32) - needed
    continues = (last_slots >= 0) & ((last_slots + 1) % page_size == prefix_lens % page_size)

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    # Unrolled, the search is part of the one GPU kernel that everything from here on becomes.
    sequence = jnp.searchsorted(starts, token, side="right", method="scan_unrolled") - 1
    offset = token - starts[sequence]
    position = prefix_lens[sequence] + offset
    page = position // page_size - _pages(prefix_lens, page_size)[sequence]
    in_last_page = jnp.where(continues[sequence], last_slots[sequence] + 1 + offset, -1)
    in_new_page = new_pages[taken_before[sequence] + page] * page_size + position % page_size
    slots = jnp.where(page < 0, in_last_page, in_new_page)
    return jnp.where(offset < extend_lens[sequence], slots, -1)


def _pages(num_tokens: PerSequence, page_size: int) -> PerSequence:
    return -(-num_tokens // page_size)


IMPLEMENTATIONS = {"reference": Implementation(reference, lambda: None)}
