"""The request table: against lists, on the faults that real ones had, in place, and traced."""

import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvjax import free_list, request_table
from kvjax.checks_mode import checks
from kvjax.errors import GeometryError
from kvjax.request_table import RequestTable

from .allocator_oracle import in_order

NUM_REQUESTS, MAX_CONTEXT_LEN = 5, 7
BATCH = 6
"""Batches are padded to this size, so that the machine compiles each function once."""


class Machine(RuleBasedStateMachine):
    """Rows come and go, and are written and read; every step is compared with plain lists."""

    def __init__(self):
        super().__init__()
        self.table = RequestTable.create(NUM_REQUESTS, MAX_CONTEXT_LEN)
        self.rows = [[0] * MAX_CONTEXT_LEN for _ in range(NUM_REQUESTS)]
        self.free_rows = list(range(NUM_REQUESTS))

    @rule(num_rows=st.integers(0, NUM_REQUESTS + 1))
    def alloc(self, num_rows):
        ok = num_rows <= len(self.free_rows)
        expected = self.free_rows[:num_rows] if ok else [-1] * num_rows
        if ok:
            del self.free_rows[:num_rows]
        self.table, rows, fits = request_table.alloc(self.table, num_rows)
        assert (rows.tolist(), bool(fits)) == (expected, ok)

    @rule(rows=st.lists(st.integers(-2, NUM_REQUESTS + 1), min_size=BATCH, max_size=BATCH))
    def free(self, rows):
        for row in rows:
            if 0 <= row < NUM_REQUESTS and row not in self.free_rows:
                self.free_rows.append(row)
        self.table = request_table.free(self.table, rows)

    @rule(data=st.data())
    def write(self, data):
        places = st.tuples(st.integers(-2, NUM_REQUESTS + 1), st.integers(-2, MAX_CONTEXT_LEN + 1))
        places = data.draw(st.lists(places, min_size=BATCH, max_size=BATCH, unique=True))
        slots = data.draw(st.lists(st.integers(-1, 99), min_size=BATCH, max_size=BATCH))
        for (row, position), slot in zip(places, slots, strict=True):
            if 0 <= row < NUM_REQUESTS and 0 <= position < MAX_CONTEXT_LEN:
                self.rows[row][position] = slot
        rows, positions = zip(*places, strict=True)
        self.table = request_table.write(self.table, rows, positions, slots)

    @rule(data=st.data(), max_seq_len=st.sampled_from([0, 3, MAX_CONTEXT_LEN]))
    def read(self, data, max_seq_len):
        def ints(low, high):
            return data.draw(st.lists(st.integers(low, high), min_size=BATCH, max_size=BATCH))

        rows, seq_lens = ints(-2, NUM_REQUESTS + 1), ints(-2, MAX_CONTEXT_LEN + 2)
        expected = []
        for row, seq_len in zip(rows, seq_lens, strict=True):
            shown = self.rows[row][: max(seq_len, 0)] if 0 <= row < NUM_REQUESTS else []
            expected.append((shown + [-1] * MAX_CONTEXT_LEN)[:max_seq_len])
        actual = request_table.read(self.table, rows, seq_lens, max_seq_len)
        assert actual.tolist() == expected

    @rule()
    def clear(self):
        self.free_rows = list(range(NUM_REQUESTS))
        self.table = request_table.clear(self.table)

    @invariant()
    def agrees(self):
        assert self.table.slots.tolist() == self.rows
        assert in_order(self.table.free_rows) == self.free_rows
        assert int(request_table.available(self.table)) == len(self.free_rows)
        taken = free_list.is_taken(self.table.free_rows, jnp.arange(NUM_REQUESTS))
        assert [row for row in range(NUM_REQUESTS) if not taken[row]] == sorted(self.free_rows)


def run_machine(**settings):
    run_state_machine_as_test(
        Machine,
        settings=hypothesis.settings(deadline=None, stateful_step_count=25, **settings),
    )


def test_equals_lists():
    run_machine(max_examples=25)


def test_a_wrong_order_is_caught(monkeypatch):
    """The comparison above can fail: rows handed out last in, first out."""
    monkeypatch.setattr(free_list, "append", free_list.prepend_sorted)
    with pytest.raises(AssertionError):
        run_machine(max_examples=200, phases=[hypothesis.Phase.generate], database=None)


