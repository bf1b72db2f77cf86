"""Writes and reads of K and V: dtypes, scales, slots and layers as callers may give them."""

import dataclasses

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from kvjax import mha
from kvjax.geometry import DTYPE_BYTES
from tests import oracles
from tests.pools.junk import MHA, assert_holds, junk_pool, numbers
from tests.strategies import seeds, some_slots

NUM_TOKENS = 5
PAIRS = [(dtype, dtype) for dtype in DTYPE_BYTES]
PAIRS += [("bfloat16", "float8_e4m3fn"), ("float8_e5m2", "float32"), ("float16", "bfloat16")]
SOURCES = [("float32", "bfloat16"), ("float16", "float32")]
CASES = [(pair, source, "reference") for pair in PAIRS for source in (*SOURCES, pair)]
CASES += [
    pytest.param(pair, source, "mosaic_gpu", marks=pytest.mark.gpu)
    for pair, source in (
        (("bfloat16", "bfloat16"), ("bfloat16", "bfloat16")),
        (("bfloat16", "float8_e4m3fn"), ("float32", "bfloat16")),
    )
]

ints = st.integers(2, 4) | st.integers(2, 4).map(np.int64)
layer_ids = ints | st.sampled_from([1, 2, 5, 2**31 - 1]).map(jnp.int32)
kinds_of_slots = st.sampled_from([list, np.int64, np.int32, jnp.int32])
kinds_of_scale = st.sampled_from(
    [float, np.float32, jnp.float32, lambda scale: np.float32([scale]), lambda _: None]
)
scales = st.floats(0.125, 8, width=32)


@pytest.mark.parametrize(
    "pair, source, implementation", CASES, ids=lambda x: x if isinstance(x, str) else "+".join(x)
)
@settings(max_examples=20)
@given(data=st.data())
def test_equals_oracle(pair, source, implementation, data):
    geometry = dataclasses.replace(MHA, dtype=pair[0], v_dtype=pair[1])
    pool, planes = junk_pool(geometry)
    layer_id = data.draw(layer_ids)
    layer = int(layer_id) - geometry.layers.start
    slots = data.draw(some_slots(NUM_TOKENS, geometry.first_slot, geometry.num_rows))
    values, given, expected = [], {}, []
    for spec, dtype, plane in zip(geometry.planes, source, planes, strict=True):
        verbatim = dtype == spec.dtype
        new = numbers(data.draw(seeds), (NUM_TOKENS, *spec.row_shape), dtype, any_bits=verbatim)
        scale = data.draw(kinds_of_scale)(data.draw(scales))
        given[f"{spec.name}_scale"] = scale
        values.append(new)
        new = oracles.narrow(new, spec.dtype, None if scale is None else np.max(scale))
        expected.append(oracles.write_rows(plane, layer, slots, new, geometry.first_slot))
    arrays = [jnp.array(new) for new in values]
    slots = data.draw(kinds_of_slots)(slots)

    pool = mha.write(pool, layer_id, slots, *arrays, **given, implementation=implementation)
    assert_holds(pool, expected)
    for array, new in zip(arrays, values, strict=True):
        oracles.assert_same_bits(array, new)

    read = mha.read(pool, layer_id, slots, implementation=implementation)
    for actual, plane in zip(read, expected, strict=True):
        oracles.assert_same_bits(
            actual, oracles.read_rows(plane, layer, slots, geometry.first_slot)
        )
