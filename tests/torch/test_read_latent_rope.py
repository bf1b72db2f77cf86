"""read_latent_rope of kvtorch against a loop over tokens."""

from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

from kvjax.errors import UnsupportedError
from kvtorch.ops.read_latent_rope import read_latent_rope
from tests import oracles
from tests.cases import latent
from tests.strategies import any_slots, inputs, planes, random_rows
from tests.torch.implementations import (
    FEW_LATENT,
    LATENT_FOR_GPU,
    NAMES,
    REFERENCE_LATENT,
    call,
    device_of,
    for_examples,
    layers,
    of_any_width,
    on_cases,
    tensors,
)
from tests.torch.tensors import to_numpy


def read(name, case, plane, layer, slots, latent_dim):
    stored, indices = tensors([plane, slots], name)
    parts = call(
        *("read_latent_rope", name, stored, layer, indices, latent_dim),
        first_slot=case.first_slot,
    )
    for tensor, expected in zip([stored, indices], [plane, slots], strict=True):
        oracles.assert_same_bits(to_numpy(tensor), expected)
    assert all(part.is_contiguous() for part in parts)
    return [to_numpy(part) for part in parts]


def compare(read, case, planes, layer, slots):
    (plane,) = planes
    latent, rope = read(case, plane, layer, slots, case.latent_dim)
    expected = oracles.read_rows(plane, layer, slots, case.first_slot)
    oracles.assert_same_bits(latent, expected[..., : case.latent_dim])
    oracles.assert_same_bits(rope, expected[..., case.latent_dim :])


@on_cases(reference=REFERENCE_LATENT, interpreted=FEW_LATENT, gpu=LATENT_FOR_GPU)
def test_equals_oracle(name, case):
    any_width = partial(of_any_width, any_slots)
    check = partial(compare, partial(read, name), case)
    for_examples(name, inputs(case, planes, layers, any_width), check)


@pytest.mark.parametrize("name", NAMES)
def test_slots_of_any_stride(name):
    case = latent(16, 8, "bfloat16", 3)
    (plane,) = random_rows(0, case.rows, 2, case.num_rows)
    slots = torch.tensor([5, 6, -1, 7, 9, 8], device=device_of(name))[::2]
    parts = call(
        *("read_latent_rope", name, *tensors([plane], name), 1, slots, 16),
        first_slot=case.first_slot,
    )
    expected = oracles.read_rows(plane, 1, [5, -1, 9], case.first_slot)
    oracles.assert_same_bits(to_numpy(parts[0]), expected[..., :16])
    oracles.assert_same_bits(to_numpy(parts[1]), expected[..., 16:])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b_k_2_absent_slots_are_zeros_in_another_dtype(name, dtype):
    """By values that the dtype has; test_narrow.py has all the others."""
    case = latent(16, 8, "float8_e4m3fn", 3)
    (plane,) = random_rows(0, case.rows, 2, case.num_rows)
    plane = np.nan_to_num(plane.astype(np.float32)).astype(plane.dtype)
    slots = np.array([-1, 5, case.num_rows, case.first_slot - 1, 2**40, 4, 5])
    stored, indices = tensors([plane, slots], name)
    parts = call(
        *("read_latent_rope", name, stored, 1, indices, 16),
        first_slot=case.first_slot,
        dtype=getattr(torch, dtype),
    )
    expected = oracles.read_rows(plane, 1, slots, case.first_slot).astype(dtype)
    oracles.assert_same_bits(to_numpy(parts[0]), expected[..., :16])
    oracles.assert_same_bits(to_numpy(parts[1]), expected[..., 16:])


def test_a_wrong_implementation_is_caught():
    """The comparison above can fail: cut in another place; a slot that wraps."""

    def elsewhere(case, plane, layer, slots, latent_dim):
        latent, rope = read("reference", case, plane, layer, slots, latent_dim + 1)
        return latent[..., :-1], np.concatenate([rope, latent[..., -1:]], axis=-1)

    def one_liner(case, plane, layer, slots, latent_dim):
        rows = plane[layer, slots]
        return rows[..., :latent_dim], rows[..., latent_dim:]

    case = latent(64, 32, "float32", 1)
    old = random_rows(0, case.rows, 2, case.num_rows)
    compare(one_liner, case, old, 1, np.array([5]))
    for wrong, slot in ((elsewhere, 5), (one_liner, -1)):
        with pytest.raises(AssertionError):
            compare(wrong, case, old, 1, np.array([slot]))


def test_an_implementation_that_cannot_run_says_why():
    args = torch.ones(1, 9, 1, 6), 0, torch.tensor([4]), 4
    with pytest.raises(UnsupportedError, match=r"triton: needs .*CUDA device.* on cpu"):
        read_latent_rope(*args, first_slot=4, implementation="triton")
    with pytest.raises(ValueError, match="no implementation 'cuda'; it has triton, reference"):
        read_latent_rope(*args, first_slot=4, implementation="cuda")
    assert [part.shape for part in read_latent_rope(*args, first_slot=4)] == [(1, 1, 4), (1, 1, 2)]
