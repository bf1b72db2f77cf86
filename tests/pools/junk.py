"""Pools full of junk, beside the NumPy planes that they should equal."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import LayerRange, MHAGeometry, MLAGeometry, Pool
from tests import oracles
from tests.strategies import random_bits, random_rows

IMPLEMENTATIONS = ["reference", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]

MHA = MHAGeometry(
    num_slots=20,
    page_size=4,
    layers=LayerRange(2, 5),
    num_kv_heads=2,
    head_dim=8,
    dtype="bfloat16",
    v_head_dim=16,
    v_dtype="float8_e4m3fn",
)
MLA = MLAGeometry(
    num_slots=20, page_size=4, layers=LayerRange(2, 5), latent_dim=16, rope_dim=4, dtype="float32"
)
QUANTIZED = dataclasses.replace(
    MLA, latent_dim=32, rope_dim=8, dtype="bfloat16", quantization="per_token_head"
)
INT8, FP8 = (
    dataclasses.replace(MHA, v_dtype=None, quantization=f"{name}_per_token_head")
    for name in ("int8", "fp8")
)
GEOMETRIES = {
    "mha": MHA,
    "mha, host tier": dataclasses.replace(MHA, padding_page=False),
    "mla": MLA,
    "mla, e5m2": dataclasses.replace(MLA, latent_dim=32, rope_dim=16, dtype="float8_e5m2"),
    "mla, quantised": QUANTIZED,
    "mha, int8": INT8,
    "mha, fp8": FP8,
}


def rows_of(geometry):
    return [(spec.row_shape, spec.dtype) for spec in geometry.planes]


def junk_pool(geometry, seed=0):
    """A pool of any bits, also in the padding page, and its planes."""
    planes = random_rows(seed, rows_of(geometry), len(geometry.layers), geometry.num_rows)
    return pool_of(geometry, planes), planes


def pool_of(geometry, planes):
    # A copy, because on CPU JAX may share NumPy's memory, and update it in place.
    return Pool(tuple(jnp.array(stored(plane)) for plane in planes), geometry)


def stored(values):
    """fp8 as the bits that a plane stores."""
    return values.view(np.uint8) if values.dtype.name.startswith("float8") else values


def assert_holds(pool, planes):
    for actual, expected in zip(pool.planes, planes, strict=True):
        oracles.assert_same_bits(actual, stored(expected))


def changed(oracle, planes, *args, first_slot):
    """The planes, each as the oracle changes it."""
    return tuple(oracle(plane, *args, first_slot) for plane in planes)


def numbers(seed, shape, dtype, *, any_bits):
    """Random numbers, on request of any bits: among them NaNs, and subnormal ones.

    Of a NaN a cast need not keep what it carries, and XLA on CPU may take float32's subnormal
    numbers for zeros; casts have a test of their own.
    """
    values = random_bits(seed, shape, dtype)
    small = np.abs(values.astype(np.float32)) < 1e-30
    plain = any_bits | ~(small | np.isnan(values))
    return np.where(plain, values, values.dtype.type(1))
