"""The prefix index against plain dictionaries that look at everything every time."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvjax.replay.prefix_index import PrefixIndex


@dataclasses.dataclass
class Entry:
    parent: int | None
    tier: str = "device"
    users: int = 0
    last_used: int = 0


class Oracle:
    """The contract, without counters, heaps or links between units."""

    def __init__(self, host_capacity):
        self.host_capacity = host_capacity
        self.entries = {}
        self.releases = 0

    def tier(self, name):
        return [key for key, entry in self.entries.items() if entry.tier == name]

    def children(self, key, tiers):
        return [
            child
            for child, entry in self.entries.items()
            if entry.parent == key and entry.tier in tiers
        ]

    def oldest(self, tier, child_tiers):
        leaves = [
            key
            for key in self.tier(tier)
            if not self.entries[key].users and not self.children(key, child_tiers)
        ]
        return min(leaves, key=lambda key: self.entries[key].last_used, default=None)

    def match(self, keys):
        path = []
        for key in keys:
            if key not in self.entries:
                break
            path.append(key)
        return path

    def evict(self):
        key = self.oldest("device", ["device"])
        if len(self.tier("host")) == self.host_capacity:
            dropped = self.oldest("host", ["device", "host"])
            if dropped is None:
                del self.entries[key]
                return key
            del self.entries[dropped]
        self.entries[key].tier = "host"
        return key


class Comparison(RuleBasedStateMachine):
    """Requests come, find and add prefixes, and go; units are evicted and restored."""

    @initialize(host_capacity=st.integers(0, 4))
    def start(self, host_capacity):
        self.index = PrefixIndex(host_capacity)
        self.oracle = Oracle(host_capacity)
        self.running = []

    # A key is its path from the root, so that it always has the same parent.
    @rule(steps=st.lists(st.integers(0, 1), max_size=4))
    def admit(self, steps):
        keys = [int("1" + "".join(map(str, steps[: i + 1]))) for i in range(len(steps))]
        path = self.index.match(keys)
        assert [unit.key for unit in path] == self.oracle.match(keys)
        self.index.acquire(path)
        new = self.index.insert(path[-1] if path else None, keys[len(path) :])
        for unit in path:
            if unit.host_unit is not None:
                self.index.restore(unit, np.array([unit.key], np.int32))
        self.running.append(path + new)
        for parent, key in zip([None, *keys], keys, strict=False):
            entry = self.oracle.entries.setdefault(key, Entry(parent))
            entry.users += 1
            entry.tier = "device"

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        path = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.index.release(path)
        self.oracle.releases += 1
        for unit in path:
            self.oracle.entries[unit.key].users -= 1
            self.oracle.entries[unit.key].last_used = self.oracle.releases

    @precondition(lambda self: self.index.num_idle)
    @rule(data=st.data())
    def evict(self, data):
        count = data.draw(st.integers(1, self.index.num_idle))
        evicted = self.index.evict(count)
        assert [unit.key for unit in evicted] == [self.oracle.evict() for _ in range(count)]
        for unit in evicted:
            assert (unit.host_unit is not None) == (unit.key in self.oracle.tier("host"))

    @invariant()
    def same_units(self):
        on_device, on_host = list(self.index.on_device()), list(self.index.on_host())
        assert {unit.key for unit in on_device} == set(self.oracle.tier("device"))
        assert {unit.key for unit in on_host} == set(self.oracle.tier("host"))
        assert self.index.num_on_device == len(on_device)
        assert self.index.num_on_host == len(on_host)
        assert self.index.num_idle == sum(not unit.users for unit in on_device)
        places = [unit.host_unit for unit in on_host]
        assert len(set(places)) == len(places)
        assert all(0 <= place < self.oracle.host_capacity for place in places)
        for unit in on_device:
            assert unit.parent is None or unit.parent.host_unit is None
            assert unit.depth == len(str(unit.key)) - 2


Comparison.TestCase.settings = settings(max_examples=200, stateful_step_count=30)
TestComparison = Comparison.TestCase


@given(st.integers(1, 3))
def test_units_that_wait_for_their_restore_keep_their_place(host_capacity):
    index = PrefixIndex(host_capacity)
    waiting = index.insert(None, range(host_capacity))
    index.release(waiting)
    index.evict(host_capacity)
    index.acquire(waiting)
    other = index.insert(None, [100])
    index.release(other)
    # The host tier is full of units that a request is about to get back: the other has no room.
    assert index.evict(1) == other
    assert other[0].host_unit is None
    assert index.match([100]) == []
    assert [unit.host_unit is not None for unit in waiting] == [True] * host_capacity


def test_a_unit_that_was_on_the_host_before_is_as_old_as_its_last_use():
    index = PrefixIndex(2)
    first, second, third = (index.insert(None, [key]) for key in (1, 2, 3))
    for path in (first, second):
        index.release(path)
        index.evict(1)
    index.acquire(first)
    index.restore(first[0], np.array([1], np.int32))
    for path in (first, third):
        index.release(path)
        index.evict(1)
    assert {unit.key for unit in index.on_host()} == {1, 3}
