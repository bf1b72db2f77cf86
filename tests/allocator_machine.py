"""Random operations on two allocators, compared after each; an adapter makes an allocator one.

An adapter has ``alloc``, ``extend``, ``decode``, ``free``, ``free_group_begin`` and
``free_group_end``, ``backup``, ``restore`` and ``clear``, with lists for arrays and None where too
few slots are free, and ``free_pages()`` and ``available()``.
"""

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.allocator_oracle import AllocatorOracle

NUM_PAGES = 9
BATCH = 4
MAX_GROWTH = 12
FREE_BATCH = 24
"""Batches are padded to one size each, so that JAX compiles each function once."""


class OracleAdapter:
    """The plain Python oracle; a snapshot is of free pages alone, as in SGLang (A-RM-6)."""

    def __init__(self, num_slots, page_size, *, fifo):
        self.oracle = AllocatorOracle(num_slots, page_size, fifo=fifo)
        self.free = self.oracle.free
        self.free_group_begin = self.oracle.free_group_begin
        self.free_group_end = self.oracle.free_group_end
        self.clear = self.oracle.clear
        self.available = self.oracle.available

    def alloc(self, num_slots):
        slots, ok = self.oracle.alloc(num_slots)
        return slots if ok else None

    def extend(self, *args):
        slots, ok = self.oracle.extend(*args)
        return slots if ok else None

    def decode(self, *args):
        slots, ok = self.oracle.decode(*args)
        return slots if ok else None

    def backup(self):
        return list(self.oracle.free_pages)

    def restore(self, snapshot):
        self.oracle.free_pages = list(snapshot)
        self.oracle.group = [page for page in self.oracle.group if page not in snapshot]

    def free_pages(self):
        return list(self.oracle.free_pages)


