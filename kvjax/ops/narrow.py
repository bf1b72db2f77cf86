"""Casts values to what a plane stores."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped


def narrow(
    values: Float[Array, "*shape"], dtype: str, scale: Float32[Array, ""] | None = None
) -> Shaped[Array, "*shape"]:
    """Returns ``values / scale`` in ``dtype``; of an fp8 dtype the bits, as ``uint8``.

    Values that have the dtype already keep their bits, and the scale is ignored. Else the division
    is done in float32 (on CPU, XLA takes its subnormal numbers for zeros), and both it and the cast
    round to nearest even. A cast to fp8 saturates at the largest finite value, infinities included;
    NaN stays NaN.

    Source: SGLang 0.4.8 ``set_kv_buffer`` (A-MHA-14), overflow settled here (A-FP8).
    """
    is_fp8 = dtype.startswith("float8")
    if values.dtype != dtype:
        if scale is not None:
            values = quotient(values, scale)
        if is_fp8:
            limit = float(jnp.finfo(dtype).max)
            values = jnp.clip(values.astype(jnp.float32), -limit, limit)
        values = values.astype(dtype)
    return jax.lax.bitcast_convert_type(values, jnp.uint8) if is_fp8 else values


def typed(values: Shaped[Array, "*shape"], dtype: str) -> Shaped[Array, "*shape"]:
    """The same bits in ``dtype``: fp8 of what ``narrow`` returned, and the reverse."""
    return values if values.dtype == dtype else jax.lax.bitcast_convert_type(values, dtype)


def quotient(
    values: Float[Array, "*shape"], scale: Float32[Array, "*_"]
) -> Float32[Array, "*shape"]:
    """``values / scale``, as if rounded once to float32, on every backend.

    ``scale`` is one number, or as many as broadcast to ``values``.

    XLA's float32 division on GPU is off by one bit now and then, and a float64 division of float32
    numbers that is rounded to float32 becomes one there. A float64 product with the inverse does
    not, and is precise enough that rounding it gives the right quotient: of 24-bit numbers, none
    that is a normal number lies closer to a tie than a part in 2^49.
    """
    with jax.enable_x64(True):
        inverse = 1 / scale.astype(jnp.float64)
        quotients = (values.astype(jnp.float64) * inverse).astype(jnp.float32)
    # Changes nothing, but keeps XLA on GPU from making one conversion of this one and the next,
    # which would round once.
    return jnp.where(jnp.isnan(quotients), jnp.nan, quotients)
