"""Which pages nobody has, and in what order they are handed out."""

import operator
import weakref
from typing import Any

import torch


class FreeList:
    """The pages that nobody has, the next one first, and a mark for each page that somebody has.

    The pages are on the device; how many are free is on the host, so that capacity is decided
    without waiting. An operation costs what its own pages cost, however many there are in all,
    except where it says otherwise.

    Attributes:
      num_pages: pages 1 to ``num_pages`` are there.
      num_free: how many of them nobody has.
      taken: for pages 0 to ``num_pages + 1``, whether somebody has it; nobody has the first or the
        last, which stand for all that are not there.
    """

    def __init__(self, num_pages: int, device: torch.device | str):
        """All pages, free, in ascending order."""
        self.num_pages = num_pages
        # Free pages are in num_free cells from _head on, wrapping round; the others are stale.
        # One cell more, where whatever is not to be stored goes.
        self._ring = torch.empty(num_pages + 1, dtype=torch.int64, device=device)
        self.taken = torch.empty(num_pages + 2, dtype=torch.bool, device=device)
        self._intact: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        self.reset()

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self._ring.device

    def reset(self) -> None:
        """Back to how it was created; costs what all pages cost."""
        self._before_writing()
        torch.arange(1, self.num_pages + 1, out=self._ring[: self.num_pages])
        self.taken.zero_()
        self._head, self.num_free = 0, self.num_pages

    def peek(self, num_pages: int) -> torch.Tensor:
        """A copy of the next ``num_pages`` pages, of which there are enough."""
        return self._cells(self._head, num_pages)

    def take(self, pages: torch.Tensor) -> None:
        """Takes what ``peek`` returned."""
        if pages.numel():
            self.taken.index_fill_(0, pages, True)
            self._advance(pages.numel())

    def is_taken(self, pages: torch.Tensor) -> torch.Tensor:
        """Whether somebody has each page; nobody has one that is not there."""
        return self.taken[pages.clamp(0, self.num_pages + 1)]

    def put_last(self, pages: torch.Tensor) -> None:
        """Takes ``pages`` back, to be handed out last, in the order given.

        Pages that nobody has, or that came earlier in ``pages``, are ignored. Waits for the device
        once, for how many are left.
        """
        _, order, returned = self._returned(pages)
        returned = torch.empty_like(returned).scatter_(0, order, returned)
        self._store(pages, returned, first=False)

    def put_first(self, pages: torch.Tensor) -> None:
        """Takes ``pages`` back, to be handed out next, in ascending order; else as ``put_last``."""
        ascending, _, returned = self._returned(pages)
        self._store(ascending, returned, first=True)

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

        Costs what was taken in between, or, if pages came back too, what all pages cost.

        Raises:
          ValueError: the snapshot is of another list.
        """
        if snapshot.pages is not None:
            self._write_all(snapshot.pages)
        elif snapshot not in self._intact:
            raise ValueError("this state was backed up by another allocator")
        elif (num_taken := snapshot.num_free - self.num_free) > 0:
            self._advance(-num_taken)
            self.taken.index_fill_(0, self.peek(num_taken), False)
        elif num_taken < 0:  # a snapshot restored before this one was older
            self.take(self.peek(-num_taken))

    def _cells(self, start: int, count: int) -> torch.Tensor:
        stop = start + count
        if stop <= self.num_pages:
            return self._ring[start:stop].clone()
        wrapped = stop - self.num_pages
        return torch.cat((self._ring[start : self.num_pages], self._ring[:wrapped]))

    def _advance(self, num_pages: int) -> None:
        self._head = (self._head + num_pages) % self.num_pages
        self.num_free -= num_pages

    def _returned(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``pages`` sorted, how, and which of them are the first to name one that is taken."""
        ascending, order = torch.sort(pages, stable=True)
        returned = self.is_taken(ascending)
        returned[1:] &= ascending[1:] != ascending[:-1]
        return ascending, order, returned

    def _store(self, pages: torch.Tensor, returned: torch.Tensor, *, first: bool) -> None:
        count = int(returned.sum())
        if not count:
            return
        self._before_writing()
        start = self._head - count if first else self._head + self.num_free
        place = (returned.cumsum(0) + (start - 1)) % self.num_pages
        self._ring.scatter_(0, place.masked_fill_(~returned, self.num_pages), pages)
        self.taken.index_fill_(0, pages.masked_fill(~returned, 0), False)
        if first:
            self._head = start % self.num_pages
        self.num_free += count

    def _write_all(self, pages: torch.Tensor) -> None:
        self._before_writing()
        self._ring[: pages.numel()] = pages
        self.taken.fill_(True)
        self.taken[:1].fill_(False)
        self.taken[-1:].fill_(False)
        self.taken.index_fill_(0, pages, False)
        self._head, self.num_free = 0, pages.numel()

    def _before_writing(self) -> None:
        # Taking only moves the head, so that up to here a snapshot's pages are where they were.
        for snapshot in tuple(self._intact):
            snapshot.pages = self._cells(snapshot.head, snapshot.num_free)
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
