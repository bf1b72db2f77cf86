"""Updates touch the rows they name, and no others: no temporary memory, no copies of planes.

Asserted of what XLA compiles, for pools that nobody allocates.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax import LayerRange, MHAGeometry, MLAGeometry, PageAllocator, allocators, mha, mla
from kvjax.geometry import DTYPE_BYTES

LAYERS = LayerRange(1, 4)
NUM_SLOTS = 1 << 18
NUM_TOKENS = 8
NUM_CONTEXT = 24


def mha_geometry(dtype, quantization=None):
    v_dtype = None if quantization else "bfloat16"
    return MHAGeometry(NUM_SLOTS, 16, LAYERS, 2, 16, dtype, 32, v_dtype, quantization)


def mla_geometry(dtype, quantization=None):
    return MLAGeometry(NUM_SLOTS, 16, LAYERS, 64, 32, dtype, quantization)


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def arguments(geometry):
    """What updates are given besides the pool, as shapes."""
    rows = [(spec.row_shape, spec.dtype) for spec in geometry.planes]
    return {
        "layer_id": array(dtype="int32"),
        "slots": array(NUM_TOKENS, dtype="int32"),
        "other": array(NUM_TOKENS, dtype="int32"),
        "context": array(NUM_CONTEXT, dtype="int32"),
        "values": [array(NUM_TOKENS, *shape) for shape, _ in rows],
        "rows": tuple(array(NUM_TOKENS, *shape, dtype=dtype) for shape, dtype in rows),
        "all_rows": tuple(array(3, NUM_TOKENS, *shape, dtype=dtype) for shape, dtype in rows),
        "source": jax.eval_shape(lambda: kvjax.create(geometry)),
    }


def write(pool, layer_id, slots, values, **options):
    """New values in the dtype of a model, cast on the way in."""
    if isinstance(pool.geometry, MHAGeometry):
        if pool.geometry.quantization is not None:
            return mha.write(pool, layer_id, slots, values[0], values[2], **options)
        return mha.write(pool, layer_id, slots, *values, k_scale=2.0, **options)
    rows = jnp.concatenate([values[0], *values[2:]], axis=-1)  # of quantized ones no scale
    latent_dim = pool.geometry.latent_dim
    parts = rows[..., :latent_dim], rows[..., latent_dim:]
    return mla.write(pool, layer_id, slots, *parts, **options)


def read(pool, layer_id, slots, **options):
    read = mha.read if isinstance(pool.geometry, MHAGeometry) else mla.read
    return [part.astype(jnp.float32) for part in read(pool, layer_id, slots, **options)]


UPDATES = {
    "write": lambda pool, a, **by: write(pool, a["layer_id"], a["slots"], a["values"], **by),
    "scatter": lambda pool, a, **by: kvjax.scatter(pool, a["slots"], a["all_rows"], **by),
    "scatter_layer": lambda pool, a, **by: kvjax.scatter_layer(
        pool, a["layer_id"], a["slots"], a["rows"], **by
    ),
    "move": lambda pool, a, **by: kvjax.move(pool, a["slots"], a["other"], **by),
    "move disjoint": lambda pool, a, **by: kvjax.move(
        pool, a["slots"], a["other"], disjoint=True, **by
    ),
    "copy_pages": lambda pool, a, **by: kvjax.copy_pages(pool, a["slots"], a["other"], **by),
    "zero": lambda pool, a, **by: kvjax.zero(pool, a["slots"], **by),
    "copy_rows": lambda pool, a, **by: kvjax.copy_rows(
        pool, a["slots"], a["source"], a["other"], **by
    ),
}


def attend(values, parts):
    """Something like attention, to make the next layer's values depend on what was read."""
    mixed = sum(jnp.tanh(part).sum((0, 1)).mean() for part in parts)
    return [new + mixed for new in values]


def decode_layer(pool, layer_id, values, a, **by):
    pool = write(pool, layer_id, a["slots"], values, **by)
    return pool, attend(values, read(pool, layer_id, a["context"], **by))


def unrolled_step(pool, a, **by):
    values = a["values"]
    for layer_id in range(LAYERS.start, LAYERS.stop):
        pool, values = decode_layer(pool, layer_id, values, a, **by)
    return pool, values


def scanned_step(pool, a, **by):
    def body(carry, layer_id):
        pool, values = carry
        return decode_layer(pool, layer_id, values, a, **by), None

    layer_ids = jnp.arange(LAYERS.start, LAYERS.stop)
    return jax.lax.scan(body, (pool, a["values"]), layer_ids)[0]


def loop_that_allocates(pool, a, **by):
    """Decodes until the allocator is short."""

    def body(carry):
        pool, state, seq_lens, slots, _ = carry
        state, slots, ok = allocators.decode(state, seq_lens + 1, slots)
        pool = write(pool, a["layer_id"], slots, a["values"], **by)
        return pool, state, seq_lens + ok, slots, ok

    geometry = pool.geometry
    state = PageAllocator.create(geometry.num_slots, geometry.page_size)
    lens = jnp.zeros(NUM_TOKENS, jnp.int32)
    return jax.lax.while_loop(lambda carry: carry[-1], body, (pool, state, lens, lens, True))


