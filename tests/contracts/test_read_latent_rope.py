"""read_latent_rope against a loop over tokens."""

from functools import partial

import numpy as np
import pytest

from tests import cases, oracles
from tests.cases import Case
from tests.implementations import for_examples, on_cases, run
from tests.strategies import any_slots, inputs, layers, planes, random_rows


def compare(read, case, planes, layer, slots):
    (plane,) = planes
    latent, rope = read(case, plane, layer, slots, case.latent_dim, first_slot=case.first_slot)
    expected = oracles.read_rows(plane, layer, slots, case.first_slot)
    oracles.assert_same_bits(latent, expected[..., : case.latent_dim])
    oracles.assert_same_bits(rope, expected[..., case.latent_dim :])


@on_cases(reference=cases.MANY_LATENT, interpreted=cases.FEW_LATENT, gpu=cases.LATENT_FOR_GPU)
def test_equals_oracle(name, case):
    check = partial(compare, partial(run, "read_latent_rope", name), case)
    for_examples(name, inputs(case, planes, layers, any_slots), check)


def test_a_wrong_implementation_is_caught():
    """The comparison above can fail: cut in another place."""

    def elsewhere(case, plane, layer, slots, latent_dim, **options):
        latent, rope = run(
            "read_latent_rope", "reference", case, plane, layer, slots, latent_dim + 1, **options
        )
        return latent[..., :-1], np.concatenate([latent[..., -1:], rope], axis=-1) * 0

    case = Case((((1, 96), "float32"),), 1, latent_dim=64)
    plane = random_rows(0, case.rows, 2, case.num_rows)
    with pytest.raises(AssertionError):
        compare(elsewhere, case, plane, 1, np.array([5], np.int32))
