"""Pools that are elsewhere than JAX's default backend: on a CPU, in a process with a GPU."""

from functools import partial

import jax
import numpy as np
import pytest

import kvjax
from kvjax import MHAGeometry, mha, mla
from kvjax.ops import row_copy
from tests import oracles
from tests.pools.junk import FP8, INT8, MHA, MLA, QUANTIZED, junk_pool, rows_of
from tests.strategies import random_rows

SLOTS, OTHERS = [5, 6, 7], [9, 10, 11]
EVERY_KIND = pytest.mark.parametrize(
    "geometry",
    [MHA, MLA, QUANTIZED, INT8, FP8],
    ids=["mha", "mla", "quantised", "int8", "fp8"],
)
NO_GPU = pytest.mark.skipif(jax.default_backend() == "gpu", reason="cpu: there is a GPU")


def ones(*widths):
    return [np.ones((len(SLOTS), *width), np.float32) for width in widths]


def call_everything(geometry):
    """What each function of a pool of this geometry returns, leaf by leaf."""

    def pool(seed=0):
        return junk_pool(geometry, seed)[0]

    layer_id = geometry.layers.start
    rows = random_rows(1, rows_of(geometry), len(geometry.layers), len(SLOTS))
    calls = [
        partial(kvjax.move, dst=OTHERS, src=SLOTS),
        partial(kvjax.copy_pages, dst_pages=[1], src_pages=[2]),
        partial(kvjax.zero, slots=SLOTS),
        partial(kvjax.gather, slots=SLOTS),
        partial(kvjax.scatter, slots=SLOTS, rows=rows),
        partial(kvjax.scatter_layer, layer_id=layer_id, slots=SLOTS, rows=[r[0] for r in rows]),
        lambda p: kvjax.copy_rows(p, OTHERS, pool(1), SLOTS),
        lambda p: kvjax.restore(p, OTHERS, kvjax.offload(p, SLOTS)),
    ]
    if isinstance(geometry, MHAGeometry):
        k, v = ones(*((geometry.num_kv_heads, dim) for dim in (8, 16)))
        calls += [
            partial(mha.write, layer_id=layer_id, slots=SLOTS, k=k, v=v),
            partial(mha.read, layer_id=layer_id, slots=SLOTS),
        ]
    else:
        latent, rope, joined = ones(
            (1, geometry.latent_dim),
            (1, geometry.rope_dim),
            (1, geometry.latent_dim + geometry.rope_dim),
        )
        calls += [
            partial(mla.write, layer_id=layer_id, slots=SLOTS, latent=latent, rope=rope),
            partial(mla.write_joined, layer_id=layer_id, slots=SLOTS, rows=joined),
            partial(mla.read, layer_id=layer_id, slots=SLOTS),
        ]
    return [np.asarray(leaf) for call in calls for leaf in jax.tree.leaves(call(pool()))]


@pytest.fixture
def beside_a_gpu(monkeypatch):
    """Makes operations believe that JAX's default backend is a GPU that they have kernels for."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(row_copy, "_CAPABILITIES", {"None"})
    jax.clear_caches()  # of what was traced when they did not
    yield
    jax.clear_caches()


def kernels_cannot_run():
    return pytest.raises(Exception, match="Only interpret mode is supported on CPU")


@NO_GPU
@EVERY_KIND
def test_the_reference_runs_where_the_pool_is(geometry, request):
    expected = call_everything(geometry)
    request.getfixturevalue("beside_a_gpu")
    for actual, wanted in zip(call_everything(geometry), expected, strict=True):
        oracles.assert_same_bits(actual, wanted)


@NO_GPU
@pytest.mark.usefixtures("beside_a_gpu")
def test_a_kernel_by_name_is_not_replaced():
    with kernels_cannot_run():
        kvjax.zero(junk_pool(MHA)[0], SLOTS, implementation="mosaic_gpu")


@NO_GPU
@pytest.mark.usefixtures("beside_a_gpu")
def test_a_kernel_where_the_pool_is_not_is_caught():
    """The test above can fail: inside ``jit`` nothing says where a pool is."""
    with kernels_cannot_run():
        jax.jit(kvjax.zero)(junk_pool(MHA)[0], jax.numpy.array(SLOTS))


@pytest.mark.gpu
@EVERY_KIND
def test_on_the_cpu_beside_a_gpu(geometry):
    """The same, but for the bits of computed NaNs, and subnormals, zeros to XLA on CPU."""
    expected = call_everything(geometry)
    with jax.default_device(jax.devices("cpu")[0]):
        on_cpu = call_everything(geometry)
    for actual, wanted in zip(on_cpu, expected, strict=True):
        # A subnormal scale makes numbers of up to 448 times as much.
        is_tiny = np.abs(wanted.astype(np.float32)) < 448 * np.finfo(np.float32).smallest_normal
        oracles.assert_same_numbers(actual, wanted, is_tiny)
