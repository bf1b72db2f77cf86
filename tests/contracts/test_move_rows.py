"""move_rows against a loop over tokens that reads before it writes."""

from functools import partial

import numpy as np
import pytest

from tests import cases, oracles
from tests.cases import BYTES, KV, ODD, SCALED, SCALED_HEADS, SCALED_LATENT, SEVEN_HEADS, WIDE, Case
from tests.implementations import for_examples, on_cases, run
from tests.strategies import inputs, moves, planes, random_rows

# Sizes on both sides of each choice that the kernel makes: all rows in one block or staged, moves
# compared with each other or rows marked, layers staged together or one after the other.
ONE_BLOCK = (("row_copy.ONE_BLOCK_TOKENS", 3), *cases.FEW_BLOCKS)
LITTLE_SHARED_MEMORY = (("row_copy.MAX_SHARED_BYTES", 2048 + 3 * 64), *cases.FEW_BLOCKS)
STAGED = (("row_copy.ONE_BLOCK_TOKENS", 0), *cases.FEW_BLOCKS)
MARKED = (("move_rows.COMPARED_TOKENS", 3), *STAGED)
BY_LAYER = (("move_rows.STAGING_BYTES", 1), *STAGED)
BY_TWO_LAYERS = (("move_rows.STAGING_BYTES", 2 * 3 * 64), *STAGED)
SHARED_MEMORY_FULL = (
    ((8, 208), "int8"),
    ((8, 1), "float32"),
    ((8, 544), "int8"),
    ((8, 1), "float32"),
)
INTERPRETED = [
    Case(KV, 0, None),
    *(Case(KV, num_tokens, None, ONE_BLOCK) for num_tokens in (3, 4)),
    Case(KV, 4, None, LITTLE_SHARED_MEMORY),
    *(Case(BYTES, num_tokens, None, MARKED) for num_tokens in (3, 4)),
    Case(KV, 3, None, BY_TWO_LAYERS, num_layers=3),
    Case(SCALED, 9, None),
    Case(SCALED, 3, None, STAGED),
    Case(ODD[1], 4, None),
]
SLOW = [Case(KV, 5, None, BY_LAYER), Case(KV, 17, None, BY_TWO_LAYERS, num_layers=3)]
FOR_GPU = [
    *(Case(KV, num_tokens, None) for num_tokens in (1, 64, 65)),
    *(Case(WIDE, num_tokens, None) for num_tokens in (55, 56)),
    *(Case(BYTES, num_tokens, None) for num_tokens in (2048, 2049)),
    Case(KV, 3, None, BY_TWO_LAYERS, num_layers=3),
    *(Case(SCALED_LATENT, num_tokens, None) for num_tokens in (1, 64, 65, 2049)),
    *(Case(SCALED_HEADS, num_tokens, None) for num_tokens in (64, 65)),
    *(Case(SEVEN_HEADS, num_tokens, None) for num_tokens in (16, 17)),
    *(Case(rows, num_tokens, None) for rows in ODD for num_tokens in (28, 65)),
    Case(SHARED_MEMORY_FULL, 36, None),
]


def compare(move, case, planes, dst, src):
    moved = move(case, planes, dst, src, first_slot=case.first_slot)
    for actual, plane in zip(moved, planes, strict=True):
        oracles.assert_same_bits(actual, oracles.move_rows(plane, dst, src, case.first_slot))


# The race detector takes a block that reads a row, waits for the barrier, and then writes the row
# for one that does not wait. Overlapping moves do that, disjoint ones do not.
@on_cases(
    reference=cases.of_all_layers(cases.MANY), interpreted=INTERPRETED, slow=SLOW, gpu=FOR_GPU
)
def test_equals_oracle(name, case):
    def check(planes, moves):
        move = partial(run, "move_rows", name, disjoint=False, detect_races=False)
        compare(move, case, planes, *moves)

    for_examples(name, inputs(case, planes, moves), check)


def disjoint_moves(case):
    """Moves that read no row which another writes."""
    return moves(case).map(lambda m: (m[0], np.where(np.isin(m[1], m[0]), -1, m[1])))


@on_cases(
    reference=[Case(KV, 17, None)],
    interpreted=[Case(rows, 9, None, cases.FEW_BLOCKS) for rows in (BYTES, SCALED)],
    gpu=[
        Case(KV, 65, None),
        *(Case(rows, 300, None) for rows in (WIDE, SCALED_LATENT, SCALED_HEADS)),
    ],
)
def test_disjoint_moves_equal_oracle(name, case):
    def check(planes, moves):
        move = partial(run, "move_rows", name, disjoint=True)
        compare(move, case, planes, *moves)

    for_examples(name, inputs(case, planes, disjoint_moves), check)


@pytest.mark.parametrize(
    "dst, src, wrong_one_by_one",
    [
        ([5, 6, 7], [4, 5, 6], True),  # a chain
        ([4, 5, 6], [5, 6, 7], False),
        ([4, 5], [5, 4], True),  # a swap
        ([4, 5, 6, 7], [5, 6, 7, 4], True),  # a cycle
        ([4, 5], [4, 5], False),  # each to itself
    ],
)
def test_a_wrong_implementation_is_caught(dst, src, wrong_one_by_one):
    """The comparison above can fail: one move after the other is no simultaneous assignment."""

    def one_by_one(case, planes, dst, src, **_):
        planes = [plane.copy() for plane in planes]
        for plane in planes:
            for to, origin in zip(dst, src, strict=True):
                plane[:, to] = plane[:, origin]
        return planes

    case = Case(KV, len(dst))
    old = random_rows(0, case.rows, 2, case.num_rows)
    if wrong_one_by_one:
        with pytest.raises(AssertionError):
            compare(one_by_one, case, old, dst, src)
    else:
        compare(one_by_one, case, old, dst, src)
    moves = np.array(dst, np.int32), np.array(src, np.int32)
    compare(partial(run, "move_rows", "reference"), case, old, *moves)
