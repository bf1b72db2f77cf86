"""What is refused, by a message that names it, before the pool is touched."""

import dataclasses
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import GeometryError, LayerRange, UnsupportedError, mha, mla
from tests.pools.junk import FP8, INT8, MHA, MLA, QUANTIZED, assert_holds, junk_pool, rows_of
from tests.strategies import random_rows

SLOTS = [5, 6, 7]
K, V = np.ones((3, 2, 8), np.float32), np.ones((3, 2, 16), np.float32)
LATENT, ROPE, ROWS = (np.ones((3, 1, width), np.float32) for width in (16, 4, 20))
K_ROWS, V_ROWS = random_rows(1, rows_of(MHA), 3, 3)
V_BITS = V_ROWS.view(np.uint8)
OTHER_DTYPE = dataclasses.replace(MHA, v_dtype="float8_e5m2")
OTHER_LAYERS = dataclasses.replace(MHA, layers=LayerRange(0, 3))
ROOT = Path(__file__).parents[2]
NO_GPU = pytest.mark.skipif(jax.default_backend() == "gpu", reason="cpu: there is a GPU")


def host_rows(geometry, slots=SLOTS):
    return kvjax.offload(junk_pool(geometry)[0], slots)


def other_pool(geometry):
    return junk_pool(geometry)[0]


write_mha = partial(mha.write, layer_id=2, slots=SLOTS, k=K, v=V)
write_mla = partial(mla.write, layer_id=2, slots=SLOTS, latent=LATENT, rope=ROPE)
write_joined = partial(mla.write_joined, layer_id=2, slots=SLOTS, rows=ROWS)
scatter = partial(kvjax.scatter, slots=SLOTS, rows=(K_ROWS, V_ROWS))
scatter_layer = partial(kvjax.scatter_layer, layer_id=2, slots=SLOTS, rows=(K_ROWS[0], V_ROWS[0]))


def copy_rows(pool, dst_slots=SLOTS, src_slots=SLOTS, geometry=MHA, **options):
    return kvjax.copy_rows(pool, dst_slots, other_pool(geometry), src_slots, **options)


def restore(pool, slots=SLOTS, geometry=MHA, **options):
    return kvjax.restore(pool, slots, host_rows(geometry), **options)


