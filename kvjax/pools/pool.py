"""What a pool is, and how to look at one."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int32, Shaped

from kvjax.errors import GeometryError, UnsupportedError
from kvjax.geometry import Geometry
from kvjax.ops import narrow
from kvjax.slots import are_there, as_slots, check

Rows = tuple[Shaped[Array, "..."], ...]
"""Rows of each plane, in its dtype: ``[layers, n, *row]``, or ``[n, *row]`` of one layer."""

LayerId = int | Int32[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
    """The planes of one pipeline stage.

    Functions that return a pool update the given one in place and use it up (``fork`` it first to
    keep it); if they raise, it is as good as before. Build one with ``create``: the class checks
    nothing, because JAX rebuilds it with tracers and other stand-ins.

    Attributes:
      planes: ``[layers, rows, *row]`` for each of ``geometry.planes``, in its storage dtype.
      geometry: sizes, layers and dtypes.
    """

    planes: tuple[Shaped[Array, "layers rows ..."], ...]
    geometry: Geometry = dataclasses.field(metadata={"static": True})


def create(geometry: Geometry, *, sharding: jax.sharding.Sharding | None = None) -> Pool:
    """A pool of zeros.

    Args:
      geometry: what to allocate.
      sharding: where; JAX's default device if ``None``.
    """
    leading = (len(geometry.layers), geometry.num_rows)
    planes = tuple(
        jnp.zeros((*leading, *spec.row_shape), spec.storage_dtype, device=sharding)
        for spec in geometry.planes
    )
    return Pool(planes, geometry)


@jax.jit
def fork(pool: Pool) -> Pool:
    """A copy that shares no memory with ``pool``, for whoever wants to keep both."""
    return jax.tree.map(jnp.copy, pool)


def layer(pool: Pool, layer_id: LayerId) -> Rows:
    """The planes of one layer, ``[rows, *row]`` each.

    Under ``jit``, XLA may copy the layer where it does not fuse the slice into its reader;
    ``page_view`` never does.

    Raises:
      GeometryError: the layer is not on this rank.
    """
    index = pool.geometry.layers.local(layer_id)
    there = are_there(index, 0, len(pool.geometry.layers))
    planes = [jax.lax.dynamic_index_in_dim(plane, index, keepdims=False) for plane in pool.planes]
    return typed(pool, [jnp.where(there, plane, 0) for plane in planes])


def page_view(
    pool: Pool, layer_id: LayerId, page_table: Int32[Array, "..."]
) -> tuple[Rows, Int32[Array, "..."]]:
    """One layer as paged-attention kernels want it, without a copy.

    Returns:
      The planes of all layers as pages, ``[layers * pages, page_size, *row]``, and ``page_table``
      moved to the layer's pages, with -1 for pages that are not there.

    Raises:
      GeometryError: the layer is not on this rank.
      UnsupportedError: called outside ``jit``, where a view would be a copy of the pool.
    """
    if not any(isinstance(x, Tracer) for x in (*pool.planes, layer_id, page_table)):
        raise UnsupportedError("page_view copies nothing inside jit only; call it there")
    geometry = pool.geometry
    index, num_pages = geometry.layers.local(layer_id), geometry.num_rows // geometry.page_size
    table = jnp.asarray(page_table, jnp.int32)
    there = are_there(index, 0, len(geometry.layers)) & are_there(table, 0, num_pages)
    pages = [plane.reshape(-1, geometry.page_size, *plane.shape[2:]) for plane in pool.planes]
    return typed(pool, pages), jnp.where(there, table + index * num_pages, -1).astype(jnp.int32)


def update(
    operation: Callable[..., Any],
    pool: Pool,
    *operands: Any,
    implementation: str | None = None,
    **options: Any,
) -> Pool:
    """``pool`` with its planes as ``operation`` returns them, in place."""
    implementation = implementation_for(pool, implementation)
    return _update(operation, pool, *operands, implementation=implementation, **options)


def view(
    operation: Callable[..., Any],
    pool: Pool,
    *operands: Any,
    dtype: str | None = None,
    implementation: str | None = None,
) -> Rows:
    """What ``operation`` reads in the pool's planes, in their dtypes or ``cast``."""
    implementation = implementation_for(pool, implementation)
    return _view(operation, pool, *operands, dtype=dtype, implementation=implementation)


def dequantized(
    operation: Callable[..., Any],
    pool: Pool,
    *operands: Any,
    dtype: str,
    implementation: str | None = None,
) -> tuple[Any, ...]:
    """What ``operation`` makes of the planes of a quantised pool, numbers in ``dtype``."""
    implementation = implementation_for(pool, implementation)
    return _dequantized(operation, pool, *operands, dtype=dtype, implementation=implementation)


def implementation_for(pool: Pool, name: str | None) -> str | None:
    """``name``; if ``None``, the reference for a pool that is elsewhere than JAX's default backend.

    Operations see the default backend only. Inside ``jit`` nothing says where a pool is.
    """
    plane = pool.planes[0]
    if name is not None or isinstance(plane, Tracer) or not isinstance(plane, jax.Array):
        return name
    device = next(iter(plane.sharding.device_set))
    return None if device.platform == jax.default_backend() else "reference"


