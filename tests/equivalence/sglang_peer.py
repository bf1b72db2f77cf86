"""SGLang 0.4.8's own pool as a peer: given all that it gets right, and kept from what it does not.

=========  ============================================  ======================================
row        what it gets wrong                            what it is given instead
=========  ============================================  ======================================
A-KV-6     keeps what is written to the padding page     the same; that page is not compared
A-IDX      wraps, crashes or corrupts where slots are    only the slots that are there; results
           not there                                     and moves are completed with zeros
A-MHA-8    an index must be contiguous for its kernels   contiguous slots
A-MHA-14a  divides the caller's tensors in place         tensors of its own
A-MHA-14b  divides in the caller's dtype                 narrow rows, unless that is float32
A-MHA-14c  looks at the dtype of K alone                 narrow rows where those of V differ
A-FP8      overflow depends on the version of torch      narrow rows where values overflow
A-MOVE     races, on a GPU, where moves overlap          a gather and a scatter
A-MLA-1    a latent part that is no multiple of 128      the two parts joined
A-MLA-2    a last dimension with gaps                    rows in one piece
A-MLA-10   forgets start_layer; looks at the dtype of    the position of the layer; narrow parts
           the latent part alone                         where those of the rope differ
A-MLA-13   cannot move latent rows                       a gather and a scatter
B-M-8      (as any launch) cannot do nothing on a GPU    nothing, where no slot is there
=========  ============================================  ======================================
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import torch

from kvjax.geometry import MHAGeometry
from tests import oracles
from tests.equivalence.peers import Layout, is_fp8, narrowed, parts_of
from tests.equivalence.torch_peer import Layer, TorchPeer
from tests.torch.tensors import to_torch, tokens_last, transposed


class SglangPeer:
    """Wraps one of SGLang's pools."""

    def __init__(self, geometry: Any, planes, pool):
        self.geometry = geometry
        self._inner = TorchPeer(geometry, planes, pool)
        self._is_mha = isinstance(geometry, MHAGeometry)

    def _where(self, slots, *, padding=False):
        first = 0 if padding else self.geometry.first_slot
        return np.flatnonzero((slots >= first) & (slots < self.geometry.num_rows))

    def _without_padding(self, arrays, axis):
        for array in arrays:
            page = [slice(None)] * axis + [slice(self.geometry.first_slot)]
            oracles.bits(array)[tuple(page)] = 0
        return arrays

    def _completed(self, rows, there, num_slots):
        results = []
        for of_plane in rows:
            result = np.zeros((len(of_plane), num_slots, *of_plane.shape[2:]), of_plane.dtype)
            result[:, there] = of_plane
            results.append(result)
        return results

    def planes(self):
        return self._without_padding(self._inner.planes(), 1)

    def layer(self, layer_id):
        return self._without_padding([a.copy() for a in self._inner.layer(layer_id)], 0)

    def write(self, layer_id, slots, values, scales, layout):
        there = self._where(slots, padding=True)
        layout = dataclasses.replace(layout, strided_slots=False)
        dtypes = [spec.dtype for spec in self.geometry.planes]
        if not _narrows_as_we_do(values, dtypes, scales):
            values, scales = narrowed(self.geometry, values, scales), [None] * len(scales)
        if self._inner.device.type == "cuda":  # else it multiplies by the inverse
            scales = [s and dataclasses.replace(s, kind="one element") for s in scales]
        mutable = [value[there] for value in values]
        self._write(layer_id, slots[there], mutable, scales, layout)

    def _write(self, layer_id, slots, values, scales, layout):
        inner, layer = self._inner, Layer(layer_id)
        tensors = [inner.values(value, layout) for value in values]
        extra = [s and s.of(inner.tensor) for s in scales] if self._is_mha else [None]
        inner.pool.set_kv_buffer(layer, inner.slots(slots, layout), *tensors, *extra)

    def write_parts(self, layer_id, slots, parts, layout):
        there = self._where(slots, padding=True)
        (spec,) = self.geometry.planes
        if not _narrows_as_we_do(parts, [spec.dtype] * 2, [None] * 2):
            parts = [oracles.narrow(part, spec.dtype) for part in parts]
        if self.geometry.latent_dim % 128:
            return self.write(layer_id, slots, [np.concatenate(parts, -1)], [None], layout)
        if layout.values in (transposed, tokens_last):
            layout = Layout(layout.slots)
        layout = dataclasses.replace(layout, strided_slots=False)
        if there.size:
            parts = [part[there] for part in parts]
            position = layer_id - self.geometry.layers.start
            self._inner.write_parts(position, slots[there], parts, layout)

    def read_parts(self, layer_id, slots, dtype):
        (rows,) = self.layer(layer_id)
        there = self._where(slots)
        ((rows,),) = self._completed([rows[None, slots[there]]], there, len(slots))
        return parts_of(self.geometry, rows, dtype)

    def gather(self, slots):
        there = self._where(slots)
        return self._completed(self._inner.gather(slots[there]), there, len(slots))

    def scatter(self, slots, rows):
        there = self._where(slots)
        self._inner.scatter(slots[there], [new[:, there] for new in rows])

    def scatter_layer(self, layer_id, slots, rows):
        there = self._where(slots)
        self._inner.scatter_layer(layer_id, slots[there], [new[there] for new in rows])

    def move(self, dst, src, disjoint):
        both = np.intersect1d(self._where(dst), self._where(src))
        targets, sources = dst[both], src[both]
        on_gpu = self._inner.device.type == "cuda"
        if not both.size:
            pass
        elif self._is_mha and not (on_gpu and np.isin(targets, sources).any()):
            self._inner.move(targets, sources, False)
        else:
            self._inner.scatter(targets, self._inner.gather(sources))
        absent = dst[np.setdiff1d(self._where(dst), both)]
        nothing = [np.zeros_like(rows) for rows in self._inner.gather(absent)]
        self._inner.scatter(absent, nothing)

    def offload(self, slots, chunk_tokens):
        there = self._where(slots)
        _, rows = self._inner.offload(slots[there], chunk_tokens)
        rows = self._completed(rows, there, len(slots))
        return rows, rows

    def restore(self, slots, copy, chunk_tokens):
        there = self._where(slots)
        rows = [new[:, there] for new in copy]
        stored = [to_torch(new) for new in rows]
        stored = [t.view(torch.uint8) if t.element_size() == 1 else t for t in stored]
        chunks = [
            [
                [part[layer, start : start + chunk_tokens] for part in stored]
                for start in range(0, there.size, chunk_tokens)
            ]
            for layer in range(len(self.geometry.layers))
        ]
        if not self._is_mha:
            chunks = [[part for (part,) in of_layer] for of_layer in chunks]
        self._inner.restore(slots[there], chunks, chunk_tokens)

    def infos(self):
        return self._inner.infos()


def _narrows_as_we_do(values, dtypes, scales) -> bool:
    if len({value.dtype for value in values}) > 1:
        return False
    for value, dtype, scale in zip(values, dtypes, scales, strict=True):
        if value.dtype == dtype:
            continue
        if scale is not None and value.dtype != np.float32:
            return False
        if is_fp8(dtype):
            with np.errstate(over="ignore"):
                quotient = value.astype(np.float32) / np.float32(scale.number if scale else 1)
            limit = np.float32(ml_dtypes.finfo(dtype).max)
            if not (np.abs(quotient) <= limit).all():
                return False
    return True
