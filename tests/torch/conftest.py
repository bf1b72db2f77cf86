"""What every test of kvtorch gets."""

from unittest import mock

import numpy as np
import pytest


def exact_fma(_, x, y, z):
    """Rounded once, as a GPU does and Triton's interpreter does not.

    The sum is rounded to odd in float64, which has more than twice the bits.
    """
    product, added = x.data.astype(np.float64) * y.data.astype(np.float64), z.data
    with np.errstate(invalid="ignore"):
        total = product + added
        of_product = total - added
        lost = (product - of_product) + (added - (total - of_product))
    inexact = np.isfinite(total) & (lost != 0) & (total.view(np.int64) & 1 == 0)
    towards = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    rounded = np.where(inexact, towards, total).astype(z.data.dtype)
    return type(z)(rounded, z.dtype.scalar)


@pytest.fixture(autouse=True)
def an_interpreter_that_rounds_once():
    from triton.runtime import interpreter

    with mock.patch.object(interpreter.InterpreterBuilder, "create_fma", exact_fma):
        yield
