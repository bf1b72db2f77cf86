"""Which pages nobody has, and in what order they are handed out."""

import operator
import weakref
from typing import Any

import torch

from kvtorch.ops.only_taken import only_taken
from kvtorch.ops.ring import Ring
from kvtorch.ops.take_back import take_back


class FreeList:
    """The pages that nobody has, the next one first.

    The pages are on the device; how many are free is on the host, so that capacity is decided
    without waiting. An operation costs what its own pages cost, however many there are in all,
    except where it says otherwise.

    Attributes:
      num_pages: pages 1 to ``num_pages`` are there.
      num_free: how many of them nobody has.
      device: where the pages are.
    """

    def __init__(self, num_pages: int, page_size: int, device: torch.device | str):
        """All pages, of ``page_size`` slots each, free, in ascending order."""
        self.num_pages = num_pages
        self._page_size = page_size
        # Of one place if there are no pages, so that there always is one to look at.
        self._pages = torch.empty(max(num_pages, 1), dtype=torch.int64, device=device)
        self._places = self._pages.new_empty(num_pages + 2)
        self._in_page = torch.arange(page_size, device=device)
        self.device = self._pages.device
        self._intact: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        self.reset()

    @property
    def ring(self) -> Ring:
        """The pages as operations take them; they write to them."""
        return Ring(self._pages, self._places, self._head, self.num_free)

    @property
    def taken(self) -> list[bool]:
        """For page 0 and every page that there is, whether somebody has it; costs what all cost."""
        pages = torch.arange(self.num_pages + 1, device=self.device)
        return self.ring.is_taken(pages).tolist()

    def reset(self) -> None:
        """Back to how it was created; costs what all pages cost."""
        self._before_writing()
        torch.arange(1, self._pages.numel() + 1, out=self._pages)
        torch.arange(-1, self.num_pages + 1, out=self._places)
        self._places[-1:].fill_(-1)
        self._head, self.num_free = 0, self.num_pages

    def peek(self, num_pages: int) -> torch.Tensor:
        """A copy of the next ``num_pages`` pages, of which there are enough."""
        return self.ring.window(self._head, num_pages).clone()

    def peek_slots(self, num_pages: int) -> torch.Tensor:
        """A copy of all slots of the next ``num_pages`` pages, of which there are enough."""
        if self._page_size == 1:
            return self.peek(num_pages)
        pages = self.ring.window(self._head, num_pages)
        return torch.add(self._in_page, pages[:, None], alpha=self._page_size).view(-1)

    def take(self, num_pages: int) -> None:
        """Takes the next ``num_pages`` pages, of which there are enough."""
        if num_pages:
            self._head = (self._head + num_pages) % self.num_pages
            self.num_free -= num_pages

    def only_taken(self, slots: torch.Tensor) -> torch.Tensor:
        """``slots``, with -1 for each that nobody has."""
        return only_taken(slots, self.ring, page_size=self._page_size)

    def put_last(self, slots: torch.Tensor) -> None:
        """Takes back the pages of ``slots``, to be handed out last, in the order given.

        Pages that nobody has, or that came earlier in ``slots``, are ignored. Waits for the device
        once, for how many are left.
        """
        self._put_back(slots, first=False)

    def put_first(self, slots: torch.Tensor) -> None:
        """Takes pages back as ``put_last``, but to be handed out next, in ascending order."""
        self._put_back(slots, first=True)

    def set_free(self, pages: torch.Tensor) -> None:
        """Makes ``pages``, in this order, the free ones; costs what all pages cost.

        Raises:
          ValueError: one is not there, or repeats.
        """
        pages = pages.to(self.device, torch.int64)
        is_there = (pages >= 1) & (pages <= self.num_pages)
        if not is_there.all() or pages.unique().numel() != pages.numel():
            raise ValueError(f"free pages must be distinct and from 1 to {self.num_pages}")
        self._write_all(pages)

    def backup(self) -> "Snapshot":
        """What ``restore`` goes back to; costs nothing until a page comes back."""
        snapshot = Snapshot(self._head, self.num_free)
        self._intact.add(snapshot)
        return snapshot

    def restore(self, snapshot: "Snapshot") -> None:
        """The list as it was at ``backup``, any number of times.

        Costs nothing or, if pages came back in between, what all pages cost.

        Raises:
          ValueError: the snapshot is of another list.
        """
        if snapshot.pages is not None:
            self._write_all(snapshot.pages)
        elif snapshot not in self._intact:
            raise ValueError("this state was backed up by another allocator")
        else:
            self._head, self.num_free = snapshot.head, snapshot.num_free

    def _put_back(self, slots: torch.Tensor, *, first: bool) -> None:
        if self.num_free == self.num_pages:  # nobody has any
            return
        self._before_writing()
        count = take_back(slots, self.ring, page_size=self._page_size, first=first)
        if first:
            self._head = (self._head - count) % self.num_pages
        self.num_free += count

    def _write_all(self, pages: torch.Tensor) -> None:
        self._before_writing()
        self._head, self.num_free = 0, pages.numel()
        self.ring.store(pages, 0)

    def _before_writing(self) -> None:
        # Taking only moves the head, so that up to here a snapshot's pages are where they were.
        for snapshot in tuple(self._intact):
            snapshot.pages = self.ring.window(snapshot.head, snapshot.num_free).clone()
        self._intact.clear()


class Snapshot:
    """A state of a ``FreeList``: where it was in the ring or, once that is overwritten, a copy."""

    def __init__(self, head: int, num_free: int):
        """In the ring."""
        self.head = head
        self.num_free = num_free
        self.pages: torch.Tensor | None = None


def as_count(name: str, value: Any) -> int:
    """``value`` as a Python int.

    Raises:
      TypeError: not an integer.
      ValueError: negative.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} must be an integer") from None
    if count < 0:
        raise ValueError(f"{name}={count} must not be negative")
    return count
