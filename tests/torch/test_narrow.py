"""narrow of kvtorch, and what operations narrow, against NumPy's division and ml_dtypes' casts."""

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

from kvtorch.ops.narrow import bits, narrow
from tests import oracles
from tests.cases import Case, latent
from tests.strategies import random_bits, random_rows, seeds
from tests.torch.implementations import (
    INTERPRETED,
    ON_GPU,
    call,
    device_of,
    for_examples,
    not_compiled,
    tensors,
)
from tests.torch.tensors import to_numpy, to_torch

SCALES = [1.0, 0.5, 0.3, -2.0, 3e38, 2e-38, np.inf]
FLOATS = ["float32", "bfloat16", "float16"]
DTYPES = [*FLOATS, "float8_e4m3fn", "float8_e5m2"]
COMPILED = [
    "reference",
    *(pytest.param(name, marks=pytest.mark.gpu) for name in (ON_GPU, "triton")),
]
EDGES = [0.0, -0.0, 448.0, 464.0, 464.1, 480.0, 57344.0, 61440.0, 61441.0, 65519.0, 65520.0, 3.4e38]
EDGES += [2.0**-10, 2.0**-17, 2.0**-25, 2.0**-149, np.inf, -np.inf, np.nan, -np.nan]
WIDTH = 64


def every_value(dtype):
    num_bytes = np.dtype(dtype).itemsize
    return np.arange(1 << 8 * num_bytes, dtype=f"u{num_bytes}").view(dtype).reshape(-1, WIDTH)


def some_float32(seed):
    near_edges = np.array(EDGES, np.float32).view(np.uint32)[:, None] + np.arange(-2, 3)
    junk = random_bits(seed, WIDTH * WIDTH - near_edges.size, "uint32")
    return np.r_[near_edges.astype(np.uint32).ravel(), junk].view(np.float32).reshape(-1, WIDTH)


def values_of(dtype):
    return some_float32(0) if dtype == "float32" else every_value(dtype)


def assert_same_numbers(actual, expected, message):
    """Bit for bit, but for what a NaN carries."""
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), is_nan, message)
    oracles.assert_same_bits(np.where(is_nan, expected, actual), expected)


def by_narrow(name, values, dtypes, scales):
    (values,) = tensors([values], name)
    pairs = zip(dtypes, scales, strict=True)
    narrowed = [narrow(values, getattr(torch, dtype), scale) for dtype, scale in pairs]
    return [to_numpy(tensor) for tensor in narrowed]


def by_write_rows(name, values, dtypes, scales):
    """A token for each row of values; what is stored then."""
    case = Case(tuple(((1, WIDTH), dtype) for dtype in dtypes), len(values), 0)
    planes = tensors(random_rows(0, case.rows, 1, case.num_rows), name)
    (rows, slots) = tensors([values[:, None], np.arange(4, 4 + len(values))], name)
    call("write_rows", name, planes, 0, slots, [rows] * len(planes), first_slot=4, scales=scales)
    return [to_numpy(plane)[0, 4 : 4 + len(values), 0] for plane in planes]


def by_write_latent_rope(name, values, dtypes, scales):
    """The latent part and the rope part; they have no scales."""
    assert not any(scales)
    narrowed = []
    for dtype in dtypes:
        case = latent(WIDTH, WIDTH, dtype, len(values))
        (plane,) = tensors(random_rows(0, case.rows, 1, case.num_rows), name)
        rows, slots = tensors([values, np.arange(4, 4 + len(values))], name)
        call("write_latent_rope", name, plane, 0, slots, rows, rows.clone(), first_slot=4)
        parts = np.split(to_numpy(plane)[0, 4 : 4 + len(values), 0], 2, axis=-1)
        oracles.assert_same_bits(*parts)
        narrowed.append(parts[0])
    return narrowed


