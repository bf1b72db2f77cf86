"""Do JAX and torch do the same?"""

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from kvjax.geometry import PlaneSpec
from kvjax.replay.data_plane import Pages, Rows


class BackendsDiffer(Exception):
    """Two backends did not do the same; says what, and where."""


@dataclasses.dataclass
class Comparison:
    """What was compared so far and found to be the same.

    Attributes:
      slots: handed out by both allocators.
      rows: read in both memories, one token in one layer, all planes.
      turns: how often the memory that both share changed hands.
      seconds: that each backend has taken, by name.
    """

    slots: int = 0
    rows: int = 0
    turns: int = 0
    seconds: defaultdict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))

    @contextlib.contextmanager
    def timed(self, backend: str) -> Iterator[None]:
        """Adds the time that the block takes to ``seconds[backend]``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[backend] += time.perf_counter() - start

    def same_slots(self, call: str, found: dict[str, np.ndarray]) -> np.ndarray:
        """The slots that both handed out.

        Raises:
          BackendsDiffer: names the first that differs.
        """
        (one, slots), (other, others) = found.items()
        if len(slots) != len(others):
            raise BackendsDiffer(
                f"{call}: {len(slots)} slots from {one}, {len(others)} from {other}"
            )
        for token in np.flatnonzero(slots != others)[:1]:
            raise BackendsDiffer(
                f"{call}: token {token} gets slot {slots[token]} from {one}, "
                f"{others[token]} from {other}"
            )
        self.slots += len(slots)
        return slots

    def same_rows(
        self,
        tier: str,
        planes: tuple[PlaneSpec, ...],
        layer_ids: range,
        slots: np.ndarray,
        found: dict[str, tuple[np.ndarray, ...]],
    ) -> tuple[np.ndarray, ...]:
        """The bits that both read, ``[len(layer_ids), len(slots), *row]`` for each plane.

        Raises:
          BackendsDiffer: names the first element that differs.
        """
        (one, rows), (other, others) = found.items()
        for plane, bits, other_bits in zip(planes, rows, others, strict=True):
            if np.array_equal(bits, other_bits):
                continue
            place = tuple(np.argwhere(bits != other_bits)[0])
            layer, row, *element = map(int, place)
            digits = 2 * bits.itemsize
            raise BackendsDiffer(
                f"{tier} slot {slots[row]}, layer {layer_ids[layer]}, plane {plane.name}: "
                f"element {element} is 0x{bits[place]:0{digits}x} in {one}, "
                f"0x{other_bits[place]:0{digits}x} in {other}"
            )
        self.rows += len(layer_ids) * len(slots)
        return rows


class BothPages:
    """``Pages`` of two backends, which have to hand out the same slots for the same calls."""

    def __init__(self, pages: dict[str, Pages], comparison: Comparison) -> None:
        self._pages = pages
        self._comparison = comparison

    def extend(self, prefix_lens, seq_lens) -> np.ndarray:
        found = self._each(lambda pages: pages.extend(prefix_lens, seq_lens))
        return self._comparison.same_slots("extend", found)

    def decode(self, seq_lens, last_slots) -> np.ndarray:
        found = self._each(lambda pages: pages.decode(seq_lens, last_slots))
        return self._comparison.same_slots("decode", found)

    def free(self, pages) -> None:
        self._each(lambda allocator: allocator.free(pages))

    def clear(self) -> None:
        self._each(lambda pages: pages.clear())

    def num_free(self) -> int:
        (one, count), (other, others) = self._each(lambda pages: pages.num_free()).items()
        if count != others:
            raise BackendsDiffer(f"{count} pages are free in {one}, {others} in {other}")
        return count

    def _each[T](self, call: Callable[[Pages], T]) -> dict[str, T]:
        return _each(self._pages, call, self._comparison)


class BothRows:
    """``Rows`` of two backends, each in its own memory; what is read has to be the same."""

    def __init__(self, rows: dict[str, Rows], comparison: Comparison) -> None:
        first, *_ = rows.values()
        self.planes = first.planes
        self.layers = first.layers
        self._rows = rows
        self._comparison = comparison

    def write(self, slots, tags, positions) -> None:
        self._each(lambda rows: rows.write(slots, tags, positions))

    def offload(self, slots, host_slots) -> None:
        self._each(lambda rows: rows.offload(slots, host_slots))

    def restore(self, slots, host_slots) -> None:
        self._each(lambda rows: rows.restore(slots, host_slots))

    def move(self, dst, src) -> None:
        self._each(lambda rows: rows.move(dst, src))

    def read_layer(self, layer_id, slots) -> tuple[np.ndarray, ...]:
        found = self._each(
            lambda rows: tuple(bits[None] for bits in rows.read_layer(layer_id, slots))
        )
        same = self._same("device", range(layer_id, layer_id + 1), slots, found)
        return tuple(bits[0] for bits in same)

    def read(self, slots) -> tuple[np.ndarray, ...]:
        return self._same("device", self._layer_ids, slots, self._each(lambda r: r.read(slots)))

    def read_host(self, host_slots) -> tuple[np.ndarray, ...]:
        found = self._each(lambda rows: rows.read_host(host_slots))
        return self._same("host", self._layer_ids, host_slots, found)

    @property
    def _layer_ids(self) -> range:
        return range(self.layers.start, self.layers.stop)

    def _same(self, tier, layer_ids, slots, found) -> tuple[np.ndarray, ...]:
        return self._comparison.same_rows(tier, self.planes, layer_ids, slots, found)

    def _each[T](self, call: Callable[[Rows], T]) -> dict[str, T]:
        return _each(self._rows, call, self._comparison)


def _each[B, T](
    backends: dict[str, B], call: Callable[[B], T], comparison: Comparison
) -> dict[str, T]:
    results = {}
    for name, backend in backends.items():
        with comparison.timed(name):
            results[name] = call(backend)
    return results
