"""Writes and reads of latent rows, quantised or not: dtypes of the parts, any widths, layers."""

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from kvjax import LayerRange, MLAGeometry, mla
from tests import oracles
from tests.pools.junk import assert_holds, junk_pool, numbers
from tests.strategies import seeds, some_slots

NUM_TOKENS = 5
# latent_dim, rope_dim, storage dtype; dtype of the latent, of the rope, and of what is read
ALL = [
    (16, 4, "float32", "float32", "bfloat16", None),
    (16, 0, "float32", "bfloat16", "float32", "bfloat16"),
    (64, 32, "bfloat16", "float32", "bfloat16", "float32"),
    (100, 28, "float16", "float32", "float16", None),
    (528, 128, "float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn", None),
    (528, 128, "float8_e4m3fn", "bfloat16", "float32", "bfloat16"),
    (32, 16, "float8_e5m2", "float8_e5m2", "bfloat16", "float32"),
    (5, 3, "float8_e5m2", "float32", "float32", None),
    (8, 4, "float32", "float32", "bfloat16", "float8_e4m3fn"),
    (8, 4, "float8_e5m2", "float8_e5m2", "bfloat16", "float8_e4m3fn"),
]
CASES = [(*case, "reference") for case in ALL]
CASES += [pytest.param(*ALL[i], "mosaic_gpu", marks=pytest.mark.gpu) for i in (2, 5)]

layer_ids = st.integers(2, 4) | st.sampled_from([1, 2, 5]).map(jnp.int32)


@pytest.mark.parametrize(
    "latent_dim, rope_dim, dtype, latent_dtype, rope_dtype, read_dtype, implementation", CASES
)
@settings(max_examples=15)
@given(data=st.data())
def test_equals_oracle(
    latent_dim, rope_dim, dtype, latent_dtype, rope_dtype, read_dtype, implementation, data
):
    geometry = MLAGeometry(20, 4, LayerRange(2, 5), latent_dim, rope_dim, dtype)
    pool, (plane,) = junk_pool(geometry)
    layer_id = data.draw(layer_ids)
    layer = int(layer_id) - geometry.layers.start
    slots = data.draw(some_slots(NUM_TOKENS, geometry.first_slot, geometry.num_rows))
    parts = [
        numbers(data.draw(seeds), (NUM_TOKENS, 1, width), source, any_bits=source == dtype)
        for width, source in ((latent_dim, latent_dtype), (rope_dim, rope_dtype))
    ]
    arrays = [jnp.array(part) for part in parts]
    row = np.concatenate([oracles.narrow(part, dtype) for part in parts], axis=-1)
    plane = oracles.write_rows(plane, layer, slots, row, geometry.first_slot)

    if latent_dtype == rope_dtype and data.draw(st.booleans()):
        joined = jnp.concatenate(arrays, axis=-1)
        pool = mla.write_joined(pool, layer_id, slots, joined, implementation=implementation)
    else:
        pool = mla.write(pool, layer_id, slots, *arrays, implementation=implementation)
    assert_holds(pool, [plane])
    for array, part in zip(arrays, parts, strict=True):
        oracles.assert_same_bits(array, part)

    if read_dtype is not None:  # what a NaN of junk turns into is the cast's affair
        slots = np.where(np.isin(slots, range(geometry.first_slot)), -1, slots)
    read = mla.read(pool, layer_id, slots, dtype=read_dtype, implementation=implementation)
    expected = oracles.read_rows(plane, layer, slots, geometry.first_slot)
    expected = oracles.narrow(expected, read_dtype or dtype)
    oracles.assert_same_bits(read[0], expected[..., :latent_dim])
    oracles.assert_same_bits(read[1], expected[..., latent_dim:])


# latent_dim, rope_dim, the model's dtype; dtype of the latent, of the rope, and of what is read
QUANTIZED = [
    (64, 32, "bfloat16", "bfloat16", "bfloat16", None),
    (64, 16, "float32", "float32", "bfloat16", "bfloat16"),
    (5, 3, "bfloat16", "float16", "float16", "float32"),
    (32, 16, "bfloat16", "float8_e5m2", "float32", "float8_e4m3fn"),
    (32, 16, "float32", "float32", "float32", jnp.float16),
]
QUANTIZED_CASES = [(*case, "reference") for case in QUANTIZED]
QUANTIZED_CASES += [
    pytest.param(*QUANTIZED[i], "mosaic_gpu", marks=pytest.mark.gpu) for i in (0, 1, 3)
]


@pytest.mark.parametrize(
    "latent_dim, rope_dim, dtype, latent_dtype, rope_dtype, read_dtype, implementation",
    QUANTIZED_CASES,
)
@settings(max_examples=15)
@given(data=st.data())
def test_quantized_equals_oracle(
    latent_dim, rope_dim, dtype, latent_dtype, rope_dtype, read_dtype, implementation, data
):
    widths = latent_dim, rope_dim
    geometry = MLAGeometry(20, 4, LayerRange(2, 5), *widths, dtype, "per_token_head")
    pool, planes = junk_pool(geometry)
    layer_id = data.draw(layer_ids)
    layer = int(layer_id) - geometry.layers.start
    slots = data.draw(some_slots(NUM_TOKENS, geometry.first_slot, geometry.num_rows))
    rng = np.random.default_rng(data.draw(seeds))
    parts = [
        rng.standard_normal((NUM_TOKENS, 1, width)).astype(source)
        for width, source in zip(widths, (latent_dtype, rope_dtype), strict=True)
    ]
    arrays = [jnp.array(part) for part in parts]
    rows = oracles.quantize(*parts, dtype)
    if latent_dtype == rope_dtype and data.draw(st.booleans()):
        joined = jnp.concatenate(arrays, axis=-1)
        pool = mla.write_joined(pool, layer_id, slots, joined, implementation=implementation)
    else:
        pool = mla.write(pool, layer_id, slots, *arrays, implementation=implementation)
    first = geometry.first_slot
    rows = [new if new.dtype != np.uint8 else new.view("float8_e4m3fn") for new in rows]
    assert_holds(
        pool,
        [
            oracles.write_rows(plane, layer, slots, new, first)
            for plane, new in zip(planes, rows, strict=True)
        ],
    )
    for array, part in zip(arrays, parts, strict=True):
        oracles.assert_same_bits(array, part)

    there = [oracles.is_there(planes[0], layer, slot, first) for slot in slots]
    read_dtype_name = dtype if read_dtype is None else np.dtype(read_dtype).name
    expected = oracles.dequantize(rows[0].view(np.uint8), *rows[1:], read_dtype_name)
    read = mla.read(pool, layer_id, slots, dtype=read_dtype, implementation=implementation)
    for have, want in zip(read, expected, strict=True):
        oracles.assert_same_bits(
            have, np.where(np.reshape(there, (-1, 1, 1)), want, np.zeros_like(want))
        )
