import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.geometry import DTYPE_BYTES, PlaneSpec
from kvjax.replay import content
from tests import oracles
from tests.replay.workloads import QUANTIZED

ROW = (2, 12)
TAGS = np.array([0, 1, 2, 2**32 - 1, 77, 77], np.uint32)
POSITIONS = np.array([0, 0, 5, 2**31, 3, 4], np.uint32)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_numpy_and_jax_agree(dtype):
    plane = PlaneSpec("k", ROW, dtype)
    on_device = jax.jit(lambda layer_id: content.row_bits(jnp, plane, 1, layer_id, TAGS, POSITIONS))
    bits = content.row_bits(np, plane, 1, 3, TAGS, POSITIONS)
    assert bits.shape == (len(TAGS), *ROW)
    np.testing.assert_array_equal(bits, on_device(3), strict=True)
    (expected,) = content.expected_rows((PlaneSpec("v", ROW, dtype),), range(2, 4), TAGS, POSITIONS)
    assert expected.shape == (2, len(TAGS), *ROW)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_rows_are_finite(dtype):
    plane = PlaneSpec("k", ROW, dtype)
    tags = np.arange(10_000, dtype=np.uint32)
    bits = content.row_bits(np, plane, 0, 0, tags, tags)
    assert np.isfinite(bits.view(jnp.dtype(dtype)).astype(np.float32)).all()
    # Half of the patterns, those with one bit of the exponent clear, are in use.
    if DTYPE_BYTES[dtype] == 1:
        assert len(np.unique(bits)) == 128


def test_a_row_depends_on_all_it_is_made_of():
    plane = PlaneSpec("k", ROW, "float32")

    def row(number=0, layer_id=0, tag=4, position=9):
        tags, positions = np.array([tag], np.uint32), np.array([position], np.uint32)
        return content.row_bits(np, plane, number, layer_id, tags, positions).tobytes()

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


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_rows_come_back_bit_for_bit(name):
    planes = QUANTIZED[name].planes
    tags = np.arange(10_000, dtype=np.uint32)
    rows = content.expected_rows(planes, range(1), tags, tags)
    latent, scale, rope = (
        bits[0].view(plane.dtype).astype(np.float32)
        for bits, plane in zip(rows, planes, strict=True)
    )
    written = oracles.quantize(latent * scale, rope * scale, planes[2].dtype)
    for have, want in zip(written, rows, strict=True):
        oracles.assert_same_bits(have.view(want.dtype), want[0])
    assert len(np.unique(rows[0])) == 130  # as of any fp8, and the largest
    assert len(np.unique(scale)) == 16
    assert not oracles.meets_subnormals(rope, scale).any()
