"""The benchmark of kvjax: what its cases of latent rows call is right, at sizes of a test.

No GPU is needed: the reference is called, and of the kernel whether it could be.
"""

import dataclasses

import numpy as np
import pytest

import kvjax
from benchmarks import cases
from kvjax.ops import read_quantized, write_quantized
from tests import oracles

SLOTS, LAYERS = 48, 2
QUANTIZED = [case for case in cases.CASES if case.geometry == cases.QUANTIZED]


@pytest.fixture
def pool(monkeypatch):
    """Like that of the quantised cases, and their inputs fit it."""
    monkeypatch.setattr(cases, "SLOTS", SLOTS)
    monkeypatch.setattr(cases, "LAYERS", LAYERS)
    return kvjax.create(dataclasses.replace(cases.QUANTIZED, num_slots=SLOTS, layers=LAYERS))


def test_bytes_moved():
    moved = {case.name: case.bytes_moved(10) for case in cases.CASES}
    assert moved["write K+V"] == moved["read K+V"] == 2 * 10 * 2 * 8 * 128 * 2
    assert moved["move, disjoint"] == 32 * moved["write K+V"]
    assert moved["write latent+rope"] == moved["read latent+rope"] == 2 * 10 * (512 + 64) * 2
    quantized = 10 * ((512 + 64) * 2 + 512 + 4 + 64 * 2)
    assert {case.name: case.bytes_moved(10) for case in QUANTIZED} == {
        "write quantised latent+rope": quantized,
        "read quantised latent+rope": quantized,
    }


@pytest.mark.parametrize("num_tokens", [1, 8, 24])
def test_quantised_cases_do_what_numpy_does(num_tokens, pool):
    write, read = QUANTIZED
    assert write.implementations == read.implementations == ("mosaic_gpu", "reference")
    layer, slots, *parts = write.inputs(np.random.default_rng(num_tokens), num_tokens, 1)
    rows = oracles.quantize(*map(np.asarray, parts), "bfloat16")
    expected = [
        oracles.write_rows(np.zeros(plane.shape, plane.dtype), layer, slots, new, 16)
        for plane, new in zip(pool.planes, rows, strict=True)
    ]
    _, pool = write.call(pool, layer, slots, *parts, implementation="reference")
    for have, want in zip(pool.planes, expected, strict=True):
        oracles.assert_same_bits(have, want)
    returned, _ = read.call(pool, layer, slots, implementation="reference")
    for have, want in zip(returned, oracles.dequantize(*rows, "bfloat16"), strict=True):
        oracles.assert_same_bits(have, want)


def test_the_kernel_could_run_quantised_cases(pool):
    write, _ = QUANTIZED
    _, _, *parts = write.inputs(np.random.default_rng(0), 8, 0)
    assert write_quantized.cannot_write(pool.planes, *parts) is None
    assert read_quantized.cannot_read(pool.planes, "bfloat16") is None
