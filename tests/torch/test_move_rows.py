"""move_rows of kvtorch against a loop over tokens that reads before it writes."""

from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

from kvjax.errors import UnsupportedError
from kvtorch.ops.move_rows import move_rows
from tests import oracles
from tests.cases import BYTES, KV, LONG, MIXED, WIDE, Case
from tests.strategies import inputs, moves, planes, random_rows
from tests.torch.implementations import (
    FP8,
    NAMES,
    ODD,
    THREE,
    call,
    device_of,
    for_examples,
    of_any_width,
    on_cases,
    tensors,
)
from tests.torch.tensors import to_numpy

# Sizes on both sides of each choice that is made: rows held or staged, one tile or several, layers
# staged together or one after the other.
HELD = (("move_rows.HELD_TOKENS", 3),)
FEW_COLUMNS = (("move_rows.HELD_BYTES", 8), ("move_rows.SECTOR_BYTES", 8))
STAGED = (("move_rows.HELD_TOKENS", 0), ("staged_move.TILE", 64))
BY_LAYER = (("staged_move.STAGING_BYTES", 1), *STAGED)
BY_TWO_LAYERS = (("staged_move.STAGING_BYTES", 2 * 7 * 64), *STAGED)
UNLIKE = (((1, 64), "bfloat16"), ((4, 256), "bfloat16"))  # more columns of V than of K
REFERENCE = [
    *(Case(KV, num_tokens, None) for num_tokens in (0, 1, 7, 64)),
    *(Case(rows, 7, None) for rows in (MIXED, BYTES, FP8, LONG, *ODD)),
]
INTERPRETED = [
    *(Case(KV, num_tokens, None) for num_tokens in (0, 1, 13)),
    *(Case(rows, 7, None) for rows in (BYTES, FP8, THREE, LONG, *ODD)),
    *(Case(KV, num_tokens, None, HELD) for num_tokens in (3, 4)),
    Case(KV, 7, None, FEW_COLUMNS),
    *(Case(rows, 7, None, FEW_COLUMNS) for rows in (ODD[0], BYTES)),
    Case(KV, 7, None, STAGED),
    *(Case(rows, 3, None, STAGED) for rows in (THREE, LONG, *ODD)),
    Case(FP8, 3, None, BY_LAYER),
    Case(KV, 7, None, BY_TWO_LAYERS, num_layers=3),
]
FOR_GPU = [
    *(Case(KV, num_tokens, None) for num_tokens in (0, 1, 61, 64, 65)),
    Case(WIDE, 61, None),
    *(Case(rows, 131, None) for rows in (UNLIKE, THREE)),
    Case(LONG, 131, None),
    *(Case(ODD[0], num_tokens, None, (("move_rows.HELD_TOKENS", 60),)) for num_tokens in (60, 61)),
    Case(FP8, 131, None, BY_LAYER),
    Case(KV, 7, None, BY_TWO_LAYERS, num_layers=3),
]


def move(name, case, planes, dst, src, *, disjoint=False):
    old, slots = tensors(planes, name), tensors([dst, src], name)
    result = call(
        *("move_rows", name, old, *slots),
        constants=case.constants,
        first_slot=case.first_slot,
        disjoint=disjoint,
    )
    assert result is None
    for tensor, expected in zip(slots, [dst, src], strict=True):
        oracles.assert_same_bits(to_numpy(tensor), expected)
    return [to_numpy(plane) for plane in old]


def compare(move, case, planes, dst, src):
    moved = move(case, planes, dst, src)
    for actual, plane in zip(moved, planes, strict=True):
        oracles.assert_same_bits(actual, oracles.move_rows(plane, dst, src, case.first_slot))


any_width = partial(of_any_width, moves)


@on_cases(reference=REFERENCE, interpreted=INTERPRETED, gpu=FOR_GPU)
def test_equals_oracle(name, case):
    def check(planes, moves):
        compare(partial(move, name), case, planes, *moves)

    for_examples(name, inputs(case, planes, any_width), check)


def disjoint_moves(case):
    """Moves that read no row which another writes."""
    return moves(case).map(lambda m: (m[0], np.where(np.isin(m[1], m[0]), -1, m[1])))


@on_cases(
    reference=[Case(KV, 17, None)],
    interpreted=[Case(KV, 13, None, (("move_rows.TILE", 64),)), Case(ODD[0], 7, None)],
    gpu=[Case(KV, 65, None), Case(WIDE, 300, None)],
)
def test_disjoint_moves_equal_oracle(name, case):
    def check(planes, moves):
        compare(partial(move, name, disjoint=True), case, planes, *moves)

    any_width = partial(of_any_width, disjoint_moves)
    for_examples(name, inputs(case, planes, any_width), check)


