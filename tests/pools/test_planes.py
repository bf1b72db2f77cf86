"""What works on any pool, in any order, against the oracles applied to each plane."""

from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import kvjax
from kvjax.ops import zero_rows
from tests import oracles
from tests.pools.junk import (
    GEOMETRIES,
    assert_holds,
    junk_pool,
    rows_of,
)
from tests.strategies import random_rows, seeds, some_moves, some_slots


def machine(geometry, implementation, sizes):
    """A pool and its planes, to which the same things happen."""
    layers, first, stop = geometry.layers, geometry.first_slot, geometry.num_rows
    first_page, stop_page = first // geometry.page_size, stop // geometry.page_size
    run_by = {"implementation": implementation}
    layer_ids = st.integers(layers.start, layers.stop - 1)
    layer_ids |= st.integers(layers.start - 1, layers.stop).map(jnp.int32)

    def slots(data):
        """For each token a slot, all of them distinct, and another."""
        num_tokens = data.draw(st.sampled_from(sizes))
        return [data.draw(some_slots(num_tokens, first, stop, distinct=d)) for d in (True, False)]

    def moves(data, first=first, stop=stop):
        return data.draw(some_moves(data.draw(st.sampled_from(sizes)), first, stop))

    class Machine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.pool, self.planes = junk_pool(geometry)
            self.kept = []

        def expect(self, oracle, *args):
            self.planes = tuple(oracle(plane, *args, first) for plane in self.planes)

        def expect_written(self, layer, slots, rows):
            self.planes = tuple(
                oracles.write_rows(plane, layer, slots, new, first)
                for plane, new in zip(self.planes, rows, strict=True)
            )

        @rule(data=st.data())
        def move(self, data):
            dst, src = moves(data)
            self.pool = kvjax.move(self.pool, dst, src, **run_by)
            self.expect(oracles.move_rows, dst, src)

        @rule(data=st.data())
        def move_disjoint(self, data):
            dst, src = moves(data)
            src = np.where(np.isin(src, dst), -1, src)
            self.pool = kvjax.move(self.pool, dst, src, disjoint=True, **run_by)
            self.expect(oracles.move_rows, dst, src)

        @rule(data=st.data())
        def copy_pages(self, data):
            dst, src = moves(data, first_page, stop_page)
            self.pool = kvjax.copy_pages(self.pool, dst, src, **run_by)
            self.expect(
                oracles.move_rows, *(oracles.slots_of(p, geometry.page_size) for p in (dst, src))
            )

        @rule(data=st.data())
        def zero(self, data):
            _, any_slots = slots(data)
            self.pool = kvjax.zero(self.pool, any_slots, **run_by)
            self.expect(oracles.zero_rows, any_slots)

        @rule(data=st.data(), seed=seeds)
        def scatter(self, data, seed):
            distinct, _ = slots(data)
            rows = random_rows(seed, rows_of(geometry), len(layers), distinct.size)
            self.pool = kvjax.scatter(self.pool, distinct, rows, **run_by)
            self.expect_written(None, distinct, rows)

        @rule(data=st.data(), seed=seeds, layer_id=layer_ids)
        def scatter_layer(self, data, seed, layer_id):
            distinct, _ = slots(data)
            rows = random_rows(seed, rows_of(geometry), distinct.size)
            self.pool = kvjax.scatter_layer(self.pool, layer_id, distinct, rows, **run_by)
            self.expect_written(int(layer_id) - layers.start, distinct, rows)

        @rule(data=st.data(), seed=seeds, layer_id=st.none() | layer_ids)
        def copy_rows(self, data, seed, layer_id):
            distinct, any_slots = slots(data)
            source, planes = junk_pool(geometry, seed)
            self.pool = kvjax.copy_rows(
                self.pool, distinct, source, any_slots, layers=layer_id, **run_by
            )
            layer = None if layer_id is None else int(layer_id) - layers.start
            rows = [oracles.read_rows(plane, layer, any_slots, first) for plane in planes]
            self.expect_written(layer, distinct, rows)
            assert_holds(source, planes)

        @rule(data=st.data(), chunk_tokens=st.integers(1, 8))
        def offload_and_restore(self, data, chunk_tokens):
            distinct, any_slots = slots(data)
            rows = kvjax.offload(self.pool, any_slots, chunk_tokens=chunk_tokens)
            self.pool = kvjax.restore(self.pool, distinct, rows, chunk_tokens=chunk_tokens)
            self.expect_written(None, distinct, self.read(None, any_slots))

        @rule(data=st.data())
        def gather(self, data):
            _, any_slots = slots(data)
            rows = kvjax.gather(self.pool, any_slots, **run_by)
            for actual, expected in zip(rows, self.read(None, any_slots), strict=True):
                oracles.assert_same_bits(actual, expected)

        @rule()
        def fork(self):
            self.kept.append((kvjax.fork(self.pool), self.planes))

        def read(self, layer, slots):
            return [oracles.read_rows(plane, layer, slots, first) for plane in self.planes]

        @invariant()
        def equals_the_planes(self):
            assert_holds(self.pool, self.planes)

        def teardown(self):
            for pool, planes in self.kept:
                assert_holds(pool, planes)

    return Machine


