"""How are a data plane's operations done with kvjax?

Arrays are padded to powers of two, with slots that are not there, so that few shapes compile. All
calls are made under ``jit``: checks mode, which refuses such slots, is for callers who have none.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import allocators, host
from kvjax.geometry import Geometry, MLAGeometry, PlaneSpec
from kvjax.replay import content
from kvjax.replay.data_plane import no_room
from kvjax.replay.scheduler import Settings

_NOWHERE = -1
_SMALLEST_BUCKET = 64
_MOST_WRITTEN = 8192  # tokens written at once: bounds the temporaries and what has to compile


def create(geometry: Geometry, settings: Settings) -> tuple["KvjaxPages", "KvjaxRows"]:
    """Allocates everything.

    Raises:
      MemoryError: there is no room.
    """
    # A host tier without room is never copied to, but no pool is empty.
    host_slots = max(settings.host_units, 1) * settings.unit_len
    host_geometry = dataclasses.replace(geometry, num_slots=host_slots)
    try:
        rows = KvjaxRows(kvjax.create(geometry), host.create(host_geometry))
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        raise no_room(geometry, host_geometry.bytes, error) from None
    return KvjaxPages(settings), rows


class KvjaxPages:
    """``Pages`` of a kvjax allocator, of single slots where those are the pages."""

    def __init__(self, settings: Settings) -> None:
        num_pages, self._page_size = settings.num_pages, settings.page_size
        self._allocator = (
            kvjax.SlotAllocator.create(num_pages)
            if self._page_size == 1
            else kvjax.PageAllocator.create(num_pages * self._page_size, self._page_size)
        )
        self._sequences = _bucket(settings.concurrency)

    def extend(self, prefix_lens, seq_lens) -> np.ndarray:
        total = int((seq_lens - prefix_lens).sum())
        self._allocator, slots = _extend(
            self._allocator,
            _padded(prefix_lens, self._sequences),
            _padded(seq_lens, self._sequences),
            num_tokens=_bucket(total),
        )
        return _handed_out(slots, total)

    def decode(self, seq_lens, last_slots) -> np.ndarray:
        self._allocator, slots = _decode(
            self._allocator,
            _padded(seq_lens, self._sequences),  # a sequence of length 0 gets no slot
            _padded(last_slots, self._sequences, _NOWHERE),
        )
        return _handed_out(slots, len(seq_lens))

    def free(self, pages) -> None:
        # One slot of a page frees it.
        self._allocator = _free(self._allocator, _padded_slots(pages * self._page_size))
        jax.block_until_ready(self._allocator)

    def clear(self) -> None:
        self._allocator = _clear(self._allocator)

    def num_free(self) -> int:
        return int(allocators.available(self._allocator)) // self._page_size


class KvjaxRows:
    """``Rows`` of a kvjax pool and a pool of the host tier.

    Attributes:
      pool: may be bound to another one of its geometry.
      host_pool: the host tier, if it is kvjax's.
    """

    host_pool: kvjax.Pool

    def __init__(self, pool: kvjax.Pool, host_pool: kvjax.Pool | None = None) -> None:
        self.planes = pool.geometry.planes
        self.layers = pool.geometry.layers
        self.pool = pool
        if host_pool is not None:
            self.host_pool = host_pool

    def write(self, slots, tags, positions) -> None:
        for start in range(0, len(slots), _MOST_WRITTEN):
            part = slice(start, start + _MOST_WRITTEN)
            size = _bucket(len(slots[part]))
            self.pool = _write(
                self.pool,
                _padded_slots(slots[part]),
                _padded(tags[part], size),
                _padded(positions[part], size),
            )
        jax.block_until_ready(self.pool)

    def offload(self, slots, host_slots) -> None:
        self.host_pool = _copy(
            self.host_pool, self.pool, _padded_slots(host_slots), _padded_slots(slots)
        )
        jax.block_until_ready(self.host_pool)

    def restore(self, slots, host_slots) -> None:
        self.pool = _copy(
            self.pool, self.host_pool, _padded_slots(slots), _padded_slots(host_slots)
        )
        jax.block_until_ready(self.pool)

    def move(self, dst, src) -> None:
        self.pool = _move(self.pool, _padded_slots(dst), _padded_slots(src))
        jax.block_until_ready(self.pool)

    def put(self, slots, rows) -> None:
        """Writes the bits that ``read`` returns."""
        size = _bucket(len(slots))
        typed = tuple(
            np.pad(bits, [(0, 0), (0, size - len(slots)), *[(0, 0)] * (bits.ndim - 2)]).view(
                plane.dtype
            )
            for plane, bits in zip(self.planes, rows, strict=True)
        )
        self.pool = _put(self.pool, _padded_slots(slots), typed)
        jax.block_until_ready(self.pool)

    def read_layer(self, layer_id, slots) -> tuple[np.ndarray, ...]:
        return self._bits(
            _read_layer(self.pool, layer_id, _padded_slots(slots)), np.s_[: len(slots)]
        )

    def read(self, slots) -> tuple[np.ndarray, ...]:
        return self._bits(_gather(self.pool, _padded_slots(slots)), np.s_[:, : len(slots)])

    def read_host(self, host_slots) -> tuple[np.ndarray, ...]:
        rows = _gather(self.host_pool, _padded_slots(host_slots))
        return self._bits(rows, np.s_[:, : len(host_slots)])

    def _bits(self, rows: Any, which: Any) -> tuple[np.ndarray, ...]:
        return tuple(
            np.asarray(plane_rows)[which].view(content.bits_dtype(plane.dtype))
            for plane, plane_rows in zip(self.planes, jax.tree.leaves(rows), strict=True)
        )


@functools.partial(jax.jit, donate_argnums=0)
def _write(pool: kvjax.Pool, slots: jax.Array, tags: jax.Array, positions: jax.Array) -> kvjax.Pool:
    """Writes the rows of these tags and positions in every layer."""
    geometry, planes = pool.geometry, pool.geometry.planes
    write_parts = kvjax.mla.write if isinstance(geometry, MLAGeometry) else kvjax.mha.write

    def write_layer(layer_id: jax.Array, pool: kvjax.Pool) -> kvjax.Pool:
        parts = [
            jax.lax.bitcast_convert_type(
                content.row_bits(jnp, planes, number, layer_id, tags, positions),
                jnp.dtype(plane.dtype),
            )
            for number, plane in enumerate(planes)
        ]
        if content.are_quantized(planes):
            parts = _values(parts)
        elif isinstance(geometry, MLAGeometry):
            parts = jnp.split(parts[0], [geometry.latent_dim], axis=-1)
        return write_parts(pool, layer_id, slots, *parts)

    return jax.lax.fori_loop(geometry.layers.start, geometry.layers.stop, write_layer, pool)


@functools.partial(jax.jit, donate_argnums=0)
def _decode[A: (kvjax.SlotAllocator, kvjax.PageAllocator)](
    allocator: A, seq_lens: jax.Array, last_slots: jax.Array
) -> tuple[A, jax.Array]:
    """A slot for each sequence's newest token."""
    allocator, slots, _ = allocators.decode(allocator, seq_lens, last_slots)
    return allocator, slots