SHAPES = [
    ([5, 6, 7], [4, 5, 6], True),  # a chain
    ([4, 5, 6], [5, 6, 7], False),
    ([4, 5], [5, 4], True),  # a swap
    ([4, 5, 6, 7], [5, 6, 7, 4], True),  # a cycle
    ([4, 5], [4, 5], False),  # each to itself
    ([5, 6, 8], [4, 4, 4], False),  # one to several
    ([5, 4, -1, 3], [-1, 5, 4, 4], True),  # some that are not there
]


@pytest.mark.parametrize("dst, src, wrong_one_by_one", SHAPES)
def test_a_wrong_implementation_is_caught(dst, src, wrong_one_by_one):
    """The comparison above can fail: one move after the other is no simultaneous assignment."""

    def one_by_one(case, planes, dst, src):
        planes = tensors(planes, "reference")
        for to, origin in zip(dst, src, strict=True):
            slots = torch.tensor([to]), torch.tensor([origin])
            move_rows(planes, *slots, first_slot=case.first_slot)
        return [to_numpy(plane) for plane in planes]

    case = Case(KV, len(dst))
    old = random_rows(0, case.rows, 2, case.num_rows)
    if wrong_one_by_one:
        with pytest.raises(AssertionError):
            compare(one_by_one, case, old, dst, src)
    else:
        compare(one_by_one, case, old, dst, src)


@pytest.mark.parametrize("constants", [(), STAGED], ids=["held", "staged"])
@pytest.mark.parametrize("dst, src, _", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_moves_of_every_shape(name, dst, src, _, constants):
    case = Case(KV, len(dst), constants=constants)
    old = random_rows(0, case.rows, 2, case.num_rows)
    compare(partial(move, name), case, old, np.array(dst), np.array(src))


@pytest.mark.parametrize("constants", [(), STAGED], ids=["held", "staged"])
@pytest.mark.parametrize("name", NAMES)
def test_slots_of_different_dtypes_and_of_any_stride(name, constants):
    case = Case(KV, 3, constants=constants)
    old = random_rows(0, case.rows, 2, case.num_rows)
    expected = [oracles.move_rows(plane, [5, 6, 8], [4, 5, 6], case.first_slot) for plane in old]
    dst = torch.tensor([5, 0, 6, 0, 8, 0], device=device_of(name))
    src = torch.tensor([4, 9, 5, 9, 6, 9], dtype=torch.int32, device=device_of(name))
    for slots in ((dst[::2].clone(), src[::2].clone()), (dst[::2], src[::2])):
        planes = tensors(old, name)
        call("move_rows", name, planes, *slots, first_slot=case.first_slot, constants=constants)
        for plane, wanted in zip(planes, expected, strict=True):
            oracles.assert_same_bits(to_numpy(plane), wanted)


@pytest.mark.parametrize(
    "name, rows, num_tokens, times",
    [
        ("reference", KV, 1000, 3),
        *(
            pytest.param("triton", *args, marks=pytest.mark.gpu)
            for args in (
                (KV, 4096, 20),
                (KV, 4097, 20),
                (KV, 8192, 100),
                (KV, 16384, 20),
                (WIDE, 4096, 5),
                (WIDE, 1000, 5),
                (BYTES, 2048, 20),
            )
        ),
    ],
)
def test_a_move_random_cycles_again_and_again(name, rows, num_tokens, times):
    """Races show now and then, and one wrong row makes the last ones wrong."""
    case = Case(rows, num_tokens, None)
    expected = [plane.copy() for plane in random_rows(0, case.rows, 2, case.num_rows)]
    planes = tensors(expected, name)
    rng = np.random.default_rng(0)
    there = np.arange(case.first_slot, case.num_rows)
    for _ in range(times):
        dst = rng.permutation(there)[:num_tokens]
        src = rng.permutation(dst)
        call("move_rows", name, planes, *tensors([dst, src], name), first_slot=case.first_slot)
        for plane in expected:
            plane[:, dst] = plane[:, src]  # NumPy reads all before it writes any
    for actual, plane in zip(planes, expected, strict=True):
        oracles.assert_same_bits(to_numpy(actual), plane)


def test_an_implementation_that_cannot_run_says_why():
    plane, dst, src = torch.zeros(1, 9, 4), torch.tensor([4]), torch.tensor([5])
    with pytest.raises(UnsupportedError, match=r"triton: needs .*CUDA device.* on cpu"):
        move_rows([plane], dst, src, first_slot=4, implementation="triton")
    with pytest.raises(ValueError, match="no implementation 'cuda'; it has triton, reference"):
        move_rows([plane], dst, src, first_slot=4, implementation="cuda")
