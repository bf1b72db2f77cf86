"""write_latent_rope against a loop over tokens."""

from functools import partial

import numpy as np
import pytest

from tests import cases, oracles
from tests.cases import Case
from tests.implementations import for_examples, on_cases, run
from tests.strategies import inputs, layers, planes, random_rows, rows, slots


def compare(write, case, planes, layer, slots, rows):
    (plane,), (new,) = planes, rows
    parts = new[..., : case.latent_dim], new[..., case.latent_dim :]
    actual = write(case, plane, layer, slots, *parts, first_slot=case.first_slot)
    expected = oracles.write_rows(plane, layer, slots, new, case.first_slot)
    oracles.assert_same_bits(actual, expected)


@on_cases(reference=cases.MANY_LATENT, interpreted=cases.FEW_LATENT, gpu=cases.LATENT_FOR_GPU)
def test_equals_oracle(name, case):
    check = partial(compare, partial(run, "write_latent_rope", name), case)
    for_examples(name, inputs(case, planes, layers, slots, rows), check)


def test_a_wrong_implementation_is_caught():
    """The comparison above can fail: rope in front of latent."""

    def swapped(case, plane, layer, slots, latent, rope, **options):
        return run(
            "write_latent_rope", "reference", case, plane, layer, slots, rope, latent, **options
        )

    case = Case((((1, 96), "float32"),), 1, latent_dim=64)
    old, new = random_rows(0, case.rows, 2, case.num_rows), random_rows(1, case.rows, 1)
    with pytest.raises(AssertionError):
        compare(swapped, case, old, 1, np.array([5], np.int32), new)
