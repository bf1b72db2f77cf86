"""Latent and rope rows of multi-head latent attention, as they are or quantised."""

from functools import partial
from typing import Any

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int32

from kvjax.errors import GeometryError
from kvjax.geometry import MLAGeometry, dtype_name
from kvjax.ops.narrow import narrow
from kvjax.ops.read_latent_rope import read_latent_rope
from kvjax.ops.read_quantized import read_quantized
from kvjax.ops.types import Planes
from kvjax.ops.write_latent_rope import write_latent_rope
from kvjax.ops.write_quantized import write_quantized
from kvjax.ops.write_rows import write_rows
from kvjax.pools.pool import (
    LayerId,
    Pool,
    as_values,
    cast,
    dequantized,
    implementation_for,
    slots_of,
    typed,
    update,
)


def write(
    pool: Pool,
    layer_id: LayerId,
    slots: Int[Array, " n"],
    latent: Float[Array, "n 1 latent_dim"],
    rope: Float[Array, "n 1 rope_dim"],
    *,
    implementation: str | None = None,
) -> Pool:
    """Returns ``pool`` with the two parts of a row at each slot, in one layer.

    Args:
      pool: updated in place and used up.
      layer_id: the model's layer number, a Python int or a traced scalar.
      slots: where each token goes, distinct; slots that are not there are not written.
      latent: cast to the pool's dtype, as ``ops.narrow`` says, or quantised, as
        ``ops.write_quantized`` does.
      rope: likewise, whatever the dtype of ``latent``.
      implementation: of ``ops.write_latent_rope``, or of ``ops.write_quantized``.

    Raises:
      GeometryError: not a pool of latent rows, the layer is not on this rank, or a part is not one
        row of the right shape for each slot.
      TypeError: a part is not of floats of at most 32 bits.
      IndexError: in checks mode, a slot is not there.

    Source: SGLang 0.4.8 ``set_mla_kv_buffer`` (A-MLA-10), TokenSpeed's (B-M-16), their faults
    excepted.
    """
    geometry = _geometry(pool)
    index = geometry.layers.local(layer_id)
    slots = slots_of(pool, slots, distinct=True)
    latent = as_values("latent", latent, (slots.size, 1, geometry.latent_dim))
    rope = as_values("rope", rope, (slots.size, 1, geometry.rope_dim))
    implementation = implementation_for(pool, implementation)
    return _write(pool, index, slots, (latent, rope), implementation=implementation)


def write_joined(
    pool: Pool,
    layer_id: LayerId,
    slots: Int[Array, " n"],
    rows: Float[Array, "n 1 latent_dim+rope_dim"],
    *,
    implementation: str | None = None,
) -> Pool:
    """Returns ``pool`` with whole rows, latent first, at each slot; else as ``write``.

    Source: SGLang 0.4.8 ``MLATokenToKVPool.set_kv_buffer`` (A-MLA-9).
    """
    geometry = _geometry(pool)
    index = geometry.layers.local(layer_id)
    slots = slots_of(pool, slots, distinct=True)
    width = geometry.latent_dim + geometry.rope_dim
    rows = as_values("rows", rows, (slots.size, 1, width))
    implementation = implementation_for(pool, implementation)
    return _write(pool, index, slots, (rows,), implementation=implementation)


def read(
    pool: Pool,
    layer_id: LayerId,
    slots: Int[Array, " n"],
    dtype: DTypeLike | None = None,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "n 1 latent_dim"], Float[Array, "n 1 rope_dim"]]:
    """Latent and rope at ``slots`` of one layer; zeros for slots that are not there.

    Args:
      pool: read, not changed.
      layer_id: the model's layer number, a Python int or a traced scalar.
      slots: which rows, in any order and as often as wanted.
      dtype: of the result, cast as ``ops.narrow`` says; the pool's if ``None``, which is the
        model's where it is quantised.
      implementation: of ``ops.read_latent_rope``, or of ``ops.read_quantized``.

    Raises:
      GeometryError: not a pool of latent rows, the layer is not on this rank, or a dtype that no
        pool has.
      IndexError: in checks mode, a slot is not there.

    Source: TokenSpeed ``get_mla_kv_buffer`` (B-M-17).
    """
    geometry = _geometry(pool)
    index = geometry.layers.local(layer_id)
    slots = slots_of(pool, slots)
    dtype = dtype_name(geometry.dtype if dtype is None else dtype)
    if geometry.quantization is None:
        implementation = implementation_for(pool, implementation)
        return _read(pool, index, slots, dtype, implementation=implementation)
    latent, rope = dequantized(
        read_quantized, pool, index, slots, dtype=dtype, implementation=implementation
    )
    return latent, rope


def _geometry(pool: Pool) -> MLAGeometry:
    if not isinstance(pool.geometry, MLAGeometry):
        raise GeometryError(f"need a pool of latent rows, this one is of {pool.geometry}")
    return pool.geometry


@partial(jax.jit, donate_argnums=0, static_argnames="implementation")
def _write(
    pool: Pool,
    index: LayerId,
    slots: Int32[Array, " n"],
    parts: tuple[Float[Array, "n 1 _"], ...],
    implementation: str | None,
) -> Pool:
    geometry = _geometry(pool)
    if geometry.quantization is not None:
        if len(parts) == 1:
            parts = parts[0][..., : geometry.latent_dim], parts[0][..., geometry.latent_dim :]
        return update(write_quantized, pool, index, slots, *parts, implementation=implementation)
    (spec,) = geometry.planes
    parts = tuple(narrow(part, spec.dtype) for part in parts)
    if len(parts) == 1:
        return update(write_rows, pool, index, slots, parts, implementation=implementation)
    return update(_write_parts, pool, index, slots, *parts, implementation=implementation)


def _write_parts(planes: Planes, *operands: Any, **options: Any) -> Planes:
    return (write_latent_rope(*planes, *operands, **options),)


@partial(jax.jit, static_argnames=("dtype", "implementation"))
def _read(
    pool: Pool,
    index: LayerId,
    slots: Int32[Array, " n"],
    dtype: str,
    implementation: str | None,
) -> tuple[Float[Array, "n 1 _"], Float[Array, "n 1 _"]]:
    geometry = _geometry(pool)
    (plane,) = pool.planes
    latent, rope = read_latent_rope(
        plane,
        index,
        slots,
        geometry.latent_dim,
        first_slot=geometry.first_slot,
        implementation=implementation,
    )
    (latent,), (rope,) = typed(pool, [latent]), typed(pool, [rope])
    latent, rope = cast((latent, rope), dtype)
    return latent, rope
