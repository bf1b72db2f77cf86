"""kvtorch's allocators with lists for tensors, as ``tests.allocator_machine`` wants them."""

import torch

from kvtorch.allocators import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator


def make(num_slots, page_size=None, device="cpu", kvcache=None):
    """A paged allocator or, without a page size, one of single slots."""
    if page_size is None:
        return TokenToKVPoolAllocator(num_slots, torch.bfloat16, device, kvcache)
    return PagedTokenToKVPoolAllocator(num_slots, page_size, torch.bfloat16, device, kvcache)


class TorchAdapter:
    def __init__(self, num_slots, page_size, *, paged, device="cpu"):
        self.device = device
        self.allocator = make(num_slots, page_size if paged else None, device)
        self.free_group_begin = self.allocator.free_group_begin
        self.free_group_end = self.allocator.free_group_end
        self.backup = self.allocator.backup_state
        self.restore = self.allocator.restore_state
        self.clear = self.allocator.clear
        self.available = self.allocator.available_size

    def _ints(self, values):
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _list(self, slots):
        if slots is None:
            return None
        assert slots.dtype == torch.int64 and slots.device.type == self.device
        return slots.tolist()

    def alloc(self, num_slots):
        return self._list(self.allocator.alloc(num_slots))

    def extend(self, prefix_lens, seq_lens, last_slots, num_tokens):
        given = {}
        if sum(seq_lens) % 2:  # as well on the host
            given = {"prefix_lens_cpu": prefix_lens, "seq_lens_cpu": torch.tensor(seq_lens)}
        lens = map(self._ints, (prefix_lens, seq_lens, last_slots))
        return self._list(self.allocator.alloc_extend(*lens, num_tokens, **given))

    def decode(self, seq_lens, last_slots):
        given = {"seq_lens_cpu": seq_lens} if sum(seq_lens) % 2 else {}
        lens = map(self._ints, (seq_lens, last_slots))
        return self._list(self.allocator.alloc_decode(*lens, **given))

    def free(self, slots):
        self.allocator.free(self._ints(slots))

    def free_pages(self):
        return self.allocator.free_pages.tolist()
