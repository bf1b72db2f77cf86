"""A pool of kvjax as a peer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import mha, mla
from kvjax.geometry import MHAGeometry
from tests import oracles
from tests.equivalence.peers import Arrays, is_fp8, logical, of_infos, without_payload


class KvjaxPeer:
    """kvjax's functions, each compiled by itself."""

    def __init__(self, geometry: Any, planes: Arrays, implementation: str | None = None):
        self.geometry = geometry
        # Copies, because on CPU JAX may share NumPy's memory, and update it in place.
        stored = [jnp.array(oracles.bits(p) if is_fp8(p.dtype) else p) for p in planes]
        self.pool = kvjax.Pool(tuple(stored), geometry)
        self._run_by: Any = {"implementation": implementation}

    def planes(self):
        return logical(self.geometry, self.pool.planes)

    def write(self, layer_id, slots, values, scales, layout):
        values = [_owned(value) for value in values]
        if isinstance(self.geometry, MHAGeometry):
            k_scale, v_scale = (scale and scale.of(jnp.asarray) for scale in scales)
            self.pool = mha.write(
                self.pool,
                layer_id,
                slots,
                *values,
                k_scale=k_scale,
                v_scale=v_scale,
                **self._run_by,
            )
        else:
            self.pool = mla.write_joined(self.pool, layer_id, slots, *values, **self._run_by)

    def write_parts(self, layer_id, slots, parts, layout):
        parts = [_owned(part) for part in parts]
        self.pool = mla.write(self.pool, layer_id, slots, *parts, **self._run_by)

    def read_parts(self, layer_id, slots, dtype):
        read = mha.read if isinstance(self.geometry, MHAGeometry) else mla.read
        parts = read(self.pool, layer_id, slots, dtype, **self._run_by)
        if self.geometry.quantization is not None:
            dtype = dtype or self.geometry.dtype
        return [without_payload(np.asarray(part), dtype) for part in parts]

    def layer(self, layer_id):
        return [np.asarray(plane) for plane in kvjax.layer(self.pool, layer_id)]

    def gather(self, slots):
        return [np.asarray(rows) for rows in kvjax.gather(self.pool, slots, **self._run_by)]

    def scatter(self, slots, rows):
        rows = tuple(_owned(new) for new in rows)
        self.pool = kvjax.scatter(self.pool, slots, rows, **self._run_by)

    def scatter_layer(self, layer_id, slots, rows):
        rows = tuple(_owned(new) for new in rows)
        self.pool = kvjax.scatter_layer(self.pool, layer_id, slots, rows, **self._run_by)

    def move(self, dst, src, disjoint):
        self.pool = kvjax.move(self.pool, dst, src, disjoint=disjoint, **self._run_by)

    def offload(self, slots, chunk_tokens):
        copy = kvjax.offload(self.pool, slots, chunk_tokens=chunk_tokens)
        return copy, list(copy.rows)

    def restore(self, slots, copy, chunk_tokens):
        self.pool = kvjax.restore(self.pool, slots, copy, chunk_tokens=chunk_tokens)

    def infos(self):
        jax.block_until_ready(self.pool.planes)
        return of_infos(kvjax.buffer_infos(self.pool), self.planes())


def _owned(array):
    return jnp.asarray(array.copy())
