"""The benchmark of kvjax: what its quantised cases call is right, at sizes of a test.

No GPU is needed: the reference is called, and of the kernel whether it could be.
"""

import dataclasses

import numpy as np
import pytest

import kvjax
from benchmarks import cases
from kvjax.ops import read_quantized, read_quantized_kv, write_quantized, write_quantized_kv
from tests import oracles

SLOTS, LAYERS = 48, 2
GEOMETRIES = {
    "quantised latent+rope": cases.QUANTIZED,
    "quantised K+V (int8)": cases.INT8,
    "quantised K+V (fp8)": cases.FP8,
}
OPERATIONS = {
    "quantised latent+rope": (write_quantized, read_quantized),
    "quantised K+V (int8)": (write_quantized_kv, read_quantized_kv),
    "quantised K+V (fp8)": (write_quantized_kv, read_quantized_kv),
}


def write_and_read(kind):
    """The two cases of a kind, in this order."""
    by_name = {case.name: case for case in cases.CASES if case.geometry == GEOMETRIES[kind]}
    assert list(by_name) == [f"write {kind}", f"read {kind}"]
    return by_name.values()


@pytest.fixture
def pool(monkeypatch, kind):
    """Like that of the quantised cases of a kind, and their inputs fit it."""
    monkeypatch.setattr(cases, "SLOTS", SLOTS)
    monkeypatch.setattr(cases, "LAYERS", LAYERS)
    return kvjax.create(dataclasses.replace(GEOMETRIES[kind], num_slots=SLOTS, layers=LAYERS))


def quantize(kind, *parts):
    """What the planes store of the parts, and what is read of it, as NumPy has it."""
    if kind == "quantised latent+rope":
        rows = oracles.quantize(*parts, "bfloat16")
        return rows, oracles.dequantize(*rows, "bfloat16")
    stored = "int8" if "int8" in kind else "float8_e4m3fn"
    halves = [oracles.quantize_kv(part, stored) for part in parts]
    read = [oracles.dequantize_kv(*half, stored, "bfloat16") for half in halves]
    return [row for half in halves for row in half], read


def test_bytes_moved():
    moved = {case.name: case.bytes_moved(10) for case in cases.CASES}
    assert moved["write K+V"] == moved["read K+V"] == 2 * 10 * 2 * 8 * 128 * 2
    assert moved["move, disjoint"] == 32 * moved["write K+V"]
    assert moved["write latent+rope"] == moved["read latent+rope"] == 2 * 10 * (512 + 64) * 2
    of_kind = {
        "quantised latent+rope": (512 + 64) * 2 + 512 + 4 + 64 * 2,
        "quantised K+V (int8)": 2 * 8 * (128 * 2 + 128 + 4),
        "quantised K+V (fp8)": 2 * 8 * (128 * 2 + 128 + 4),
    }
    for kind, num_bytes in of_kind.items():
        assert [case.bytes_moved(10) for case in write_and_read(kind)] == [10 * num_bytes] * 2


@pytest.mark.parametrize("num_tokens", [1, 8, 24])
@pytest.mark.parametrize("kind", GEOMETRIES)
def test_quantised_cases_do_what_numpy_does(kind, num_tokens, pool):
    write, read = write_and_read(kind)
    assert write.implementations == read.implementations == ("mosaic_gpu", "reference")
    layer, slots, *parts = write.inputs(np.random.default_rng(num_tokens), num_tokens, 1)
    rows, numbers = quantize(kind, *map(np.asarray, parts))
    expected = [
        oracles.write_rows(
            np.zeros(plane.shape, plane.dtype), layer, slots, new.view(plane.dtype), 16
        )
        for plane, new in zip(pool.planes, rows, strict=True)
    ]
    _, pool = write.call(pool, layer, slots, *parts, implementation="reference")
    for have, want in zip(pool.planes, expected, strict=True):
        oracles.assert_same_bits(have, want)
    returned, _ = read.call(pool, layer, slots, implementation="reference")
    for have, want in zip(returned, numbers, strict=True):
        oracles.assert_same_bits(have, want)


@pytest.mark.parametrize("kind", GEOMETRIES)
def test_the_kernel_could_run_quantised_cases(kind, pool):
    write, _ = write_and_read(kind)
    _, _, *parts = write.inputs(np.random.default_rng(0), 8, 0)
    writing, reading = OPERATIONS[kind]
    assert writing.cannot_write(pool.planes, *parts) is None
    assert reading.cannot_read(pool.planes, "bfloat16") is None
