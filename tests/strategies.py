"""What is not compiled: bits, slots and layers."""

import hypothesis.strategies as st
import numpy as np

from tests.cases import TRACED

INT32 = np.iinfo(np.int32)
MANY_TOKENS = 100
"""From here on slots come from a drawn seed: one by one they are more than hypothesis draws."""

seeds = st.integers(0, 2**32 - 1)


def random_bits(seed, shape, dtype):
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(np.random.default_rng(seed).bytes(num_bytes), dtype).reshape(shape)


def random_rows(seed, rows, *leading):
    """An array ``[*leading, *row]`` for each plane, no two rows alike.

    NaNs, infinities, -0.0 and subnormals all occur.
    """
    return tuple(
        random_bits([seed, i], (*leading, *shape), dtype) for i, (shape, dtype) in enumerate(rows)
    )


def junk(rows, *leading):
    """``random_rows`` of any seed.

    Drawn one by one instead, most elements of a large array would be equal, and a row at the wrong
    place would not show.
    """
    return seeds.map(lambda seed: random_rows(seed, rows, *leading))


def planes(case):
    return junk(case.rows, case.num_layers, case.num_rows)


def rows(case):
    """New rows for the planes, of one layer or of all."""
    return junk(case.rows, *[case.num_layers] * (case.layer is None), case.num_tokens)


def layers(case):
    """Positions that are there, and others."""
    if case.layer != TRACED:
        return st.just(case.layer)
    others = [-1, case.num_layers, -case.num_layers, INT32.min, INT32.max]
    return (st.integers(0, case.num_layers - 1) | st.sampled_from(others)).map(np.int32)


def inputs(case, *strategies):
    """A value of each strategy for the case."""
    return st.tuples(*(strategy(case) for strategy in strategies))


def slots(case):
    """A slot for each token; those that are there are distinct."""
    return some_slots(case.num_tokens, case.first_slot, case.num_rows)


def any_slots(case):
    """A slot for each token."""
    return some_slots(case.num_tokens, case.first_slot, case.num_rows, distinct=False)


def moves(case):
    """Where the row of each token goes, and where it comes from."""
    return some_moves(case.num_tokens, case.first_slot, case.num_rows)


@st.composite
def some_moves(draw, *args):
    """Distinct slots, and slots half of which are among them."""
    dst, src = draw(some_slots(*args)), draw(some_slots(*args, distinct=False))
    rng = np.random.default_rng(draw(seeds))
    return dst, np.where(rng.random(dst.size) < 0.5, rng.permutation(dst), src)


@st.composite
def some_slots(draw, num_tokens, first, stop, *, distinct=True):
    """Slots from ``first`` to ``stop`` and, among them, slots that are not there."""
    edges = [-1, 0, first - 1, stop, stop + 1, -stop, 2 * stop, INT32.min, INT32.max]
    edges = [slot for slot in edges if not first <= slot < stop]
    if num_tokens < MANY_TOKENS:
        there = draw(
            st.permutations(range(first, stop))
            if distinct
            else st.lists(st.integers(first, stop - 1), min_size=num_tokens, max_size=num_tokens)
        )
        absent = st.integers(-2 * stop, first - 1) | st.sampled_from(edges)
        there += [first - 1] * num_tokens  # where there are not so many
        is_absent = st.integers(0, 3).map(lambda number: number == 3)
        choices = [draw(absent) if draw(is_absent) else there[i] for i in range(num_tokens)]
        return np.array(choices, np.int32)
    rng = np.random.default_rng(draw(seeds))
    there = rng.permutation(np.arange(first, stop)) if distinct else rng.integers(first, stop, stop)
    absent = rng.choice(np.r_[edges, -stop:first, stop : 2 * stop], num_tokens)
    return np.where(rng.random(num_tokens) < 0.9, there[:num_tokens], absent).astype(np.int32)