def machine(make_actual, make_expected, page_size, *, grows, restores_in_group):
    class Machine(RuleBasedStateMachine):
        """Sequences come, grow and go, some of them in free groups."""

        def __init__(self):
            super().__init__()
            self.actual = make_actual(NUM_PAGES * page_size, page_size)
            self.expected = make_expected(NUM_PAGES * page_size, page_size)
            self.sequences = []
            self.depth = 0
            self.pending = set()
            self.saved = []

        def both(self, name, *args):
            expected = getattr(self.expected, name)(*args)
            assert getattr(self.actual, name)(*args) == expected
            return expected

        @rule(num_pages=st.integers(0, 4))
        def alloc(self, num_pages):
            self.hand_out(num_pages)

        def hand_out(self, num_pages):
            if slots := self.both("alloc", num_pages * page_size):
                self.sequences.append(slots)

        @rule(data=st.data())
        def extend(self, data):
            if not grows:
                return
            chosen = self.choose(data, BATCH)
            new = [[] for _ in range(data.draw(st.integers(0, BATCH - len(chosen))))]
            batch = chosen + new + [None] * (BATCH - len(chosen) - len(new))
            prefix_lens = [len(seq or ()) for seq in batch]
            grow = [
                data.draw(st.integers(0, MAX_GROWTH)) if seq is not None else 0 for seq in batch
            ]
            seq_lens = [a + b for a, b in zip(prefix_lens, grow, strict=True)]
            last_slots = [self.last_slot(data, seq) for seq in batch]
            args = (prefix_lens, seq_lens, last_slots, BATCH * MAX_GROWTH)
            if (slots := self.both("extend", *args)) is not None:
                rest = iter(slots)
                for seq, num in zip(batch, grow, strict=True):
                    if seq is not None:
                        seq.extend(next(rest) for _ in range(num))
                self.sequences += [seq for seq in new if seq]

        @rule(data=st.data())
        def decode(self, data):
            self.some_decode(data)

        def some_decode(self, data):
            if not grows:
                return
            chosen = self.choose(data, BATCH)
            batch = data.draw(st.permutations(chosen + [None] * (BATCH - len(chosen))))
            seq_lens = [0 if seq is None else len(seq) + 1 for seq in batch]
            last_slots = [self.last_slot(data, seq) for seq in batch]
            slots = self.both("decode", seq_lens, last_slots)
            for seq, slot in zip(batch, slots or (), strict=slots is not None):
                if seq is not None:
                    seq.append(slot)

        @rule(data=st.data())
        def free(self, data):
            self.some_free(data)

        def some_free(self, data):
            """Sequences, one token of each page at least, among slots that nobody has."""
            gone = self.choose(data, 2)
            self.sequences = [seq for seq in self.sequences if not any(seq is g for g in gone)]
            slots = [slot for seq in gone for slot in seq[:: data.draw(st.integers(1, page_size))]]
            held = {slot // page_size for seq in self.sequences for slot in seq}
            junk = st.integers(-3 * page_size, (NUM_PAGES + 4) * page_size)
            slots += data.draw(st.lists(junk.filter(lambda slot: slot // page_size not in held)))
            slots = data.draw(st.permutations(slots))[:FREE_BATCH]
            slots += [-1] * (FREE_BATCH - len(slots))
            if self.depth:
                self.pending.update(slot // page_size for slot in slots)
            self.both("free", slots)

        @rule()
        def free_group_begin(self):
            self.depth += 1
            self.both("free_group_begin")

        @rule()
        def free_group_end(self):
            self.depth = max(self.depth - 1, 0)
            if not self.depth:
                self.pending.clear()
            self.both("free_group_end")

        @rule()
        def backup(self):
            if restores_in_group or not self.depth:
                self.saved = [*self.saved[-2:], self.snapshot()]

        @rule(data=st.data())
        def restore(self, data):
            """Any state that was backed up of late, in any order, again and again."""
            if self.saved and (restores_in_group or not self.depth):
                self.go_back(data.draw(st.sampled_from(self.saved)))

        @rule(data=st.data(), steps=st.lists(st.sampled_from(["alloc", "free", "decode"])))
        def trial(self, data, steps):
            """As speculative decoding does it."""
            if not restores_in_group and self.depth:
                return
            snapshot = self.snapshot()
            for step in steps:
                if step == "alloc":
                    self.hand_out(data.draw(st.integers(0, 4)))
                else:
                    getattr(self, f"some_{step}")(data)
            self.go_back(snapshot)

        def snapshot(self):
            sequences = [list(seq) for seq in self.sequences]
            return self.actual.backup(), self.expected.backup(), sequences

        def go_back(self, snapshot):
            actual, expected, sequences = snapshot
            self.actual.restore(actual)
            self.expected.restore(expected)
            # Those that the open group still frees are gone.
            self.sequences = [
                list(seq)
                for seq in sequences
                if not any(slot // page_size in self.pending for slot in seq)
            ]

        @rule()
        def clear(self):
            self.both("clear")
            self.sequences, self.depth = [], 0
            self.pending.clear()

        def choose(self, data, at_most):
            order = data.draw(st.permutations(range(len(self.sequences))))
            return [self.sequences[i] for i in order[: data.draw(st.integers(0, at_most))]]

        def last_slot(self, data, seq):
            """Sometimes one in a page that nobody has, or that does not exist."""
            if seq and data.draw(st.integers(0, 3)):
                return seq[-1]
            pages = [-2, -1, 0, NUM_PAGES + 1, NUM_PAGES + 900, *self.expected.free_pages()]
            first = data.draw(st.sampled_from(pages)) * page_size
            return first + data.draw(st.integers(0, page_size - 1))

        @invariant()
        def agree(self):
            self.both("free_pages")
            self.both("available")

        @invariant()
        def no_page_has_two_owners(self):
            owned = [
                page for seq in self.sequences for page in {s // page_size for s in seq if s >= 0}
            ]
            everyones = owned + self.actual.free_pages()
            assert len(everyones) == len(set(everyones))

    return Machine


def run_machine(*args, grows=True, restores_in_group=True, **settings):
    run_state_machine_as_test(
        machine(*args, grows=grows, restores_in_group=restores_in_group),
        settings=hypothesis.settings(deadline=None, stateful_step_count=30, **settings),
    )
