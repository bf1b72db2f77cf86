"""What the allocators should do, one token at a time, in plain Python."""

import copy

import numpy as np

NOBODY = -1


def in_order(free):
    """The numbers of a FreeList as they would be handed out."""
    return np.roll(free.ring, -int(free.head))[: int(free.num_free)].tolist()


class AllocatorOracle:
    """A free list of pages as a Python list; ``fifo`` as SlotAllocator, otherwise PageAllocator."""

    def __init__(self, num_slots, page_size, *, fifo):
        self.page_size = page_size
        self.fifo = fifo
        self.num_pages = num_slots // page_size
        self.clear()

    def clear(self):
        self.free_pages = list(range(1, self.num_pages + 1))
        self.group = []
        self.depth = 0

    def available(self):
        return len(self.free_pages) * self.page_size

    def backup(self):
        return copy.deepcopy(self.__dict__)

    def restore(self, snapshot):
        self.__dict__ = copy.deepcopy(snapshot)

    def alloc(self, num_slots):
        slots, ok = self._grow([(0, num_slots, NOBODY)])
        return (slots[0], True) if ok else ([NOBODY] * num_slots, False)

    def extend(self, prefix_lens, seq_lens, last_slots, num_tokens):
        slots, ok = self._grow(zip(prefix_lens, seq_lens, last_slots, strict=True), num_tokens)
        packed = [slot for of_sequence in slots for slot in of_sequence] if ok else []
        return packed + [NOBODY] * (num_tokens - len(packed)), ok

    def decode(self, seq_lens, last_slots):
        prefix_lens = [max(seq_len - 1, 0) for seq_len in seq_lens]
        slots, ok = self._grow(zip(prefix_lens, seq_lens, last_slots, strict=True))
        if not ok:
            return [NOBODY] * len(seq_lens), False
        return [of_sequence[0] if of_sequence else NOBODY for of_sequence in slots], True

    def free(self, slots):
        pages = [slot // self.page_size for slot in slots]
        pages = [p for p in pages if 1 <= p <= self.num_pages and p not in self.free_pages]
        if self.depth:
            self.group += pages
        else:
            self._take_back(pages)

    def free_group_begin(self):
        self.depth += 1

    def free_group_end(self):
        self.depth = max(self.depth - 1, 0)
        if self.depth == 0:
            group, self.group = self.group, []
            self._take_back(group)

    def _take_back(self, pages):
        freed = list(dict.fromkeys(pages))  # the first of each
        self.free_pages = self.free_pages + freed if self.fifo else sorted(freed) + self.free_pages

    def _grow(self, sequences, num_tokens=None):
        """The new slots of each sequence, or False where there are not enough pages."""
        free_pages = list(self.free_pages)
        result = []
        for prefix_len, seq_len, slot in sequences:
            slots = []
            page = slot // self.page_size
            if page in self.free_pages or not 1 <= page <= self.num_pages:
                slot = NOBODY
            for position in range(prefix_len, seq_len):
                if position % self.page_size == 0:
                    if not free_pages:
                        return [], False
                    slot = free_pages.pop(0) * self.page_size
                elif (slot + 1) % self.page_size == position % self.page_size:
                    slot += 1
                else:
                    slot = NOBODY
                slots.append(slot)
            result.append(slots)
        if num_tokens is not None and sum(map(len, result)) > num_tokens:
            return [], False
        self.free_pages = free_pages
        return result, True
