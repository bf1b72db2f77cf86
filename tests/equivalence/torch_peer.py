"""A pool with SGLang's methods as a peer."""

import math
from typing import Any

import numpy as np
import torch

from kvjax.geometry import MHAGeometry
from tests import oracles
from tests.equivalence.peers import Arrays, Layout, logical, of_infos, without_payload
from tests.torch.tensors import to_numpy, to_torch


class TorchPeer:
    """A pool with SGLang's methods, kvtorch's or its own, or TokenSpeed's quantised one."""

    def __init__(self, geometry: Any, planes: Arrays, pool: Any):
        self.geometry = geometry
        self.pool = pool
        self._is_mha = isinstance(geometry, MHAGeometry)
        self._is_quantized = geometry.quantization is not None
        self._is_one_plane = len(geometry.planes) == 1
        self.device = torch.device(pool.device)
        for buffers, plane in zip(self._buffers(), planes, strict=True):
            for buffer, of_layer in zip(buffers, plane, strict=True):
                buffer.copy_(self.tensor(of_layer).view(buffer.dtype))

    def _buffers(self):
        pool = self.pool
        if not self._is_mha:
            return [*zip(*pool.kv_buffer, strict=True)] if self._is_quantized else [pool.kv_buffer]
        if self._is_quantized:
            return [pool.k_buffer, pool.k_scale_buffer, pool.v_buffer, pool.v_scale_buffer]
        return [pool.k_buffer, pool.v_buffer]

    def tensor(self, array):
        return to_torch(array).to(self.device)

    def slots(self, slots, layout=None):
        layout = layout or Layout()
        slots = torch.from_numpy(np.array(slots)).to(self.device, layout.slots)
        if layout.strided_slots:
            slots = torch.stack([slots, torch.full_like(slots, self.geometry.first_slot)], 1)[:, 0]
        return slots

    def values(self, array, layout):
        return layout.values(self.tensor(array), array.ndim - 1)

    def planes(self):
        return logical(
            self.geometry,
            [np.stack([to_numpy(buffer) for buffer in buffers]) for buffers in self._buffers()],
        )

    def write(self, layer_id, slots, values, scales, layout):
        tensors = [self.values(value, layout) for value in values]
        if self._is_mha:
            tensors += [scale and scale.of(self.tensor) for scale in scales]
        else:
            tensors.append(None)  # cache_v is in cache_k (A-MLA-9)
        self.pool.set_kv_buffer(Layer(layer_id), self.slots(slots, layout), *tensors)
        for tensor, value in zip(tensors, values, strict=False):
            oracles.assert_same_bits(to_numpy(tensor), value)  # A-MHA-14a

    def write_parts(self, layer_id, slots, parts, layout):
        tensors = [self.values(part, layout) for part in parts]
        self.pool.set_mla_kv_buffer(Layer(layer_id), self.slots(slots, layout), *tensors)
        for tensor, part in zip(tensors, parts, strict=True):
            oracles.assert_same_bits(to_numpy(tensor), part)

    def read_parts(self, layer_id, slots, dtype):
        into = None if dtype is None else getattr(torch, dtype)
        read = self.pool.get_mha_kv_buffer if self._is_mha else self.pool.get_mla_kv_buffer
        parts = read(Layer(layer_id), self.slots(slots), into)
        if self._is_quantized:
            dtype = dtype or self.geometry.dtype
        return [without_payload(to_numpy(part), dtype) for part in parts]

    def layer(self, layer_id):
        key, value = self.pool.get_kv_buffer(layer_id)
        if self._is_quantized:
            tensors = [*key, *value] if self._is_mha else key
            position = layer_id - self.geometry.layers.start
            for tensor, buffers in zip(tensors, self._buffers(), strict=True):
                assert tensor.data_ptr() == buffers[position].data_ptr()
            return logical(self.geometry, map(to_numpy, tensors))
        index = layer_id - self.geometry.layers.start
        for returned, alone, buffers in (
            (key, self.pool.get_key_buffer(layer_id), self._buffers()[0]),
            (value, self.pool.get_value_buffer(layer_id), self._buffers()[-1]),
        ):
            assert returned.data_ptr() == alone.data_ptr() == buffers[index].data_ptr()
            assert returned.stride() == alone.stride() == buffers[index].stride()
        if self._is_mha:
            return [to_numpy(key), to_numpy(value)]
        oracles.assert_same_bits(to_numpy(value), to_numpy(key)[..., : self.geometry.latent_dim])
        return [to_numpy(key)]

    def gather(self, slots):
        flat = self.pool.get_flat_data(self.slots(slots))
        return logical(self.geometry, map(to_numpy, [flat] if self._is_one_plane else flat))

    def _flat(self, rows):
        stored = [self.tensor(new) for new in rows]
        specs = self.geometry.planes
        stored = [
            tensor.view(getattr(torch, spec.storage_dtype))
            for tensor, spec in zip(stored, specs, strict=True)
        ]
        if self._is_one_plane:
            return stored[0]
        alike = len({(spec.row_shape, spec.storage_dtype) for spec in specs}) == 1
        return torch.stack(stored) if alike else tuple(stored)

    def scatter(self, slots, rows):
        self.pool.transfer(self.slots(slots), self._flat(rows))

    def scatter_layer(self, layer_id, slots, rows):
        self.pool.transfer_per_layer(self.slots(slots), self._flat(rows), layer_id)

    def move(self, dst, src, disjoint):
        promise = {"disjoint": True} if disjoint else {}
        self.pool.move_kv_cache(self.slots(dst), self.slots(src), **promise)

    def _copy_in_chunks_of(self, chunk_tokens):
        is_tokenspeeds = self._is_quantized and not self._is_mha
        name = "offload_chunk_page_num" if is_tokenspeeds else "cpu_offloading_chunk_size"
        setattr(self.pool, name, chunk_tokens)

    def offload(self, slots, chunk_tokens):
        self._copy_in_chunks_of(chunk_tokens)
        copy = self.pool.get_cpu_copy(self.slots(slots))
        num_chunks = math.ceil(len(slots) / chunk_tokens)
        assert [len(chunks) for chunks in copy] == [num_chunks] * len(self.geometry.layers)
        planes = []
        for position, spec in enumerate(self.geometry.planes):
            parts = [[c if self._is_one_plane else c[position] for c in chunks] for chunks in copy]
            assert all(part.device.type == "cpu" for chunks in parts for part in chunks)
            rows = [[to_numpy(part).view(spec.dtype) for part in chunks] for chunks in parts]
            none = np.zeros((0, *spec.row_shape), spec.dtype)
            planes.append(np.stack([np.concatenate([none, *chunks]) for chunks in rows]))
        return copy, planes

    def restore(self, slots, copy, chunk_tokens):
        self._copy_in_chunks_of(chunk_tokens)
        self.pool.load_cpu_copy(copy, self.slots(slots))

    def infos(self):
        return of_infos(self.pool.get_contiguous_buf_infos(), self.planes())


class Layer:
    """What pools read of an attention layer."""

    def __init__(self, layer_id):
        self.layer_id = layer_id
