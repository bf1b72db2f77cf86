import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.geometry import DTYPE_BYTES, MLAGeometry, PlaneSpec
from kvjax.replay import content
from tests import oracles
from tests.replay.workloads import QUANTIZED

ROW = (2, 12)
TAGS = np.array([0, 1, 2, 2**32 - 1, 77, 77], np.uint32)
POSITIONS = np.array([0, 0, 5, 2**31, 3, 4], np.uint32)


def on_device(planes, number):
    """The rows of layer 3 as JAX computes them."""
    rows = jax.jit(lambda id_: content.row_bits(jnp, planes, number, id_, TAGS, POSITIONS))
    return np.asarray(rows(3))


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_numpy_and_jax_agree(dtype):
    plane = PlaneSpec("k", ROW, dtype)
    bits = content.row_bits(np, (plane, plane), 1, 3, TAGS, POSITIONS)
    assert bits.shape == (len(TAGS), *ROW)
    np.testing.assert_array_equal(bits, on_device((plane, plane), 1), strict=True)
    (expected,) = content.expected_rows((PlaneSpec("v", ROW, dtype),), range(2, 4), TAGS, POSITIONS)
    assert expected.shape == (2, len(TAGS), *ROW)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_rows_are_finite(dtype):
    plane = PlaneSpec("k", ROW, dtype)
    tags = np.arange(10_000, dtype=np.uint32)
    bits = content.row_bits(np, (plane,), 0, 0, tags, tags)
    assert np.isfinite(bits.view(jnp.dtype(dtype)).astype(np.float32)).all()
    # Half of the patterns, those with one bit of the exponent clear, are in use.
    if DTYPE_BYTES[dtype] == 1:
        assert len(np.unique(bits)) == 128


def test_a_row_depends_on_all_it_is_made_of():
    planes = (PlaneSpec("k", ROW, "float32"),) * 2

    def row(number=0, layer_id=0, tag=4, position=9):
        tags, positions = np.array([tag], np.uint32), np.array([position], np.uint32)
        return content.row_bits(np, planes, number, layer_id, tags, positions).tobytes()

    rows = {
        row(),
        row(number=1),
        row(layer_id=1),
        row(tag=5),
        row(position=8),
        row(tag=9, position=4),
    }
    assert len(rows) == 6


def test_tags_of_units_and_requests_differ():
    numbers = np.arange(100)
    tags = np.concatenate([content.unit_tags(numbers), content.request_tags(numbers)])
    assert len(np.unique(tags)) == 200
    assert content.describe_tag(tags[7]) == "cached unit 7"
    assert content.describe_tag(tags[107]) == "request 7"


@pytest.mark.parametrize("planes", [QUANTIZED[name].planes for name in QUANTIZED], ids=QUANTIZED)
def test_numpy_and_jax_agree_on_quantized_rows(planes):
    expected = content.expected_rows(planes, range(3, 4), TAGS, POSITIONS)
    for number, rows in enumerate(expected):
        np.testing.assert_array_equal(on_device(planes, number), rows[0], strict=True)


@pytest.mark.parametrize("geometry", QUANTIZED.values(), ids=QUANTIZED)
def test_quantized_rows_come_back_bit_for_bit(geometry):
    planes = geometry.planes
    tags = np.arange(10_000, dtype=np.uint32)
    rows = [bits[0] for bits in content.expected_rows(planes, range(1), tags, tags)]
    numbers = [
        bits.view(plane.dtype).astype(np.float32) for bits, plane in zip(rows, planes, strict=True)
    ]
    first, scale, second, second_scale = (*numbers, numbers[1])[:4]
    given = first * scale, second * second_scale
    if isinstance(geometry, MLAGeometry):
        written = oracles.quantize(*given, planes[2].dtype)
        assert not oracles.meets_subnormals(second, scale).any()
    else:
        written = [x for part in given for x in oracles.quantize_kv(part, planes[0].dtype)]
        assert (scale != second_scale).any()
    for have, want in zip(written, rows, strict=True):
        oracles.assert_same_bits(have.view(want.dtype), want)
    # All that int8 has but -128; as of any fp8, and the largest.
    assert len(np.unique(rows[0])) == (255 if planes[0].dtype == "int8" else 130)
    assert len(np.unique(scale)) == len(np.unique(second_scale)) == 16
