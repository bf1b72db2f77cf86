"""read_rows of kvtorch against a loop over tokens."""

from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

from kvtorch.ops.read_rows import read_rows
from tests import oracles
from tests.cases import KV, MIXED, Case
from tests.strategies import any_slots, inputs, planes, random_rows
from tests.torch.implementations import (
    FP8,
    REFERENCE,
    REFERENCE_ON_GPU,
    call,
    for_examples,
    layers,
    of_any_width,
    on_cases,
    tensors,
)
from tests.torch.tensors import to_numpy


def read(name, case, planes, layer, slots):
    stored, (indices,) = tensors(planes, name), tensors([slots], name)
    rows = call("read_rows", name, stored, layer, indices, first_slot=case.first_slot)
    assert isinstance(rows, tuple)
    for tensor, expected in zip([*stored, indices], [*planes, slots], strict=True):
        oracles.assert_same_bits(to_numpy(tensor), expected)
    return [to_numpy(tensor) for tensor in rows]


def compare(read, case, planes, layer, slots):
    for actual, plane in zip(read(case, planes, layer, slots), planes, strict=True):
        expected = oracles.read_rows(plane, layer, slots, case.first_slot)
        oracles.assert_same_bits(actual, expected)


@on_cases(
    reference=[*REFERENCE, Case(MIXED, 7)], reference_on_gpu=[*REFERENCE_ON_GPU, Case(KV, 2053)]
)
def test_equals_oracle(name, case):
    any_width = partial(of_any_width, any_slots)
    for_examples(
        name, inputs(case, planes, layers, any_width), partial(compare, partial(read, name), case)
    )


def test_slots_of_any_stride():
    planes = tensors(random_rows(0, FP8, 2, 20), "reference")
    slots = torch.tensor([5, 6, -1, 7, 9, 8])[::2]
    for actual, expected in zip(
        read_rows(planes, 1, slots, first_slot=4),
        read_rows(planes, 1, slots.clone(), first_slot=4),
        strict=True,
    ):
        oracles.assert_same_bits(to_numpy(actual), to_numpy(expected))


def test_a_wrong_implementation_is_caught():
    """The comparison above can fail: an index that wraps reads the last row for slot -1."""

    def one_liner(case, planes, layer, slots):
        indices = torch.from_numpy(slots)
        return [to_numpy(plane[layer, indices]) for plane in tensors(planes, "reference")]

    case = Case(KV, 1)
    old = random_rows(0, case.rows, 2, case.num_rows)
    compare(one_liner, case, old, 1, np.array([5]))
    with pytest.raises(AssertionError):
        compare(one_liner, case, old, 1, np.array([-1]))


def test_what_was_read_is_a_copy():
    plane = torch.ones(2, 9, 4)
    (rows,) = read_rows([plane], 1, torch.tensor([4]), first_slot=4)
    rows.zero_()
    assert plane.eq(1).all()


def test_there_is_no_implementation_of_another_name():
    with pytest.raises(ValueError, match="read_rows has no implementation 'triton'"):
        read_rows(
            [torch.ones(2, 9, 4)], 1, torch.tensor([4]), first_slot=4, implementation="triton"
        )
