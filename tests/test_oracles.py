"""The comparison that every other test trusts."""

import ml_dtypes
import numpy as np
import pytest

from tests.oracles import assert_same_bits, bits

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
