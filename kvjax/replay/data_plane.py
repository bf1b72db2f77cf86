"""What the scheduler asks of the memory under it."""

from typing import Protocol

import numpy as np


class DataPlane(Protocol):
    """Two tiers of rows and the allocator of the first. Every call is finished when it returns.

    Callers ask for no more than is free. Slots and pages are int32; ``tags`` and ``positions``,
    uint32, say what ``content`` the rows get, in every layer.
    """

    def prefill(
        self, prefix_lens: np.ndarray, seq_lens: np.ndarray, tags: np.ndarray, positions: np.ndarray
    ) -> np.ndarray:
        """Allocates and writes what each sequence has beyond its prefix.

        Prefixes end with a page. Returns the new slots, sequence after sequence.
        """
        ...

    def decode(
        self, seq_lens: np.ndarray, last_slots: np.ndarray, tags: np.ndarray, positions: np.ndarray
    ) -> np.ndarray:
        """Allocates and writes one token more for each sequence; ``seq_lens`` counts it.

        ``last_slots`` are those of the tokens before. Returns the new slots.
        """
        ...

    def free(self, pages: np.ndarray) -> None:
        """Gives device pages back."""
        ...

    def offload(self, pages: np.ndarray, host_slots: np.ndarray) -> None:
        """Copies device pages to the host tier; they stay allocated."""
        ...

    def restore(self, host_slots: np.ndarray) -> np.ndarray:
        """Copies whole pages of the host tier to newly allocated ones, and returns those."""
        ...

    def compact(self, pages: np.ndarray) -> None:
        """Makes ``pages``, all that are allocated, the pool's first ones, in the order given.

        Page ``pages[i]`` becomes page ``i + 1``; the others are free afterwards.
        """
        ...

    def num_free_pages(self) -> int:
        """Device pages that nobody has."""
        ...


def page_slots(pages: np.ndarray, page_size: int) -> np.ndarray:
    """The slots of whole pages, page after page."""
    return (pages[:, None] * page_size + np.arange(page_size, dtype=np.int32)).reshape(-1)
