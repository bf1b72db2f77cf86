"""What tests of quantised rows share: cases, values and planes, and the oracles applied to them."""

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
]
REFERENCE_ON_GPU = [Case(512, 64, num_tokens=61), Case(5, 3, "float32", "float32")]

EDGES = [0.0, -0.0, 1e-26, 9e-27, 1e-38, 2.0**-149, 448.0, 1.0, -3.0, 3.3e38, np.inf, -np.inf]


def junk_planes(seed, case):
    return [plane.copy() for plane in random_rows(seed, case.rows, NUM_LAYERS, case.num_rows)]


def any_values(seed, case):
    """Latents and ropes: any bits; of like size; zeros; and edges, NaN among them or not."""
    rng = np.random.default_rng(seed)
    widths = (case.latent_dim, case.rope_dim)
    kinds = rng.integers(0, 4, (case.num_tokens, 1, 1))
    parts = []
    for i, width in enumerate(widths):
        shape = (case.num_tokens, 1, width)
        junk = random_bits([seed, i], shape, case.source)
        plain = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 4, (case.num_tokens, 1, 1))
        edges = rng.choice([*EDGES, np.nan] if rng.random() < 0.2 else EDGES, shape)
        with np.errstate(all="ignore"):
            values = [x.astype(case.source) for x in (plain, np.zeros(shape), edges)]
        parts.append(np.select([kinds == k for k in range(3)], values, junk))
    return [part.astype(case.source) for part in parts]


def exact_values(seed, case):
    """Latents whose scale is a power of two, and all quotients numbers of the planes' dtypes."""
    rng = np.random.default_rng(seed)
    shape = (case.num_tokens, 1, case.latent_dim)
    steps = np.array([448, 224, 112, 96, 64, 7, 3, 1, 0.5, 0.0], np.float32)
    scale = 2.0 ** rng.integers(-5, 6, (case.num_tokens, 1, 1))
    latent = rng.choice(steps, shape) * rng.choice([-1, 1], shape)
    latent[..., rng.integers(case.latent_dim)] = -448
    rope = rng.integers(-128, 129, (case.num_tokens, 1, case.rope_dim))
    return [(part * scale).astype(case.source) for part in (latent, rope)]


def written(planes, layer, slots, latent, rope, first_slot=FIRST_SLOT):
    """The planes after the write."""
    new = oracles.quantize(latent, rope, planes[2].dtype)
    return [
        oracles.write_rows(plane, layer, slots, rows.view(plane.dtype), first_slot)
        for plane, rows in zip(planes, new, strict=True)
    ]


def read(planes, layer, slots, dtype, first_slot=FIRST_SLOT):
    """Latents and ropes."""
    rows = [oracles.read_rows(plane, layer, slots, first_slot) for plane in planes]
    return oracles.dequantize(*rows, dtype)


def assert_same_numbers(actual, expected):
    """Bit for bit, but for what a NaN carries."""
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), is_nan)
    oracles.assert_same_bits(np.where(is_nan, expected, actual), expected)
