"""Which slots the next tokens get: SGLang's two allocators.

What they do is SGLang 0.4.8's: names, arguments, return values, and which slots are handed out in
which order. ``None`` means too few are free, decided before anything is touched (AL1). What is
returned is never a view of the free list (HO2).

In addition, every operation costs what its own slots cost, however large the pool, except where it
says otherwise; and a slot that nobody has can neither be freed nor be the ``last_loc`` of a
sequence that grows, so that no slot ever has two owners (AL4, AL5). Such slots are ignored, or -1
in the result. They raise instead in debug mode, which is on if the environment variable
``SGLANG_DEBUG_MEMORY_POOL`` was true when the allocator was made, or in checks mode; looking at
them waits for the device.
"""

import abc
import itertools
import os
from typing import Any

import numpy as np
import torch

from kvjax.checks_mode import enabled
from kvjax.errors import GeometryError
from kvtorch import lengths
from kvtorch.free_list import FreeList, Snapshot, as_count
from kvtorch.ops.assign_slots import assign_slots
from kvtorch.slots import as_slots


class BaseTokenToKVPoolAllocator(abc.ABC):
    """What the allocators have in common.

    Attributes:
      size: slots 1 to ``size`` (or the last of the last whole page) are handed out.
      page_size: slots a page; page 0 is the padding page.
      dtype, device: as given, for engines.
      debug_mode: whether slots that nobody has raise.
      free_group: what was freed in the open free group, a tensor for each call.

    Source: SGLang 0.4.8 ``BaseTokenToKVPoolAllocator`` (A-RM-1 to A-RM-9).
    """

    _put_back = staticmethod(FreeList.put_last)

    @abc.abstractmethod
    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kvcache: Any,
    ):
        self.size = as_count("size", size)
        self.page_size = as_count("page_size", page_size)
        if not self.page_size:
            raise GeometryError(f"{page_size=} must be at least 1")
        self.dtype = dtype
        self.device = device
        self._kvcache = kvcache
        self.debug_mode = _debug_requested()
        self.free_group: list[torch.Tensor] = []
        self._group_depth = 0
        self._free_list = FreeList(self.size // self.page_size, device)

    def clear(self) -> None:
        """Everything is free and no free group open, as when created; costs what the pool costs."""
        self._free_list.reset()
        self.free_group = []
        self._group_depth = 0

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Hands out ``need_size`` slots, int64, in whole pages; never waits for the device.

        Raises:
          TypeError: ``need_size`` is not an integer.
          ValueError: it is negative or no multiple of the page size (S8).
        """
        num_slots, page_size = as_count("need_size", need_size), self.page_size
        if num_slots % page_size:
            raise ValueError(
                f"need_size={num_slots} must be a multiple of {page_size=}; "
                "alloc_extend and alloc_decode hand out parts of a page"
            )
        num_pages = num_slots // page_size
        if num_pages > self._free_list.num_free:
            return None
        pages = self._free_list.peek(num_pages)
        self._free_list.take(pages)
        if page_size == 1:
            return pages
        place = torch.arange(page_size, device=pages.device)
        return (pages[:, None] * page_size + place).reshape(-1)

    def free(self, free_index: torch.Tensor) -> None:
        """Takes back the pages that ``free_index`` is in; in a free group, when that ends.

        One slot frees its whole page, several of a page free it once. Slots that nobody has are
        ignored. Waits for the device once, for how many pages came back; in a free group not at
        all, but once when that ends.

        Raises:
          TypeError: not a tensor of int32 or int64.
          ValueError: on another device; in debug mode, a slot is freed twice or nobody has it.

        Source: A-RM-4, A-PG-5, AL4, AL5.
        """
        slots = as_slots(free_index, self._free_list.device, name="free_index").long()
        if not slots.numel():
            return
        if self._debugs():
            self._check_freed(slots.tolist())
        if self._group_depth:
            # Later, a slot that nobody has now could be somebody's.
            self.free_group.append(self._only_taken(slots))
        else:
            self._take_back(slots)

    def debug_print(self) -> str:
        """Nothing (A-RM-2)."""
        return ""

    def available_size(self) -> int:
        """How many slots are free, those of an open free group not included (A-RM-2)."""
        return self._free_list.num_free * self.page_size

    def get_kvcache(self) -> Any:
        """The pool whose slots these are."""
        return self._kvcache

    @property
    def free_pages(self) -> torch.Tensor:
        """A copy of the free pages, int64, in the order in which they are handed out.

        Reading and setting it cost what the pool costs; setting also waits for the device.
        """
        return self._free_list.peek(self._free_list.num_free)

    @free_pages.setter
    def free_pages(self, pages: torch.Tensor) -> None:
        self._free_list.set_free(pages)
        self._filter_group()

    @property
    def is_not_in_free_group(self) -> bool:
        """Whether no free group is open."""
        return not self._group_depth

    def free_group_begin(self) -> None:
        """Opens a free group, whose slots are taken back all at once; groups nest (A-RM-5, AL3)."""
        self._group_depth += 1

    def free_group_end(self) -> None:
        """Closes the innermost free group, if one is open; the outermost as one ``free`` of all."""
        self._group_depth = max(self._group_depth - 1, 0)
        if not self._group_depth and self.free_group:
            freed, self.free_group = torch.cat(self.free_group), []
            self._take_back(freed)

    def backup_state(self) -> Snapshot:
        """What ``restore_state`` goes back to; open free groups are no part of it (A-RM-6).

        Costs nothing, unless pages are freed while the state is still kept: then, once, what the
        pool costs.
        """
        return self._free_list.backup()

    def restore_state(self, free_pages: Snapshot | torch.Tensor) -> None:
        """Undoes what was handed out and taken back since ``backup_state``; may be repeated.

        Costs what was handed out since or, if pages were freed too, what the pool costs. Slots that
        are free again are no longer pending in a free group.

        Args:
          free_pages: what ``backup_state`` returned, or ``free_pages`` as they were.

        Raises:
          ValueError: it is of another allocator.
        """
        if isinstance(free_pages, torch.Tensor):
            self._free_list.set_free(free_pages)
        else:
            self._free_list.restore(free_pages)
        self._filter_group()

    def get_cpu_copy(self, *args, **kwargs) -> Any:
        """Only ``TokenToKVPoolAllocator`` has it (A-RM-7)."""
        raise NotImplementedError("get_cpu_copy: call it on the pool, get_kvcache()")

    def load_cpu_copy(self, *args, **kwargs) -> Any:
        """Only ``TokenToKVPoolAllocator`` has it (A-RM-7)."""
        raise NotImplementedError("load_cpu_copy: call it on the pool, get_kvcache()")

    def alloc_extend(self, *args, **kwargs) -> torch.Tensor | None:
        """Only ``PagedTokenToKVPoolAllocator`` has it (A-RM-8)."""
        raise NotImplementedError("alloc_extend is only for the paged allocator; call alloc")

    def alloc_decode(self, *args, **kwargs) -> torch.Tensor | None:
        """Only ``PagedTokenToKVPoolAllocator`` has it (A-RM-8)."""
        raise NotImplementedError("alloc_decode is only for the paged allocator; call alloc")

    def _take_back(self, slots: torch.Tensor) -> None:
        self._put_back(self._free_list, self._pages(slots))

    def _pages(self, slots: torch.Tensor) -> torch.Tensor:
        return slots if self.page_size == 1 else slots // self.page_size

    def _only_taken(self, slots: torch.Tensor) -> torch.Tensor:
        return slots.where(self._free_list.is_taken(self._pages(slots)), -1)

    def _filter_group(self) -> None:
        self.free_group = [self._only_taken(slots) for slots in self.free_group]

    def _debugs(self) -> bool:
        return self.debug_mode or enabled()

    def _check_freed(self, slots: list[int]) -> None:
        taken = self._free_list.taken.tolist()
        seen = {slot for freed in self.free_group for slot in freed.tolist()}
        for position, slot in enumerate(slots):
            page = slot // self.page_size
            has_owner = 0 <= page < len(taken) and taken[page]
            if not has_owner or slot in seen:
                raise ValueError(
                    f"free_index[{position}]={slot} is {'freed twice' if has_owner else 'free'}; "
                    "allowed: slots that were handed out, each once"
                )
            seen.add(slot)


class TokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Hands out single slots, those freed first before those freed later.

    Source: SGLang 0.4.8 and 0.4.7 ``TokenToKVPoolAllocator`` (A-RM-1 to A-RM-9).
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | str, kvcache: Any):
        """All slots, free."""
        super().__init__(size, 1, dtype, device, kvcache)

    @property
    def free_slots(self) -> torch.Tensor:
        """``free_pages``, by its name in SGLang 0.4.7."""
        return self.free_pages

    @free_slots.setter
    def free_slots(self, slots: torch.Tensor) -> None:
        self.free_pages = slots

    def get_cpu_copy(self, indices: torch.Tensor) -> Any:
        """The pool's."""
        return self._kvcache.get_cpu_copy(indices)

    def load_cpu_copy(self, kv_cache_cpu: Any, indices: torch.Tensor) -> Any:
        """The pool's."""
        return self._kvcache.load_cpu_copy(kv_cache_cpu, indices)


class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Hands out whole pages, those freed last first; a sequence then fills its own.

    Slots past the last whole page are never handed out.

    Attributes:
      num_pages: how many pages there are.

    Source: SGLang 0.4.8 ``PagedTokenToKVPoolAllocator`` (A-PG-1 to A-PG-7).
    """

    _put_back = staticmethod(FreeList.put_first)

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kvcache: Any,
    ):
        """All pages, free."""
        super().__init__(size, page_size, dtype, device, kvcache)
        self.num_pages = self.size // self.page_size

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        *,
        prefix_lens_cpu: lengths.OnHost | None = None,
        seq_lens_cpu: lengths.OnHost | None = None,
    ) -> torch.Tensor | None:
        """Hands out slots for tokens ``prefix_len`` to ``seq_len - 1`` of every sequence in turn.

        Waits for the device once, to read lengths that are there and not given on the host as well.

        Args:
          prefix_lens: tokens that each sequence has.
          seq_lens: tokens that it is to have. A sequence that does not grow is padding.
          last_loc: the slot of each prefix's last token, used where the prefix ends inside a page,
            which is filled first. One that is not at that place of a page, or of a page that nobody
            has, gives -1 instead.
          extend_num_tokens: how many slots to return; the last are -1 where fewer are needed.
          prefix_lens_cpu, seq_lens_cpu: the same lengths on the host.

        Raises:
          TypeError: an argument does not consist of integers.
          ValueError: more tokens than ``extend_num_tokens``, or the arguments' lengths differ. In
            debug mode, also: a sequence shrinks or has a negative length, or a ``last_loc`` that is
            used is not at its place of a page that was handed out and not freed, or two are in one
            page.

        Source: A-PG-3, with capacity decided before anything else (AL1).
        """
        num_tokens = as_count("extend_num_tokens", extend_num_tokens)
        lens = lengths.one_entry_each(prefix_lens=prefix_lens, seq_lens=seq_lens, last_loc=last_loc)
        prefixes, totals = lengths.on_host(lens[:2], (prefix_lens_cpu, seq_lens_cpu))
        grow = np.where(prefixes >= 0, np.maximum(totals - prefixes, 0), 0)
        if grow.sum() > num_tokens:
            raise ValueError(
                f"the sequences grow by {grow.sum()} tokens, more than {extend_num_tokens=}"
            )
        if self._debugs():
            self._check_growth(prefixes, totals, lens[2].tolist())
        num_pages = lengths.pages_needed(prefixes, grow, self.page_size)
        if num_pages > self._free_list.num_free:
            return None
        prefix_lens, seq_lens, last_loc = self._on_device(lens)
        extend_lens = (seq_lens - prefix_lens).clamp_(min=0).mul_(prefix_lens >= 0)
        starts = extend_lens.cumsum(0) - extend_lens
        return self._grow(num_pages, prefix_lens, extend_lens, last_loc, starts, num_tokens)

    def alloc_decode(
        self,
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        *,
        seq_lens_cpu: lengths.OnHost | None = None,
    ) -> torch.Tensor | None:
        """Hands out the slot of each sequence's token ``seq_len - 1``, its newest.

        Waits for the device as ``alloc_extend`` does.

        Args:
          seq_lens: tokens of each sequence, the new one included. One of 0 is padding and gets -1.
          last_loc: the slot of the token before, as in ``alloc_extend``.
          seq_lens_cpu: the same lengths on the host.

        Raises:
          TypeError, ValueError: as ``alloc_extend``.

        Source: A-PG-4, with capacity decided before anything else (AL1).
        """
        lens = lengths.one_entry_each(seq_lens=seq_lens, last_loc=last_loc)
        (totals,) = lengths.on_host(lens[:1], (seq_lens_cpu,))
        if self._debugs():
            self._check_growth(np.maximum(totals - 1, 0), totals, lens[1].tolist())
        num_pages = lengths.pages_needed(totals - 1, totals > 0, self.page_size)
        if num_pages > self._free_list.num_free:
            return None
        seq_lens, last_loc = self._on_device(lens)
        starts = torch.arange(seq_lens.numel(), device=seq_lens.device)
        return self._grow(num_pages, seq_lens - 1, seq_lens > 0, last_loc, starts, seq_lens.numel())

    def _on_device(self, lens: list[torch.Tensor]) -> list[torch.Tensor]:
        return [x.to(self._free_list.device, non_blocking=True) for x in lens]

    def _grow(self, num_pages, prefix_lens, extend_lens, last_loc, starts, num_tokens):
        pages = self._free_list.peek(num_pages)
        slots = assign_slots(
            prefix_lens,
            extend_lens,
            last_loc,
            starts,
            pages,
            page_size=self.page_size,
            num_tokens=num_tokens,
            taken=self._free_list.taken,
        )
        # After it, so that nobody's last slot is in a page that is only now handed out.
        self._free_list.take(pages)
        return slots

    def _check_growth(
        self, prefixes: np.ndarray, totals: np.ndarray, last_slots: list[int]
    ) -> None:
        taken = self._free_list.taken.tolist()
        for slot in itertools.chain.from_iterable(freed.tolist() for freed in self.free_group):
            taken[max(slot, 0) // self.page_size] = False
        lengths.check_growth(
            prefixes.tolist(), totals.tolist(), last_slots, taken, page_size=self.page_size
        )


def _debug_requested() -> bool:
    """As SGLang reads its own variable (A-MOD-7)."""
    return os.environ.get("SGLANG_DEBUG_MEMORY_POOL", "").lower() in ("true", "1")
