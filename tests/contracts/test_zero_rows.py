"""zero_rows against a loop over tokens."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from tests import cases, oracles
from tests.cases import Case
from tests.implementations import for_examples, on_cases, run
from tests.strategies import any_slots, inputs, planes, random_rows


def compare(zero, case, planes, slots):
    zeroed = zero(case, planes, slots, first_slot=case.first_slot)
    for actual, plane in zip(zeroed, planes, strict=True):
        oracles.assert_same_bits(actual, oracles.zero_rows(plane, slots, case.first_slot))


@on_cases(
    reference=cases.of_all_layers(cases.MANY),
    interpreted=cases.of_all_layers(cases.FEWEST),
    gpu=cases.of_all_layers(cases.FEWEST_FOR_GPU),
)
def test_equals_oracle(name, case):
    # A repeated slot is written twice, with the same zeros: a race that does no harm.
    check = partial(compare, partial(run, "zero_rows", name, detect_races=False), case)
    for_examples(name, inputs(case, planes, any_slots), check)


def test_a_wrong_implementation_is_caught():
    """The comparison above can fail: -0.0 is not zero bits."""

    def negative(case, planes, slots, **_):
        return [jnp.asarray(plane).at[:, slots].set(-0.0, mode="drop") for plane in planes]

    case = Case(cases.KV, 1)
    plane = random_rows(0, case.rows, 2, case.num_rows)
    compare(partial(run, "zero_rows", "reference"), case, plane, np.array([5], np.int32))
    with pytest.raises(AssertionError):
        compare(negative, case, plane, np.array([5]))
