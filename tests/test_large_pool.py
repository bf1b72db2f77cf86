"""Sizes that count: more elements than int32 does, many rows at once, again and again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
from kvjax import MHAGeometry, mha
from tests import coded, oracles

NEW = 1 << 30  # codes that no row has at first
# 6.4e9 elements, and rows of one layer past 2**31.
LARGE = MHAGeometry((1 << 21) + 48, 16, 3, 8, 128, "float8_e4m3fn", 1, "bfloat16")
SMALL = MHAGeometry(1 << 12, 16, 2, 1, 16, "float8_e4m3fn", 8, "bfloat16")


def update(geometry, num_rows):
    """Writes, reads, moves and zeroes rows, also the last; what is wrong then, and the peak."""
    rng = np.random.default_rng(0)
    pool, codes = coded.create(geometry), coded.first_codes(geometry)
    last, layer = geometry.num_rows - 1, len(geometry.layers) - 1

    slots = rng.permutation(np.arange(geometry.first_slot, last - num_rows))[:num_rows]
    slots[0] = last
    new = np.arange(NEW, NEW + num_rows)
    rows = coded.rows(geometry, new)
    pool = mha.write(pool, layer, slots, *rows)
    codes[layer, slots] = new
    for actual, expected in zip(mha.read(pool, layer, slots), rows, strict=True):
        oracles.assert_same_bits(actual, np.asarray(expected))

    end = rng.permutation(np.arange(last + 1 - num_rows, last + 1))
    for dst, src in ((end, np.roll(end, 1)), (slots[1:8], end[:7])):
        pool = kvjax.move(pool, dst, src)
        codes[:, dst] = codes[:, src]
    pool = kvjax.zero(pool, [last - 1])
    codes[:, last - 1] = 0

    jax.block_until_ready(pool)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "num_wrong": coded.num_wrong(pool, codes),
        "peak_bytes": stats.get("peak_bytes_in_use"),
    }


def test_a_small_pool_is_updated_as_the_large_one_is():
    assert update(SMALL, num_rows=64)["num_wrong"] == 0


@pytest.mark.parametrize("position", [0, 1])
def test_a_single_wrong_bit_is_caught(position):
    pool, codes = coded.create(SMALL), coded.first_codes(SMALL)
    assert coded.num_wrong(pool, codes) == 0
    planes = [np.array(plane) for plane in pool.planes]
    oracles.bits(planes[position])[1, -1, 0, -1] ^= 1
    assert coded.num_wrong(kvjax.Pool(tuple(planes), SMALL), codes) == 1


@pytest.mark.gpu
def test_more_elements_than_int32_counts_in_the_memory_of_the_pool():
    """In a process of its own, whose peak is nobody else's."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.test_large_pool"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    result = json.loads(result.stdout.splitlines()[-1])
    assert result["num_wrong"] == 0
    assert result["peak_bytes"] <= 1.01 * LARGE.bytes


# Rows in one call, more than 2**20 of them.
MANY = MHAGeometry(1 << 21, 64, 1, 1, 8, "bfloat16", 16, "float8_e4m3fn")


@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param("reference", marks=pytest.mark.slow),
        pytest.param("mosaic_gpu", marks=pytest.mark.gpu),
    ],
)
def test_more_than_two_to_the_20_rows_in_one_call(implementation):
    num_rows = (1 << 20) + 3
    pool, codes = coded.create(MANY), coded.first_codes(MANY)
    dst = np.random.default_rng(0).permutation(np.arange(64, MANY.num_rows))[:num_rows]
    rows = coded.rows(MANY, np.arange(NEW, NEW + num_rows)[None])
    pool = kvjax.scatter(pool, dst, rows, implementation=implementation)
    codes[0, dst] = np.arange(NEW, NEW + num_rows)
    assert coded.num_wrong(pool, codes) == 0
    pool = kvjax.move(pool, dst, np.roll(dst, 1), implementation=implementation)
    codes[0, dst] = codes[0, np.roll(dst, 1)]
    assert coded.num_wrong(pool, codes) == 0


@pytest.mark.gpu
def test_random_cycles_again_and_again():
    geometry = MHAGeometry(1 << 16, 16, 4, 8, 128, "bfloat16")
    pool, codes = coded.create(geometry), coded.first_codes(geometry)
    rng = np.random.default_rng(0)
    for _ in range(20):
        dst = rng.permutation(np.arange(geometry.first_slot, geometry.num_rows))[:8192]
        src = rng.permutation(dst)
        pool = kvjax.move(pool, dst, src, implementation="mosaic_gpu")
        codes[:, dst] = codes[:, src]
        assert coded.num_wrong(pool, codes) == 0


if __name__ == "__main__":
    print(json.dumps(update(LARGE, num_rows=4096)))
