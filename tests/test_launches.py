"""How many kernels a call launches, as JAX's profiler sees it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from benchmarks.device_time import kernels
from kvjax import MHAGeometry, MLAGeometry, mha, mla

NUM_SLOTS, PAGE_SIZE = 8192, 16
KV = MHAGeometry(NUM_SLOTS, PAGE_SIZE, 3, 8, 128, "bfloat16")
LATENT = MLAGeometry(NUM_SLOTS, PAGE_SIZE, 3, 512, 64, "bfloat16")
QUANTIZED = dataclasses.replace(LATENT, quantization="per_token_head")
SIZES = [1, 64, 4096]


def some_slots(num_tokens):
    rng = np.random.default_rng(num_tokens)
    return jnp.asarray(PAGE_SIZE + rng.permutation(NUM_SLOTS)[:num_tokens], jnp.int32)


def rows(num_tokens, *shapes):
    return [jnp.ones((num_tokens, *shape), "bfloat16") for shape in shapes]


def of_layer(function):
    """``function`` of a layer that is known when compiling, so that its number is not sent."""
    return lambda pool, *arguments: function(pool, 1, *arguments)


def launches(function, pool, *arguments):
    """Kernels and copies of a compiled call; the pool is donated where it is returned."""
    updates = isinstance(jax.eval_shape(function, pool, *arguments), kvjax.Pool)
    call = jax.jit(function, donate_argnums=(0,) if updates else ())
    result = call(pool, *arguments)  # compiles
    pool = result if updates else pool
    return sum(count for count, _ in kernels(lambda: call(pool, *arguments)).values())


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", SIZES)
def test_one_launch_writes_k_and_v(num_tokens):
    new = rows(num_tokens, *[(8, 128)] * 2)
    assert launches(of_layer(mha.write), kvjax.create(KV), some_slots(num_tokens), *new) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("geometry", [LATENT, QUANTIZED], ids=["latent", "quantised"])
def test_one_launch_writes_or_reads_latent_and_rope(geometry, num_tokens):
    pool, slots = kvjax.create(geometry), some_slots(num_tokens)
    parts = rows(num_tokens, (1, 512), (1, 64))
    assert launches(of_layer(mla.write), pool, slots, *parts) == 1
    assert launches(of_layer(mla.read), kvjax.create(geometry), slots) == 1


@pytest.mark.gpu
def test_two_launches_are_counted():
    pool, slots = kvjax.create(KV), some_slots(64)

    def write_twice(pool, slots, k, v):
        pool = mha.write(pool, 1, slots, k, v)
        return mha.write(pool, 2, slots, k, v)

    assert launches(write_twice, pool, slots, *rows(64, *[(8, 128)] * 2)) == 2