def test_rq1_a_continuing_request_keeps_its_row():
    table, (a, b), _ = request_table.alloc(RequestTable.create(2, 8), 2)
    table, rows, ok = request_table.alloc(table, 1)
    assert rows.tolist() == [-1] and not ok
    table = request_table.free(table, b[None])
    table, (c,), ok = request_table.alloc(table, 1)
    assert ok and (a, c) == (0, b)
    forgotten = [-1]  # what b's owner is left with
    with checks(), pytest.raises(ValueError, match=r"rows\[0\]=-1 is not taken"):
        request_table.free(table, forgotten)
    assert request_table.available(request_table.free(table, forgotten)) == 0


def test_rq2_counts():
    table, rows, ok = request_table.alloc(RequestTable.create(4, 8), 0)
    assert rows.shape == (0,) and ok and request_table.available(table) == 4
    table, rows, ok = request_table.alloc(table, 5)
    assert rows.tolist() == [-1] * 5 and not ok and request_table.available(table) == 4
    table, rows, ok = request_table.alloc(table, 4)
    assert rows.tolist() == [0, 1, 2, 3] and ok
    table, rows, ok = request_table.alloc(table, 1)
    assert rows.tolist() == [-1] and not ok


def test_rq2_padding_changes_no_row():
    table, _, _ = request_table.alloc(RequestTable.create(2, 4), 2)
    table = request_table.write(table, [0, 1, -1, -1], [0, 0, 0, 1], [5, 6, 7, 8])
    assert table.slots.tolist() == [[5, 0, 0, 0], [6, 0, 0, 0]]
    assert request_table.read(table, [0, -1], [1, 1], 2).tolist() == [[5, -1], [-1, -1]]


@pytest.mark.parametrize("checked", [False, True])
def test_al4_double_free(checked):
    table, rows, _ = request_table.alloc(RequestTable.create(2, 8), 2)
    table = request_table.free(table, rows[:1])
    with checks(checked):
        if checked:
            with pytest.raises(ValueError, match=r"rows\[0\]=0 is not taken; allowed: rows from 0"):
                request_table.free(table, rows[:1])
        else:
            table = request_table.free(table, rows[:1])
    table, rows, ok = request_table.alloc(table, 2)
    assert rows.tolist() == [-1, -1] and not ok


def test_a_rt_6_stale_slots_are_not_read():
    table, rows, _ = request_table.alloc(RequestTable.create(1, 4), 1)
    table = request_table.write(table, [0] * 4, range(4), [7, 8, 9, 10])
    table, rows, _ = request_table.alloc(request_table.free(table, rows), 1)
    assert request_table.read(table, rows, [0], 4).tolist() == [[-1] * 4]
    table = request_table.write(table, rows, [0], [3])
    assert request_table.read(table, rows, [1], 4).tolist() == [[3, -1, -1, -1]]


@pytest.mark.parametrize("row", [2**32, 2**31, -(2**31) - 1])
def test_dl3_numbers_that_do_not_fit(row):
    table, _, _ = request_table.alloc(RequestTable.create(4, 8), 4)
    for name, call in {
        "rows": lambda: request_table.free(table, np.array([row])),
        "positions": lambda: request_table.write(table, [0], [row], [1]),
        "slots": lambda: request_table.write(table, [0], [1], [row]),
        "seq_lens": lambda: request_table.read(table, [0], [row], 8),
    }.items():
        with pytest.raises(OverflowError, match=name):
            call()
    assert not table.slots.any() and request_table.available(table) == 0