def by_read_latent_rope(name, values, dtypes, scales):
    """What a plane of these values is read as."""
    assert not any(scales)
    narrowed = []
    for dtype in dtypes:
        padding = np.zeros((4, WIDTH), values.dtype)
        plane, slots = tensors(
            [np.r_[padding, values][None, :, None], np.arange(4, 4 + len(values))], name
        )
        latent, rope = call(
            *("read_latent_rope", name, plane, 0, slots, WIDTH // 4),
            first_slot=4,
            dtype=getattr(torch, dtype),
        )
        narrowed.append(to_numpy(torch.cat([bits(latent), bits(rope)], -1))[:, 0].view(dtype))
    return narrowed


def compare(by, name, values, dtypes, scales, number=None):
    """Narrows ``values`` to each dtype.

    Args:
      by: what narrows.
      name: of the implementation.
      values: a row for each token.
      dtypes: one or two.
      scales: for each dtype.
      number: what all scales are, as a number.
    """
    for actual, dtype, scale in zip(by(name, values, dtypes, scales), dtypes, scales, strict=True):
        expected = oracles.narrow(values, np.dtype(dtype), None if scale is None else number)
        if values.dtype == dtype:
            oracles.assert_same_bits(actual, expected)
        else:
            assert_same_numbers(actual, expected, f"{values.dtype} to {dtype}")


def compare_every_scale(by, name, source, dtype):
    """A number for one plane and a tensor for the other, so that one kernel has both."""
    for number in SCALES:
        scale = torch.tensor(number, dtype=torch.float32, device=device_of(name))
        scale = scale.view([1] * (number == 0.3))  # of one element, with dimensions and without
        compare(by, name, values_of(source), (dtype, dtype), (number, scale), number)


@pytest.mark.parametrize("name", COMPILED[:2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_every_value(name, source, dtype):
    compare(by_narrow, name, values_of(source), (dtype,), (None,))
    compare_every_scale(by_narrow, name, source, dtype)


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize(
    "source, dtype",
    [
        *((source, dtype) for source in FLOATS for dtype in DTYPES if source != dtype),
        ("float8_e5m2", "float16"),
        ("float8_e5m2", "float8_e4m3fn"),
    ],
)
def test_a_mha_14_values_written_are_divided_by_a_scale(name, source, dtype):
    compare_every_scale(by_write_rows, name, source, dtype)


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("dtypes", [DTYPES[:2], DTYPES[2:4], DTYPES[4:]], ids="+".join)
@pytest.mark.parametrize("source", DTYPES)
def test_values_written_without_a_scale(name, source, dtypes):
    compare(by_write_rows, name, values_of(source), dtypes, [None] * len(dtypes))


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("by", [by_write_latent_rope, by_read_latent_rope])
@pytest.mark.parametrize(
    "source, dtypes",
    [
        ("float32", ["bfloat16", "float8_e4m3fn"]),
        ("bfloat16", ["float16", "float8_e4m3fn", "float8_e5m2"]),
        ("float8_e4m3fn", ["bfloat16", "float32"]),
        ("float8_e5m2", ["bfloat16", "float16", "float32", "float8_e4m3fn"]),
    ],
)
def test_latent_rows(name, by, source, dtypes):
    compare(by, name, values_of(source), dtypes, [None] * len(dtypes))


@pytest.mark.parametrize("name", COMPILED)
def test_any_float32_and_any_scale(name):
    def check(seed, number):
        for dtypes in (DTYPES[1:3], DTYPES[3:]):
            compare(by_write_rows, name, some_float32(seed), dtypes, (number, number), number)

    numbers = st.sampled_from(SCALES) | st.floats(2.0**-99, 2.0**99, width=32)
    for_examples(name, st.tuples(seeds, numbers), check)


@not_compiled
@pytest.mark.parametrize("number", [None, 0.5, -2.0])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_values_that_the_dtype_has_in_the_interpreter(dtype, number):
    """Triton's interpreter cuts digits off where a GPU rounds.

    Nor has it subnormal bfloat16, or NaN in float8_e4m3fn.
    """
    values = every_value(dtype)[:: 1 if "float8" in dtype else 37].astype(np.float32)
    if dtype == "float8_e4m3fn":
        values = np.nan_to_num(values)
    if dtype == "bfloat16":
        values[np.abs(values) < np.finfo(np.float32).smallest_normal] = 0
    if number is None:
        for by in (by_write_rows, by_write_latent_rope, by_read_latent_rope):
            compare(by, INTERPRETED, values, (dtype,), (None,))
    else:
        values = np.clip(values, -1e38, 1e38) * np.float32(number)
        scales = (number, torch.tensor(number))
        compare(by_write_rows, INTERPRETED, values, (dtype, dtype), scales, number)


def test_fp8_saturates():
    values = np.array([1e6, -1e6, np.inf, -np.inf, np.nan, -0.0], np.float32)
    for dtype, largest in (("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)):
        (stored,) = by_narrow("reference", values, [dtype], [None])
        expected = [largest, -largest, largest, -largest, np.nan, -0.0]
        np.testing.assert_array_equal(stored.astype(np.float32), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_the_dtype_keep_their_bits_and_ignore_the_scale(dtype):
    values = to_torch(random_bits(0, 1000, dtype))
    assert narrow(values, values.dtype) is values
    assert narrow(values, values.dtype, 2.0) is values
    assert narrow(values, values.dtype, torch.tensor(2.0)) is values


def times_the_inverse(name, values, dtypes, scales):
    (dtype,), (scale,) = dtypes, scales
    return [(values * (np.float32(1) / np.float32(scale))).astype(dtype)]


def unsaturated(name, values, dtypes, scales):
    return [values.astype(dtypes[0])]


@pytest.mark.parametrize(
    "value, dtype, scale, wrong",
    [
        (3.433e-05, "float8_e5m2", 0.3, times_the_inverse),
        (480.0, "float8_e4m3fn", None, unsaturated),
    ],
)
def test_a_wrong_implementation_is_caught(value, dtype, scale, wrong):
    """The comparison above can fail: a product with the inverse; a plain cast."""
    values = np.full((1, WIDTH), value, ml_dtypes.bfloat16).astype(np.float32)
    for by in (by_narrow, by_write_rows):
        compare(by, "reference", values, (dtype,), (scale,), scale)
    with pytest.raises(AssertionError):
        compare(wrong, "reference", values, (dtype,), (scale,), scale)
