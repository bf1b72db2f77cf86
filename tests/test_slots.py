"""Slots as callers give them, and which of them are there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.slots import absent_as, are_there, as_slots, check

INT32 = st.integers(-(2**31), 2**31 - 1)


@pytest.mark.parametrize("make", [list, np.int32, np.int64, jnp.int32])
@given(values=st.lists(INT32, min_size=1, max_size=9))
def test_values_stay_as_they_are(make, values):
    slots = as_slots(make(values))
    assert slots.dtype == jnp.int32 and slots.tolist() == values


@pytest.mark.parametrize("empty", [[], np.zeros(0), np.zeros(0, bool), jnp.zeros(0)])
def test_an_empty_list_may_have_any_dtype(empty):
    slots = as_slots(empty)
    assert slots.shape == (0,) and slots.dtype == jnp.int32


def test_every_other_value_of_a_strided_array():
    assert as_slots(np.array([2, 9, 3, 9])[::2]).tolist() == [2, 3]


@pytest.mark.parametrize("function", [as_slots, jax.jit(as_slots)])
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8", "uint16", "uint32"])
def test_any_integers_on_the_device(dtype, function):
    values = [0, 5, np.iinfo(dtype).max] + [-7] * dtype.startswith("i")
    slots = function(jnp.array(values, dtype))
    assert slots.dtype == jnp.int32
    assert slots.tolist() == [value if value < 2**31 else -1 for value in values]


@pytest.mark.parametrize("calling", ["in 64-bit mode", "in 64-bit mode, traced", "outside"])
def test_dl3_what_does_not_fit_is_not_there(calling):
    """On the device nobody looks at values: one that is cut to int32 would be another slot."""
    with jax.enable_x64(True):
        slots = jnp.array([2**32 + 5, 7, 2**31, -(2**31) - 1, -(2**31)])
        assert slots.dtype == jnp.int64
        if calling != "outside":
            slots = (jax.jit(as_slots) if "traced" in calling else as_slots)(slots)
    slots = as_slots(slots)
    assert slots.dtype == jnp.int32 and slots.tolist() == [-1, 7, -1, -1, -(2**31)]


@given(
    slots=st.lists(st.integers(-9, 20) | INT32, min_size=1, max_size=9),
    first=st.integers(0, 5),
    count=st.integers(0, 9),
)
def test_there_is_from_first_up_to_stop(slots, first, count):
    stop = first + count
    there = [first <= slot < stop for slot in slots]
    assert are_there(jnp.array(slots), first, stop).tolist() == there
    absent = [slot if ok else stop for slot, ok in zip(slots, there, strict=True)]
    assert absent_as(stop, jnp.array(slots), first).tolist() == absent


def test_check_is_off_unless_asked_for():
    check(np.array([-1, 99, 99]), 4, 12, distinct=True)
