"""Rows whose every bit follows from a number, their code: pools of any size can be checked by it.

What happens to rows happens to an array of codes, ``[layers, rows]``; code 0 is a row of zeros.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import Pool

_PRIMES = np.array([2_654_435_761, 40_503, 2_246_822_519], np.uint32)


def bits(codes, spec, position):
    """The rows of these codes, of the plane at ``position``, as unsigned integers."""
    width = math.prod(spec.row_shape)
    codes = jnp.asarray(codes, jnp.uint32)[..., None]
    mixed = codes * _PRIMES[0] ^ (jnp.arange(width, dtype=jnp.uint32) * _PRIMES[1] + position)
    mixed = (mixed ^ mixed >> 15) * _PRIMES[2]
    mixed = jnp.where(codes == 0, 0, mixed ^ mixed >> 13)
    dtype = f"uint{spec.row_bytes // width * 8}"
    return mixed.astype(dtype).reshape(*codes.shape[:-1], *spec.row_shape)


def rows(geometry, codes):
    """The rows of these codes, in the planes' dtypes."""
    return tuple(
        jax.lax.bitcast_convert_type(bits(codes, spec, position), spec.dtype)
        for position, spec in enumerate(geometry.planes)
    )


def first_codes(geometry):
    shape = (len(geometry.layers), geometry.num_rows)
    return np.arange(1, 1 + math.prod(shape), dtype=np.uint32).reshape(shape)


def create(geometry):
    """A pool of rows that are all different."""

    @jax.jit
    def planes():
        layers, slots = jnp.ogrid[: len(geometry.layers), : geometry.num_rows]
        codes = 1 + layers * geometry.num_rows + slots  # first_codes, without taking memory
        return tuple(
            jax.lax.bitcast_convert_type(bits(codes, spec, position), spec.storage_dtype)
            for position, spec in enumerate(geometry.planes)
        )

    return Pool(planes(), geometry)


@functools.partial(jax.jit, static_argnames=("spec", "position"))
def _num_wrong(plane, codes, spec, position):
    expected = bits(codes, spec, position)
    actual = jax.lax.bitcast_convert_type(plane, expected.dtype)
    return (actual != expected).any(axis=(-2, -1)).sum()


def num_wrong(pool, codes):
    """How many rows, of any layer and plane, are not those of ``codes``."""
    return sum(
        int(_num_wrong(plane, codes, spec, position))
        for position, (plane, spec) in enumerate(
            zip(pool.planes, pool.geometry.planes, strict=True)
        )
    )
