import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvjax.errors import GeometryError
from kvjax.replay import jobs
from kvjax.replay.trace import BLOCK_LEN, Request

SCALES = [1, 4, 16, 512]


def request(input_len, output_len=100):
    blocks = -(-input_len // BLOCK_LEN)
    return Request(0, input_len, output_len, tuple(range(10, 10 + blocks)))


@given(st.integers(1, 20_000), st.integers(0, 2_000), st.sampled_from(SCALES))
def test_full_blocks_stay_full(input_len, output_len, scale):
    (job,) = jobs.make_jobs([request(input_len, output_len)], scale, page_size=1)
    assert job.input_len == max(1, input_len // scale)
    assert job.output_len == max(1, output_len // scale)
    assert job.units == tuple(range(10, 10 + input_len // BLOCK_LEN))
    assert len(job.units) * (BLOCK_LEN // scale) <= job.input_len


def test_a_page_of_several_blocks_is_cached_as_one():
    # Pages of 128 tokens are 4 blocks of 32; the id of the last block names all four.
    assert jobs.unit_len(scale=16, page_size=128) == 128
    (job,) = jobs.make_jobs([request(11 * BLOCK_LEN + 5)], scale=16, page_size=128)
    assert job.units == (13, 17)


def test_a_block_of_several_pages_is_cached_as_one():
    assert jobs.unit_len(scale=16, page_size=8) == 32


@pytest.mark.parametrize("scale", [0, -1, 3, 1024])
def test_a_scale_that_does_not_divide_a_block_is_rejected(scale):
    with pytest.raises(GeometryError, match=f"scale={scale} must divide"):
        jobs.unit_len(scale, page_size=1)


def test_pages_and_blocks_that_do_not_divide_each_other_are_rejected():
    with pytest.raises(GeometryError, match=r"page_size=24 and blocks of 32 tokens"):
        jobs.unit_len(scale=16, page_size=24)
