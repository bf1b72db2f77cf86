"""copy_rows against a loop over tokens."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tests import cases, oracles
from tests.cases import Case
from tests.implementations import for_examples, on_cases, run
from tests.strategies import any_slots, inputs, layers, planes, random_rows, slots


def source_of(case):
    """Planes of fewer rows, because they have no padding page."""
    return replace(case, first_slot=0)


def compare(copy, case, target, target_layer, target_slots, source, source_layer, source_slots):
    first = {"target_first": case.first_slot, "source_first": source_of(case).first_slot}
    layers = {"target_layer": target_layer, "source_layer": source_layer}
    copied = copy(case, target, target_slots, source, source_slots, **layers, **first)
    for actual, target_plane, source_plane in zip(copied, target, source, strict=True):
        expected = oracles.copy_rows(
            target_plane,
            target_layer,
            target_slots,
            case.first_slot,
            source_plane,
            source_layer,
            source_slots,
            source_of(case).first_slot,
        )
        oracles.assert_same_bits(actual, expected)


def both(case):
    return inputs(case, planes, layers, slots).flatmap(
        lambda target: inputs(source_of(case), planes, layers, any_slots).map(
            lambda source: (*target, *source)
        )
    )


@on_cases(reference=cases.MANY, interpreted=cases.FEWEST, gpu=cases.FEWEST_FOR_GPU)
def test_equals_oracle(name, case):
    for_examples(name, both(case), partial(compare, partial(run, "copy_rows", name), case))


def test_a_wrong_implementation_is_caught():
    """The comparison above can fail: a source that has a padding page where it has none."""

    def padded(*args, source_first, **options):
        return run("copy_rows", "reference", *args, source_first=4, **options)

    case = Case(cases.KV, 1, None)
    target = random_rows(0, case.rows, 2, case.num_rows)
    source = random_rows(1, case.rows, 2, source_of(case).num_rows)
    four, five = np.array([4], np.int32), np.array([5], np.int32)
    compare(padded, case, target, None, five, source, None, four)
    with pytest.raises(AssertionError):
        compare(padded, case, target, None, five, source, None, four - 1)