@functools.partial(jax.jit, donate_argnums=0, static_argnames="num_tokens")
def _extend[A: (kvjax.SlotAllocator, kvjax.PageAllocator)](
    allocator: A, prefix_lens: jax.Array, seq_lens: jax.Array, num_tokens: int
) -> tuple[A, jax.Array]:
    """Slots for what sequences have beyond prefixes that end with a page."""
    last_slots = jnp.full_like(seq_lens, _NOWHERE)
    allocator, slots, _ = allocators.extend(
        allocator, prefix_lens, seq_lens, last_slots, num_tokens
    )
    return allocator, slots


@jax.jit
def _read_layer(pool: kvjax.Pool, layer_id: jax.Array, slots: jax.Array) -> Any:
    is_mla = isinstance(pool.geometry, MLAGeometry)
    read_parts: Any = kvjax.mla.read if is_mla else kvjax.mha.read
    planes = pool.geometry.planes
    if content.are_quantized(planes):
        return _stored(planes, read_parts(pool, layer_id, slots, dtype=jnp.float32))
    parts = read_parts(pool, layer_id, slots)
    return (jnp.concatenate(parts, axis=-1),) if is_mla else parts


def _values(rows: list[jax.Array]) -> list[jax.Array]:
    """What a model writes so that quantised planes hold these rows."""
    # Each part has a scale of its own, or all have the only one.
    pairs = zip(rows[::2], itertools.cycle(rows[1::2]), strict=False)
    return [part.astype(jnp.float32) * scale for part, scale in pairs]


def _stored(planes: tuple[PlaneSpec, ...], parts: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """What quantised planes hold where a model reads these parts, of float32."""
    first, second = parts
    stored, scale, inverse = _heads(first, planes[0].dtype)
    if len(planes) == 3:  # a rope has the latent's scale
        return stored, scale, (second * inverse).astype(planes[2].dtype)
    return stored, scale, *_heads(second, planes[2].dtype)[:2]


def _heads(values: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What is stored of heads, their scales, and one over these.

    Scales are powers of two, times which the first number of a head is the largest of its dtype.
    They are computed with as bits, because a float32 division need not be exact on GPU.
    """
    one, largest = (np.float32(n).view(np.int32) for n in (1, content.largest(dtype)))
    scale = jax.lax.bitcast_convert_type(jnp.abs(values[..., :1]), jnp.int32) - largest + one
    inverse = jax.lax.bitcast_convert_type(one + one - scale, jnp.float32)
    stored = (values * inverse).astype(dtype)
    return stored, jax.lax.bitcast_convert_type(scale, jnp.float32), inverse


_free = jax.jit(allocators.free, donate_argnums=0)
_clear = jax.jit(allocators.clear, donate_argnums=0)
_move = jax.jit(kvjax.move, donate_argnums=0)
_gather = jax.jit(kvjax.gather)
_put = jax.jit(kvjax.scatter, donate_argnums=0)


@functools.partial(jax.jit, donate_argnums=0)
def _copy(
    target: kvjax.Pool, source: kvjax.Pool, target_slots: jax.Array, source_slots: jax.Array
) -> kvjax.Pool:
    return kvjax.copy_rows(target, target_slots, source, source_slots)


def _bucket(count: int) -> int:
    """The padded size of an array: few sizes, at most twice as large."""
    return max(_SMALLEST_BUCKET, 1 << (count - 1).bit_length())


def _padded(array: np.ndarray, size: int, value: int = 0) -> np.ndarray:
    return np.pad(array, (0, size - len(array)), constant_values=value)


def _padded_slots(slots: np.ndarray) -> np.ndarray:
    return _padded(slots, _bucket(len(slots)), _NOWHERE)


def _handed_out(slots: jax.Array, count: int) -> np.ndarray:
    """The first ``count`` slots, which an allocator that ran short would have left out."""
    array = np.asarray(slots)[:count]
    assert (array >= 0).all(), "the scheduler asked for more pages than are free"
    return array
