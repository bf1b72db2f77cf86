"""Keys and values of multi-head, grouped-query or multi-query attention, quantised or not."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Int32, Shaped

from kvjax.errors import GeometryError
from kvjax.geometry import MHAGeometry, dtype_name
from kvjax.ops.narrow import narrow
from kvjax.ops.read_quantized_kv import read_quantized_kv
from kvjax.ops.read_rows import read_rows
from kvjax.ops.write_quantized_kv import write_quantized_kv
from kvjax.ops.write_rows import write_rows
from kvjax.pools.pool import (
    LayerId,
    Pool,
    as_values,
    dequantized,
    implementation_for,
    slots_of,
    update,
    view,
)

Scale = float | Shaped[Array, ""] | Shaped[Array, "1"]


def write(
    pool: Pool,
    layer_id: LayerId,
    slots: Int[Array, " n"],
    k: Float[Array, "n num_kv_heads head_dim"],
    v: Float[Array, "n num_kv_heads v_head_dim"],
    *,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    implementation: str | None = None,
) -> Pool:
    """Returns ``pool`` with a row of K and one of V at each slot, in one layer.

    Args:
      pool: updated in place and used up.
      layer_id: the model's layer number, a Python int or a traced scalar.
      slots: where each token goes, distinct; slots that are not there are not written.
      k: cast to the pool's dtype, as ``ops.narrow`` says, or quantised, as
        ``ops.write_quantized_kv`` does.
      v: likewise.
      k_scale: what K is divided by before a cast; ignored where K has the pool's dtype already.
      v_scale: likewise for V.
      implementation: of ``ops.write_rows``, or of ``ops.write_quantized_kv``.

    Raises:
      GeometryError: not a pool of K and V, the layer is not on this rank, or K or V are not one row
        of the right shape for each slot.
      TypeError: K or V is not of floats of at most 32 bits, or a scale is no number.
      ValueError: a scale is not a single number or, on the host, is 0, infinite or NaN; or it is
        given for a quantised pool, which makes its own.
      IndexError: in checks mode, a slot is not there.

    Source: SGLang 0.4.8 ``set_kv_buffer`` (A-MHA-14), its faults (a) to (e), (g) and (h) excepted.
    """
    geometry = _geometry(pool)
    index = geometry.layers.local(layer_id)
    slots = slots_of(pool, slots, distinct=True)
    row_shapes = {spec.name: spec.row_shape for spec in geometry.planes}
    k = as_values("k", k, (slots.size, *row_shapes["k"]))
    v = as_values("v", v, (slots.size, *row_shapes["v"]))
    scales = _scales(geometry, k_scale=k_scale, v_scale=v_scale)
    implementation = implementation_for(pool, implementation)
    return _write(pool, index, slots, (k, v), scales, implementation=implementation)


def read(
    pool: Pool,
    layer_id: LayerId,
    slots: Int[Array, " n"],
    dtype: DTypeLike | None = None,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "n num_kv_heads head_dim"], Float[Array, "n num_kv_heads v_head_dim"]]:
    """K and V at ``slots`` of one layer; zeros for slots that are not there.

    Args:
      pool: read, not changed.
      layer_id: the model's layer number, a Python int or a traced scalar.
      slots: which rows, in any order and as often as wanted.
      dtype: of both results, cast as ``ops.narrow`` says; the pool's of each if ``None``, which is
        the model's where it is quantised.
      implementation: of ``ops.read_rows``, or of ``ops.read_quantized_kv``.

    Raises:
      GeometryError: not a pool of K and V, the layer is not on this rank, or a dtype that no pool
        has.
      IndexError: in checks mode, a slot is not there.
    """
    geometry = _geometry(pool)
    index = geometry.layers.local(layer_id)
    slots = slots_of(pool, slots)
    name = None if dtype is None else dtype_name(dtype)
    if geometry.quantization is None:
        k, v = view(read_rows, pool, index, slots, dtype=name, implementation=implementation)
    else:
        k, v = dequantized(
            read_quantized_kv,
            pool,
            index,
            slots,
            dtype=name or geometry.dtype,
            implementation=implementation,
        )
    return k, v


def _geometry(pool: Pool) -> MHAGeometry:
    if not isinstance(pool.geometry, MHAGeometry):
        raise GeometryError(f"need a pool of K and V, this one is of {pool.geometry}")
    return pool.geometry


def _scales(geometry: MHAGeometry, **scales: Scale | None) -> tuple[Float32[Array, ""] | None, ...]:
    if geometry.quantization is not None:
        for name, scale in scales.items():
            if scale is not None:
                raise ValueError(f"{name} is given, but a quantised pool makes its own; leave it")
    return tuple(_scale(name, scale) for name, scale in scales.items())


def _scale(name: str, scale: Any) -> Float32[Array, ""] | None:
    if scale is None:
        return None
    if not isinstance(scale, int | float | np.ndarray | np.generic | jax.Array):
        raise TypeError(f"{name} is {type(scale)}, need a number or an array of one")
    if np.size(scale) != 1 or np.ndim(scale) > 1:
        raise ValueError(f"{name} has shape {np.shape(scale)}, need a single number")
    if not isinstance(scale, jax.Array):
        with np.errstate(over="ignore"):
            scale = np.asarray(scale).astype(np.float32).item()
        if scale == 0 or not math.isfinite(scale):
            raise ValueError(f"{name}={scale} cannot be divided by")
    return jnp.asarray(scale, jnp.float32).reshape(())


@partial(jax.jit, donate_argnums=0, static_argnames="implementation")
def _write(
    pool: Pool,
    index: LayerId,
    slots: Int32[Array, " n"],
    values: tuple[Float[Array, "..."], ...],
    scales: tuple[Float32[Array, ""] | None, ...],
    implementation: str | None,
) -> Pool:
    if _geometry(pool).quantization is not None:
        return update(
            write_quantized_kv, pool, index, slots, *values, implementation=implementation
        )
    rows = tuple(
        narrow(value, spec.dtype, scale)
        for value, spec, scale in zip(values, pool.geometry.planes, scales, strict=True)
    )
    return update(write_rows, pool, index, slots, rows, implementation=implementation)
