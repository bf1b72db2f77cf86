"""SGLang's own allocators and request table against kvtorch's, in any order of calls."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

from kvtorch import sglang as ours
from tests.equivalence.upstream import require_sglang

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUM_PAGES = 9
NUM_ROWS = 5
CONTEXT = 12


def assert_same(actual, expected):
    """Of the same type and value; tensors of the same dtype, shape and device too."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor)
        assert (actual.dtype, actual.device) == (expected.dtype, expected.device)
        assert torch.equal(actual, expected)
    elif isinstance(expected, list | tuple):
        assert type(actual) is type(expected) and len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    else:
        assert type(actual) is type(expected)
        assert actual == expected


class Both:
    """Two objects that get the same calls and have to give the same answers."""

    def __init__(self, actual, expected):
        self.actual = actual
        self.expected = expected

    def call(self, method, *args):
        results = []
        for target in (self.expected, self.actual):
            given = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
            try:
                results.append(getattr(target, method)(*given))
            except Exception as error:
                results.append(type(error))
            assert_same(given, list(args))
        expected, actual = results
        assert_same(actual, expected)
        return expected

    def look(self, *names):
        for name in names:
            assert_same(getattr(self.actual, name), getattr(self.expected, name))


def allocators(theirs, make, page_size, device):
    """What engines do with an allocator, short of what SGLang's gets wrong.

    Not done are allocations that do not fill pages (A-PG-2, A-RM-3), growth beyond the free pages
    (AL1), of no sequences, nested free groups and ends without a beginning (AL3), frees of what is
    free, or of a page in two calls (AL4, AL5), and restores in a free group (A-RM-6).
    """

    class Machine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.both = Both(*make(theirs, page_size, device))
            self.paged = isinstance(self.both.actual, ours.PagedTokenToKVPoolAllocator)
            self.sequences = []
            self.in_group = False
            self.saved = None

        def tensor(self, values, dtype=torch.int64):
            return torch.tensor(values, dtype=dtype, device=device)

        def num_free(self):
            return len(self.both.expected.free_pages)

        @rule(num_pages=st.integers(0, NUM_PAGES + 1))
        def alloc(self, num_pages):
            slots = self.both.call("alloc", num_pages * page_size)
            if slots is not None and len(slots):
                self.sequences.append(slots.tolist())

        def chosen(self, data):
            if not self.sequences:
                return []
            indices = st.lists(
                st.integers(0, len(self.sequences) - 1), unique=True, min_size=1, max_size=3
            )
            return [self.sequences[i] for i in data.draw(indices)]

        @rule(
            data=st.data(),
            num_new=st.integers(0, 2),
            dtype=st.sampled_from([torch.int64, torch.int32]),
        )
        def alloc_extend(self, data, num_new, dtype):
            batch = [*self.chosen(data), *([] for _ in range(num_new))]
            old = [len(sequence) for sequence in batch]
            new = [n + data.draw(st.integers(1, 2 * page_size + 2)) for n in old]
            pages = [-(-n // page_size) for n in old + new]
            if not batch or sum(pages[len(old) :]) - sum(pages[: len(old)]) > self.num_free():
                return
            last = self.tensor([sequence[-1] if sequence else -1 for sequence in batch])
            lens = (self.tensor(old, dtype), self.tensor(new, dtype))
            slots = self.both.call("alloc_extend", *lens, last, sum(new) - sum(old))
            if not self.paged:
                assert slots is NotImplementedError
                return
            rest = iter(slots.tolist())
            for sequence, before, after in zip(batch, old, new, strict=True):
                sequence += [next(rest) for _ in range(after - before)]
            self.sequences += batch[len(old) - num_new :]

        @rule(data=st.data())
        def alloc_decode(self, data):
            batch = self.chosen(data)
            if not batch or sum(len(s) % page_size == 0 for s in batch) > self.num_free():
                return
            lens = self.tensor([len(sequence) + 1 for sequence in batch])
            last = self.tensor([sequence[-1] for sequence in batch])
            slots = self.both.call("alloc_decode", lens, last)
            if self.paged:
                for sequence, slot in zip(batch, slots.tolist(), strict=True):
                    sequence.append(slot)

        @rule(data=st.data())
        def free(self, data):
            slots = []
            for sequence in self.chosen(data):
                self.sequences = [other for other in self.sequences if other is not sequence]
                slots += sequence
            self.both.call("free", self.tensor(data.draw(st.permutations(slots))))
            self.saved = None  # else what is restored was freed again since

        @rule()
        def free_group(self):
            self.in_group = not self.in_group
            self.both.call("free_group_begin" if self.in_group else "free_group_end")

        @rule()
        def backup(self):
            if not self.in_group:
                states = [x.backup_state() for x in (self.both.actual, self.both.expected)]
                self.saved = states, [list(sequence) for sequence in self.sequences]

        @rule()
        def restore(self):
            if self.saved and not self.in_group:
                (actual, expected), sequences = self.saved
                self.both.actual.restore_state(actual)
                self.both.expected.restore_state(expected)
                self.sequences = [list(sequence) for sequence in sequences]

        @rule()
        def clear(self):
            self.both.call("clear")
            self.sequences, self.saved, self.in_group = [], None, False

        @rule(data=st.data())
        def cpu_copy(self, data):
            copy = self.both.call("get_cpu_copy", self.tensor([3]))
            self.both.call("load_cpu_copy", copy, self.tensor([3]))

        @invariant()
        def same(self):
            self.both.call("available_size")
            self.both.call("debug_print")
            self.both.look("free_pages", "is_not_in_free_group", "size", "page_size")
            if self.in_group:  # SGLang keeps the list behind the end (AL3)
                self.both.look("free_group")
            pool = self.both.expected.get_kvcache()
            assert self.both.actual.get_kvcache() is pool is not None

    return Machine


class Pool:
    """What an allocator asks of a pool."""

    def get_cpu_copy(self, indices):
        return indices.tolist()

    def load_cpu_copy(self, copy, indices):
        return [copy, indices.tolist()]


def of_slots(theirs, page_size, device, mutant=None):
    pool, args = Pool(), (NUM_PAGES * page_size, torch.bfloat16, device)
    cls = mutant or ours.TokenToKVPoolAllocator
    return cls(*args, pool), theirs.TokenToKVPoolAllocator(*args, pool)


def of_pages(theirs, page_size, device, mutant=None):
    # Some slots past the last whole page.
    pool, args = Pool(), ((NUM_PAGES + 1) * page_size - 1, page_size, torch.bfloat16, device)
    cls = mutant or ours.PagedTokenToKVPoolAllocator
    return cls(*args, pool), theirs.PagedTokenToKVPoolAllocator(*args, pool)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make, page_size", [(of_slots, 1), (of_pages, 1), (of_pages, 4)])
def test_allocators_hand_out_the_same_slots(make, page_size, device):
    machine = allocators(require_sglang(), make, page_size, device)
    # On a GPU, SGLang's kernels are compiled for many sizes.
    max_examples = 15 if device == "cpu" else 4
    run_state_machine_as_test(machine, settings=settings(max_examples=max_examples))


def request_tables(theirs, device, mutant=ours.ReqToTokenPool):
    """What engines do with a request table, short of what SGLang's gets wrong.

    Not done are allocations of fewer than no rows (A-RT-4), and frees of what is free (AL4).
    """

    class Machine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            args = (NUM_ROWS, CONTEXT, device, False)
            self.both = Both(mutant(*args), theirs.ReqToTokenPool(*args))
            self.taken = []

        @rule(num_rows=st.integers(0, NUM_ROWS))
        def alloc(self, num_rows):
            self.taken += self.both.call("alloc", num_rows) or []

        @rule(data=st.data())
        def free(self, data):
            if self.taken:
                rows = data.draw(st.lists(st.sampled_from(self.taken), unique=True))
                self.taken = [row for row in self.taken if row not in rows]
                alone = len(rows) == 1 and data.draw(st.booleans())
                self.both.call("free", rows[0] if alone else rows)

        @rule(row=st.integers(0, NUM_ROWS - 1), seed=st.integers(0, 99), data=st.data())
        def write(self, row, seed, data):
            rng = np.random.default_rng(seed)
            start, stop = sorted(rng.integers(0, CONTEXT + 1, 2).tolist())
            rows = rng.permutation(NUM_ROWS)[:3]
            indices, num_values = data.draw(
                st.sampled_from(
                    [
                        ((row, slice(start, stop)), stop - start),
                        (row, CONTEXT),
                        ((torch.tensor(rows, device=device), start % CONTEXT), 3),
                    ]
                )
            )
            values = torch.tensor(rng.integers(0, 99, num_values), dtype=torch.int32)
            self.both.call("write", indices, values.to(device))

        @rule()
        def clear(self):
            self.both.call("clear")
            self.taken = []

        @invariant()
        def same(self):
            self.both.call("available_size")
            self.both.look("free_slots", "req_to_token", "size", "max_context_len", "device")

    return Machine


@pytest.mark.parametrize("device", DEVICES)
def test_request_tables_hand_out_the_same_rows(device):
    machine = request_tables(require_sglang(), device)
    run_state_machine_as_test(machine, settings=settings(max_examples=30))


class FreesBehindTheOthers(ours.PagedTokenToKVPoolAllocator):
    _put_back = ours.TokenToKVPoolAllocator._put_back


class OpensAPageForEveryExtension(ours.PagedTokenToKVPoolAllocator):
    def alloc_extend(self, prefix_lens, seq_lens, last_loc, extend_num_tokens):
        whole = -(-prefix_lens // self.page_size) * self.page_size
        return super().alloc_extend(
            whole, seq_lens + whole - prefix_lens, last_loc, extend_num_tokens
        )


class TakesBackAtOnceInAGroup(ours.PagedTokenToKVPoolAllocator):
    def free_group_begin(self):
        pass


class HandsOutInt32(ours.TokenToKVPoolAllocator):
    def alloc(self, need_size):
        slots = super().alloc(need_size)
        return None if slots is None else slots.int()


class NeverHandsOutTheLast(ours.TokenToKVPoolAllocator):
    def alloc(self, need_size):
        return None if need_size >= self.available_size() else super().alloc(need_size)


class ForgetsToRestore(ours.TokenToKVPoolAllocator):
    def restore_state(self, free_pages):
        pass


class HandsOutTheLastFreedFirst(ours.ReqToTokenPool):
    def free(self, free_index):
        before = len(self.free_slots)
        super().free(free_index)
        self.free_slots = self.free_slots[before:] + self.free_slots[:before]


class ErasesRowsWhenCleared(ours.ReqToTokenPool):
    def clear(self):
        super().clear()
        self.req_to_token.zero_()


@pytest.mark.parametrize(
    "mutant",
    [
        FreesBehindTheOthers,
        OpensAPageForEveryExtension,
        TakesBackAtOnceInAGroup,
        HandsOutInt32,
        NeverHandsOutTheLast,
        ForgetsToRestore,
        HandsOutTheLastFreedFirst,
        ErasesRowsWhenCleared,
    ],
    ids=lambda mutant: mutant.__name__,
)
def test_a_wrong_class_is_caught(mutant):
    theirs = require_sglang()
    if issubclass(mutant, ours.ReqToTokenPool):
        machine = request_tables(theirs, "cpu", mutant)
    else:
        paged = issubclass(mutant, ours.PagedTokenToKVPoolAllocator)

        def make(theirs, page_size, device):
            return (of_pages if paged else of_slots)(theirs, page_size, device, mutant)

        machine = allocators(theirs, make, 4 if paged else 1, "cpu")
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=500,
                phases=[Phase.generate],
                derandomize=True,
                database=None,
                report_multiple_bugs=False,
            ),
        )
