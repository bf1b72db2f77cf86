"""What tests of quantised rows share: cases, values and planes, and the oracles applied to them.

A ``Case`` is of latent rows, a ``KvCase`` of keys and values.
"""

import dataclasses

import numpy as np

from tests import oracles
from tests.strategies import random_bits, random_rows

FIRST_SLOT, NUM_LAYERS, LAYER = 4, 2, 1


@dataclasses.dataclass(frozen=True)
class Case:
    """Widths, the model's dtype, what values are given in, and how many tokens."""

    latent_dim: int
    rope_dim: int
    dtype: str = "bfloat16"
    source: str = "bfloat16"
    num_tokens: int = 7
    constants: tuple = ()

    @property
    def num_rows(self):
        return FIRST_SLOT + self.num_tokens + 9

    @property
    def rows(self):
        return (
            ((1, self.latent_dim), "float8_e4m3fn"),
            ((1, 1), "float32"),
            ((1, self.rope_dim), self.dtype),
        )

    def __str__(self):
        constants = "".join(f"-{name}={value}" for name, value in self.constants)
        widths = f"{self.latent_dim}+{self.rope_dim}"
        return f"{widths}-{self.source}-to-{self.dtype}-n={self.num_tokens}{constants}"


WIDTHS = [(512, 64), (100, 28), (5, 3), (1, 1), (16, 40)]
SOURCES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
REFERENCE = [
    *(Case(512, 64, num_tokens=n) for n in (0, 1, 7)),
    *(Case(*widths, "float32", "float32") for widths in WIDTHS),
    *(Case(16, 8, dtype, source) for source in SOURCES for dtype in ("float32", "bfloat16")),
]
SEVERAL_A_PROGRAM = (("launch.FEW_TOKENS", 0),)
INTERPRETED = [
    *(Case(16, 8, num_tokens=n) for n in (0, 1, 7)),
    Case(16, 8, "bfloat16", "bfloat16", 13, SEVERAL_A_PROGRAM),
    Case(5, 3, "float32", "float32", 3),
    Case(100, 28, "bfloat16", "float16", 3),
    Case(16, 40, "float32", "bfloat16", 3),
]
FOR_GPU = [
    *(Case(512, 64, num_tokens=n) for n in (0, 1, 61, 2053)),
    *(Case(*widths, "float32", "float32", 33) for widths in WIDTHS[1:]),
    *(Case(16, 8, dtype, source, 1291) for source in SOURCES for dtype in ("float32", "bfloat16")),
    *(Case(24, 8, "bfloat16", source, 1291) for source in SOURCES),
]
REFERENCE_ON_GPU = [Case(512, 64, num_tokens=61), Case(5, 3, "float32", "float32")]

EDGES = [0.0, -0.0, 1e-26, 9e-27, 1e-38, 2.0**-149, 448.0, 1.0, -3.0, 3.3e38, np.inf, -np.inf]


@dataclasses.dataclass(frozen=True)
class KvCase:
    """What is stored, heads and widths of K and V, what they are given in, how many tokens."""

    stored: str
    heads: int
    head_dim: int
    v_head_dim: int
    source: str = "bfloat16"
    num_tokens: int = 7
    constants: tuple = ()

    @property
    def num_rows(self):
        return FIRST_SLOT + self.num_tokens + 9

    @property
    def shapes(self):
        dims = (self.head_dim, self.v_head_dim)
        return [(self.num_tokens, self.heads, dim) for dim in dims]

    @property
    def rows(self):
        rows = [((self.heads, dim), self.stored) for dim in (self.head_dim, self.v_head_dim)]
        scales = ((self.heads, 1), "float32")
        return rows[0], scales, rows[1], scales

    def __str__(self):
        constants = "".join(f"-{name}={value}" for name, value in self.constants)
        widths = f"{self.heads}x{self.head_dim}+{self.v_head_dim}"
        return f"{widths}-{self.source}-to-{self.stored}-n={self.num_tokens}{constants}"


INT8, FP8 = STORED = "int8", "float8_e4m3fn"
HEADS = [(8, 128, 128), (3, 100, 28), (1, 1, 5), (5, 16, 48)]
KV_REFERENCE = [
    *(KvCase(INT8, 8, 128, 128, num_tokens=n) for n in (0, 1, 7)),
    *(KvCase(stored, *sizes, "float32") for stored in STORED for sizes in HEADS),
    *(KvCase(stored, 2, 16, 8, source) for stored in STORED for source in SOURCES),
]
KV_SEVERAL_A_PROGRAM = (("launch.FEW_TOKENS", 0), ("write_quantized_kv.TILE", 64))
KV_INTERPRETED = [
    *(KvCase(INT8, 2, 16, 16, num_tokens=n) for n in (0, 1, 7)),
    *(KvCase(stored, 2, 16, 16, "bfloat16", 13, KV_SEVERAL_A_PROGRAM) for stored in STORED),
    *(KvCase(stored, 3, 20, 12, "float16", 5, KV_SEVERAL_A_PROGRAM) for stored in STORED),
    *(KvCase(stored, 1, 1, 5, "float32", 3) for stored in STORED),
]
KV_FOR_GPU = [
    *(KvCase(stored, 8, 128, 128, num_tokens=n) for stored in STORED for n in (0, 1, 61, 2053)),
    *(KvCase(stored, *sizes, "float32", 33) for stored in STORED for sizes in HEADS[1:]),
    *(KvCase(stored, 2, 16, 8, source, 1291) for stored in STORED for source in SOURCES),
]
KV_REFERENCE_ON_GPU = [
    KvCase(INT8, 8, 128, 128, num_tokens=61),
    KvCase(FP8, 1, 1, 5, "float32"),
]


