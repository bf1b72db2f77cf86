"""write_rows against a loop over tokens."""

import warnings
from functools import partial

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from tests import cases, oracles
from tests.cases import Case
from tests.implementations import INTERPRETED, for_examples, on_cases, run
from tests.strategies import inputs, layers, planes, random_rows, rows, slots


def compare(write, case, planes, layer, slots, rows):
    written = write(case, planes, layer, slots, rows, first_slot=case.first_slot)
    for actual, plane, new in zip(written, planes, rows, strict=True):
        expected = oracles.write_rows(plane, layer, slots, new, case.first_slot)
        oracles.assert_same_bits(actual, expected)


@on_cases(reference=cases.MANY, interpreted=cases.FEW, gpu=cases.FOR_GPU)
def test_equals_oracle(name, case):
    check = partial(compare, partial(run, "write_rows", name), case)
    for_examples(name, inputs(case, planes, layers, slots, rows), check)


def test_a_wrong_implementation_is_caught():
    """The comparison above can fail: the obvious one-liner writes the last row for slot -1."""

    def one_liner(case, planes, layer, slots, rows, **_):
        pairs = zip(planes, rows, strict=True)
        return [jnp.asarray(old).at[layer, slots].set(new, mode="drop") for old, new in pairs]

    case = Case(cases.KV, 1)
    old, new = random_rows(0, case.rows, 2, case.num_rows), random_rows(1, case.rows, 1)
    compare(one_liner, case, old, 1, np.array([5]), new)
    with pytest.raises(AssertionError):
        compare(one_liner, case, old, 1, np.array([-1]), new)


def few_slots(case):
    few = st.integers(case.first_slot - 2, case.first_slot + 4)
    return st.lists(few, min_size=case.num_tokens, max_size=case.num_tokens).map(np.int32)


@on_cases(reference=[Case(cases.KV, 17)])
def test_in_the_reference_a_repeated_slot_holds_one_of_its_rows_whole(name, case):
    def check(planes, slots, rows):
        written = run("write_rows", name, case, planes, 1, slots, rows, first_slot=case.first_slot)
        for actual, plane, new in zip(written, planes, rows, strict=True):
            expected = oracles.write_repeated_rows(plane, 1, slots, new, case.first_slot, actual)
            oracles.assert_same_bits(actual, expected)

    for_examples(name, inputs(case, planes, few_slots, rows), check)


@pytest.mark.gpu
def test_rows_torn_by_a_repeated_slot_are_counted():
    """The contract asks for distinct slots: two blocks that write one row may mix theirs."""
    case = Case(cases.WIDE, 4096)
    num_slots = 64
    old = random_rows(0, case.rows, 1, case.first_slot + num_slots)
    new = random_rows(1, case.rows, case.num_tokens)
    slots = (np.arange(case.num_tokens) % num_slots + case.first_slot).astype(np.int32)
    written = run("write_rows", "mosaic_gpu", case, old, 0, slots, new, first_slot=case.first_slot)
    num_torn = 0
    for actual, plane, given in zip(written, old, new, strict=True):
        whole = oracles.write_repeated_rows(plane, 0, slots, given, case.first_slot, actual)
        num_torn += (oracles.bits(actual) != oracles.bits(whole)).any((0, 2, 3)).sum()
    warnings.warn(f"{num_torn} of {2 * num_slots} rows are torn", stacklevel=1)


@pytest.mark.parametrize("rows", [cases.KV, cases.ODD[1]])
def test_a_race_is_caught(rows):
    """Race detection can fail: a slot twice, in two blocks."""
    case = Case(rows, 2)
    old, new = random_rows(0, case.rows, 2, case.num_rows), random_rows(1, case.rows, 2)
    write = partial(run, "write_rows", INTERPRETED, case, old, 1, first_slot=case.first_slot)
    write(np.array([5, 6], np.int32), new)
    with pytest.raises(RuntimeError, match="RACE DETECTED"):
        write(np.array([5, 5], np.int32), new)
