"""Which slots the next tokens get.

Two allocators and one set of functions for both. They differ in their page size, and in where
freed pages go: behind the others in the order given (``SlotAllocator``), or before them, sorted
(``PageAllocator``).

A function that returns an allocator updates the given one in place and uses it up; if it raises,
the given one is as good as before. Those that hand out slots return ``(state, slots, ok)``: when
there are too few, ``ok`` is False, nothing is handed out, and every slot is -1. All work under
``jit``, ``scan`` and ``while_loop``, with no host synchronisation. Arrays of integers may be lists,
NumPy or JAX arrays; ``slots.as_slots`` says what it refuses.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, Int32

from kvjax import free_list
from kvjax.checks_mode import enabled
from kvjax.errors import GeometryError
from kvjax.free_list import FreeList
from kvjax.ops.assign_slots import assign_slots, pages_needed
from kvjax.slots import as_slots

type Ints = Int[ArrayLike, " n"] | Sequence[int]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotAllocator:
    """Hands out single slots, those freed first before those freed later.

    Attributes:
      free_pages: the free slots, each a page of its own.
      pending: the slots freed in the open free group.
      group_depth: how many free groups are open.

    Source: SGLang 0.4.8 ``TokenToKVPoolAllocator`` (A-RM-1 to A-RM-9), which lacks ``extend`` and
    ``decode``.
    """

    free_pages: FreeList
    pending: tuple[Int32[Array, " _"], ...] = ()
    group_depth: int = dataclasses.field(default=0, metadata={"static": True})

    page_size: ClassVar[int] = 1
    take_back: ClassVar = staticmethod(free_list.append)

    @classmethod
    def create(cls, num_slots: int) -> "SlotAllocator":
        """Slots 1 to ``num_slots``, all free.

        Raises:
          TypeError: ``num_slots`` is not an integer.
          GeometryError: it is less than 1, or does not fit int32 slots.
        """
        free_pages, _ = _all_pages(num_slots, cls.page_size)
        return cls(free_pages)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageAllocator:
    """Hands out whole pages, those freed last first; a sequence then fills its own.

    Attributes:
      free_pages: the free pages.
      page_size: slots a page; any number.
      pending: the slots freed in the open free group.
      group_depth: how many free groups are open.

    Source: SGLang 0.4.8 ``PagedTokenToKVPoolAllocator`` (A-PG-1 to A-PG-7).
    """

    free_pages: FreeList
    page_size: int = dataclasses.field(metadata={"static": True})
    pending: tuple[Int32[Array, " _"], ...] = ()
    group_depth: int = dataclasses.field(default=0, metadata={"static": True})

    take_back: ClassVar = staticmethod(free_list.prepend_sorted)

    @classmethod
    def create(cls, num_slots: int, page_size: int) -> "PageAllocator":
        """Pages 1 to ``num_slots // page_size``, all free; page 0 is the padding page.

        Raises:
          TypeError: a size is not an integer.
          GeometryError: a size is less than 1, or ``num_slots`` is not a multiple of ``page_size``
            or does not fit int32 slots.
        """
        return cls(*_all_pages(num_slots, page_size))


def alloc[A: (SlotAllocator, PageAllocator)](
    state: A, num_slots: int
) -> tuple[A, Int32[Array, "{num_slots}"], Bool[Array, ""]]:
    """Hands out ``num_slots`` slots, in whole pages; a static number.

    Raises:
      TypeError: ``num_slots`` is not an integer.
      ValueError: it is negative, does not fit int32 or is not a multiple of the page size (S8).

    Source: A-RM-3, A-PG-2.
    """
    num_slots, page_size = free_list.as_count("num_slots", num_slots), state.page_size
    if num_slots % page_size:
        raise ValueError(
            f"{num_slots=} must be a multiple of {page_size=}; "
            "extend and decode hand out parts of a page"
        )
    free_pages, slots, ok = _alloc(
        state.free_pages, num_pages=num_slots // page_size, page_size=page_size
    )
    return dataclasses.replace(state, free_pages=free_pages), slots, ok


def extend[A: (SlotAllocator, PageAllocator)](
    state: A, prefix_lens: Ints, seq_lens: Ints, last_slots: Ints, num_tokens: int
) -> tuple[A, Int32[Array, "{num_tokens}"], Bool[Array, ""]]:
    """Hands out slots for tokens ``prefix_len`` to ``seq_len - 1`` of every sequence in turn.

    Args:
      state: the allocator.
      prefix_lens: tokens that each sequence has.
      seq_lens: tokens that it is to have. A sequence that does not grow is padding.
      last_slots: the slot of each prefix's last token, used where the prefix ends inside a page,
        which is filled first. One that is not at that place of a page, or of a page that nobody
        has, gives -1 instead. A page that was freed and handed out again looks like the sequence's.
      num_tokens: static, the most tokens there may be in all sequences; with more, ``ok`` is
        False. With fewer, the last slots are -1.

    Raises:
      TypeError: ``num_tokens`` is not an integer.
      ValueError: it is negative or does not fit int32, or the arguments' lengths differ. In checks
        mode, also: a sequence shrinks or has a negative length, or a last slot that is used is not
        at its place of a page that was handed out and not freed, or two are in one page.

    Source: A-PG-3, with capacity decided before anything else (AL1).
    """
    num_tokens = free_list.as_count("num_tokens", num_tokens)
    sequences = _one_entry_each(prefix_lens=prefix_lens, seq_lens=seq_lens, last_slots=last_slots)
    if enabled():
        _check_growth(state, *sequences)
    free_pages, slots, ok = _extend(
        state.free_pages, *sequences, page_size=state.page_size, num_tokens=num_tokens
    )
    return dataclasses.replace(state, free_pages=free_pages), slots, ok


def decode[A: (SlotAllocator, PageAllocator)](
    state: A, seq_lens: Ints, last_slots: Ints
) -> tuple[A, Int32[Array, " sequences"], Bool[Array, ""]]:
    """Hands out the slot of each sequence's token ``seq_len - 1``, its newest.

    Args:
      state: the allocator.
      seq_lens: tokens of each sequence, the new one included. One of 0 is padding and gets -1.
      last_slots: the slot of the token before, as in ``extend``.

    Raises:
      ValueError: as ``extend``.

    Source: A-PG-4, with capacity decided before anything else (AL1).
    """
    seq_lens, last_slots = _one_entry_each(seq_lens=seq_lens, last_slots=last_slots)
    if enabled():
        _check_growth(state, jnp.maximum(seq_lens - 1, 0), seq_lens, last_slots)
    free_pages, slots, ok = _decode(
        state.free_pages, seq_lens, last_slots, page_size=state.page_size
    )
    return dataclasses.replace(state, free_pages=free_pages), slots, ok


def free[A: (SlotAllocator, PageAllocator)](state: A, slots: Ints) -> A:
    """Takes back the pages that ``slots`` are in; in a free group, when the outermost one ends.

    One slot frees its whole page, several of a page free it once. Slots that nobody has are
    ignored: freed already, of the padding page, negative or too large.

    Raises:
      ValueError: in checks mode, a slot is named twice or nobody has it.

    Source: A-RM-4, A-PG-5, AL4, AL5.
    """
    slots = free_list.as_returned(
        state.free_pages, "slots", slots, per_number=state.page_size, earlier=state.pending
    )
    if state.group_depth:
        # Later, a slot that nobody has now could be somebody's.
        freed = _only_taken(state.free_pages, slots, page_size=state.page_size)
        return dataclasses.replace(state, pending=(*state.pending, freed))
    return _take_back(state, slots)


def free_group_begin[A: (SlotAllocator, PageAllocator)](state: A) -> A:
    """Opens a free group, whose slots are taken back all at once; groups nest.

    What is pending is part of the allocator's structure, so that a group begun inside ``jit`` or
    a loop's body has to end there.

    Source: A-RM-5, AL3.
    """
    return dataclasses.replace(state, group_depth=state.group_depth + 1)


def free_group_end[A: (SlotAllocator, PageAllocator)](state: A) -> A:
    """Closes the innermost free group, if one is open; the outermost as one ``free`` of them all.

    Source: A-RM-5, AL3.
    """
    if state.group_depth > 1:
        return dataclasses.replace(state, group_depth=state.group_depth - 1)
    pending = state.pending
    state = dataclasses.replace(state, pending=(), group_depth=0)
    if not pending:
        return state
    # One at a time: a concatenation would compile for each combination of sizes.
    num_slots = free_list.padded(sum(slots.size for slots in pending))
    together, start = jnp.full(num_slots, free_list.NOBODY, jnp.int32), 0
    for slots in pending:
        together = jax.lax.dynamic_update_slice(together, slots, (start,))
        start += slots.size
    return _take_back(state, together)


def backup[A: (SlotAllocator, PageAllocator)](state: A) -> A:
    """A copy for ``restore``, open free group included, at the cost of copying every page number.

    Source: A-RM-6.
    """
    return jax.tree.map(jnp.copy, state)


def restore[A: (SlotAllocator, PageAllocator)](snapshot: A) -> A:
    """The allocator as it was at ``backup``, from where it can be restored again.

    Source: A-RM-6.
    """
    return jax.tree.map(jnp.copy, snapshot)


def clear[A: (SlotAllocator, PageAllocator)](state: A) -> A:
    """The allocator as it was created: everything free, no free group open.

    Source: A-RM-9, A-PG-6.
    """
    free_pages = free_list.reset(state.free_pages)
    return dataclasses.replace(state, free_pages=free_pages, pending=(), group_depth=0)


def available(state: SlotAllocator | PageAllocator) -> Int32[Array, ""]:
    """How many slots are free, those of an open free group not included (A-RM-2)."""
    return state.free_pages.num_free * state.page_size


def _all_pages(num_slots: int, page_size: int) -> tuple[FreeList, int]:
    size = functools.partial(free_list.as_count, least=1, error=GeometryError)
    num_slots, page_size = size("num_slots", num_slots), size("page_size", page_size)
    if num_slots % page_size:
        raise GeometryError(f"{num_slots=} must be a multiple of {page_size=}")
    if num_slots + page_size > 2**31 - 1:
        raise GeometryError(f"{num_slots=} does not fit int32 slot numbers")
    return free_list.create(1, num_slots // page_size), page_size


def _one_entry_each(**arrays: Ints) -> list[Int32[Array, " sequences"]]:
    converted = [as_slots(array, name=name) for name, array in arrays.items()]
    lengths = {name: array.size for name, array in zip(arrays, converted, strict=True)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{lengths} must be equal, one entry for each sequence")
    return converted


def _check_growth(state, prefix_lens, seq_lens, last_slots):
    arrays = (prefix_lens, seq_lens, last_slots)
    if any(isinstance(x, Tracer) for x in (state.free_pages.mark, *state.pending, *arrays)):
        return
    page_size = state.page_size
    freed = {slot // page_size for slots in state.pending for slot in slots.tolist()}
    filled_by = {}
    taken = free_list.is_taken(state.free_pages, last_slots // page_size)
    rows = zip(*(x.tolist() for x in (*arrays, taken)), strict=True)
    for i, (prefix_len, seq_len, last_slot, is_taken) in enumerate(rows):
        if not 0 <= prefix_len <= seq_len:
            raise ValueError(
                f"seq_lens[{i}]={seq_len} is less than the {prefix_len=} before; "
                "a sequence grows, or keeps its length as padding"
            )
        place, page = prefix_len % page_size, last_slot // page_size
        if seq_len == prefix_len or not place:
            continue
        if not is_taken or page in freed or (last_slot + 1) % page_size != place:
            raise ValueError(
                f"last_slots[{i}]={last_slot} cannot hold token {prefix_len - 1}; allowed: "
                f"slot {place - 1} of a page of {page_size} that was handed out and not freed"
            )
        if (j := filled_by.setdefault(page, i)) != i:
            raise ValueError(
                f"last_slots[{i}]={last_slot} is in the page of last_slots[{j}]; "
                "two sequences cannot both fill it"
            )


def _take_back[A: (SlotAllocator, PageAllocator)](state: A, slots: Int32[Array, " n"]) -> A:
    free_pages = _free(
        state.free_pages, slots, page_size=state.page_size, take_back=state.take_back
    )
    return dataclasses.replace(state, free_pages=free_pages)


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("num_pages", "page_size"))
def _alloc(free_pages: FreeList, *, num_pages, page_size):
    free_pages, pages, ok = free_list.take(free_pages, num_pages, capacity=num_pages)
    slots = pages[:, None] * page_size + jnp.arange(page_size, dtype=jnp.int32)
    return free_pages, jnp.where(ok, slots.reshape(-1), free_list.NOBODY), ok


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("page_size", "num_tokens"))
def _extend(free_pages: FreeList, prefix_lens, seq_lens, last_slots, *, page_size, num_tokens):
    grows = (prefix_lens >= 0) & (seq_lens > prefix_lens)
    extend_lens = jnp.where(grows, seq_lens - prefix_lens, 0)
    ends = jnp.cumsum(extend_lens, dtype=jnp.int32)
    # The first sum that is too large for int32 comes out negative.
    fits = jnp.all((ends >= 0) & (ends <= num_tokens))
    sequences = (prefix_lens, extend_lens, last_slots, ends - extend_lens)
    return _grow(free_pages, fits, *sequences, page_size=page_size, num_tokens=num_tokens)


@functools.partial(jax.jit, donate_argnums=0, static_argnames="page_size")
def _decode(free_pages: FreeList, seq_lens, last_slots, *, page_size):
    extend_lens = (seq_lens > 0).astype(jnp.int32)
    starts = jnp.arange(seq_lens.size, dtype=jnp.int32)
    sequences = (seq_lens - 1, extend_lens, last_slots, starts)
    return _grow(free_pages, True, *sequences, page_size=page_size, num_tokens=seq_lens.size)


def _grow(free_pages, fits, prefix_lens, extend_lens, last_slots, starts, *, page_size, num_tokens):
    if page_size > 1:  # otherwise nobody's page is filled further
        last_slots = _only_taken(free_pages, last_slots, page_size=page_size)
        # Fenced, as in free_list.take.
        last_slots, free_pages = jax.lax.optimization_barrier((last_slots, free_pages))
    num_pages = pages_needed(prefix_lens, extend_lens, page_size=page_size).sum(dtype=jnp.int32)
    free_pages, new_pages, ok = free_list.take(
        free_pages,
        jnp.where(fits, num_pages, free_pages.ring.size + 1),
        capacity=min(num_tokens, num_tokens // page_size + starts.size, free_pages.ring.size),
    )
    slots = assign_slots(
        prefix_lens,
        extend_lens,
        last_slots,
        starts,
        new_pages,
        page_size=page_size,
        num_tokens=num_tokens,
    )
    return free_pages, jnp.where(ok, slots, free_list.NOBODY), ok


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("page_size", "take_back"))
def _free(free_pages: FreeList, slots, *, page_size, take_back):
    return take_back(free_pages, slots // page_size)


@functools.partial(jax.jit, static_argnames="page_size")
def _only_taken(free_pages: FreeList, slots, *, page_size):
    taken = free_list.is_taken(free_pages, slots // page_size)
    return jnp.where(taken, slots, free_list.NOBODY)
