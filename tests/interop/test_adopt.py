"""A kvjax pool in torch's hands, and given back."""

import gc
import weakref
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import kvjax  # noqa: E402
from kvjax import GeometryError, MHAGeometry, Pool, mha  # noqa: E402
from kvtorch.interop import adopt  # noqa: E402
from kvtorch.pools.quantized_mha import QuantizedMHATokenToKVPool  # noqa: E402
from tests import oracles  # noqa: E402
from tests.interop.torch_pools import (  # noqa: E402
    GEOMETRIES,
    assert_holds,
    fill,
    junk_planes,
    read_late,
    slow_work,
)
from tests.pools import junk  # noqa: E402
from tests.pools.junk import MHA, MLA  # noqa: E402
from tests.torch import quantized  # noqa: E402
from tests.torch.quantized import KvCase  # noqa: E402
from tests.torch.tensors import to_numpy, to_torch  # noqa: E402

SLOTS = [5, 23, 9, -1, 4, 17, 12]
OTHER_SLOTS = [6, 8, 24, 7, 9, 22, 4]
BIG = MHAGeometry(2048, 16, 4, 8, 64, "bfloat16")  # 2 x 8 MB, more than XLA runs at once

REFUSED = (ValueError, jax.errors.JaxRuntimeError)
"""What JAX raises if it cannot donate: the second in a program's first call."""

every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where JAX puts pools."""
    if request.param == "cpu" and jax.default_backend() != "cpu":
        pytest.skip("cpu: JAX's default device is another")
    return request.param


def kvjax_pool(geometry, seed=0):
    planes = junk_planes(geometry, seed)
    return junk.pool_of(geometry, planes), planes


def move(pool):
    return kvjax.move(pool, np.array(SLOTS), np.array(OTHER_SLOTS))


def moved(planes):
    return [oracles.move_rows(plane, SLOTS, OTHER_SLOTS, 4) for plane in planes]


def torch_moves(pool):
    on = pool.planes[0].device
    pool.move_kv_cache(torch.tensor(SLOTS, device=on), torch.tensor(OTHER_SLOTS, device=on))


def assert_gathers(pool, planes):
    for rows, plane in zip(kvjax.gather(pool, np.array(OTHER_SLOTS)), planes, strict=True):
        oracles.assert_same_bits(rows, oracles.read_rows(plane, None, OTHER_SLOTS, 4))


@every_geometry
def test_torch_reads_and_writes_the_memory(geometry, device):
    pool, planes = kvjax_pool(geometry)
    adoption = adopt(pool)
    assert adoption.pool.geometry == geometry and adoption.pool.audit() == []
    for tensor, array in zip(adoption.pool.planes, pool.planes, strict=True):
        assert tensor.data_ptr() == array.unsafe_buffer_pointer()
        assert tensor.device.type == device
    assert_holds(adoption.pool, planes)
    torch_moves(adoption.pool)
    assert_holds(adoption.pool, moved(planes))
    assert adoption.release() is pool
    assert_gathers(pool, moved(planes))


@every_geometry
def test_after_release_jax_updates_in_place(geometry, device):
    pool, planes = kvjax_pool(geometry)
    addresses = [array.unsafe_buffer_pointer() for array in pool.planes]
    with adopt(pool) as adoption:
        torch_moves(adoption.pool)
    pool = move(pool)
    assert_gathers(pool, moved(moved(planes)))
    assert [array.unsafe_buffer_pointer() for array in pool.planes] == addresses


def test_while_adopted_the_pool_can_be_read(device):
    pool, planes = kvjax_pool(MHA)
    with adopt(pool) as adoption:
        assert_gathers(pool, planes)
        torch_moves(adoption.pool)
        if device == "cuda":
            torch.cuda.synchronize()
        assert_gathers(pool, moved(planes))
        assert_gathers(kvjax.fork(pool), moved(planes))


def test_while_adopted_an_update_on_cpu_leaves_torch_behind():
    """JAX makes new memory without a word; the old pool is not used up, and torch's unchanged."""
    if jax.default_backend() != "cpu":
        pytest.skip("cpu: JAX's default device is another")
    pool, planes = kvjax_pool(MHA)
    with adopt(pool) as adoption:
        updated = move(pool)
        torch_pointers = [tensor.data_ptr() for tensor in adoption.pool.planes]
        assert not {array.unsafe_buffer_pointer() for array in updated.planes} & {*torch_pointers}
        assert_holds(adoption.pool, planes)
        assert not any(array.is_deleted() for array in pool.planes)
    assert_gathers(updated, moved(planes))
    assert_gathers(pool, planes)


