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

import itertools
from typing import Any

import numpy as np
import torch

from kvtorch import lengths
from kvtorch.base_allocator import BaseTokenToKVPoolAllocator
from kvtorch.free_list import FreeList, as_count
from kvtorch.ops.assign_next_slots import assign_next_slots
from kvtorch.ops.assign_slots import assign_slots

__all__ = [
    "BaseTokenToKVPoolAllocator",
    "PagedTokenToKVPoolAllocator",
    "TokenToKVPoolAllocator",
]


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
        growth, num_pages = lengths.needed(prefixes, totals, self.page_size)
        if growth > num_tokens:
            raise ValueError(
                f"the sequences grow by {growth} tokens, more than {extend_num_tokens=}"
            )
        if self._debugs():
            self._check_growth(prefixes, totals, last_loc.tolist())
        free_list = self._free_list
        if num_pages > free_list.num_free:
            return None
        prefix_lens, seq_lens, last_loc = lengths.on_device(lens, free_list.device)
        slots = assign_slots(
            prefix_lens,
            seq_lens,
            last_loc,
            free_list.ring,
            page_size=self.page_size,
            num_new_pages=num_pages,
            num_tokens=num_tokens,
        )
        free_list.take(num_pages)
        return slots

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
            self._check_growth(np.maximum(totals - 1, 0), totals, last_loc.tolist())
        num_pages = lengths.needed_next(totals, self.page_size)
        free_list = self._free_list
        if num_pages > free_list.num_free:
            return None
        seq_lens, last_loc = lengths.on_device(lens, free_list.device)
        slots = assign_next_slots(
            seq_lens,
            last_loc,
            free_list.ring,
            page_size=self.page_size,
            num_new_pages=num_pages,
        )
        free_list.take(num_pages)
        return slots

    def _check_growth(
        self, prefixes: np.ndarray, totals: np.ndarray, last_slots: list[int]
    ) -> None:
        taken = self._free_list.taken
        for slot in itertools.chain.from_iterable(freed.tolist() for freed in self.free_group):
            taken[max(slot, 0) // self.page_size] = False
        lengths.check_growth(
            prefixes.tolist(), totals.tolist(), last_slots, taken, page_size=self.page_size
        )
