"""Which rows the kernel says it can copy, and what becomes of those that it cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import UnsupportedError
from kvjax.ops import row_copy
from kvjax.ops.write_rows import write_rows
from tests import oracles
from tests.cases import Case
from tests.strategies import random_rows


def plane(*row_shape, dtype="bfloat16"):
    return jnp.zeros((1, 1, *row_shape), dtype)


@pytest.mark.parametrize(
    "planes, widths, reason",
    [
        ([plane(1, 8)], [], None),
        ([plane(1, 16, dtype="uint8"), plane(3, 8)], [], None),
        ([plane(1, 7)], [], "14 bytes"),
        ([plane(1, 8), plane(3, 3)], [], "18 bytes"),
        ([plane(1, 8, dtype="uint8")], [], "8 bytes"),
        ([plane(1, 24)], [16, 8], None),
        ([plane(1, 24)], [24, 0], None),
        ([plane(1, 24)], [20, 4], "40 bytes"),
        ([plane(64, 1024), plane(64, 1024)], [], "262144 bytes are more than a block"),
    ],
)
def test_cannot_copy(planes, widths, reason):
    reason_given = row_copy.cannot_copy(tuple(planes), *widths)
    assert (reason_given is None) if reason is None else (reason in reason_given)


def write(rows, **options):
    case = Case(rows, 3)
    old, new = random_rows(0, rows, 2, case.num_rows), random_rows(1, rows, 3)
    slots = np.array([5, -1, 7], np.int32)
    arrays = [tuple(map(jnp.asarray, planes)) for planes in (old, new)]
    (actual,) = write_rows(arrays[0], 1, jnp.asarray(slots), arrays[1], first_slot=4, **options)
    oracles.assert_same_bits(actual, oracles.write_rows(old[0], 1, slots, new[0], 4))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cpu: there is a GPU")
def test_a_named_kernel_needs_a_gpu():
    rows = (((1, 8), "float32"),)
    write(rows)
    with pytest.raises(UnsupportedError, match=r"write_rows .* mosaic_gpu: needs a GPU, .* 'cpu'"):
        write(rows, implementation="mosaic_gpu")


@pytest.mark.gpu
def test_rows_that_it_cannot_copy_take_the_reference_unless_it_is_named():
    rows = (((3, 3), "bfloat16"),)
    write(rows)
    with pytest.raises(UnsupportedError, match=r"mosaic_gpu: a row .* 18 bytes .* multiple of 16"):
        write(rows, implementation="mosaic_gpu")
