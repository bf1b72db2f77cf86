"""Slots as callers of kvtorch give them, and which of them are there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

from kvjax.checks_mode import checks
from kvtorch.slots import are_there, as_slots, check

CPU = torch.device("cpu")
INT64 = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_are_taken_as_they_are(dtype):
    slots = torch.tensor([5, -1, 2**31 - 1], dtype=dtype)
    assert as_slots(slots, CPU) is slots
    assert as_slots(slots[::2], CPU).tolist() == [5, 2**31 - 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
def test_an_empty_list_may_have_any_dtype(dtype):
    slots = as_slots(torch.zeros(0, dtype=dtype), CPU)
    assert slots.shape == (0,) and slots.dtype == torch.int64


@pytest.mark.parametrize(
    "slots, error, message",
    [
        ([4, 5], TypeError, "src is <class 'list'>, need a tensor"),
        (torch.tensor(4), ValueError, r"src has shape \[\], need one dimension"),
        (torch.tensor([[4]]), ValueError, r"src has shape \[1, 1\], need one dimension"),
        (torch.tensor([4.0]), TypeError, "src has dtype torch.float32, need int32 or int64"),
        (torch.tensor([True]), TypeError, "src has dtype torch.bool, need int32 or int64"),
        (torch.tensor([4], device="meta"), ValueError, "src is on meta, need cpu, where the pool"),
    ],
)
def test_what_cannot_be_slots_is_refused(slots, error, message):
    with pytest.raises(error, match=message):
        as_slots(slots, CPU, name="src")


@given(
    slots=st.lists(st.integers(-9, 20) | INT64, max_size=9),
    first=st.integers(0, 5),
    count=st.integers(0, 9),
)
def test_there_is_from_first_up_to_stop(slots, first, count):
    there = [first <= slot < first + count for slot in slots]
    tensor = torch.tensor(slots, dtype=torch.int64)
    assert are_there(tensor, first, first + count).tolist() == there


def test_check_is_off_unless_asked_for():
    check(torch.tensor([-1, 99, 99]), 4, 12, distinct=True)


@checks()
def test_check_names_the_first_slot_that_is_not_there():
    check(torch.tensor([4, 11, 4], dtype=torch.int32), 4, 12)
    check(torch.tensor([], dtype=torch.int64), 4, 12, distinct=True)
    for slot in (-1, 3, 12, 2**40):
        with pytest.raises(IndexError, match=rf"dst\[1\]={slot} is not there; slots are 4\.\.11"):
            check(torch.tensor([4, slot, -7]), 4, 12, name="dst")


@checks()
def test_check_names_the_first_slot_that_repeats():
    check(torch.tensor([4, 5, 6]), 4, 12, distinct=True)
    with pytest.raises(ValueError, match=r"slots\[2\]=4 repeats; need distinct slots"):
        check(torch.tensor([4, 5, 4, 5]), 4, 12, distinct=True)


@pytest.mark.gpu
@checks()
def test_what_is_captured_is_not_checked():
    slots = torch.tensor([-1], device="cuda")
    with pytest.raises(IndexError):
        check(slots, 4, 12)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        check(slots, 4, 12)
        slots.add_(1)  # a graph of nothing is warned of