@pytest.mark.gpu
@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("jitted", [False, True])
def test_while_adopted_an_update_on_gpu_is_refused(jitted, called_before):
    """JAX takes another way through a program that it has run before."""
    step = jax.jit(move, donate_argnums=0) if jitted else move
    pool, planes = kvjax_pool(MHA)
    if called_before:
        step(kvjax.fork(pool))
    with adopt(pool) as adoption:
        with pytest.raises(REFUSED, match="with external reference"):
            jax.block_until_ready(step(pool))
        assert_gathers(pool, planes)
        assert_holds(adoption.pool, planes)
    assert_gathers(step(pool), moved(planes))


@pytest.mark.gpu
def test_a_tensor_that_was_kept_keeps_jax_from_updating():
    pool, planes = kvjax_pool(MHA)
    with adopt(pool) as adoption:
        kept = adoption.pool.k_buffer[1]
    with pytest.raises(REFUSED, match="with external reference"):
        jax.block_until_ready(move(pool))
    del kept
    assert_gathers(move(pool), moved(planes))


def test_the_torch_pool_raises_after_release(device):
    pool, planes = kvjax_pool(MHA)
    adoption = adopt(pool)
    torch_pool = adoption.pool
    adoption.release()
    slots, layer = torch.tensor([4], device=device), SimpleNamespace(layer_id=2)
    k, v = (torch.ones(1, 2, dim, device=device) for dim in (8, 16))
    for use in (
        lambda: torch_pool.set_kv_buffer(layer, slots, k, v),
        lambda: torch_pool.get_kv_buffer(2),
        lambda: torch_pool.move_kv_cache(slots, slots),
        lambda: torch_pool.get_flat_data(slots),
        lambda: torch_pool.jax().__enter__(),
        lambda: adoption.release(),
        lambda: adoption.pool,
    ):
        with pytest.raises(RuntimeError, match=r"no memory|given back"):
            use()
    with pytest.raises(AttributeError):
        _ = torch_pool.k_buffer
    assert_gathers(pool, planes)


def test_an_exception_in_the_block_releases(device):
    pool, planes = kvjax_pool(MLA)
    with pytest.raises(KeyError), adopt(pool) as adoption:
        torch_moves(adoption.pool)
        raise KeyError("the user's")
    assert_gathers(move(pool), moved(moved(planes)))


def test_released_in_the_block(device):
    pool, planes = kvjax_pool(MLA)
    with adopt(pool) as adoption:
        assert adoption.release() is pool
    assert_gathers(move(pool), moved(planes))


def test_an_adopted_pool_can_be_lent(device):
    """JAX updates what it owns, through torch, in order with torch's work."""
    pool, planes = kvjax_pool(MHA)
    with adopt(pool) as adoption:
        for _ in range(3):
            torch_moves(adoption.pool)
            with adoption.pool.jax() as lease:
                lease.pool = move(lease.pool)
                with pytest.raises(RuntimeError, match="lent"):
                    adoption.release()
            planes = moved(moved(planes))
        assert_holds(adoption.pool, planes)
        assert lease.copied == (() if device == "cuda" else ("k", "v"))
    assert_gathers(pool, planes)


def test_reads_under_way_are_over_before_torch_writes(device):
    pool, work = kvjax.create(BIG), slow_work()
    read_late(pool.planes[0], work).block_until_ready()  # compiled
    k = read_late(pool.planes[0], work)
    with adopt(pool) as adoption:
        for tensor in adoption.pool.planes:
            tensor.fill_(1)
        assert (np.asarray(k) == 0).all()


def test_updates_under_way_are_over_before_torch_reads(device):
    pool = kvjax.create(BIG)
    add = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
    for turn in range(5):
        pool = add(pool)
        with adopt(pool) as adoption:
            plane = adoption.pool.planes[1]
            assert plane.min() == plane.max() == turn + 1
            del plane


def test_dl5_release_waits_for_torch(device):
    pool = kvjax.create(BIG)
    total = jax.jit(lambda plane: jnp.stack([plane.min(), plane.max()]))
    for turn in range(1, 6):
        with adopt(pool) as adoption:
            for tensor in adoption.pool.planes:
                tensor.fill_(-1)
                tensor.fill_(turn)
        assert np.asarray(total(pool.planes[1])).tolist() == [turn, turn]
        del tensor
    kvjax.zero(pool, np.array([16]))