# geometry, call, error, message
SHAPES = [
    (MHA, partial(write_mha, k=K[:1]), GeometryError, r"k has shape \(1, 2, 8\), need \(3, 2, 8\)"),
    (MHA, partial(write_mha, v=V[:2]), GeometryError, "v has shape"),
    (MHA, partial(write_mha, k=K[:, :1]), GeometryError, "k has shape"),
    (MHA, partial(write_mha, v=V[..., :1]), GeometryError, "v has shape"),
    (MHA, partial(write_mha, k=V, v=K), GeometryError, "k has shape"),
    (MHA, partial(write_mha, k=K[0]), GeometryError, "k has shape"),
    (MLA, partial(write_mla, latent=LATENT[:1]), GeometryError, "latent has shape"),
    (MLA, partial(write_mla, latent=LATENT[:, 0]), GeometryError, "latent has shape"),
    (MLA, partial(write_mla, rope=ROPE[..., :3]), GeometryError, "rope has shape"),
    (MLA, partial(write_joined, rows=LATENT), GeometryError, "rows has shape"),
    (QUANTIZED, write_mla, GeometryError, r"latent has shape \(3, 1, 16\), need \(3, 1, 32\)"),
    (QUANTIZED, write_joined, GeometryError, r"rows has shape \(3, 1, 20\), need \(3, 1, 40\)"),
    (MHA, partial(scatter, rows=(K_ROWS,)), GeometryError, "rows has 1 planes, the pool 2"),
    (MHA, partial(scatter, rows=(K_ROWS[:2], V_ROWS[:2])), GeometryError, "rows of plane 'k'"),
    (MHA, partial(scatter, rows=(K_ROWS, V_ROWS[:, :1])), GeometryError, "rows of plane 'v'"),
    (MHA, partial(scatter_layer, rows=(K_ROWS, V_ROWS)), GeometryError, "rows of plane 'k'"),
    (MHA, partial(restore, slots=[5]), GeometryError, "host_rows has 3 rows for 1 slots"),
    (MHA, partial(kvjax.move, dst=[5, 6], src=[7]), ValueError, "dst has 2, src has 1 entries"),
    (
        MHA,
        partial(kvjax.copy_pages, dst_pages=[1], src_pages=[2, 3]),
        ValueError,
        "dst_pages has 1, src_pages has 2 entries",
    ),
    (MHA, partial(copy_rows, src_slots=[5]), ValueError, "dst_slots has 3, src_slots has 1"),
    (MHA, partial(write_mha, k_scale=np.ones(2)), ValueError, r"k_scale has shape \(2,\)"),
    (MHA, partial(write_mha, v_scale=np.ones((3, 1))), ValueError, "v_scale has shape"),
    (MHA, partial(write_mha, v_scale=0.0), ValueError, r"v_scale=0\.0 cannot be divided by"),
    (MHA, partial(write_mha, k_scale=np.float32(np.inf)), ValueError, "k_scale=inf cannot"),
    (MHA, partial(write_mha, k_scale=float("nan")), ValueError, "k_scale=nan cannot"),
    (MHA, partial(write_mha, k_scale=np.array([1e39])), ValueError, "k_scale=inf cannot"),
    (MHA, partial(write_mha, k_scale="2"), TypeError, "k_scale is <class 'str'>, need a number"),
    (
        INT8,
        partial(write_mha, k=K[:, :1]),
        GeometryError,
        r"k has shape \(3, 1, 8\), need \(3, 2, 8",
    ),
    (INT8, partial(write_mha, v=K), GeometryError, r"v has shape \(3, 2, 8\), need \(3, 2, 16\)"),
    *(
        (
            geometry,
            partial(write_mha, **{f"{name}_scale": 1.0}),
            ValueError,
            f"^{name}_scale is giv",
        )
        for geometry in (INT8, FP8)
        for name in ("k", "v")
    ),
]
KINDS = [
    (
        MHA,
        partial(write_mha, k=K.astype(np.int32)),
        TypeError,
        "k is int32, need an array of",
    ),
    (MHA, partial(write_mha, v=V.astype(bool)), TypeError, "v is bool"),
    (MHA, partial(write_mha, k=K.astype(np.float64)), TypeError, "k is float64"),
    (MHA, partial(write_mha, k=K.tolist()), TypeError, "k is <class 'list'>"),
    (
        MHA,
        partial(scatter, rows=(K_ROWS.tolist(), V_ROWS)),
        TypeError,
        "rows of plane 'k' are <class 'list'>, need an array",
    ),
    (MHA, partial(scatter, rows=K_ROWS), TypeError, "rows is <class 'numpy.ndarray'>"),
    (MHA, partial(scatter_layer, rows=None), TypeError, "rows is <class 'NoneType'>"),
    (
        MHA,
        partial(kvjax.restore, slots=SLOTS, host_rows=None),
        TypeError,
        "host_rows is <class 'NoneType'>, need what offload returned",
    ),
    (MLA, partial(write_mla, rope=ROPE.astype(np.uint8)), TypeError, "rope is uint8"),
    (MHA, partial(scatter, rows=(K_ROWS, V_BITS)), GeometryError, "plane 'v' are uint8"),
    (MHA, partial(scatter, rows=(K, V)), GeometryError, "plane 'k' are float32"),
    (MLA, write_mha, GeometryError, "need a pool of K and V, this one is of MLAGeometry"),
    (MLA, partial(mha.read, layer_id=2, slots=SLOTS), GeometryError, "need a pool of K and V"),
    (MHA, write_mla, GeometryError, "need a pool of latent rows, this one is of MHAGeometry"),
    (MHA, write_joined, GeometryError, "need a pool of latent rows"),
    (MHA, partial(mla.read, layer_id=2, slots=SLOTS), GeometryError, "need a pool of latent rows"),
    (
        QUANTIZED,
        partial(mla.read, layer_id=2, slots=SLOTS, dtype=np.int32),
        GeometryError,
        "int32'> cannot be stored",
    ),
    (
        INT8,
        partial(mha.read, layer_id=2, slots=SLOTS, dtype=np.int8),
        GeometryError,
        "int8'> cannot be stored",
    ),
    (INT8, partial(write_mha, v=V.astype(np.float64)), TypeError, "v is float64"),
    (MLA, partial(copy_rows, geometry=QUANTIZED), GeometryError, "planes of dst_pool"),
    (INT8, partial(copy_rows, geometry=FP8), GeometryError, "planes of dst_pool"),
    (MHA, partial(copy_rows, geometry=MLA), GeometryError, "planes of dst_pool"),
    (MHA, partial(copy_rows, geometry=OTHER_DTYPE), GeometryError, "planes of dst_pool"),
    (MHA, partial(copy_rows, geometry=OTHER_LAYERS), GeometryError, "layers of dst_pool, 2..4"),
    (MHA, lambda pool: kvjax.copy_rows(pool, [5], pool, [6]), ValueError, "share a plane; move"),
    (MHA, partial(restore, geometry=MLA), GeometryError, "planes of host_rows"),
    (MHA, partial(restore, geometry=OTHER_DTYPE), GeometryError, "planes of host_rows"),
    (MHA, partial(restore, geometry=OTHER_LAYERS), GeometryError, "layers of host_rows, 0..2, and"),
    (MHA, partial(restore, chunk_tokens=0), ValueError, "chunk_tokens=0 must be at least 1"),
    (MHA, partial(kvjax.offload, slots=SLOTS, chunk_tokens=-1), ValueError, "chunk_tokens=-1"),
    (MHA, partial(write_mha, implementation="triton"), ValueError, "no implementation 'triton'"),
    (MHA, partial(kvjax.zero, slots=[5], implementation="x"), ValueError, "no implementation 'x'"),
    pytest.param(
        MHA,
        partial(write_mha, implementation="mosaic_gpu"),
        UnsupportedError,
        "mosaic_gpu: needs a GPU",
        marks=NO_GPU,
    ),
    pytest.param(
        INT8,
        partial(write_mha, implementation="mosaic_gpu"),
        UnsupportedError,
        "mosaic_gpu: needs a GPU",
        marks=NO_GPU,
    ),
    pytest.param(
        INT8,
        partial(mha.read, layer_id=2, slots=SLOTS, implementation="mosaic_gpu"),
        UnsupportedError,
        "read_quantized_kv cannot run; mosaic_gpu: needs a GPU",
        marks=NO_GPU,
    ),
    pytest.param(
        MLA,
        partial(kvjax.zero, slots=[5], implementation="mosaic_gpu"),
        UnsupportedError,
        "mosaic_gpu: needs a GPU",
        marks=NO_GPU,
    ),
]
BY_LAYER = [  # every function that is given a layer
    (MHA, write_mha, "layer_id"),
    (MHA, partial(mha.read, slots=SLOTS), "layer_id"),
    (INT8, write_mha, "layer_id"),
    (INT8, partial(mha.read, slots=SLOTS), "layer_id"),
    (MLA, write_mla, "layer_id"),
    (MLA, write_joined, "layer_id"),
    (MLA, partial(mla.read, slots=SLOTS), "layer_id"),
    (MHA, scatter_layer, "layer_id"),
    (MHA, copy_rows, "layers"),
    (MHA, kvjax.layer, "layer_id"),
]
LAYERS = [
    (geometry, partial(call, **{name: layer_id}), GeometryError, f"{layer_id} is not on this rank")
    for geometry, call, name in BY_LAYER
    for layer_id in (1, 5, -1)
]
DISTINCT = [  # every function that is given slots: the geometry, the call, the argument
    (MHA, write_mha, "slots"),
    (INT8, write_mha, "slots"),
    (MLA, write_mla, "slots"),
    (MLA, write_joined, "slots"),
    (MHA, scatter, "slots"),
    (MHA, scatter_layer, "slots"),
    (MHA, restore, "slots"),
    (MHA, partial(kvjax.move, src=SLOTS), "dst"),
    (MHA, copy_rows, "dst_slots"),
]
REPEATABLE = [
    (MHA, partial(mha.read, layer_id=2), "slots"),
    (INT8, partial(mha.read, layer_id=2), "slots"),
    (MLA, partial(mla.read, layer_id=2), "slots"),
    (MHA, kvjax.gather, "slots"),
    (MHA, kvjax.zero, "slots"),
    (MHA, kvjax.offload, "slots"),
    (MHA, partial(kvjax.move, dst=SLOTS), "src"),
    (MHA, copy_rows, "src_slots"),
]
PAGES = [
    (MHA, partial(kvjax.copy_pages, src_pages=[1, 2, 3]), "dst_pages"),
    (MHA, partial(kvjax.copy_pages, dst_pages=[1, 2, 3]), "src_pages"),
]
NO_SLOTS = [
    (geometry, partial(call, **{name: slots}), error, f"{name}{message}")
    for geometry, call, name in (*DISTINCT, *REPEATABLE, *PAGES)
    for slots, error, message in (
        ([[5, 6, 7]], ValueError, r" has shape \(1, 3\), need one dimension"),
        (5, ValueError, r" has shape \(\)"),
        ([5.0, 6.0, 7.0], TypeError, " has dtype float64, need integers"),
        (jnp.ones(3), TypeError, " has dtype float32"),
        ([True, False, True], TypeError, " has dtype bool"),
        ([5, 2**31, 7], OverflowError, r"\[1\]=2147483648 does not fit int32"),
        ([5, 6, -(2**40)], OverflowError, r"\[2\]=-1099511627776 does not fit int32"),
    )
]


