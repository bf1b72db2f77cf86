"""Which prefixes are cached, where, and which of them goes first when space is short?

A tree of units, each ``unit_len`` tokens that extend their parent's prefix. A unit is in one tier:

| on      | parent is on    | leaves it when                                                     |
| ------- | --------------- | ------------------------------------------------------------------ |
| device  | device          | it is the unit longest unused of those with no user and no child   |
|         |                 | on the device: to the host tier or, where that has no room, for good |
| host    | device or host  | a request hits it (back to the device), or it is the longest unused |
|         |                 | of those without a child and room is needed: for good               |

Nothing here knows a slot's content or moves a byte.
"""

import dataclasses
import heapq
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvjax.replay.data_plane import page_slots

NO_PAGES = np.empty(0, np.int32)
"""The pages of a unit that is not on the device, or not yet written."""


@dataclasses.dataclass(eq=False, slots=True)
class Unit:
    """One cached unit; ``depth`` units come before it.

    Attributes:
      pages: the device pages that hold it.
      host_unit: which of the host tier's places holds it; ``None`` on the device.
      users: running requests whose prefix it is part of.
      last_used: when the last of them finished, in releases since the start.
    """

    key: int
    parent: "Unit | None"
    depth: int
    pages: np.ndarray = dataclasses.field(default_factory=lambda: NO_PAGES)
    host_unit: int | None = None
    users: int = 0
    last_used: int = 0
    device_children: int = 0
    children: int = 0


class PrefixIndex:
    """Cached units by key, with reference counts and an LRU order in each tier.

    Attributes:
      num_idle: units on the device without a user; every one of them can be evicted.
      num_dropped: units that were evicted for good.
    """

    def __init__(self, host_capacity: int) -> None:
        self._units: dict[int, Unit] = {}
        self._host_free = list(range(host_capacity))[::-1]
        self._host_capacity = host_capacity
        self._releases = 0
        # (last_used, tie-breaker, unit); entries go stale and are then skipped when popped.
        self._device_leaves: list[tuple[int, int, Unit]] = []
        self._host_leaves: list[tuple[int, int, Unit]] = []
        self.num_idle = 0
        self.num_dropped = 0

    @property
    def num_on_host(self) -> int:
        """Units in the host tier."""
        return self._host_capacity - len(self._host_free)

    @property
    def num_on_device(self) -> int:
        """Units in the device tier."""
        return len(self._units) - self.num_on_host

    def on_device(self) -> Iterator[Unit]:
        """Units in the device tier, parents before children."""
        return (unit for unit in self._units.values() if unit.host_unit is None)

    def on_host(self) -> Iterator[Unit]:
        """Units in the host tier."""
        return (unit for unit in self._units.values() if unit.host_unit is not None)

    def match(self, keys: Iterable[int]) -> list[Unit]:
        """The units of the longest cached prefix of ``keys``: first those on the device."""
        path = []
        for key in keys:
            unit = self._units.get(key)
            if unit is None:
                break
            path.append(unit)
        return path

    def insert(self, parent: Unit | None, keys: Sequence[int]) -> list[Unit]:
        """Adds new units below ``parent``, on the device, with one user and no pages yet."""
        units = []
        for key in keys:
            assert key not in self._units, f"{key=} is cached already"
            depth = 0 if parent is None else parent.depth + 1
            unit = self._units[key] = Unit(key, parent, depth, users=1)
            if parent is not None:
                parent.children += 1
                parent.device_children += 1
            units.append(unit)
            parent = unit
        return units

    def acquire(self, path: Iterable[Unit]) -> None:
        """Adds a user to every unit of a matched path."""
        for unit in path:
            if unit.users == 0 and unit.host_unit is None:
                self.num_idle -= 1
            unit.users += 1

    def release(self, path: Sequence[Unit]) -> None:
        """Takes a user from every unit of a path that is all on the device, and marks it used."""
        self._releases += 1
        for unit in path:
            unit.users -= 1
            unit.last_used = self._releases
            if unit.users == 0:
                self.num_idle += 1
        for unit in path[-1:]:
            self._note_device_leaf(unit)

    def evict(self, count: int) -> list[Unit]:
        """Takes ``count`` idle units off the device, those longest unused first.

        Returns them, with the pages they had. Those with a ``host_unit`` are now in the host tier;
        the others are gone, as are host units that had to make room.
        """
        assert count <= self.num_idle, f"{count=} units asked for, {self.num_idle} are idle"
        evicted = []
        while len(evicted) < count:
            last_used, _, unit = heapq.heappop(self._device_leaves)
            if not _is_idle_device_leaf(unit) or unit.last_used != last_used:
                continue
            self._leave_device(unit)
            evicted.append(unit)
        return evicted

    def restore(self, unit: Unit, pages: np.ndarray) -> None:
        """Moves a unit that has a user from the host tier to the device, into ``pages``."""
        assert unit.users > 0 and unit.host_unit is not None
        self._host_free.append(unit.host_unit)
        unit.host_unit = None
        unit.pages = pages
        if unit.parent is not None:
            unit.parent.device_children += 1

    def _leave_device(self, unit: Unit) -> None:
        self.num_idle -= 1
        parent = unit.parent
        if parent is not None:
            parent.device_children -= 1
            self._note_device_leaf(parent)
        unit.host_unit = self._host_place()
        if unit.host_unit is None:
            self._drop(unit)
        else:
            self._note_host_leaf(unit)

    def _host_place(self) -> int | None:
        """A free place in the host tier, made by dropping its longest unused leaf if need be.

        ``None`` where there is no place at all, or running requests wait for all that is there.
        """
        while not self._host_free and self._host_leaves:
            last_used, _, unit = heapq.heappop(self._host_leaves)
            if _is_idle_host_leaf(unit) and unit.last_used == last_used:
                assert unit.host_unit is not None
                self._host_free.append(unit.host_unit)
                unit.host_unit = None
                self._drop(unit)
        return self._host_free.pop() if self._host_free else None

    def _drop(self, unit: Unit) -> None:
        # A unit without a place has no child: a child could only be on the host, without a user
        # as its parent has none, and would have made the room.
        assert unit.children == 0
        del self._units[unit.key]
        self.num_dropped += 1
        if unit.parent is not None:
            unit.parent.children -= 1
            self._note_host_leaf(unit.parent)

    def _note_device_leaf(self, unit: Unit) -> None:
        if _is_idle_device_leaf(unit):
            heapq.heappush(self._device_leaves, (unit.last_used, unit.key, unit))

    def _note_host_leaf(self, unit: Unit) -> None:
        if _is_idle_host_leaf(unit):
            heapq.heappush(self._host_leaves, (unit.last_used, unit.key, unit))


def _is_idle_device_leaf(unit: Unit) -> bool:
    return unit.host_unit is None and unit.users == 0 and unit.device_children == 0


def _is_idle_host_leaf(unit: Unit) -> bool:
    return unit.host_unit is not None and unit.users == 0 and unit.children == 0


def device_pages(units: Sequence[Unit]) -> np.ndarray:
    """The device pages of ``units``, unit after unit."""
    return np.concatenate([NO_PAGES, *(unit.pages for unit in units)])


def host_slots(units: Sequence[Unit], unit_len: int) -> np.ndarray:
    """The host tier's slots of ``units``, which are all there, unit after unit."""
    places = np.array([unit.host_unit for unit in units], np.int32)
    return page_slots(places, unit_len)