REFUSED = {
    "negative_count": (ValueError, lambda t: request_table.alloc(t, -1)),
    "int64_count": (ValueError, lambda t: request_table.alloc(t, 2**31)),
    "float_count": (TypeError, lambda t: request_table.alloc(t, 1.0)),
    "one_row_for_two": (ValueError, lambda t: request_table.write(t, [0], [0, 1], [1, 2])),
    "one_slot_for_two": (ValueError, lambda t: request_table.write(t, [0, 0], [0, 1], [1])),
    "one_length_for_two": (ValueError, lambda t: request_table.read(t, [0, 1], [1], 8)),
    "too_long": (ValueError, lambda t: request_table.read(t, [0], [1], 9)),
    "negative_length": (ValueError, lambda t: request_table.read(t, [0], [1], -1)),
    "float_rows": (TypeError, lambda t: request_table.free(t, [1.0])),
}
CHECKED = {
    "row_below": (IndexError, lambda t: request_table.write(t, [0, -1], [0, 0], [1, 2])),
    "row_past_the_end": (IndexError, lambda t: request_table.write(t, [0, 4], [0, 0], [1, 2])),
    "position": (IndexError, lambda t: request_table.write(t, [0, 0], [0, 8], [1, 2])),
    "row_read": (IndexError, lambda t: request_table.read(t, [0, 4], [1, 1], 8)),
    "row_freed_twice": (ValueError, lambda t: request_table.free(t, [1, 1])),
    "nobodys_row_freed": (ValueError, lambda t: request_table.free(t, [0, 3])),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_call_changes_nothing(case):
    error, call = REFUSED[case]
    table, rows, _ = request_table.alloc(RequestTable.create(4, 8), 2)
    with pytest.raises(error):
        call(table)
    table = request_table.write(request_table.free(table, rows), [0], [0], [3])
    assert request_table.available(table) == 4 and table.slots[0, 0] == 3


@pytest.mark.parametrize("case", CHECKED)
def test_checks_mode_refuses_what_is_otherwise_ignored(case):
    error, call = CHECKED[case]
    table, _, _ = request_table.alloc(RequestTable.create(4, 8), 3)
    with checks(), pytest.raises(error, match=r"(rows|positions)\[1\]="):
        call(table)
    call(table)  # ignored, and not because something was left behind


@pytest.mark.parametrize("sizes", [(0, 8), (8, 0), (-1, 8)])
def test_sizes_that_are_none(sizes):
    with pytest.raises(GeometryError):
        RequestTable.create(*sizes)


@pytest.mark.parametrize(
    "name, call",
    {
        "num_requests=4.0": lambda: RequestTable.create(4.0, 8),  # pyright: ignore
        "num_requests=2147483648": lambda: RequestTable.create(2**31, 1),
        "max_context_len=8.0": lambda: RequestTable.create(4, 8.0),  # pyright: ignore
        "num_rows=2147483648": lambda: request_table.alloc(RequestTable.create(4, 8), 2**31),
        "max_seq_len=2147483648": lambda: request_table.read(
            RequestTable.create(4, 8), [0], [1], 2**31
        ),
    }.items(),
)
def test_messages_name_the_count(name, call):
    with pytest.raises((TypeError, ValueError), match=name):
        call()


def test_numpy_integers_are_integers():
    table, rows, ok = request_table.alloc(RequestTable.create(np.int64(2), np.uint8(8)), np.int8(2))
    assert table.slots.shape == (2, 8) and rows.tolist() == [0, 1] and ok


def test_frees_of_many_sizes_compile_for_few():
    append = free_list.append
    table, _, _ = request_table.alloc(RequestTable.create(37, 1), 37)
    before = append._cache_size()
    for i, num_rows in enumerate([3, 5, 6, 7, 4, 8]):
        table = request_table.free(table, range(num_rows) if i % 2 else np.arange(num_rows))
    assert append._cache_size() - before == 2  # 4 and 8
    assert in_order(table.free_rows) == [*range(8)]


def step(table, rows, seq_lens):
    """What a decode step does."""
    table = request_table.write(table, rows, seq_lens, seq_lens + 100)
    return table, request_table.read(table, rows, seq_lens + 1, 32)


def scanned(table, rows, seq_lens):
    def body(carry, _):
        table, seq_lens = carry
        table, slots = step(table, rows, seq_lens)
        return (table, seq_lens + 1), slots

    (table, _), slots = jax.lax.scan(body, (table, seq_lens), None, length=8)
    return table, slots


@pytest.mark.parametrize("function", [step, scanned, request_table.write, request_table.free])
def test_in_place_at_a_cost_that_the_table_does_not_matter_for(function):
    rows = jnp.zeros(16, jnp.int32)
    args = {request_table.write: (rows,) * 3, request_table.free: (rows,)}.get(
        function, (rows,) * 2
    )
    temp = {}
    for num_requests in (1 << 8, 1 << 12):
        table = RequestTable.create(num_requests, 64)
        compiled = jax.jit(function, donate_argnums=0).lower(table, *args).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(table))
        assert not re.search(rf"s32\[{num_requests},64\]\S* copy", compiled.as_text())
        temp[num_requests] = memory.temp_size_in_bytes
    assert temp[1 << 8] == temp[1 << 12] < 1 << 14


def test_a_scanned_decode_reads_what_it_wrote():
    table, rows, _ = request_table.alloc(RequestTable.create(4, 64), 2)
    table, slots = jax.jit(scanned, donate_argnums=0)(table, rows, jnp.array([0, 3]))
    assert slots[-1, 0].tolist() == [*range(100, 108)] + [-1] * 24
    assert slots[-1, 1].tolist() == [0, 0, 0, *range(103, 111)] + [-1] * 21
