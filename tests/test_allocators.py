"""The allocators: against the oracle, on the faults that real ones had, in place, and traced."""

import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvjax import allocators, free_list
from kvjax.allocators import PageAllocator, SlotAllocator
from kvjax.checks_mode import checks
from kvjax.errors import GeometryError

from .allocator_oracle import AllocatorOracle, in_order

NUM_PAGES = 9
BATCH = 4
MAX_TOKENS = 40
FREE_BATCH = 24
"""Batches are padded to one size each, so that the machine compiles each function once."""

FAMILIES = {"slots": SlotAllocator, "pages": PageAllocator}


def create(family, num_slots, page_size):
    return (
        SlotAllocator.create(num_slots)
        if family == "slots"
        else PageAllocator.create(num_slots, page_size)
    )


def free_pages_in_order(state):
    return in_order(state.free_pages)


def machine(family, page_size):
    class Machine(RuleBasedStateMachine):
        """Sequences come, grow and go, some of them in free groups; every step is compared."""

        def __init__(self):
            super().__init__()
            num_slots = NUM_PAGES * page_size
            self.state = create(family, num_slots, page_size)
            self.oracle = AllocatorOracle(num_slots, page_size, fifo=family == "slots")
            self.sequences = []
            self.saved = None

        def compare(self, name, *args):
            expected_slots, expected_ok = getattr(self.oracle, name)(*args)
            self.state, slots, ok = getattr(allocators, name)(self.state, *args)
            assert (slots.tolist(), bool(ok)) == (expected_slots, expected_ok)
            return expected_slots if expected_ok else None

        @rule(num_pages=st.integers(0, 4))
        def alloc(self, num_pages):
            if slots := self.compare("alloc", num_pages * page_size):
                self.sequences.append(slots)

        @rule(data=st.data(), num_tokens=st.just(MAX_TOKENS) | st.just(3))
        def extend(self, data, num_tokens):
            chosen = self.choose(data, BATCH)
            new = [[] for _ in range(data.draw(st.integers(0, BATCH - len(chosen))))]
            batch = chosen + new + [None] * (BATCH - len(chosen) - len(new))
            prefix_lens = [len(seq or ()) for seq in batch]
            grow = [data.draw(st.integers(0, 12)) if seq is not None else 0 for seq in batch]
            seq_lens = [a + b for a, b in zip(prefix_lens, grow, strict=True)]
            last_slots = [self.last_slot(data, seq) for seq in batch]
            slots = self.compare("extend", prefix_lens, seq_lens, last_slots, num_tokens)
            if slots is not None:
                rest = iter(slots)
                for seq, num in zip(batch, grow, strict=True):
                    if seq is not None:
                        seq.extend(next(rest) for _ in range(num))
                self.sequences += [seq for seq in new if seq]

        @rule(data=st.data())
        def decode(self, data):
            chosen = self.choose(data, BATCH)
            batch = data.draw(st.permutations(chosen + [None] * (BATCH - len(chosen))))
            seq_lens = [0 if seq is None else len(seq) + 1 for seq in batch]
            last_slots = [self.last_slot(data, seq) for seq in batch]
            slots = self.compare("decode", seq_lens, last_slots)
            for seq, slot in zip(batch, slots or (), strict=slots is not None):
                if seq is not None:
                    seq.append(slot)

        @rule(data=st.data())
        def free(self, data):
            """Sequences, one token of each page at least, among slots that nobody has."""
            gone = self.choose(data, 2)
            self.sequences = [seq for seq in self.sequences if not any(seq is g for g in gone)]
            slots = [slot for seq in gone for slot in seq[:: data.draw(st.integers(1, page_size))]]
            held = {slot // page_size for seq in self.sequences for slot in seq}
            junk = st.integers(-3 * page_size, (NUM_PAGES + 4) * page_size)
            slots += data.draw(st.lists(junk.filter(lambda slot: slot // page_size not in held)))
            slots = data.draw(st.permutations(slots))[:FREE_BATCH]
            slots += [-1] * (FREE_BATCH - len(slots))
            self.oracle.free(slots)
            self.state = allocators.free(self.state, slots)

        @rule(name=st.sampled_from(["free_group_begin", "free_group_end"]))
        def free_group(self, name):
            getattr(self.oracle, name)()
            self.state = getattr(allocators, name)(self.state)

        @rule()
        def backup(self):
            self.saved = (
                allocators.backup(self.state),
                self.oracle.backup(),
                [list(seq) for seq in self.sequences],
            )

        @rule()
        def restore(self):
            if self.saved is not None:
                snapshot, oracle, sequences = self.saved
                self.state = allocators.restore(snapshot)
                self.oracle.restore(oracle)
                self.sequences = [list(seq) for seq in sequences]

        @rule()
        def clear(self):
            self.state = allocators.clear(self.state)
            self.oracle.clear()
            self.sequences = []

        def choose(self, data, at_most):
            order = data.draw(st.permutations(range(len(self.sequences))))
            return [self.sequences[i] for i in order[: data.draw(st.integers(0, at_most))]]

        def last_slot(self, data, seq):
            """Sometimes one in a page that nobody has, or that does not exist."""
            if seq and data.draw(st.integers(0, 3)):
                return seq[-1]
            pages = [-2, -1, 0, NUM_PAGES + 1, NUM_PAGES + 900, *self.oracle.free_pages]
            first = data.draw(st.sampled_from(pages)) * page_size
            return first + data.draw(st.integers(0, page_size - 1))

        @invariant()
        def agrees_with_the_oracle(self):
            assert free_pages_in_order(self.state) == self.oracle.free_pages
            assert int(allocators.available(self.state)) == self.oracle.available()

        @invariant()
        def no_page_has_two_owners(self):
            owned = [
                page for seq in self.sequences for page in {s // page_size for s in seq if s >= 0}
            ]
            everyones = owned + free_pages_in_order(self.state)
            assert len(everyones) == len(set(everyones))
            assert len(free_pages_in_order(self.state)) + self.num_taken() == NUM_PAGES

        def num_taken(self):
            pages = jnp.arange(-3, NUM_PAGES + 4)
            return int(free_list.is_taken(self.state.free_pages, pages).sum())

    return Machine


def run_machine(family, page_size, **settings):
    run_state_machine_as_test(
        machine(family, page_size),
        settings=hypothesis.settings(deadline=None, stateful_step_count=25, **settings),
    )


@pytest.mark.parametrize(
    "family, page_size", [("slots", 1), ("pages", 1), ("pages", 3), ("pages", 4), ("pages", 16)]
)
def test_equals_oracle(family, page_size):
    run_machine(family, page_size, max_examples=20)


def test_a_wrong_order_is_caught(monkeypatch):
    """The comparison above can fail: pages that come back behind the others instead of before."""
    monkeypatch.setattr(PageAllocator, "take_back", staticmethod(free_list.append))
    with pytest.raises(AssertionError):
        run_machine("pages", 4, max_examples=200, phases=[hypothesis.Phase.generate], database=None)


# What real allocators got wrong, by the ids of the collection of public faults.


def drain(state, num_slots):
    """Every slot that can still be handed out, ``num_slots`` at a time."""
    slots = []
    while True:
        state, more, ok = allocators.alloc(state, num_slots)
        if not ok:
            return slots
        slots += more.tolist()


def test_al1_capacity_is_decided_first():
    state = PageAllocator.create(16, 4)
    state, slots, ok = allocators.extend(state, [0], [10], [-1], 10)
    assert slots.tolist() == list(range(4, 14)) and ok
    state, slots, ok = allocators.extend(state, [10], [17], [13], 7)
    assert slots.tolist() == [-1] * 7 and not ok and free_pages_in_order(state) == [4]
    state, slots, ok = allocators.extend(state, [10], [16], [13], 6)
    assert slots.tolist() == [14, 15, 16, 17, 18, 19] and ok and allocators.available(state) == 0
    state, slots, ok = allocators.decode(state, [17], [19])
    assert slots.tolist() == [-1] and not ok
    state, slots, ok = allocators.decode(state, [16], [18])
    assert slots.tolist() == [19] and ok


@pytest.mark.parametrize("family, page_size", [("slots", 1), ("pages", 4)])
def test_al1_an_empty_batch(family, page_size):
    state = create(family, 16, page_size)
    for name, args in (("extend", ([], [], [], 0)), ("decode", ([], [])), ("alloc", (0,))):
        state, slots, ok = getattr(allocators, name)(state, *args)
        assert slots.shape == (0,) and slots.dtype == jnp.int32 and ok
    state, slots, ok = allocators.extend(state, [], [], [], 3)
    assert slots.tolist() == [-1] * 3 and ok
    assert allocators.available(allocators.free(state, [])) == 16


def test_al3_a_group_ended_twice():
    state, slots, _ = allocators.alloc(SlotAllocator.create(6), 3)
    state = allocators.free(allocators.free_group_begin(state), slots)
    assert allocators.available(state) == 3
    state = allocators.free_group_end(allocators.free_group_end(state))
    assert free_pages_in_order(state) == [4, 5, 6, 1, 2, 3]


def test_al3_nested_groups():
    state, slots, _ = allocators.alloc(SlotAllocator.create(6), 4)
    state = allocators.free(allocators.free_group_begin(state), slots[:2])
    state = allocators.free(allocators.free_group_begin(state), slots[2:])
    state = allocators.free_group_end(state)
    assert allocators.available(state) == 2
    assert free_pages_in_order(allocators.free_group_end(state)) == [5, 6, 1, 2, 3, 4]


def test_al3_an_empty_group():
    state = allocators.free_group_begin(SlotAllocator.create(6))
    assert allocators.available(allocators.free_group_end(state)) == 6


@pytest.mark.parametrize("family, page_size", [("slots", 1), ("pages", 4)])
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_al4_double_free(family, page_size, checked, grouped):
    num_slots = 4 * page_size
    state, slots, _ = allocators.alloc(create(family, num_slots, page_size), 2 * page_size)
    if grouped:
        state = allocators.free_group_begin(state)
    state = allocators.free(state, slots)
    with checks(checked):
        if checked:
            with pytest.raises(ValueError, match=rf"slots\[0\]={page_size} is .*handed out"):
                allocators.free(state, slots)
        else:
            state = allocators.free(state, slots)
    state = allocators.free_group_end(state)
    assert allocators.available(state) == num_slots
    handed_out = drain(state, 2 * page_size)
    assert len(handed_out) == len(set(handed_out)) == num_slots


def test_al4_a_group_does_not_free_what_is_handed_out_after_the_call():
    state, _, _ = allocators.alloc(SlotAllocator.create(4), 2)
    state = allocators.free(allocators.free_group_begin(state), [3])
    state, slots, _ = allocators.alloc(state, 1)
    assert slots.tolist() == [3]
    assert free_pages_in_order(allocators.free_group_end(state)) == [4]


def test_al5_parts_of_a_page_in_one_group():
    state, slots, _ = allocators.alloc(PageAllocator.create(16, 4), 8)
    state = allocators.free_group_begin(state)
    state = allocators.free(allocators.free(state, slots[:2]), slots[2:4])
    state = allocators.free_group_end(state)
    assert free_pages_in_order(state) == [1, 3, 4]


def test_al5_parts_of_a_page_in_two_calls():
    state, slots, _ = allocators.alloc(PageAllocator.create(16, 4), 8)
    state = allocators.free(state, slots[:2])
    with checks(), pytest.raises(ValueError, match=r"slots\[0\]=6"):
        allocators.free(state, slots[2:4])
    state = allocators.free(state, slots[2:4])
    assert free_pages_in_order(state) == [1, 3, 4]


@pytest.fixture
def compilations():
    """Names of what is compiled, as a list that grows."""
    seen = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(kwargs.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_al6_past_two_to_the_twenty_tokens_and_one_compilation_per_capacity(compilations):
    num_tokens = (1 << 20) + 3
    state = PageAllocator.create(16385 * 64, 64)
    state, _, ok = allocators.extend(state, [0], [5], [-1], 5)
    state, slots, ok = allocators.extend(state, [5], [5 + num_tokens], [68], num_tokens)
    np.testing.assert_array_equal(slots, np.arange(69, 69 + num_tokens))
    assert ok and allocators.available(state) == 0

    state = allocators.clear(state)
    for i, grow in enumerate([3, 5, 9, 17, 33]):
        if i == 1:
            compilations.clear()
        state, slots, ok = allocators.extend(state, [0], [grow], [-1], 64)
        first = (i + 1) * 64
        assert slots.tolist() == [*range(first, first + grow)] + [-1] * (64 - grow)
    assert not compilations


# n = 5, 6 and 7 share a size, and so do groups whose parts and whole do.
@pytest.mark.parametrize("family, page_size", [("slots", 1), ("pages", 4)])
def test_frees_of_many_sizes_compile_for_few(family, page_size, compilations):
    def run(groups, make=list):
        state = create(family, 16 * page_size, page_size)
        for group in groups:
            state, slots, _ = allocators.alloc(state, sum(group) * page_size)
            slots = np.asarray(slots)[::page_size].tolist()
            before = len(compilations)
            if len(group) == 1:
                state = allocators.free(state, make(slots))
            else:
                state = allocators.free_group_begin(state)
                for size in group:
                    state = allocators.free(state, make(slots[:size]))
                    slots = slots[size:]
                state = allocators.free_group_end(state)
            counts.append(len(compilations) - before)
            assert allocators.available(state) == 16 * page_size

    counts = []
    jax.clear_caches()
    run([(3,), (5,), (6,), (7,), (3,)])
    assert counts[0] and counts[1] and counts[2:] == [0, 0, 0], counts
    counts.clear()
    jax.clear_caches()
    # The sizes inside a group are 4+8, 4+4 and 2+8, its own 16, 8 and 16.
    run([(3, 5), (4, 4), (2, 6)])
    assert counts[0] and sum(counts) <= 14, counts
    counts.clear()
    run([(5, 4), (3, 4), (2, 7), (6, 2), (7, 3)], make=np.array)
    assert counts == [0] * 5, counts


@pytest.mark.parametrize("lens", [[2**31 - 1], [8, 2**31 - 1], [8, 2**31 - 8, 2**31 - 8, 8]])
def test_al6_more_tokens_than_int32_counts(lens):
    state, batch = SlotAllocator.create(8), [0] * len(lens)
    state, slots, ok = allocators.extend(state, batch, lens, batch, 8)
    assert slots.tolist() == [-1] * 8 and not ok and allocators.available(state) == 8


@pytest.mark.parametrize("slot", [2**32 + 5, 2**31, -(2**31) - 1])
@pytest.mark.parametrize("make", [list, np.array])
def test_dl3_slots_that_do_not_fit(slot, make):
    state, _, _ = allocators.alloc(SlotAllocator.create(8), 8)
    with pytest.raises(OverflowError, match="slots"):
        allocators.free(state, make([5, slot]))
    with pytest.raises(OverflowError, match="last_slots"):
        allocators.decode(state, [1], make([slot]))
    assert allocators.available(state) == 0


def test_x1_freed_pages_come_first():
    state, _, _ = allocators.alloc(PageAllocator.create(16, 4), 12)
    state = allocators.free(allocators.free(state, [8]), [4])
    assert allocators.available(state) == 12
    state, slots, _ = allocators.alloc(state, 4)
    assert slots.tolist() == [4, 5, 6, 7]


def test_s8_parts_of_a_page():
    with pytest.raises(GeometryError, match="multiple"):
        PageAllocator.create(10, 4)
    state = PageAllocator.create(8, 4)
    for num_slots in (6, 1, -4, -1):
        with pytest.raises(ValueError, match=f"num_slots={num_slots}"):
            allocators.alloc(state, num_slots)
    assert drain(state, 4) == [*range(4, 12)]


def test_a_pg_7_worked_example():
    state = PageAllocator.create(160, 16)
    state, slots, _ = allocators.extend(state, [0], [20], [-1], 20)
    assert slots.tolist() == [*range(16, 36)]
    state, slots, _ = allocators.extend(state, [20], [36], [35], 16)
    assert slots.tolist() == [*range(36, 52)]
    state, slots, _ = allocators.decode(state, [37], [51])
    assert slots.tolist() == [52]


# Last slots that are not the sequence's own.

NOT_OURS = {
    "a page that was never handed out": ([2], [4], [9]),
    "a page that was freed": ([2], [4], [5]),
    "the padding page": ([2], [4], [1]),
    "not there": ([2, 2, 2], [4, 4, 4], [-3, 1, 1001]),
    "past int32's last page": ([4 + 3], [8], [2**31 - 2]),
}


@pytest.mark.parametrize("case", NOT_OURS)
def test_a_foreign_last_slot_gives_no_slot(case):
    prefix_lens, seq_lens, last_slots = NOT_OURS[case]
    state, slots, _ = allocators.alloc(PageAllocator.create(16, 4), 4)
    state = allocators.free(state, slots)
    num_tokens = sum(seq_lens) - sum(prefix_lens)
    with checks(), pytest.raises(ValueError, match=rf"last_slots\[0\]={last_slots[0]} "):
        allocators.extend(state, prefix_lens, seq_lens, last_slots, num_tokens)
    with checks(), pytest.raises(ValueError, match=rf"last_slots\[0\]={last_slots[0]} "):
        allocators.decode(state, [n + 1 for n in prefix_lens], last_slots)
    state, slots, ok = allocators.extend(state, prefix_lens, seq_lens, last_slots, num_tokens)
    assert slots.tolist() == [-1] * num_tokens and ok
    state, slots, ok = allocators.decode(state, [n + 1 for n in prefix_lens], last_slots)
    assert slots.tolist() == [-1] * len(last_slots) and ok
    assert drain(state, 4) == [*range(4, 20)]


def test_a_foreign_last_slot_takes_nothing_of_pages_handed_out_in_the_same_call():
    state = PageAllocator.create(16, 4)
    state, slots, ok = allocators.extend(state, [0, 2], [2, 7], [-1, 5], 7)
    assert slots.tolist() == [4, 5, -1, -1, 8, 9, 10] and ok


# Refused calls.

REFUSED = {
    "sizes_differ": (ValueError, lambda s: allocators.extend(s, [0], [1, 2], [-1], 8)),
    "sizes_differ_decode": (ValueError, lambda s: allocators.decode(s, [1, 2], [-1])),
    "negative_capacity": (ValueError, lambda s: allocators.extend(s, [0], [1], [-1], -1)),
    "float_count": (TypeError, lambda s: allocators.alloc(s, 4.0)),
    "int64_count": (ValueError, lambda s: allocators.alloc(s, 2**31)),
    "int64_capacity": (ValueError, lambda s: allocators.extend(s, [0], [1], [-1], 2**31)),
    "traced_count": (TypeError, lambda s: jax.jit(lambda n: allocators.alloc(s, n))(4)),
    "float_slots": (TypeError, lambda s: allocators.free(s, [1.0])),
    "matrix": (ValueError, lambda s: allocators.free(s, np.zeros((2, 2), np.int32))),
}
CHECKED = {
    "shrinks": (r"seq_lens\[1\]=3", lambda s: allocators.extend(s, [0, 4], [4, 3], [-1, 7], 8)),
    "negative": (r"seq_lens\[0\]=-1", lambda s: allocators.decode(s, [-1], [5])),
    "misplaced": (r"last_slots\[0\]=6 ", lambda s: allocators.decode(s, [3], [6])),
    "same_slot": (
        r"last_slots\[1\]=5 .*last_slots\[0\]",
        lambda s: allocators.decode(s, [3, 3], [5, 5]),
    ),
    "same_page": (
        r"last_slots\[1\]=4 .*last_slots\[0\]",
        lambda s: allocators.extend(s, [2, 1], [3, 2], [5, 4], 2),
    ),
    "nobodys": (r"last_slots\[0\]=13 ", lambda s: allocators.decode(s, [3], [13])),
    "padding_page": (r"slots\[1\]=3 ", lambda s: allocators.free(s, [4, 3])),
    "below": (r"slots\[1\]=-1 ", lambda s: allocators.free(s, [4, -1])),
    "past_the_end": (r"slots\[1\]=20 ", lambda s: allocators.free(s, [4, 20])),
    "twice": (r"slots\[2\]=5 is named twice", lambda s: allocators.free(s, [5, 4, 5])),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_call_changes_nothing(case):
    error, call = REFUSED[case]
    state, slots, _ = allocators.alloc(PageAllocator.create(16, 4), 8)
    with pytest.raises(error):
        call(state)
    assert allocators.available(allocators.free(state, slots)) == 16


@pytest.mark.parametrize("case", CHECKED)
def test_checks_mode_refuses_what_is_otherwise_ignored(case):
    message, call = CHECKED[case]
    state, _, _ = allocators.alloc(PageAllocator.create(16, 4), 8)
    with checks(), pytest.raises(ValueError, match=message):
        call(state)
    call(state)  # ignored, and not because something was left behind


def test_checks_mode_accepts_what_is_right():
    with checks():
        state, slots, _ = allocators.extend(PageAllocator.create(16, 4), [0, 0], [3, 0], [-1, 9], 4)
        state, more, _ = allocators.decode(state, [0, 4], [-1, slots[2]])
        assert more.tolist() == [-1, 7]
        state = allocators.free_group_begin(state)
        state = allocators.free(allocators.free(state, [4, 5]), [6, 7])
        assert allocators.available(allocators.free_group_end(state)) == 16
        jax.jit(allocators.free)(SlotAllocator.create(4), jnp.array([9]))  # traced: not looked at


@pytest.mark.parametrize("sizes", [(0, 4), (-4, 4), (8, 0), (2**31 - 4, 4)])
def test_sizes_that_are_none(sizes):
    with pytest.raises(GeometryError):
        PageAllocator.create(*sizes)


@pytest.mark.parametrize(
    "name, call",
    {
        "num_slots=8.0": lambda: SlotAllocator.create(8.0),  # pyright: ignore
        "page_size=4.0": lambda: PageAllocator.create(8, 4.0),  # pyright: ignore
        "num_slots='8'": lambda: PageAllocator.create("8", 4),  # pyright: ignore
        "num_slots=4.0": lambda: allocators.alloc(SlotAllocator.create(8), 4.0),
        "num_slots=2147483648": lambda: allocators.alloc(SlotAllocator.create(8), 2**31),
        "num_tokens=2147483648": lambda: allocators.extend(
            SlotAllocator.create(8), [0], [1], [-1], 2**31
        ),
    }.items(),
)
def test_messages_name_the_count(name, call):
    with pytest.raises((TypeError, ValueError), match=name):
        call()


def test_numpy_integers_are_integers():
    state = PageAllocator.create(np.int64(16), np.int32(4))
    assert type(state.page_size) is int
    state, slots, _ = allocators.alloc(state, np.uint8(4))
    state, more, _ = allocators.extend(state, [0], [2], [-1], np.int64(2))
    assert slots.tolist() + more.tolist() == [4, 5, 6, 7, 8, 9]
    assert drain(SlotAllocator.create(np.int16(3)), 1) == [1, 2, 3]


def test_checks_mode_refuses_to_grow_what_an_open_group_frees():
    state, slots, _ = allocators.alloc(PageAllocator.create(16, 4), 4)
    state = allocators.free(allocators.free_group_begin(state), slots)
    with checks(), pytest.raises(ValueError, match=r"last_slots\[0\]=5 .*not freed"):
        allocators.decode(state, [3], [5])


def test_pending_slots_are_the_allocators_own():
    """What NumPy memory holds when the group ends does not matter."""
    state, _, _ = allocators.alloc(SlotAllocator.create(64), 64)
    slots = np.arange(1, 33, dtype=np.int32)
    state = allocators.free(allocators.free_group_begin(state), slots)
    slots[:] = 0
    assert allocators.available(allocators.free_group_end(state)) == 32


# In place.

NUM_CALLS = 64


def steps(state):
    """Functions that update an allocator, with arguments for them."""
    lens = jnp.zeros(NUM_CALLS, jnp.int32)

    def mixed(state, seq_lens, last_slots):
        """Reads and updates of one list in turn, which XLA would like to reorder."""
        seen = []
        for _ in range(3):
            state, slots, _ = allocators.decode(state, seq_lens, last_slots)
            state = allocators.free(state, slots)
            state, more, _ = allocators.alloc(state, 4 * state.page_size)
            state = allocators.free(state, last_slots)  # does not depend on what was handed out
            seen += [slots, more]
        return state, seen

    def loop(state, seq_lens, last_slots):
        def more(carry):
            return carry[1]

        def body(carry):
            state, _ = carry
            state, slots, ok = allocators.decode(state, seq_lens, last_slots)
            return state, ok & (slots[0] > 0)

        return jax.lax.while_loop(more, body, (state, True))

    return {
        "alloc": (lambda s: allocators.alloc(s, NUM_CALLS * s.page_size), ()),
        "extend": (lambda s, *a: allocators.extend(s, *a, NUM_CALLS), (lens, lens, lens)),
        "decode": (allocators.decode, (lens, lens)),
        "free": (allocators.free, (lens,)),
        "clear": (allocators.clear, ()),
        "mixed": (mixed, (lens, lens)),
        "while_loop": (loop, (lens, lens)),
        "scan": (
            lambda s, *a: jax.lax.scan(lambda s, _: mixed(s, *a), s, None, length=3),
            (lens, lens),
        ),
    }


@pytest.mark.parametrize("family, page_size", [("slots", 1), ("pages", 16)])
@pytest.mark.parametrize("name", steps(None))
def test_in_place_at_a_cost_that_the_pool_does_not_matter_for(family, page_size, name):
    temp = {}
    for num_pages in (1 << 12, 1 << 16):
        state = create(family, num_pages * page_size, page_size)
        function, args = steps(state)[name]
        compiled = (
            jax.jit(function, donate_argnums=0, keep_unused=True).lower(state, *args).compile()
        )
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(state))
        assert not re.search(rf"s32\[({num_pages}|{num_pages + 1})\]\S* copy", compiled.as_text())
        temp[num_pages] = memory.temp_size_in_bytes
    assert temp[1 << 12] == temp[1 << 16] < 1 << 16


@pytest.mark.parametrize("name", ["alloc", "extend", "decode", "free", "clear"])
def test_eager_calls_use_up_what_they_are_given(name):
    state = PageAllocator.create(1 << 12, 16)
    function, args = steps(state)[name]
    function(state, *args)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


# Traced.


def test_a_traced_count_inside_scan():
    """Requests of 1, 2, 3, … tokens, as many as fit."""

    def step(state, seq_len):
        zero = jnp.zeros(1, jnp.int32)
        state, slots, ok = allocators.extend(state, zero, seq_len[None], zero, 4)
        return state, (slots, ok)

    state, (slots, ok) = jax.lax.scan(step, PageAllocator.create(20, 4), jnp.arange(8))
    assert ok.tolist() == [True] * 5 + [False] * 3  # 5 pages, and 4 tokens at a time
    assert slots[1:5].tolist() == [
        [4, -1, -1, -1],
        [8, 9, -1, -1],
        [12, 13, 14, -1],
        [16, 17, 18, 19],
    ]
    assert allocators.available(state) == 4


def test_while_loop_until_the_pool_is_empty():
    def more(carry):
        return carry[-1]

    def body(carry):
        state, last_slots, seq_lens, _ = carry
        new, slots, ok = allocators.decode(state, seq_lens, last_slots)
        return new, jnp.where(ok, slots, last_slots), seq_lens + ok, ok

    state = PageAllocator.create(24, 4)
    ones = jnp.ones(2, jnp.int32)
    state, last, seq_lens, _ = jax.jit(
        lambda state: jax.lax.while_loop(more, body, (state, ones, ones, True))
    )(state)
    assert last.tolist() == [23, 27] and seq_lens.tolist() == [13, 13]
    assert allocators.available(state) == 0


def test_a_free_group_inside_a_traced_step():
    @jax.jit
    def step(state, slots):
        state = allocators.free_group_begin(state)
        state = allocators.free(allocators.free(state, slots[:2]), slots[2:4])
        return allocators.free_group_end(state)

    state, slots, _ = allocators.alloc(PageAllocator.create(16, 4), 8)
    assert free_pages_in_order(step(state, slots)) == [1, 3, 4]


def test_backups_can_be_restored_twice_and_inside_jit():
    state, slots, _ = allocators.alloc(SlotAllocator.create(4), 2)
    snapshot = allocators.backup(state)
    for _ in range(2):
        state, slots, _ = allocators.alloc(allocators.free(state, slots), 3)
        state = allocators.restore(snapshot)
        slots = jnp.array([1, 2])
        assert free_pages_in_order(state) == [3, 4]

    @jax.jit
    def tried(state):
        snapshot = allocators.backup(state)
        state, slots, _ = allocators.alloc(state, 2)
        return allocators.restore(snapshot), slots

    state, slots = tried(state)
    assert slots.tolist() == [3, 4] and free_pages_in_order(state) == [3, 4]
