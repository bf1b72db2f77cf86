"""The same calls give the same slots in kvjax and kvtorch."""

import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")

from kvjax import allocators  # noqa: E402
from kvjax.allocators import PageAllocator, SlotAllocator  # noqa: E402
from tests.allocator_machine import run_machine  # noqa: E402
from tests.allocator_oracle import in_order  # noqa: E402
from tests.torch.allocator_adapter import TorchAdapter  # noqa: E402


class JaxAdapter:
    def __init__(self, num_slots, page_size, *, paged):
        self.state = (
            PageAllocator.create(num_slots, page_size) if paged else SlotAllocator.create(num_slots)
        )

    def _hand_out(self, function, *args):
        self.state, slots, ok = function(self.state, *args)
        return slots.tolist() if ok else None

    def alloc(self, num_slots):
        return self._hand_out(allocators.alloc, num_slots)

    def extend(self, *args):
        return self._hand_out(allocators.extend, *args)

    def decode(self, *args):
        return self._hand_out(allocators.decode, *args)

    def free(self, slots):
        self.state = allocators.free(self.state, slots)

    def free_group_begin(self):
        self.state = allocators.free_group_begin(self.state)

    def free_group_end(self):
        self.state = allocators.free_group_end(self.state)

    def backup(self):
        return allocators.backup(self.state)

    def restore(self, snapshot):
        self.state = allocators.restore(snapshot)

    def clear(self):
        self.state = allocators.clear(self.state)

    def free_pages(self):
        return in_order(self.state.free_pages)

    def available(self):
        return int(allocators.available(self.state))


def compare(paged, page_size, device, **settings):
    # Torch's allocator of single slots does not grow sequences (A-RM-8), and an open group is part
    # of kvjax's states only (A-RM-6).
    run_machine(
        lambda *sizes: TorchAdapter(*sizes, paged=paged, device=device),
        lambda *sizes: JaxAdapter(*sizes, paged=paged),
        page_size,
        grows=paged,
        restores_in_group=False,
        **settings,
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("paged, page_size", [(False, 1), (True, 1), (True, 4)])
def test_the_same_slots(paged, page_size, device):
    compare(paged, page_size, device, max_examples=5)


def test_another_order_is_caught(monkeypatch):
    """The comparison above can fail: pages that come back behind the others."""
    from hypothesis import Phase

    from kvtorch.allocators import PagedTokenToKVPoolAllocator
    from kvtorch.free_list import FreeList

    monkeypatch.setattr(PagedTokenToKVPoolAllocator, "_put_back", staticmethod(FreeList.put_last))
    with pytest.raises(AssertionError):
        compare(True, 4, "cpu", max_examples=500, phases=[Phase.generate], database=None)
