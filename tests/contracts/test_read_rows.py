"""read_rows against a loop over tokens."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from tests import cases, oracles
from tests.cases import Case
from tests.implementations import for_examples, on_cases, run
from tests.strategies import any_slots, inputs, layers, planes, random_rows


def compare(read, case, planes, layer, slots):
    read = read(case, planes, layer, slots, first_slot=case.first_slot)
    for actual, plane in zip(read, planes, strict=True):
        expected = oracles.read_rows(plane, layer, slots, case.first_slot)
        oracles.assert_same_bits(actual, expected)


@on_cases(reference=cases.MANY, interpreted=cases.FEWEST, gpu=cases.FEWEST_FOR_GPU)
def test_equals_oracle(name, case):
    check = partial(compare, partial(run, "read_rows", name), case)
    for_examples(name, inputs(case, planes, layers, any_slots), check)


def test_a_wrong_implementation_is_caught():
    """The comparison above can fail: a gather that clamps, as JAX's do."""

    def one_liner(case, planes, layer, slots, **_):
        return [jnp.asarray(plane).at[layer, slots].get(mode="clip") for plane in planes]

    case = Case(cases.KV, 1)
    plane = random_rows(0, case.rows, 2, case.num_rows)
    compare(one_liner, case, plane, 1, np.array([5]))
    with pytest.raises(AssertionError):
        compare(one_liner, case, plane, 1, np.array([case.num_rows]))
