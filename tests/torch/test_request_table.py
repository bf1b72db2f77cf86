"""SGLang's request table: against lists, and on the faults that real ones had."""

import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvtorch.request_table import ReqToTokenPool  # noqa: E402

NUM_REQUESTS = 5
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def make(size=4, max_context_len=8, device="cpu"):
    return ReqToTokenPool(size, max_context_len, device, False)


class Machine(RuleBasedStateMachine):
    """Rows come and go; every step is compared with a plain list."""

    def __init__(self):
        super().__init__()
        self.table = make(NUM_REQUESTS)
        self.free_rows = list(range(NUM_REQUESTS))

    @rule(num_rows=st.integers(0, NUM_REQUESTS + 1))
    def alloc(self, num_rows):
        expected = None
        if num_rows <= len(self.free_rows):
            expected = [self.free_rows.pop(0) for _ in range(num_rows)]
        assert self.table.alloc(num_rows) == expected

    @rule(rows=st.lists(st.integers(-1, NUM_REQUESTS), max_size=3), data=st.data())
    def free(self, rows, data):
        held = set(range(NUM_REQUESTS)) - set(self.free_rows)
        kinds = [list, tuple, iter, np.array, torch.tensor]
        given = data.draw(st.sampled_from(kinds))(rows) if rows else []
        if len(set(rows)) == len(rows) and held.issuperset(rows):
            self.table.free(given)
            self.free_rows += rows
        else:
            with pytest.raises(ValueError):
                self.table.free(given)

    @rule()
    def clear(self):
        self.free_rows = list(range(NUM_REQUESTS))
        self.table.clear()

    @invariant()
    def agrees(self):
        assert type(self.table.free_slots) is list
        assert self.table.free_slots == self.free_rows
        assert self.table.available_size() == len(self.free_rows)


def run_machine(**settings):
    run_state_machine_as_test(
        Machine, settings=hypothesis.settings(deadline=None, stateful_step_count=30, **settings)
    )


def test_equals_lists():
    run_machine(max_examples=40)


def test_a_wrong_order_is_caught(monkeypatch):
    """The comparison above can fail: rows handed out last in, first out."""

    def alloc(table, need_size):
        rows = table.free_slots[::-1][:need_size]
        table._taken.update(rows)
        table.free_slots = table.free_slots[: len(table.free_slots) - need_size]
        return rows

    monkeypatch.setattr(ReqToTokenPool, "alloc", alloc)
    with pytest.raises(AssertionError):
        run_machine(max_examples=200, phases=[hypothesis.Phase.generate], database=None)


@on_devices
def test_a_rt_1_names(device):
    table = ReqToTokenPool(size=3, max_context_len=7, device=device, enable_memory_saver=False)
    assert (table.size, table.max_context_len, table.device) == (3, 7, device)
    assert table.req_to_token.shape == (3, 7) and table.req_to_token.dtype == torch.int32
    assert table.req_to_token.device.type == device and not table.req_to_token.any()
    assert table.free_slots == [0, 1, 2]
    assert {type(row) for row in table.alloc(3)} == {int}


@on_devices
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_rt_2_write(device, dtype):
    table = make(device=device)

    def slots(*values):
        return torch.tensor(values, dtype=dtype, device=device)

    assert table.write((1, slice(2, 4)), slots(7, 8)) is None
    table.write((slots(0, 2).long(), slots(1, 7).long()), slots(5, 6))
    table.write(3, 9)
    assert table.req_to_token.tolist() == [
        [0, 5, 0, 0, 0, 0, 0, 0],
        [0, 0, 7, 8, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 6],
        [9] * 8,
    ]
    with pytest.raises(IndexError):
        make().write(4, 1)


def test_a_rt_4_counts():
    table = make()
    assert table.alloc(np.int64(1)) == [0] and table.alloc(torch.tensor(1)) == [1]
    rows = table.free_slots
    assert table.alloc(1) == [2] and table.free_slots is rows
    for error, count in ((ValueError, -1), (TypeError, 1.0), (TypeError, True), (TypeError, "1")):
        with pytest.raises(error, match="need_size="):
            table.alloc(count)
    assert table.free_slots == [3]


@pytest.mark.parametrize(
    "row",
    [1, np.int32(1), np.array(1), torch.tensor(1), torch.tensor([1]), [torch.tensor(1)], {1}],
    ids=repr,
)
def test_a_rt_5_whatever_is_an_integer_is_a_row(row):
    table = make()
    table.alloc(3)
    assert table.free(row) is None
    assert table.free_slots == [3, 1] and {type(row) for row in table.free_slots} == {int}


@pytest.mark.parametrize(
    "rows",
    [
        *(True, [0, True], 1.0, [0, 1.0], "0", None, [None], np.bool_(True), [np.bool_(False)]),
        *(torch.tensor(True), torch.tensor([True]), [torch.tensor(True)], torch.tensor([0.0])),
        torch.zeros((1, 2), dtype=torch.int64),
    ],
    ids=repr,
)
def test_a_rt_5_nothing_else_is(rows):
    table = make()
    table.alloc(3)
    with pytest.raises(TypeError, match=r"free_index"):
        table.free(rows)
    assert table.free_slots == [3]


@pytest.mark.parametrize(
    "rows, message",
    [
        (-1, r"free_index\[0\]=-1 is not taken; allowed: rows from 0 to 3"),
        ([0, 4], r"free_index\[1\]=4 is not taken"),
        ([1, 3], r"free_index\[1\]=3 is not taken"),
        ([1, 0, 1], r"free_index\[2\]=1 is named twice"),
        (2**32, r"free_index\[0\]=4294967296 is not taken"),
    ],
)
def test_a_rt_5_a_refused_free_changes_nothing(rows, message):
    table = make()
    table.alloc(3)
    with pytest.raises(ValueError, match=message):
        table.free(rows)
    assert table.free_slots == [3]
    table.free([2, 1, 0])
    assert table.free_slots == [3, 2, 1, 0]


def test_a_rt_6_clear_keeps_what_was_written():
    table = make()
    rows = table.alloc(3)
    table.write((1, slice(None)), 7)
    table.free(rows[:1])
    table.clear()
    assert table.free_slots == [0, 1, 2, 3] and table.req_to_token[1].tolist() == [7] * 8
    with pytest.raises(ValueError, match="not taken"):
        table.free(rows)


def test_al4_double_free():
    table = make(2)
    rows = table.alloc(2)
    table.free(rows[0])
    with pytest.raises(ValueError, match="not taken"):
        table.free(rows[0])
    assert table.alloc(2) is None and table.alloc(1) == [0]


def test_rq1_a_continuing_request_keeps_its_row():
    table = make(2)
    a, b = table.alloc(2)
    assert table.alloc(1) is None
    table.free(b)
    (c,) = table.alloc(1)
    assert (a, c) == (0, b)
    with pytest.raises(ValueError, match="not taken"):
        table.free([c, -1])  # -1 is what b's owner is left with
    assert table.available_size() == 0


def test_rq2_counts():
    table = make()
    assert table.alloc(0) == [] and table.available_size() == 4
    assert table.alloc(5) is None and table.available_size() == 4
    assert table.alloc(4) == [0, 1, 2, 3]
    assert table.alloc(1) is None and table.alloc(0) == []


@pytest.mark.parametrize("sizes", [(-1, 8), (4, -1), (4.0, 8), ("4", 8)])
def test_sizes_that_are_none(sizes):
    with pytest.raises((TypeError, ValueError)):
        make(*sizes)
