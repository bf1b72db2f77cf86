"""What the scheduler asks of the memory under it, and what that consists of."""

from typing import Protocol

import numpy as np

from kvjax.geometry import Geometry, LayerRange, PlaneSpec


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


class ReadableRows(Protocol):
    """Rows that can be looked at, as bit patterns plane by plane.

    Reads of several layers give ``[layers, len(slots), *row]``.
    """

    planes: tuple[PlaneSpec, ...]
    layers: LayerRange

    def read_layer(self, layer_id: int, slots: np.ndarray) -> tuple[np.ndarray, ...]:
        """The rows of one layer, as a model reads them; ``[len(slots), *row]``."""
        ...

    def read(self, slots: np.ndarray) -> tuple[np.ndarray, ...]:
        """The rows of all layers."""
        ...

    def read_host(self, host_slots: np.ndarray) -> tuple[np.ndarray, ...]:
        """The rows of all layers in the host tier."""
        ...


class ReadablePlane(DataPlane, ReadableRows, Protocol):
    """A data plane whose rows can be looked at."""


class Pages(Protocol):
    """The allocator of the device tier: who has which page."""

    def extend(self, prefix_lens: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
        """Slots for what sequences have beyond prefixes that end with a page."""
        ...

    def decode(self, seq_lens: np.ndarray, last_slots: np.ndarray) -> np.ndarray:
        """The slot of each sequence's newest token."""
        ...

    def free(self, pages: np.ndarray) -> None:
        """Takes pages back."""
        ...

    def clear(self) -> None:
        """Takes everything back; pages are handed out from the first on, as at the beginning."""
        ...

    def num_free(self) -> int:
        """Pages that nobody has."""
        ...


class Rows(ReadableRows, Protocol):
    """The rows of both tiers, wherever an allocator puts them."""

    def write(self, slots: np.ndarray, tags: np.ndarray, positions: np.ndarray) -> None:
        """Writes the ``content`` of these tags and positions, in every layer."""
        ...

    def offload(self, slots: np.ndarray, host_slots: np.ndarray) -> None:
        """Copies rows to the host tier."""
        ...

    def restore(self, slots: np.ndarray, host_slots: np.ndarray) -> None:
        """Copies rows from the host tier."""
        ...

    def move(self, dst: np.ndarray, src: np.ndarray) -> None:
        """Moves rows within the device tier, all at once."""
        ...


def page_slots(pages: np.ndarray, page_size: int) -> np.ndarray:
    """The slots of whole pages, page after page."""
    return (pages[:, None] * page_size + np.arange(page_size, dtype=np.int32)).reshape(-1)


def no_room(geometry: Geometry, host_bytes: int, reason: Exception) -> MemoryError:
    """What to raise where the two tiers cannot be allocated."""
    return MemoryError(
        f"no room for a pool of {geometry.bytes} bytes and one of {host_bytes} in the host tier: "
        f"{reason}"
    )
