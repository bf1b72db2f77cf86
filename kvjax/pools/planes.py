"""Moves, copies, reads and writes whole rows of any pool, all its planes together."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

from kvjax.ops.copy_rows import copy_rows as copy_between
from kvjax.ops.move_rows import move_rows
from kvjax.ops.read_rows import read_rows
from kvjax.ops.write_rows import write_rows
from kvjax.ops.zero_rows import zero_rows
from kvjax.pools.pool import (
    LayerId,
    Pool,
    Rows,
    as_rows,
    implementation_for,
    require_same_length,
    require_same_planes,
    slots_of,
    update,
    view,
)
from kvjax.slots import absent_as, as_slots, check


def move(
    pool: Pool,
    dst: Int[Array, " n"],
    src: Int[Array, " n"],
    *,
    disjoint: bool = False,
    implementation: str | None = None,
) -> Pool:
    """Returns ``pool`` with, for every t at once, the old row ``src[t]`` at ``dst[t]``.

    In every layer and plane; ``ops.move_rows`` has the contract.

    Raises:
      ValueError: ``dst`` and ``src`` differ in length.
      IndexError: in checks mode, a slot is not there.
    """
    dst = slots_of(pool, dst, name="dst", distinct=True)
    src = slots_of(pool, src, name="src")
    require_same_length(dst=dst, src=src)
    return update(move_rows, pool, dst, src, disjoint=disjoint, implementation=implementation)


def copy_pages(
    pool: Pool,
    dst_pages: Int[Array, " n"],
    src_pages: Int[Array, " n"],
    *,
    disjoint: bool = False,
    implementation: str | None = None,
) -> Pool:
    """Returns ``pool`` with the old page ``src_pages[t]`` at ``dst_pages[t]``, for every t at once.

    A page that is not there is treated as slots that are not there: skipped, or read as zeros.

    Raises:
      ValueError: the two differ in length.
      IndexError: in checks mode, a page is not there.
    """
    pages = {
        "dst_pages": as_slots(dst_pages, name="dst_pages"),
        "src_pages": as_slots(src_pages, name="src_pages"),
    }
    require_same_length(**pages)
    page_size = pool.geometry.page_size
    first, stop = pool.geometry.first_slot // page_size, pool.geometry.num_rows // page_size
    for name, values in pages.items():
        check(values, first, stop, name=name, distinct=name == "dst_pages")
    dst, src = (_slots_of(values, page_size, stop) for values in pages.values())
    return update(move_rows, pool, dst, src, disjoint=disjoint, implementation=implementation)


def _slots_of(pages: Int32[Array, " n"], page_size: int, num_pages: int) -> Int32[Array, " slots"]:
    # A page far past the end must not come back as a slot by overflow.
    pages = absent_as(num_pages, pages, 0)
    return (pages[:, None] * page_size + jnp.arange(page_size, dtype=jnp.int32)).reshape(-1)


def zero(pool: Pool, slots: Int[Array, " n"], *, implementation: str | None = None) -> Pool:
    """Returns ``pool`` with zeros at ``slots``, in every layer and plane.

    Raises:
      IndexError: in checks mode, a slot is not there.
    """
    slots = slots_of(pool, slots)
    return update(zero_rows, pool, slots, implementation=implementation)


def gather(pool: Pool, slots: Int[Array, " n"], *, implementation: str | None = None) -> Rows:
    """The rows of ``slots`` in every layer, ``[layers, n, *row]`` for each plane.

    Raises:
      IndexError: in checks mode, a slot is not there.

    Source: SGLang 0.4.8 ``get_flat_data`` (A-MHA-9).
    """
    slots = slots_of(pool, slots)
    return view(read_rows, pool, None, slots, implementation=implementation)


def scatter(
    pool: Pool, slots: Int[Array, " n"], rows: Rows, *, implementation: str | None = None
) -> Pool:
    """Returns ``pool`` with ``rows``, as ``gather`` returns them, at ``slots`` in every layer.

    Raises:
      GeometryError: ``rows`` are not of this pool's planes, layers or dtypes, or not one a slot.
      IndexError: in checks mode, a slot is not there.

    Source: SGLang 0.4.8 ``transfer`` (A-MHA-10).
    """
    slots = slots_of(pool, slots, distinct=True)
    rows = as_rows(pool, rows, len(pool.geometry.layers), slots.size)
    return update(write_rows, pool, None, slots, rows, implementation=implementation)


def scatter_layer(
    pool: Pool,
    layer_id: LayerId,
    slots: Int[Array, " n"],
    rows: Rows,
    *,
    implementation: str | None = None,
) -> Pool:
    """Returns ``pool`` with ``rows``, ``[n, *row]`` for each plane, at ``slots`` of one layer.

    Raises:
      GeometryError: as for ``scatter``, or the layer is not on this rank.
      IndexError: in checks mode, a slot is not there.

    Source: SGLang 0.4.8 ``transfer_per_layer`` (A-MHA-11).
    """
    slots = slots_of(pool, slots, distinct=True)
    rows = as_rows(pool, rows, slots.size)
    index = pool.geometry.layers.local(layer_id)
    return update(write_rows, pool, index, slots, rows, implementation=implementation)


def copy_rows(
    dst_pool: Pool,
    dst_slots: Int[Array, " n"],
    src_pool: Pool,
    src_slots: Int[Array, " n"],
    *,
    layers: LayerId | None = None,
    implementation: str | None = None,
) -> Pool:
    """Returns ``dst_pool`` with the rows of ``src_pool`` at ``src_slots`` at ``dst_slots``.

    Either pool may be of either tier. ``layers`` is one layer's id, or ``None`` for all of them.

    Raises:
      GeometryError: the pools differ in layers, rows or dtypes, or the layer is not on this rank.
      ValueError: the slots differ in length, or the two pools are one (``move`` does that).
      IndexError: in checks mode, a slot is not there.
    """
    if any(ours is theirs for ours in dst_pool.planes for theirs in src_pool.planes):
        raise ValueError("dst_pool and src_pool share a plane; move works within one pool")
    require_same_planes("dst_pool", dst_pool.geometry, "src_pool", src_pool.geometry)
    dst = slots_of(dst_pool, dst_slots, name="dst_slots", distinct=True)
    src = slots_of(src_pool, src_slots, name="src_slots")
    require_same_length(dst_slots=dst, src_slots=src)
    index = None if layers is None else dst_pool.geometry.layers.local(layers)
    implementation = implementation_for(dst_pool, implementation)
    return _copy_between(dst_pool, dst, src_pool, src, index, implementation=implementation)


@partial(jax.jit, donate_argnums=0, static_argnames="implementation")
def _copy_between(
    dst_pool: Pool,
    dst: Int32[Array, " n"],
    src_pool: Pool,
    src: Int32[Array, " n"],
    index: LayerId | None,
    implementation: str | None,
) -> Pool:
    planes = copy_between(
        dst_pool.planes,
        dst,
        src_pool.planes,
        src,
        target_first=dst_pool.geometry.first_slot,
        source_first=src_pool.geometry.first_slot,
        target_layer=index,
        source_layer=index,
        implementation=implementation,
    )
    return dataclasses.replace(dst_pool, planes=planes)
