"""Which rows the kernel says it can copy, that it can, and what becomes of those that it cannot."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import UnsupportedError
from kvjax.ops import copy_rows, move_rows, read_rows, row_copy, write_rows, zero_rows
from tests import cases, oracles
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


@pytest.mark.parametrize(
    "planes, reason",
    [
        ([plane(1, 8)], None),
        ([plane(1, 512, dtype="uint8"), plane(1, 1, dtype="float32")], None),
        ([plane(3, 3)], None),
        ([plane(1, 63), plane(1, 8), plane(1, 1, dtype="float32")], None),
        ([plane(1, 63), plane(1, 8), plane(2, 1, dtype="float32")], "65 elements a token"),
        ([plane(1, 65, dtype="uint8")], "65 elements a token"),
        ([plane(64, 1024), plane(64, 1024)], "262144 bytes are more than a block"),
    ],
)
def test_cannot_copy_rows(planes, reason):
    reason_given = row_copy.cannot_copy_rows(tuple(planes))
    assert (reason_given is None) if reason is None else (reason in reason_given)


def test_rows_of_four_planes_fit_shared_memory():
    """Filled by whole tokens of K and V and their scales, each plane's padded to 1 KiB."""
    planes = [plane(8, width, dtype="int8") for width in (208, 4, 544, 4)]
    num_tokens = row_copy.max_block_tokens(tuple(planes))
    rows = [-(-num_tokens * p.size // 1024) for p in planes]
    assert num_tokens == 36 and sum(rows) + len(planes) + 1 <= 227


def call(operation, planes, slots, rows):
    """The kernel on all layers, with rows that are also planes of another pool."""
    match operation:
        case "move":
            return move_rows._mosaic_gpu(planes, slots, slots[::-1], first_slot=4, disjoint=False)
        case "zero":
            return zero_rows._mosaic_gpu(planes, slots, first_slot=4)
        case "read":
            return read_rows._mosaic_gpu(planes, None, slots, first_slot=4)
        case "write":
            return write_rows._mosaic_gpu(planes, None, slots, rows, first_slot=4)
        case "copy":
            options = {"target_first": 4, "source_first": 0, "target_layer": None}
            return copy_rows._mosaic_gpu(planes, slots, rows, slots, source_layer=None, **options)


ANY_BYTES = [cases.SCALED_LATENT, cases.SCALED_HEADS, cases.SEVEN_HEADS, *cases.ODD]


# On both sides of what one block moves: 64 tokens of up to 4 elements, 16 of 14, 28 of 9.
@pytest.mark.parametrize("case", [Case(rows, n) for rows in ANY_BYTES for n in (16, 65)], ids=str)
@pytest.mark.parametrize("operation", ["move", "zero", "read", "write", "copy"])
def test_rows_of_any_bytes_lower_for_cuda(operation, case):
    planes, new = (
        tuple(jnp.zeros((2, num_rows, *shape), dtype) for shape, dtype in case.rows)
        for num_rows in (case.num_rows, case.num_tokens)
    )
    slots = jnp.zeros(case.num_tokens, jnp.int32)
    traced = jax.jit(partial(call, operation)).trace(planes, slots, new)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    is_staged = operation == "move" and case.num_tokens == 65
    assert text.count("custom_call @mosaic_gpu") == 1 + is_staged


def write(rows, **options):
    case = Case(rows, 3)
    old, new = random_rows(0, rows, 2, case.num_rows), random_rows(1, rows, 3)
    slots = np.array([5, -1, 7], np.int32)
    arrays = [tuple(map(jnp.asarray, planes)) for planes in (old, new)]
    (actual,) = write_rows.write_rows(
        arrays[0], 1, jnp.asarray(slots), arrays[1], first_slot=4, **options
    )
    oracles.assert_same_bits(actual, oracles.write_rows(old[0], 1, slots, new[0], 4))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cpu: there is a GPU")
def test_a_named_kernel_needs_a_gpu():
    rows = (((1, 8), "float32"),)
    write(rows)
    with pytest.raises(UnsupportedError, match=r"write_rows .* mosaic_gpu: needs a GPU, .* 'cpu'"):
        write(rows, implementation="mosaic_gpu")


@pytest.mark.gpu
def test_rows_that_it_cannot_copy_take_the_reference_unless_it_is_named():
    rows = (((1, 100), "uint8"),)
    write(rows)
    with pytest.raises(UnsupportedError, match=r"mosaic_gpu: 100 elements .* multiple of 16"):
        write(rows, implementation="mosaic_gpu")
