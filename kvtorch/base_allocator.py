"""What SGLang's two allocators have in common: whole pages, and when what is freed comes back."""

import abc
import os
from typing import Any

import torch

from kvjax.checks_mode import enabled
from kvjax.errors import GeometryError
from kvtorch.free_list import FreeList, Snapshot, as_count
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
        self._free_list = FreeList(self.size // self.page_size, self.page_size, device)

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
        slots = self._free_list.peek_slots(num_pages)
        self._free_list.take(num_pages)
        return slots

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
        slots = as_slots(free_index, self._free_list.device, name="free_index")
        if not slots.numel():
            return
        if self._debugs():
            self._check_freed(slots.tolist())
        if self._group_depth:
            # Later, a slot that nobody has now could be somebody's.
            self.free_group.append(self._free_list.only_taken(slots))
        else:
            self._put_back(self._free_list, slots)

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
            freed, self.free_group = self.free_group, []
            self._put_back(self._free_list, freed[0] if len(freed) == 1 else torch.cat(freed))

    def backup_state(self) -> Snapshot:
        """What ``restore_state`` goes back to; open free groups are no part of it (A-RM-6).

        Costs nothing, unless pages are freed while the state is still kept: then, once, what the
        pool costs.
        """
        return self._free_list.backup()

    def restore_state(self, free_pages: Snapshot | torch.Tensor) -> None:
        """Undoes what was handed out and taken back since ``backup_state``; may be repeated.

        Costs nothing or, if pages were freed too, what the pool costs. Slots that are free again
        are no longer pending in a free group.

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

    def _filter_group(self) -> None:
        self.free_group = [self._free_list.only_taken(slots) for slots in self.free_group]

    def _debugs(self) -> bool:
        return self.debug_mode or enabled()

    def _check_freed(self, slots: list[int]) -> None:
        taken = self._free_list.taken
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


def _debug_requested() -> bool:
    """As SGLang reads its own variable (A-MOD-7)."""
    return os.environ.get("SGLANG_DEBUG_MEMORY_POOL", "").lower() in ("true", "1")
