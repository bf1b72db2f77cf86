"""write_latent_rope of kvtorch against a loop over tokens."""

from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

from kvjax.errors import UnsupportedError
from kvtorch.ops.write_latent_rope import write_latent_rope
from tests import oracles
from tests.cases import latent
from tests.strategies import inputs, planes, random_rows, rows, slots
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
from tests.torch.tensors import LAYOUTS, to_numpy


def write(name, case, planes, layer, slots, parts):
    """What becomes of the plane; ``parts`` are tensors, and keep their bits."""
    old, indices = tensors([*planes, slots], name)
    before = [to_numpy(part) for part in parts]
    result = call(
        *("write_latent_rope", name, old, layer, indices, *parts),
        first_slot=case.first_slot,
        constants=case.constants,
    )
    assert result is None
    for tensor, expected in zip([indices, *parts], [slots, *before], strict=True):
        oracles.assert_same_bits(to_numpy(tensor), expected)
    return to_numpy(old)


def in_one_tensor(latent_dim, rows):
    return rows[..., :latent_dim], rows[..., latent_dim:]


def without_heads(latent_dim, rows):
    return in_one_tensor(latent_dim, rows[:, 0])


def by_themselves(latent_dim, rows):
    return [part.contiguous() for part in in_one_tensor(latent_dim, rows)]


def laid_out(layout):
    def split(latent_dim, rows):
        return [layout(part.contiguous(), 2) for part in in_one_tensor(latent_dim, rows)]

    split.__name__ = layout.__name__
    return split


SPLITS = [in_one_tensor, without_heads, by_themselves, *map(laid_out, LAYOUTS[1:])]


def compare(write, case, planes, layer, slots, rows):
    (plane,), (new,) = planes, rows
    expected = oracles.write_rows(plane, layer, slots, new, case.first_slot)
    oracles.assert_same_bits(write(case, planes, layer, slots, rows), expected)


def write_split(name, split, case, planes, layer, slots, rows):
    parts = split(case.latent_dim, *tensors(rows, name))
    return write(name, case, planes, layer, slots, parts)


any_width = partial(of_any_width, slots)


@on_cases(reference=REFERENCE_LATENT, interpreted=FEW_LATENT, gpu=LATENT_FOR_GPU)
def test_equals_oracle(name, case):
    check = partial(compare, partial(write_split, name, in_one_tensor), case)
    for_examples(name, inputs(case, planes, layers, any_width, rows), check)


@pytest.mark.parametrize("split", SPLITS)
@on_cases(
    reference=[latent(100, 28, "float8_e4m3fn", 7)],
    interpreted=[latent(64, 32, "float32", 3), latent(5, 3, "float16", 1)],
    gpu=[latent(512, 64, "bfloat16", 61)],
)
def test_parts_of_any_strides(name, case, split):
    check = partial(compare, partial(write_split, name, split), case)
    for_examples(name, inputs(case, planes, layers, slots, rows), check)


@pytest.mark.parametrize("name", NAMES)
def test_calls_that_differ_in_how_parts_lie_do_not_share_what_was_compiled(name):
    case = latent(16, 8, "bfloat16", 5)
    old, new = random_rows(0, case.rows, 2, case.num_rows), random_rows(1, case.rows, 5)
    for split in (*SPLITS, *SPLITS[::-1]):
        compare(partial(write_split, name, split), case, old, 1, np.arange(4, 9), new)


@pytest.mark.parametrize("name", NAMES)
def test_slots_of_any_stride(name):
    case = latent(16, 8, "bfloat16", 3)
    (old,), (new,) = random_rows(0, case.rows, 2, case.num_rows), random_rows(1, case.rows, 3)
    plane, rows = tensors([old, new], name)
    slots = torch.tensor([5, 6, 4, 7, 9, 8], device=device_of(name))[::2]
    parts = in_one_tensor(16, rows)
    call("write_latent_rope", name, plane, 1, slots, *parts, first_slot=case.first_slot)
    expected = oracles.write_rows(old, 1, [5, 4, 9], new, case.first_slot)
    oracles.assert_same_bits(to_numpy(plane), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_mla_1_each_part_is_cast_by_itself(name):
    """By values that both dtypes have; test_narrow.py has all the others."""
    case = latent(16, 8, "bfloat16", 7)
    (old,) = random_rows(0, case.rows, 2, case.num_rows)
    (bits,) = random_rows(1, (((1, 24), "float8_e4m3fn"),), 7)
    new = np.nan_to_num(bits.astype(np.float32)).astype(old.dtype)
    slots = np.arange(5, 12)
    expected = oracles.write_rows(old, 1, slots, new, case.first_slot)
    for dtypes in (("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float8_e4m3fn")):
        parts = [
            part.to(getattr(torch, dtype))
            for part, dtype in zip(in_one_tensor(16, *tensors([new], name)), dtypes, strict=True)
        ]
        oracles.assert_same_bits(write(name, case, [old], 1, slots, parts), expected)


def test_a_wrong_implementation_is_caught():
    """The comparison above can fail: the parts in the other order; a slot that wraps."""

    def swapped(case, planes, layer, slots, rows):
        def split(latent_dim, rows):
            return in_one_tensor(latent_dim, rows)[::-1]

        return write_split("reference", split, case, planes, layer, slots, rows)

    def one_liner(case, planes, layer, slots, rows):
        plane, new = tensors([*planes, *rows], "reference")
        plane[layer, torch.from_numpy(slots)] = new
        return to_numpy(plane)

    case = latent(16, 8, "bfloat16", 1)
    old, new = random_rows(0, case.rows, 2, case.num_rows), random_rows(1, case.rows, 1)
    compare(one_liner, case, old, 1, np.array([5]), new)
    for wrong, slot in ((swapped, 5), (one_liner, -1)):
        with pytest.raises(AssertionError):
            compare(wrong, case, old, 1, np.array([slot]), new)


def test_an_implementation_that_cannot_run_says_why():
    plane = torch.zeros(1, 9, 1, 6)
    args = plane, 0, torch.tensor([4]), torch.ones(1, 1, 4), torch.ones(1, 1, 2)
    with pytest.raises(UnsupportedError, match=r"triton: needs .*CUDA device.* on cpu"):
        write_latent_rope(*args, first_slot=4, implementation="triton")
    with pytest.raises(ValueError, match="no implementation 'cuda'; it has triton, reference"):
        write_latent_rope(*args, first_slot=4, implementation="cuda")
    assert not plane.any()
    write_latent_rope(*args, first_slot=4)
    assert plane.sum() == 6