def test_torch_keeps_the_memory(device):
    pool, planes = kvjax_pool(MHA)
    adoption = adopt(pool)
    del pool
    gc.collect()
    torch_moves(adoption.pool)
    assert_holds(adoption.pool, moved(planes))
    torch_pool = adoption.pool
    del adoption
    gc.collect()
    assert_holds(torch_pool, moved(planes))
    torch_pool._require_here()


def test_an_adoption_that_is_dropped_releases_with_its_pool(device):
    pool, planes = kvjax_pool(MHA)
    torch_pool = weakref.ref(adopt(pool).pool)
    gc.collect()
    assert torch_pool() is None
    assert_gathers(move(pool), moved(planes))


def test_memory_does_not_grow(device):
    pool = kvjax.create(MHA)
    counts = []
    for _ in range(20):
        with adopt(pool) as adoption:
            fill(adoption.pool, junk_planes(MHA))
        pool = move(pool)
        counts.append(len(jax.live_arrays()))
    assert len(set(counts[2:])) == 1


def test_what_cannot_be_adopted():
    pool, _ = kvjax_pool(MHA)
    used_up = kvjax.fork(pool)
    move(used_up)
    for bad, error, message in [
        (pool.planes, TypeError, "need a kvjax Pool"),
        (used_up, ValueError, "used up"),
        (Pool(tuple(map(np.asarray, pool.planes)), MHA), TypeError, "need an array"),
        (kvjax.host.create(MHA), GeometryError, "host tier"),
        (Pool(pool.planes[::-1], MHA), GeometryError, "for plane 'k'"),
    ]:
        with pytest.raises(error, match=message):
            adopt(bad)
    with pytest.raises(TypeError, match="Tracer"):
        jax.jit(adopt)(pool)


def test_mha_torch_writes_what_jax_reads(device):
    pool, planes = kvjax_pool(MHA)
    k = np.linspace(-3, 3, 7 * 16, dtype=np.float32).reshape(7, 2, 8)
    v = np.linspace(-3e3, 3e3, 7 * 32, dtype=np.float32).reshape(7, 2, 16)
    with adopt(pool) as adoption:
        slots, *values = (torch.tensor(x, device=device) for x in (SLOTS, k, v))
        adoption.pool.set_kv_buffer(SimpleNamespace(layer_id=4), slots, *values, None, 2.0)
    new = oracles.narrow(k, planes[0].dtype), oracles.narrow(v, planes[1].dtype, 2.0)
    for rows, plane, n in zip(mha.read(pool, 4, np.array(SLOTS)), planes, new, strict=True):
        expected = oracles.write_rows(plane, 2, SLOTS, n, 4)
        oracles.assert_same_bits(rows, oracles.read_rows(expected, 2, SLOTS, 4))


@pytest.mark.parametrize("name", ["mha, int8", "mha, fp8"])
def test_quantised_mha_torch_and_jax_write_the_same_and_read_the_same(name, device):
    pool, planes = kvjax_pool(GEOMETRIES[name])
    other = kvjax.fork(pool)
    case = KvCase(quantized.INT8, 2, 8, 16, "bfloat16", len(SLOTS))
    values = quantized.any_heads(0, case)
    with adopt(pool) as adoption:
        assert isinstance(adoption.pool, QuantizedMHATokenToKVPool)
        slots = torch.tensor(SLOTS, device=device)
        tensors = [to_torch(part, device) for part in values]
        adoption.pool.set_kv_buffer(SimpleNamespace(layer_id=4), slots, *tensors)
        read = adoption.pool.get_mha_kv_buffer(SimpleNamespace(layer_id=4), slots)
    other = mha.write(other, 4, np.array(SLOTS), *map(jnp.asarray, values))
    wanted = quantized.written_kv(planes, 2, SLOTS, *values)
    for ours, theirs, plane in zip(pool.planes, other.planes, wanted, strict=True):
        found, others = (np.asarray(x).view(plane.dtype)[2, SLOTS] for x in (ours, theirs))
        quantized.assert_same_numbers(found, plane[2, SLOTS])
        quantized.assert_same_numbers(others, plane[2, SLOTS])
    for jax_read in (mha.read(pool, 4, np.array(SLOTS)), mha.read(other, 4, np.array(SLOTS))):
        for ours, theirs in zip(map(to_numpy, read), map(np.asarray, jax_read), strict=True):
            quantized.assert_same_numbers(theirs, ours)
