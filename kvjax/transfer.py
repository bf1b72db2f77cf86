"""Rows of a pool in host memory, and the addresses of its buffers."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from kvjax.errors import GeometryError
from kvjax.geometry import LayerRange, PlaneSpec
from kvjax.ops.read_rows import read_rows
from kvjax.ops.write_rows import write_rows
from kvjax.pools.pool import (
    Pool,
    as_rows,
    require_rows,
    require_same_planes,
    slots_of,
    update,
    view,
)

CHUNK_TOKENS = 8192
"""Tokens that ``offload`` and ``restore`` move at once: the device memory they need beside the
pool is that of as many rows. Source: SGLang 0.4.8 ``cpu_offloading_chunk_size`` (A-KV-1)."""


@dataclasses.dataclass(frozen=True)
class HostRows:
    """Rows of some slots in host memory, of every layer and plane.

    Attributes:
      rows: a NumPy array ``[layers, n, *row]`` for each plane, in its dtype.
      planes: what the pool that they came from stores.
      layers: the layers of that pool.
    """

    rows: tuple[np.ndarray, ...]
    planes: tuple[PlaneSpec, ...]
    layers: LayerRange

    def __len__(self) -> int:
        """How many slots the rows are of."""
        return self.rows[0].shape[1]


def offload(pool: Pool, slots: Int[Array, " n"], *, chunk_tokens: int = CHUNK_TOKENS) -> HostRows:
    """A copy of the rows at ``slots`` in host memory; waits until it is there.

    Args:
      pool: read, not changed.
      slots: which rows; a slot that is not there gives zeros.
      chunk_tokens: how many tokens to move at once.

    Raises:
      ValueError: ``chunk_tokens`` is less than 1.
      IndexError: in checks mode, a slot is not there.

    Source: SGLang 0.4.8 ``get_cpu_copy`` (A-MHA-7, A-MLA-12).
    """
    host_slots, geometry = _host_slots(pool, slots, chunk_tokens, distinct=False), pool.geometry
    rows = tuple(
        np.empty((len(geometry.layers), host_slots.size, *spec.row_shape), spec.dtype)
        for spec in geometry.planes
    )
    for start in range(0, host_slots.size, chunk_tokens):
        chunk = host_slots[start : start + chunk_tokens]
        for host, device in zip(rows, view(read_rows, pool, None, _padded(chunk)), strict=True):
            host[:, start : start + chunk.size] = np.asarray(device)[:, : chunk.size]
    return HostRows(rows, geometry.planes, geometry.layers)


def restore(
    pool: Pool,
    slots: Int[Array, " n"],
    host_rows: HostRows,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Pool:
    """Returns ``pool`` with ``host_rows`` at ``slots``, which need not be those they came from.

    Args:
      pool: updated in place and used up.
      slots: where each row goes, distinct; slots that are not there are not written.
      host_rows: from ``offload`` of a pool with these planes and layers; may be reused or changed
        as soon as this returns.
      chunk_tokens: how many tokens to move at once.

    Raises:
      TypeError: ``host_rows`` did not come from ``offload``.
      GeometryError: ``host_rows`` are of other planes or layers, or not one for each slot.
      ValueError: ``chunk_tokens`` is less than 1.
      IndexError: in checks mode, a slot is not there.

    Source: SGLang 0.4.8 ``load_cpu_copy`` (A-MHA-8, A-MLA-12).
    """
    host_slots, geometry = _host_slots(pool, slots, chunk_tokens, distinct=True), pool.geometry
    if not isinstance(host_rows, HostRows):
        raise TypeError(f"host_rows is {type(host_rows)}, need what offload returned")
    require_same_planes("host_rows", host_rows, "the pool", geometry)
    if len(host_rows) != host_slots.size:
        raise GeometryError(f"host_rows has {len(host_rows)} rows for {host_slots.size} slots")
    # All of them, before the first chunk uses the pool up.
    require_rows(pool, host_rows.rows, len(geometry.layers), host_slots.size)
    for start in range(0, host_slots.size, chunk_tokens):
        chunk = host_slots[start : start + chunk_tokens]
        padded = _padded(chunk)
        rows = tuple(_chunk(host, start, chunk.size, padded.size) for host in host_rows.rows)
        pool = update(
            write_rows, pool, None, padded, as_rows(pool, rows, len(geometry.layers), padded.size)
        )
    return pool


def buffer_infos(pool: Pool) -> tuple[list[int], list[int], list[int]]:
    """What an RDMA engine registers: addresses, lengths in bytes, and bytes a page.

    One entry for each plane and layer, all layers of the first plane first. An address is that of
    the layer's row 0, and holds until the pool is next updated on CPU, for its life on GPU.

    Raises:
      RuntimeError: the pool is used up, or lies on several devices.

    Source: SGLang 0.4.8 ``get_contiguous_buf_infos`` (A-MHA-5, A-MLA-5).
    """
    addresses, lengths, item_lengths = [], [], []
    for plane, spec in zip(pool.planes, pool.geometry.planes, strict=True):
        base, length = plane.unsafe_buffer_pointer(), spec.row_bytes * pool.geometry.num_rows
        for index in range(len(pool.geometry.layers)):
            addresses.append(base + index * length)
            lengths.append(length)
            item_lengths.append(spec.row_bytes * pool.geometry.page_size)
    return addresses, lengths, item_lengths


def _host_slots(pool: Pool, slots: Any, chunk_tokens: int, *, distinct: bool) -> np.ndarray:
    if chunk_tokens < 1:
        raise ValueError(f"{chunk_tokens=} must be at least 1")
    return np.asarray(slots_of(pool, slots, distinct=distinct))


def _padded(slots: np.ndarray) -> Int32[Array, " _"]:
    """``slots`` with -1 up to a power of two, so that few sizes are compiled."""
    size = 1 << max(0, slots.size - 1).bit_length()
    return jnp.asarray(np.pad(slots, (0, size - slots.size), constant_values=-1))


def _chunk(rows: np.ndarray, start: int, count: int, padded: int) -> Array:
    """``count`` tokens of ``rows`` from ``start`` on, and zeros up to ``padded`` tokens."""
    chunk = np.zeros((rows.shape[0], padded, *rows.shape[2:]), rows.dtype)
    chunk[:, :count] = rows[:, start : start + count]
    # On CPU JAX may share this array's memory, never the caller's (DL5).
    return jnp.asarray(chunk)
