"""Writes and reads of K and V, quantised or not: dtypes, scales, slots and layers as given."""

import dataclasses

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from kvjax import LayerRange, MHAGeometry, mha
from kvjax.geometry import DTYPE_BYTES, KV_QUANTIZATIONS
from tests import oracles
from tests.pools.junk import FP8, INT8, MHA, assert_holds, junk_pool, numbers
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


@pytest.mark.parametrize("dtype", [None, "float32", jnp.float16, "float8_e5m2", "float8_e4m3fn"])
def test_plain_rows_are_read_in_any_dtype(dtype):
    geometry = dataclasses.replace(MHA, dtype="float32", v_dtype="bfloat16")
    pool, planes = junk_pool(geometry)
    for (spec, plane), read in zip(
        zip(geometry.planes, planes, strict=True), mha.read(pool, 2, [5, -1], dtype), strict=True
    ):
        rows = oracles.read_rows(plane, 0, [5, -1], geometry.first_slot)
        with np.errstate(all="ignore"):
            want = oracles.narrow(rows, np.dtype(spec.dtype if dtype is None else dtype))
        oracles.assert_same_numbers(read, want, oracles.meets_subnormals(rows, 1.0))


# head_dim, v_head_dim, the model's dtype; dtype of K, of V, and of what is read
QUANTIZED = [
    (64, 32, "bfloat16", "bfloat16", "bfloat16", None),
    (16, 48, "float16", "float32", "bfloat16", "bfloat16"),
    (5, 3, "float32", "float16", "float16", "float32"),
    (32, 16, "bfloat16", "float8_e5m2", "float32", "float8_e4m3fn"),
    (32, 32, "float16", "float32", "float32", jnp.float16),
]
QUANTIZED_CASES = [(*case, "reference") for case in QUANTIZED]
QUANTIZED_CASES += [
    pytest.param(*QUANTIZED[i], "mosaic_gpu", marks=pytest.mark.gpu) for i in (0, 1, 3)
]


@pytest.mark.parametrize("quantization", KV_QUANTIZATIONS)
@pytest.mark.parametrize(
    "head_dim, v_head_dim, dtype, k_dtype, v_dtype, read_dtype, implementation", QUANTIZED_CASES
)
@settings(max_examples=15)
@given(data=st.data())
def test_quantized_equals_oracle(
    head_dim,
    v_head_dim,
    dtype,
    k_dtype,
    v_dtype,
    read_dtype,
    implementation,
    quantization,
    data,
):
    geometry = MHAGeometry(
        20, 4, LayerRange(2, 5), 2, head_dim, dtype, v_head_dim, quantization=quantization
    )
    pool, planes = junk_pool(geometry)
    layer_id = data.draw(layer_ids)
    layer = int(layer_id) - geometry.layers.start
    slots = data.draw(some_slots(NUM_TOKENS, geometry.first_slot, geometry.num_rows))
    rng = np.random.default_rng(data.draw(seeds))
    values = [
        rng.standard_normal((NUM_TOKENS, 2, width)).astype(source)
        for width, source in ((head_dim, k_dtype), (v_head_dim, v_dtype))
    ]
    arrays = [jnp.array(new) for new in values]
    stored = KV_QUANTIZATIONS[quantization]
    rows = [plane for new in values for plane in oracles.quantize_kv(new, stored)]

    given_slots = data.draw(kinds_of_slots)(slots)
    pool = mha.write(pool, layer_id, given_slots, *arrays, implementation=implementation)
    first = geometry.first_slot
    assert_holds(
        pool,
        [
            oracles.write_rows(plane, layer, slots, new.view(plane.dtype), first)
            for plane, new in zip(planes, rows, strict=True)
        ],
    )
    for array, new in zip(arrays, values, strict=True):
        oracles.assert_same_bits(array, new)

    there = [oracles.is_there(planes[0], layer, slot, first) for slot in slots]
    read = mha.read(pool, layer_id, slots, read_dtype, implementation=implementation)
    for have, (bits, scale) in zip(read, (rows[:2], rows[2:]), strict=True):
        want = oracles.dequantize_kv(
            bits, scale, stored, dtype if read_dtype is None else np.dtype(read_dtype).name
        )
        oracles.assert_same_bits(
            have, np.where(np.reshape(there, (-1, 1, 1)), want, np.zeros_like(want))
        )


@pytest.mark.parametrize("geometry", [INT8, FP8], ids=["int8", "fp8"])
def test_no_slots_at_all(geometry):
    pool, planes = junk_pool(geometry)
    k, v = np.zeros((0, 2, 8), np.float32), np.zeros((0, 2, 16), np.float32)
    pool = mha.write(pool, 2, [], k, v)
    assert_holds(pool, planes)
    assert [part.shape for part in mha.read(pool, 2, [])] == [k.shape, v.shape]
