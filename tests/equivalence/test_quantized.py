"""Quantised rows are the same bits whichever framework writes them, and the same numbers read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

import kvjax
from kvjax import LayerRange, MLAGeometry
from tests import oracles
from tests.interop.torch_pools import assert_holds, junk_pool
from tests.torch.pools import DEVICES, Layer
from tests.torch.tensors import to_numpy, to_torch

GEOMETRY = MLAGeometry(64, 4, LayerRange(2, 5), 128, 16, "bfloat16", quantization="per_token_head")
NUM_TOKENS = 24
SLOTS = np.r_[np.random.default_rng(0).permutation(np.arange(4, 68))[:21], [-1, 2, 68]]


def values(seed, source):
    """Latents and ropes of all sizes; some rows of zeros, infinities, and ropes far larger.

    No number that XLA on CPU takes for zero, and no NaN, of which casts keep what they like.
    """
    rng = np.random.default_rng(seed)
    parts = []
    for width in (GEOMETRY.latent_dim, GEOMETRY.rope_dim):
        sizes = 10.0 ** rng.uniform(-4, 4, (NUM_TOKENS, 1, 1))
        parts.append((rng.standard_normal((NUM_TOKENS, 1, width)) * sizes).astype(source))
    parts[0][3] = 0
    parts[0][4, 0, 5], parts[1][4], parts[1][5, 0, 6] = np.inf, 0, -np.inf
    return parts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", ["bfloat16", "float32"])
@pytest.mark.parametrize("source", ["bfloat16", "float32", "float16"])
def test_both_write_and_read_the_same(source, model, device):
    with jax.default_device(jax.devices(device)[0]):
        compare(source, model, device)


def compare(source, model, device):
    geometry = dataclasses.replace(GEOMETRY, dtype=model)
    pool, planes = junk_pool(geometry, device=device)
    stored = [
        plane.view(spec.storage_dtype) for plane, spec in zip(planes, geometry.planes, strict=True)
    ]
    other = kvjax.Pool(tuple(map(jnp.array, stored)), geometry)
    for layer_id in (2, 4):
        latent, rope = values(layer_id, source)
        where = to_torch(SLOTS, device)
        tensors = [to_torch(part, device) for part in (latent, rope)]
        pool.set_mla_kv_buffer(Layer(layer_id), where, *tensors)
        other = kvjax.mla.write(
            other, layer_id, jnp.array(SLOTS), jnp.array(latent), jnp.array(rope)
        )
        rows = torch.cat([part.flip(0) for part in tensors], -1)
        pool.set_kv_buffer(Layer(3), where, rows, None)
        other = kvjax.mla.write_joined(other, 3, jnp.array(SLOTS), jnp.array(to_numpy(rows)))
    for tensor, array in zip(pool.planes, other.planes, strict=True):
        oracles.assert_same_bits(to_numpy(tensor), np.asarray(array))
    for dtype in (None, "float32", "float16"):
        found = pool.get_mla_kv_buffer(Layer(2), where, dtype and getattr(torch, dtype))
        wanted = kvjax.mla.read(other, 2, jnp.array(SLOTS), dtype)
        for part, expected in zip(found, wanted, strict=True):
            oracles.assert_same_bits(to_numpy(part), np.asarray(expected))


@pytest.mark.parametrize("device", DEVICES)
def test_what_jax_writes_into_a_lent_pool_torch_reads(device):
    pool, planes = junk_pool(GEOMETRY, device=device)
    latent, rope = values(0, "bfloat16")
    with jax.default_device(jax.devices(device)[0]), pool.jax() as lease:
        lease.pool = kvjax.mla.write(
            lease.pool, 3, jnp.array(SLOTS), jnp.array(latent), jnp.array(rope)
        )
    stored = oracles.quantize(latent, rope, "bfloat16")
    planes = [
        oracles.write_rows(plane, 1, SLOTS, rows.view(plane.dtype), 4)
        for plane, rows in zip(planes, stored, strict=True)
    ]
    assert_holds(pool, planes)
    found = pool.get_mla_kv_buffer(Layer(3), to_torch(SLOTS[:21], device))
    for part, rows in zip(found, oracles.dequantize(*stored, "bfloat16"), strict=True):
        oracles.assert_same_bits(to_numpy(part), rows[:21])


def test_the_comparison_can_fail():
    pool, planes = junk_pool(GEOMETRY)
    planes[1].view(np.uint8)[1, 9] ^= 1
    with pytest.raises(AssertionError):
        assert_holds(pool, planes)
