"""Which pages nobody has, and in what order they are handed out, as operations take it."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Ring(NamedTuple):
    """Pages in a ring; those that nobody has are in ``num_free`` places from ``head`` on.

    A page that nobody has is in the place that ``places`` says, and that place is one of those.
    Every other place, and ``places`` of a page that somebody has, may hold anything. So pages are
    handed out, and that is undone, by moving ``head`` alone.

    Attributes:
      pages: int64, a page for each place; of one place if there are no pages.
      places: int64, the place of each page from 0 on; negative for the first and the last, which
        stand for all pages that are not there.
      head: the place of the next page.
      num_free: how many pages nobody has.
    """

    pages: torch.Tensor
    places: torch.Tensor
    head: int
    num_free: int

    @property
    def num_pages(self) -> int:
        """Pages 1 to ``num_pages`` are there."""
        return self.places.numel() - 2

    def window(self, start: int, count: int) -> torch.Tensor:
        """The pages in ``count`` places from ``start`` on; not always a copy."""
        stop = start + count
        if stop <= self.pages.numel():
            return self.pages[start:stop]
        return torch.cat((self.pages[start:], self.pages[: stop - self.pages.numel()]))

    def is_taken(self, pages: torch.Tensor) -> torch.Tensor:
        """Whether somebody has each page, int64; nobody has one that is not there."""
        place = self.places.index_select(0, pages.clamp(0, self.num_pages + 1))
        is_free = self.pages.index_select(0, place.clamp(min=0)) == pages
        stop = self.head + self.num_free
        if stop <= self.pages.numel():
            is_free &= (place >= self.head).logical_and_(place < stop)
        else:
            is_free &= (place >= self.head).logical_or_(place < stop - self.pages.numel())
        return (place >= 0).gt_(is_free)

    def store(self, pages: torch.Tensor, start: int) -> None:
        """Puts distinct ``pages`` into the places from ``start`` on, which hold no free ones."""
        stop = start + pages.numel()
        place = torch.arange(start, stop, device=pages.device).remainder_(self.pages.numel())
        self.pages.scatter_(0, place, pages)
        self.places.scatter_(0, pages, place)


@triton.jit
def is_taken(page, mask, pages_ptr, places_ptr, head, num_free, num_pages):
    """``Ring.is_taken`` of int64; a page is also taken while its place is negative."""
    is_there = mask & (page >= 1) & (page <= num_pages)
    place = tl.load(places_ptr + page, mask=is_there, other=0)
    index = place - head
    index = tl.where(index < 0, index + num_pages, index)
    may_be_free = is_there & (place >= 0) & (index < num_free)
    found = tl.load(pages_ptr + place, mask=may_be_free, other=0)
    return is_there & (found != page)
