"""A data plane of NumPy arrays, for tests of what stands above one."""

import numpy as np

from kvjax.geometry import MHAGeometry
from kvjax.replay import content
from kvjax.replay.data_plane import page_slots
from kvjax.replay.null_plane import NullPlane


class NumpyPlane:
    """Allocates as ``NullPlane`` does, and keeps the bits of every row of both tiers."""

    def __init__(self, geometry: MHAGeometry, host_slots: int):
        self.planes, self.layers = geometry.planes, geometry.layers
        self.page_size = geometry.page_size
        self.null = NullPlane(geometry.num_pages, geometry.page_size)
        self.pool = [self._empty(plane, geometry.num_rows) for plane in self.planes]
        self.host = [self._empty(plane, host_slots) for plane in self.planes]

    def _empty(self, plane, rows):
        shape = (len(self.layers), rows, *plane.row_shape)
        return np.zeros(shape, content.bits_dtype(plane.dtype))

    def _write(self, slots, tags, positions):
        layer_ids = range(self.layers.start, self.layers.stop)
        rows = content.expected_rows(self.planes, layer_ids, tags, positions)
        for plane, plane_rows in zip(self.pool, rows, strict=True):
            plane[:, slots] = plane_rows

    def prefill(self, prefix_lens, seq_lens, tags, positions):
        slots = self.null.prefill(prefix_lens, seq_lens, tags, positions)
        self._write(slots, tags, positions)
        return slots

    def decode(self, seq_lens, last_slots, tags, positions):
        slots = self.null.decode(seq_lens, last_slots, tags, positions)
        self._write(slots, tags, positions)
        return slots

    def free(self, pages):
        self.null.free(pages)

    def offload(self, pages, host_slots):
        for plane, host in zip(self.pool, self.host, strict=True):
            host[:, host_slots] = plane[:, page_slots(pages, self.page_size)]

    def restore(self, host_slots):
        pages = self.null.restore(host_slots)
        for plane, host in zip(self.pool, self.host, strict=True):
            plane[:, page_slots(pages, self.page_size)] = host[:, host_slots]
        return pages

    def compact(self, pages):
        self.null.compact(pages)
        new = page_slots(np.arange(1, len(pages) + 1), self.page_size)
        for plane in self.pool:
            plane[:, new] = plane[:, page_slots(pages, self.page_size)]

    def num_free_pages(self):
        return self.null.num_free_pages()

    def read_layer(self, layer_id, slots):
        return tuple(plane[self.layers.local(layer_id), slots] for plane in self.pool)

    def read(self, slots):
        return tuple(plane[:, slots] for plane in self.pool)

    def read_host(self, host_slots):
        return tuple(plane[:, host_slots] for plane in self.host)
