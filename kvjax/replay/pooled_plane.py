"""How does an allocator and rows make a data plane?"""

import numpy as np

from kvjax.replay.data_plane import Pages, Rows, page_slots


class PooledPlane:
    """A ``ReadablePlane``: ``pages`` says where rows go, ``rows`` has them."""

    def __init__(self, pages: Pages, rows: Rows, page_size: int) -> None:
        self.pages = pages
        self.rows = rows
        self.planes = rows.planes
        self.layers = rows.layers
        self._page_size = page_size

    def prefill(self, prefix_lens, seq_lens, tags, positions) -> np.ndarray:
        slots = self.pages.extend(prefix_lens, seq_lens)
        self.rows.write(slots, tags, positions)
        return slots

    def decode(self, seq_lens, last_slots, tags, positions) -> np.ndarray:
        slots = self.pages.decode(seq_lens, last_slots)
        self.rows.write(slots, tags, positions)
        return slots

    def free(self, pages) -> None:
        self.pages.free(pages)

    def offload(self, pages, host_slots) -> None:
        self.rows.offload(page_slots(pages, self._page_size), host_slots)

    def restore(self, host_slots) -> np.ndarray:
        slots = self._extend(len(host_slots))
        self.rows.restore(slots, host_slots)
        return slots[:: self._page_size] // self._page_size

    def compact(self, pages) -> None:
        self.pages.clear()
        # An allocator as it was created hands out its pages from the first on.
        new_slots = self._extend(len(pages) * self._page_size)
        slots = page_slots(pages, self._page_size)
        moved = slots != new_slots
        self.rows.move(new_slots[moved], slots[moved])

    def num_free_pages(self) -> int:
        return self.pages.num_free()

    def read_layer(self, layer_id, slots) -> tuple[np.ndarray, ...]:
        return self.rows.read_layer(layer_id, slots)

    def read(self, slots) -> tuple[np.ndarray, ...]:
        return self.rows.read(slots)

    def read_host(self, host_slots) -> tuple[np.ndarray, ...]:
        return self.rows.read_host(host_slots)

    def _extend(self, num_tokens: int) -> np.ndarray:
        length = np.array([num_tokens], np.int32)
        return self.pages.extend(np.zeros_like(length), length)
