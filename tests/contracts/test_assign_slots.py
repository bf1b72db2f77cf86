"""assign_slots against a loop over tokens."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.ops import assign_slots

MAX_EXTEND = 7


def oracle(prefix_lens, extend_lens, last_slots, starts, new_pages, page_size, num_tokens):
    """The contract, one token at a time."""
    out = np.full(num_tokens, -1, np.int32)
    pages = iter(new_pages)
    for prefix_len, extend_len, slot, start in zip(
        prefix_lens, extend_lens, last_slots, starts, strict=True
    ):
        for i in range(extend_len):
            place = (prefix_len + i) % page_size
            if place == 0:
                slot = next(pages) * page_size
            else:
                slot = slot + 1 if slot >= 0 and (slot + 1) % page_size == place else -1
            out[start + i] = slot
    return out


@st.composite
def batches(draw, num_sequences, page_size):
    """Sequences that grow by up to ``MAX_EXTEND`` tokens, some by none, with gaps between them.

    Some last slots are not where their prefix ends, some are not slots at all.
    """

    def ints(low, high):
        return draw(
            st.lists(st.integers(low, high), min_size=num_sequences, max_size=num_sequences)
        )

    prefix_lens = ints(0, 4 * page_size)
    extend_lens = ints(0, MAX_EXTEND)
    last_slots = [
        draw(st.integers(-3, 99)) * page_size + (prefix_len - 1) % page_size + wrong
        for prefix_len, wrong in zip(prefix_lens, ints(0, 1), strict=True)
    ]
    last_slots = [slot if there else -1 for slot, there in zip(last_slots, ints(0, 3), strict=True)]
    lens_and_gaps = np.array(extend_lens) + np.array(ints(0, 2))
    starts = np.cumsum(lens_and_gaps) - lens_and_gaps
    num_pages = num_sequences * (MAX_EXTEND + 1)
    new_pages = draw(st.permutations(range(1, num_pages + 1)))
    return [
        np.array(x, np.int32) for x in (prefix_lens, extend_lens, last_slots, starts, new_pages)
    ]


@functools.cache
def compiled(name, page_size, num_tokens):
    run = assign_slots.IMPLEMENTATIONS[name].run
    return jax.jit(functools.partial(run, page_size=page_size, num_tokens=num_tokens))


@pytest.mark.parametrize("num_sequences", [1, 5])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("name", assign_slots.IMPLEMENTATIONS)
@settings(max_examples=60)
@given(data=st.data())
def test_equals_oracle(name, page_size, num_sequences, data):
    num_tokens = num_sequences * (MAX_EXTEND + 2)
    batch = data.draw(batches(num_sequences, page_size))
    np.testing.assert_array_equal(
        compiled(name, page_size, num_tokens)(*batch), oracle(*batch, page_size, num_tokens)
    )


def run(batch, page_size, num_tokens):
    return compiled("reference", page_size, num_tokens)(*map(np.int32, batch))


def test_a_wrong_implementation_is_caught():
    """The comparison above can fail: pages counted by tokens alone, whatever the prefix fills."""
    batch = [1, 0], [3, 3], [5, -1], [0, 3], [7, 9]
    wrong = [7 * 4, 7 * 4 + 1, 7 * 4 + 2, 9 * 4, 9 * 4 + 1, 9 * 4 + 2]
    np.testing.assert_array_equal(run(batch, 4, 6), oracle(*batch, 4, 6))
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(wrong, oracle(*batch, 4, 6))


def test_worked_example_a_pg_7():
    assert run(([0], [20], [-1], [0], [1, 2]), 16, 20).tolist() == list(range(16, 36))
    assert run(([20], [16], [35], [0], [3]), 16, 16).tolist() == list(range(36, 52))
    assert run(([36], [1], [51], [0], [9]), 16, 1).tolist() == [52]


def test_no_sequences_or_no_tokens():
    assert run(([], [], [], [], [1]), 4, 3).tolist() == [-1] * 3
    assert run(([5], [0], [9], [0], [1]), 4, 0).tolist() == []


def test_al6_more_than_two_to_the_twenty_tokens():
    num_tokens = (1 << 20) + 3
    new_pages = np.arange(2, 2 + num_tokens // 64 + 1)
    slots = run(([5], [num_tokens], [68], [0], new_pages), 64, num_tokens)
    np.testing.assert_array_equal(slots, np.arange(69, 69 + num_tokens))