def refuses(geometry, call, error, message):
    pool, planes = junk_pool(geometry)
    with pytest.raises(error, match=message):
        call(pool)
    assert_holds(pool, planes)


def shown(value):
    """A call by the name of its function."""
    return getattr(getattr(value, "func", value), "__name__", None)


@pytest.mark.parametrize("geometry, call, error, message", [*SHAPES, *KINDS, *LAYERS], ids=shown)
def test_a_refused_call_leaves_the_pool_as_it_was(geometry, call, error, message):
    refuses(geometry, call, error, message)


@pytest.mark.parametrize("geometry, call, error, message", NO_SLOTS, ids=shown)
def test_what_are_no_slots_is_refused_by_name(geometry, call, error, message):
    refuses(geometry, call, error, message)


@pytest.mark.parametrize("bad", [-1, 3, 24, 2**31 - 1])
@pytest.mark.parametrize("geometry, call, name", [*DISTINCT, *REPEATABLE], ids=shown)
def test_checks_mode_refuses_slots_that_are_not_there(geometry, call, name, bad):
    call = partial(call, **{name: [5, 7, bad]})
    with kvjax.checks():
        refuses(geometry, call, IndexError, rf"^{name}\[2\]={bad} is not there; slots are 4\.\.23")
    call(junk_pool(geometry)[0])