@partial(
    jax.jit, static_argnums=0, donate_argnums=1, static_argnames=("disjoint", "implementation")
)
def _update(operation: Callable[..., Any], pool: Pool, *operands: Any, **options: Any) -> Pool:
    planes = operation(pool.planes, *operands, first_slot=pool.geometry.first_slot, **options)
    return dataclasses.replace(pool, planes=planes)


@partial(jax.jit, static_argnums=0, static_argnames=("dtype", "implementation"))
def _view(
    operation: Callable[..., Any], pool: Pool, *operands: Any, dtype: str | None, **options: Any
) -> Rows:
    rows = operation(pool.planes, *operands, first_slot=pool.geometry.first_slot, **options)
    return cast(typed(pool, rows), dtype)


@partial(jax.jit, static_argnums=0, static_argnames=("dtype", "implementation"))
def _dequantized(
    operation: Callable[..., Any], pool: Pool, *operands: Any, **options: Any
) -> tuple[Any, ...]:
    return operation(pool.planes, *operands, first_slot=pool.geometry.first_slot, **options)


def typed(pool: Pool, rows: Sequence[Shaped[Array, "..."]]) -> Rows:
    """Rows as the planes store them in the planes' dtypes."""
    specs = pool.geometry.planes
    return tuple(narrow.typed(new, spec.dtype) for new, spec in zip(rows, specs, strict=True))


def cast(rows: Sequence[Float[Array, "..."]], dtype: str | None) -> Rows:
    """Rows in ``dtype``, as ``ops.narrow`` casts them; as they are if ``None``."""
    if dtype is None:
        return tuple(rows)
    return tuple(narrow.typed(narrow.narrow(new, dtype), dtype) for new in rows)


def slots_of(
    pool: Pool, slots: Any, *, name: str = "slots", distinct: bool = False
) -> Int32[Array, " n"]:
    """``slots`` as int32, of ``pool`` and ``distinct`` as far as checks mode looks.

    Raises:
      TypeError, ValueError, OverflowError: ``as_slots`` refuses them.
      IndexError: in checks mode, a slot is not there.
      ValueError: in checks mode, one repeats that should not.
    """
    slots = as_slots(slots, name=name)
    geometry = pool.geometry
    check(slots, geometry.first_slot, geometry.num_rows, name=name, distinct=distinct)
    return slots


def require_same_length(**slots: Int32[Array, " _"]) -> None:
    """Raises unless the named arguments have one entry each for every row.

    Raises:
      ValueError: says how many each has.
    """
    if len({values.size for values in slots.values()}) > 1:
        sizes = ", ".join(f"{name} has {values.size}" for name, values in slots.items())
        raise ValueError(f"{sizes} entries; need one of each for every row")


def as_values(name: str, values: Any, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """``values`` as an array of exactly that shape; nothing is broadcast.

    Raises:
      GeometryError: another shape.
      TypeError: not an array, or not of floating-point numbers of at most 32 bits.
    """
    dtype = getattr(values, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize > 4:
        raise TypeError(f"{name} is {dtype or type(values)}, need an array of float32 or narrower")
    if values.shape != shape:
        raise GeometryError(f"{name} has shape {values.shape}, need {shape}")
    return _own(values)


def require_same_planes(first: str, one: Any, second: str, other: Any) -> None:
    """Raises unless two geometries, or what came from them, agree on layers, rows and dtypes.

    Raises:
      GeometryError: names them as ``first`` and ``second``, and says what differs.
    """
    for what in ("layers", "planes"):
        ours, theirs = getattr(one, what), getattr(other, what)
        if ours != theirs:
            raise GeometryError(f"{what} of {first}, {ours}, and of {second}, {theirs}, differ")


def require_rows(pool: Pool, rows: Sequence[Any], *leading: int) -> None:
    """Raises unless ``rows`` are ``[*leading, *row]`` for each plane, in its dtype.

    Raises:
      TypeError: not a sequence of arrays.
      GeometryError: says what they are instead.
    """
    specs = pool.geometry.planes
    if not isinstance(rows, Sequence):
        raise TypeError(f"rows is {type(rows)}, need a sequence, an array for each plane")
    if len(rows) != len(specs):
        raise GeometryError(f"rows has {len(rows)} planes, the pool {len(specs)}")
    for spec, new in zip(specs, rows, strict=True):
        if not hasattr(new, "dtype"):
            raise TypeError(f"rows of plane {spec.name!r} are {type(new)}, need an array")
        shape = (*leading, *spec.row_shape)
        if np.shape(new) != shape or new.dtype != spec.dtype:
            raise GeometryError(
                f"rows of plane {spec.name!r} are {new.dtype}{list(np.shape(new))}, "
                f"need {spec.dtype}{list(shape)}"
            )


def as_rows(pool: Pool, rows: Sequence[Any], *leading: int) -> Rows:
    """``rows``, as ``require_rows`` wants them, the way that planes store them."""
    require_rows(pool, rows, *leading)
    specs = pool.geometry.planes
    return tuple(
        narrow.typed(_own(new), spec.storage_dtype) for new, spec in zip(rows, specs, strict=True)
    )


def _own(values: Any) -> Array:
    """An array that shares no memory with the caller's: JAX on CPU would, with NumPy's (DL5).

    ``jnp.array`` does too, until it gets round to the copy.
    """
    return jnp.asarray(values.copy()) if isinstance(values, np.ndarray) else values