_STEPS = np.array([448, 224, 112, 96, 64, 7, 3, 1, 0.5, 0.0], np.float32)  # that fp8 has


def junk_planes(seed, case):
    return [plane.copy() for plane in random_rows(seed, case.rows, NUM_LAYERS, case.num_rows)]


def any_values(seed, case):
    """Latents and ropes: any bits; of like size; zeros; and edges, NaN among them or not."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 4, (case.num_tokens, 1, 1))
    shapes = [(case.num_tokens, 1, width) for width in (case.latent_dim, case.rope_dim)]
    return [_numbers([seed, i], rng, kinds, shape, case.source) for i, shape in enumerate(shapes)]


def any_heads(seed, case):
    """K and V, each head one of what ``any_values`` has."""
    rng = np.random.default_rng(seed)
    return [
        _numbers([seed, i], rng, rng.integers(0, 4, (*shape[:2], 1)), shape, case.source)
        for i, shape in enumerate(case.shapes)
    ]


def _numbers(seed, rng, kinds, shape, source):
    junk = random_bits(seed, shape, source)
    plain = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 4, kinds.shape)
    edges = rng.choice([*EDGES, np.nan] if rng.random() < 0.2 else EDGES, shape)
    with np.errstate(all="ignore"):
        values = [x.astype(source) for x in (plain, np.zeros(shape), edges)]
    return np.select([kinds == k for k in range(3)], values, junk).astype(source)


def exact_values(seed, case):
    """Latents whose scale is a power of two, and all quotients numbers of the planes' dtypes."""
    rng = np.random.default_rng(seed)
    shape = (case.num_tokens, 1, case.latent_dim)
    scale = 2.0 ** rng.integers(-5, 6, (case.num_tokens, 1, 1))
    latent = rng.choice(_STEPS, shape) * rng.choice([-1, 1], shape)
    latent[..., rng.integers(case.latent_dim)] = -448
    rope = rng.integers(-128, 129, (case.num_tokens, 1, case.rope_dim))
    return [(part * scale).astype(case.source) for part in (latent, rope)]


def exact_heads(seed, case):
    """K and V whose scales are powers of two; quotients that fp8 has, or halves for int8."""
    rng = np.random.default_rng(seed)
    parts = []
    for shape in case.shapes:
        scale = 2.0 ** rng.integers(-5, 6, (*shape[:2], 1))
        if case.stored == INT8:
            quotients, largest = rng.integers(-127, 128, shape) / 2, 127
        else:
            quotients, largest = rng.choice(_STEPS, shape) * rng.choice([-1, 1], shape), 448
        quotients[..., rng.integers(shape[-1])] = -largest
        parts.append((quotients * scale).astype(case.source))
    return parts


def written(planes, layer, slots, latent, rope, first_slot=FIRST_SLOT):
    """The planes after the write."""
    new = oracles.quantize(latent, rope, planes[2].dtype)
    return _with_rows(planes, layer, slots, new, first_slot)


def written_kv(planes, layer, slots, k, v, first_slot=FIRST_SLOT):
    """The planes after the write."""
    stored = str(planes[0].dtype)
    new = *oracles.quantize_kv(k, stored), *oracles.quantize_kv(v, stored)
    return _with_rows(planes, layer, slots, new, first_slot)


def _with_rows(planes, layer, slots, new, first_slot):
    return [
        oracles.write_rows(plane, layer, slots, rows.view(plane.dtype), first_slot)
        for plane, rows in zip(planes, new, strict=True)
    ]


def read(planes, layer, slots, dtype, first_slot=FIRST_SLOT):
    """Latents and ropes."""
    rows = [oracles.read_rows(plane, layer, slots, first_slot) for plane in planes]
    return oracles.dequantize(*rows, dtype)


def read_kv(planes, layer, slots, dtype, first_slot=FIRST_SLOT):
    """K and V."""
    k, k_scale, v, v_scale = (
        oracles.read_rows(plane, layer, slots, first_slot) for plane in planes
    )
    return [
        oracles.dequantize_kv(rows, scale, rows.dtype, dtype)
        for rows, scale in ((k, k_scale), (v, v_scale))
    ]


def assert_same_numbers(actual, expected):
    """Bit for bit, but for what a NaN carries."""
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), is_nan)
    oracles.assert_same_bits(np.where(is_nan, expected, actual), expected)