def run_machine(geometry, implementation="reference", sizes=(0, 1, 6), **settings):
    settings = hypothesis.settings(deadline=None, stateful_step_count=20, **settings)
    run_state_machine_as_test(machine(geometry, implementation, sizes), settings=settings)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_any_order_of_operations(name):
    run_machine(GEOMETRIES[name], max_examples=15)


def test_any_order_of_operations_in_64_bit_mode():
    with jax.enable_x64(True):
        run_machine(GEOMETRIES["mha"], max_examples=5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mha", "mla, e5m2", "mla, quantised", "mha, int8", "mha, fp8"])
def test_any_order_of_operations_by_kernels(name):
    run_machine(GEOMETRIES[name], "mosaic_gpu", sizes=(6,), max_examples=15)


@pytest.mark.parametrize(
    "name, forgotten",
    [
        ("mha", 1),
        *(("mla, quantised", plane) for plane in (0, 1)),
        *(("mha, int8", plane) for plane in range(4)),
    ],
)
def test_a_plane_left_behind_is_caught(monkeypatch, name, forgotten):
    """The comparison above can fail: an operation that forgets a plane, such as the scales."""

    def forgetful(planes, slots, *, first_slot, implementation):
        zeroed = list(zero_rows.reference(planes, slots, first_slot=first_slot))
        zeroed[forgotten] = planes[forgotten]
        return tuple(zeroed)

    monkeypatch.setattr("kvjax.pools.planes.zero_rows", forgetful)
    with pytest.raises(AssertionError):
        run_machine(
            GEOMETRIES[name],
            max_examples=500,  # far more than it takes
            phases=[hypothesis.Phase.generate],
            database=None,
        )


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_new_pool_is_zeros_and_a_fork_is_another_pool(name):
    geometry = GEOMETRIES[name]
    pool = kvjax.create(geometry)
    assert_holds(pool, [np.zeros_like(plane) for plane in junk_pool(geometry)[1]])
    pool, planes = junk_pool(geometry)
    kept = kvjax.fork(pool)
    assert not {p.unsafe_buffer_pointer() for p in pool.planes} & {
        p.unsafe_buffer_pointer() for p in kept.planes
    }
    kvjax.zero(pool, np.arange(geometry.num_rows))
    assert all(plane.is_deleted() for plane in pool.planes)
    assert_holds(kept, planes)


@pytest.mark.parametrize("as_layer_id", [int, jnp.int32])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_layer_and_page_view_are_the_rows(name, as_layer_id):
    geometry = GEOMETRIES[name]
    pool, planes = junk_pool(geometry)
    num_pages = geometry.num_rows // geometry.page_size
    table = np.array([[2, 0, -1], [4, 1, 3]], np.int32)

    def views(pool, layer_id):
        return kvjax.page_view(pool, layer_id, table), kvjax.layer(pool, layer_id)

    if as_layer_id is int:
        views = partial(views, layer_id=3)
        (pages, page_table), layer = jax.jit(views)(pool)
    else:
        (pages, page_table), layer = jax.jit(views)(pool, 3)
    for *actual, plane in zip(pages, layer, kvjax.layer(pool, as_layer_id(3)), planes, strict=True):
        pages, inside, outside = map(np.asarray, actual)
        by_page = plane.reshape(-1, num_pages, geometry.page_size, *plane.shape[2:])
        oracles.assert_same_bits(pages, by_page.reshape(pages.shape))
        oracles.assert_same_bits(pages[page_table[table >= 0]], by_page[1, table[table >= 0]])
        oracles.assert_same_bits(inside, plane[1])
        oracles.assert_same_bits(outside, plane[1])
    assert page_table[0, 2] == -1


@pytest.mark.parametrize("layer_id", [1, 5])
def test_a_traced_layer_that_is_not_there_is_zeros(layer_id):
    pool, _ = junk_pool(GEOMETRIES["mla"])
    (rows,) = kvjax.layer(pool, jnp.int32(layer_id))
    assert not oracles.bits(rows).any()


def test_a_page_view_outside_jit_would_be_a_copy():
    pool, planes = junk_pool(GEOMETRIES["mha"])
    with pytest.raises(kvjax.UnsupportedError, match="page_view copies nothing inside jit only"):
        kvjax.page_view(pool, 2, np.zeros((1, 1), np.int32))
    assert_holds(pool, planes)