@pytest.mark.parametrize("bad", [-1, 0, 6])
@pytest.mark.parametrize("geometry, call, name", PAGES, ids=shown)
def test_checks_mode_refuses_pages_that_are_not_there(geometry, call, name, bad):
    call = partial(call, **{name: [bad, 1, 2]})
    with kvjax.checks():
        refuses(geometry, call, IndexError, rf"^{name}\[0\]={bad} is not there; .* are 1\.\.5")
    call(junk_pool(geometry)[0])


@pytest.mark.parametrize("geometry, call, name", [*DISTINCT, PAGES[0]], ids=shown)
def test_checks_mode_refuses_slots_that_repeat(geometry, call, name):
    call = partial(call, **{name: [5, 4, 5]})
    with kvjax.checks():
        refuses(geometry, call, ValueError, rf"^{name}\[2\]=5 repeats; need distinct {name}")


@pytest.mark.parametrize("geometry, call, name", [*DISTINCT, *REPEATABLE, *PAGES], ids=shown)
def test_checks_mode_lets_pass_what_is_right(geometry, call, name):
    slots = [5, 4, 3] if name.endswith("pages") else [4, 23, 5]
    if (geometry, call, name) in REPEATABLE:
        slots[-1] = 4
    with kvjax.checks():
        call(junk_pool(geometry)[0], **{name: np.array(slots)})
        call(junk_pool(geometry)[0], **{name: jnp.array(slots)})


@pytest.mark.parametrize(
    "layer_id", [2.0, "2", jnp.array([2]), jnp.array([2, 3, 4]), jnp.float32(2)]
)
@pytest.mark.parametrize("geometry, call, name", BY_LAYER, ids=shown)
def test_a_layer_is_one_number(geometry, call, name, layer_id):
    call = partial(call, **{name: layer_id})
    refuses(geometry, call, GeometryError, r"layer_id=.* must be one integer")


def test_checks_mode_does_not_see_traced_slots():
    pool, planes = junk_pool(MHA)
    with kvjax.checks():
        assert_holds(jax.jit(kvjax.zero)(pool, jnp.array([-1, 3, 24])), planes)


def test_checks_mode_by_the_environment():
    program = "import kvjax; pool = kvjax.create(kvjax.MLAGeometry(4, 4, 1, 4, 4, 'float32'));"
    result = subprocess.run(
        [sys.executable, "-c", program + "kvjax.zero(pool, [3])"],
        cwd=ROOT,
        env={**os.environ, "KVJAX_CHECKS": "1"},
        capture_output=True,
        text=True,
    )
    assert "IndexError: slots[0]=3 is not there; slots are 4..7" in result.stderr


UPDATES = [*DISTINCT, (MHA, kvjax.zero, "slots"), PAGES[0]]


@pytest.mark.parametrize("geometry, call, name", UPDATES, ids=shown)
def test_an_update_uses_up_the_pool_and_keeps_its_memory(geometry, call, name):
    pool, _ = junk_pool(geometry)
    addresses = [plane.unsafe_buffer_pointer() for plane in pool.planes]
    new = call(pool, **{name: [5, 4, 3]})
    assert all(plane.is_deleted() for plane in pool.planes)
    assert [plane.unsafe_buffer_pointer() for plane in new.planes] == addresses


def test_a_pool_that_is_used_up_says_so():
    pool, _ = junk_pool(MHA)
    kvjax.zero(pool, [5])
    for call in (write_mha, partial(kvjax.gather, slots=SLOTS), kvjax.fork):
        with pytest.raises(RuntimeError, match="deleted"):
            call(pool)