STEPS = {
    "unrolled": unrolled_step,
    "scanned": scanned_step,
    "loop that allocates": loop_that_allocates,
}


def compiled_for(geometry, function, **options):
    pool = jax.eval_shape(lambda: kvjax.create(geometry))
    return jax.jit(function, **options).lower(pool, arguments(geometry)).compile()


def assert_no_memory(compiled, geometry):
    one_layer = geometry.num_rows * min(spec.row_bytes for spec in geometry.planes)
    assert compiled.memory_analysis().temp_size_in_bytes < one_layer // 10
    assert max(copied_bytes(compiled), default=0) < one_layer // 10


def assert_in_place(update, geometry):
    compiled = compiled_for(geometry, update, donate_argnums=0)
    assert compiled.memory_analysis().alias_size_in_bytes == geometry.bytes
    assert_no_memory(compiled, geometry)


def copied_bytes(compiled):
    """The sizes of what is copied, but for what a fusion copies an element at a time."""
    computations = re.split(r"\n(?=%|ENTRY)", compiled.as_text())
    text = "".join(c for c in computations if not c.startswith("%fused_computation"))
    for bits, dims in re.findall(r" = [a-z]+(\d*)\S*?\[([\d,]*)\]\S* copy\(", text):
        yield math.prod(int(dim) for dim in dims.split(",") if dim) * int(bits or 8) // 8


GEOMETRIES = {
    f"{kind}-{dtype}": make(dtype)
    for kind, make in (("mha", mha_geometry), ("mla", mla_geometry))
    for dtype in DTYPE_BYTES
}
GEOMETRIES |= {
    f"mla-quantized-{dtype}": mla_geometry(dtype, "per_token_head")
    for dtype in ("bfloat16", "float32")
}
GEOMETRIES |= {
    f"mha-{name}-{dtype}": mha_geometry(dtype, f"{name}_per_token_head")
    for name in ("int8", "fp8")
    for dtype in ("bfloat16", "float16")
}
ALL = {**UPDATES, **STEPS}


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("update", ALL)
def test_in_place(update, geometry):
    assert_in_place(ALL[update], GEOMETRIES[geometry])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "update, geometry",
    [
        *((update, "mha-float8_e4m3fn") for update in ALL),
        *((update, "mla-bfloat16") for update in ("write", *STEPS)),
        *((update, "mla-quantized-bfloat16") for update in ALL),
        *((update, "mha-int8-bfloat16") for update in ALL),
        *((update, "mha-fp8-bfloat16") for update in ("write", *STEPS)),
    ],
)
def test_in_place_by_kernels(update, geometry):
    by_kernels = functools.partial(ALL[update], implementation="mosaic_gpu")
    assert_in_place(by_kernels, GEOMETRIES[geometry])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "geometry",
    [
        "mha-bfloat16",
        "mla-float8_e5m2",
        "mla-quantized-bfloat16",
        "mha-int8-bfloat16",
        "mha-fp8-float16",
    ],
)
@pytest.mark.parametrize("update", ["write", "move", "unrolled"])
def test_in_place_by_xla_on_a_gpu(update, geometry):
    """As for rows that the kernel cannot copy."""
    by_xla = functools.partial(ALL[update], implementation="reference")
    assert_in_place(by_xla, GEOMETRIES[geometry])


def cast_and_back(pool, a):
    planes = [plane.astype(jnp.float16) for plane in pool.planes]
    planes = [plane.at[0, a["slots"]].set(0).astype(jnp.float32) for plane in planes]
    return dataclasses.replace(pool, planes=tuple(planes))


def keep_the_old(pool, a):
    return kvjax.zero(pool, a["slots"]), kvjax.layer(pool, 1)


@pytest.mark.parametrize("update", [cast_and_back, keep_the_old])
def test_an_update_that_copies_is_caught(update):
    with pytest.raises(AssertionError):
        assert_in_place(update, GEOMETRIES["mha-float32"])


def test_copies_are_seen():
    geometry = GEOMETRIES["mha-float32"]
    compiled = compiled_for(geometry, keep_the_old, donate_argnums=0)
    planes = [spec.row_bytes * geometry.num_rows * len(LAYERS) for spec in geometry.planes]
    assert set(planes) <= set(copied_bytes(compiled))


def through_pages(pool, a):
    pages, page_table = kvjax.page_view(pool, a["layer_id"], a["slots"])
    return [plane[page_table].astype(jnp.float32).sum() for plane in pages]


@pytest.mark.parametrize(
    "geometry",
    [
        *GEOMETRIES,
        *(
            pytest.param(geometry, marks=pytest.mark.gpu, id=f"gpu-{geometry}")
            for geometry in ("mha-bfloat16", "mha-float8_e4m3fn", "mha-int8-bfloat16")
        ),
    ],
)
def test_a_page_view_is_no_copy(geometry):
    geometry = GEOMETRIES[geometry]
    assert_no_memory(compiled_for(geometry, through_pages), geometry)
