"""The comparison that every other test trusts."""

import ml_dtypes
import numpy as np
import pytest

from tests.oracles import assert_same_bits, assert_same_numbers, bits

NAN = np.uint32(0x7FC00000)
ONE = np.ones((2, 3), np.float32)


def changed(array, change):
    array = array.copy()
    bits(array).reshape(-1)[-1] ^= np.uint64(change).astype(bits(array).dtype)
    return array


@pytest.mark.parametrize(
    "actual, expected",
    [
        (changed(ONE, 1), ONE),
        (changed(ONE, 0x80000000), ONE),
        (np.array([NAN + 1]).view(np.float32), np.array([NAN]).view(np.float32)),
        (np.array([-0.0]), np.array([0.0])),
        (ONE.view(np.uint32), ONE),
        (ONE.astype(ml_dtypes.bfloat16), ONE.astype(np.float16)),
        (ONE, ONE[None]),
        (ONE[:1], ONE),
    ],
)
def test_it_can_fail(actual, expected):
    assert_same_bits(expected, expected)
    with pytest.raises(AssertionError):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize(
    "actual, expected, may_be_zero",
    [
        (changed(ONE, 1), ONE, False),
        (np.float32([np.nan]), np.float32([1]), True),
        (np.float32([1]), np.float32([np.nan]), True),
        (np.float32([0.0]), np.float32([1e-39]), False),
        (np.float32([0.0]), np.float32([-1e-39]), True),
        (np.float32([1e-39]), np.float32([2e-39]), True),
    ],
)
def test_numbers_can_differ(actual, expected, may_be_zero):
    assert_same_numbers(expected, expected, may_be_zero)
    with pytest.raises(AssertionError):
        assert_same_numbers(actual, expected, may_be_zero)


def test_numbers_that_are_as_good():
    assert_same_numbers(np.uint32([NAN + 1]).view(np.float32), np.uint32([NAN]).view(np.float32))
    assert_same_numbers(np.float32([-0.0]), np.float32([-1e-39]), np.array([True]))
