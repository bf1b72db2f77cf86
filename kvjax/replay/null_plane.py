"""What a data plane hands out when there are no bytes behind it."""

import numpy as np


class NullPlane:
    """A ``DataPlane`` that keeps account of pages and does nothing else.

    It makes a sweep over pool sizes cheap, with the scheduler's decisions those of a real run:
    which pages it hands out differs, how many does not.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._num_pages = num_pages
        self._page_size = page_size
        self._fresh = 1  # pages from here on were never handed out: a list of all would be long
        self._freed: list[int] = []

    def prefill(self, prefix_lens, seq_lens, tags, positions) -> np.ndarray:
        del tags, positions
        steps = np.arange(self._page_size, dtype=np.int32)
        slots = [
            (self._take(-(-length // self._page_size))[:, None] * self._page_size + steps).reshape(
                -1
            )[:length]
            for length in seq_lens - prefix_lens
        ]
        return np.concatenate(slots)

    def decode(self, seq_lens, last_slots, tags, positions) -> np.ndarray:
        del tags, positions
        slots = last_slots + 1
        starts_page = (seq_lens - 1) % self._page_size == 0
        slots[starts_page] = self._take(int(starts_page.sum())) * self._page_size
        return slots

    def free(self, pages) -> None:
        self._freed.extend(pages.tolist())

    def offload(self, pages, host_slots) -> None:
        del pages, host_slots

    def restore(self, host_slots) -> np.ndarray:
        return self._take(len(host_slots) // self._page_size)

    def compact(self, pages) -> None:
        self._fresh = len(pages) + 1
        self._freed.clear()

    def num_free_pages(self) -> int:
        return self._num_pages - self._fresh + 1 + len(self._freed)

    def _take(self, count: int) -> np.ndarray:
        reused = min(count, len(self._freed))
        pages = [self._freed.pop() for _ in range(reused)]
        pages.extend(range(self._fresh, self._fresh + count - reused))
        self._fresh += count - reused
        return np.array(pages, np.int32)
