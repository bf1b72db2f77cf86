"""What pools of different kinds have in common: the same calls, with NumPy's arrays in and out.

Arrays are in the planes' own dtypes, fp8 included.
"""

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from kvjax.geometry import MHAGeometry, PlaneSpec
from tests import oracles
from tests.torch.tensors import whole

Arrays = list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Scale:
    """What values are divided by, as one of the kinds of things that callers pass."""

    number: float
    kind: str

    def of(self, array):
        return {
            "number": self.number,
            "no dimension": array(np.float32(self.number)),
            "one element": array(np.array([self.number], np.float32)),
        }[self.kind]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a torch caller's tensors lie in memory; that changes no result.

    Attributes:
      slots: their dtype, and whether only every second element is one.
      values: one of ``LAYOUTS``.
    """

    slots: torch.dtype = torch.int64
    strided_slots: bool = False
    values: Callable[[torch.Tensor, int], torch.Tensor] = whole


class Peer(Protocol):
    """A pool. Rows are an array for each plane; slots may be ones that are not there."""

    def planes(self) -> Arrays:
        """All planes."""
        ...

    def write(self, layer_id, slots, values, scales, layout) -> None:
        """Rows of one layer, narrowed or quantised: K and V, or rows of an MLA pool."""
        ...

    def write_parts(self, layer_id, slots, parts, layout) -> None:
        """The latent and the rope part of MLA rows, each narrowed by itself, or quantised."""
        ...

    def read_parts(self, layer_id, slots, dtype) -> Arrays:
        """What a model reads, in another dtype unless that is ``None``.

        The latent and the rope part of MLA rows, or K and V of a quantised pool.
        """
        ...

    def layer(self, layer_id) -> Arrays:
        """One layer of each plane."""
        ...

    def gather(self, slots) -> Arrays:
        """The rows of all layers."""
        ...

    def scatter(self, slots, rows) -> None:
        """What ``gather`` returned, at other slots."""
        ...

    def scatter_layer(self, layer_id, slots, rows) -> None:
        """The same for one layer."""
        ...

    def move(self, dst, src, disjoint) -> None:
        """Simultaneously in all layers."""
        ...

    def offload(self, slots, chunk_tokens) -> tuple[Any, Arrays]:
        """A copy in host memory, as the pool returns it and as ``gather`` would."""
        ...

    def restore(self, slots, copy, chunk_tokens) -> None:
        """Such a copy, at other slots."""
        ...

    def infos(self) -> Arrays:
        """Lengths, lengths of a page, and what lies there but for the padding page."""
        ...


class Oracle:
    """What the others are compared with."""

    def __init__(self, geometry: Any, planes: Arrays):
        self.geometry = geometry
        self._planes = planes

    def _set(self, oracle, layer, slots, rows):
        first = self.geometry.first_slot
        self._planes = [
            oracle(plane, layer, slots, new, first)
            for plane, new in zip(self._planes, rows, strict=True)
        ]

    def planes(self):
        return self._planes

    def write(self, layer_id, slots, values, scales, layout):
        layer = layer_id - self.geometry.layers.start
        self._set(oracles.write_rows, layer, slots, stored(self.geometry, values, scales))

    def write_parts(self, layer_id, slots, parts, layout):
        is_quantized = self.geometry.quantization is not None
        # float32 has the numbers of all parts.
        dtype = "float32" if is_quantized else self.geometry.dtype
        row = np.concatenate([oracles.narrow(part, dtype) for part in parts], -1)
        self.write(layer_id, slots, [row], [None], layout)

    def read_parts(self, layer_id, slots, dtype):
        layer, first = layer_id - self.geometry.layers.start, self.geometry.first_slot
        rows = [oracles.read_rows(plane, layer, slots, first) for plane in self._planes]
        if self.geometry.quantization is None:
            return parts_of(self.geometry, rows[0], dtype)
        return dequantized(self.geometry, rows, dtype or self.geometry.dtype)

    def layer(self, layer_id):
        return [plane[layer_id - self.geometry.layers.start] for plane in self._planes]

    def gather(self, slots):
        first = self.geometry.first_slot
        return [oracles.read_rows(plane, None, slots, first) for plane in self._planes]

    def scatter(self, slots, rows):
        self._set(oracles.write_rows, None, slots, rows)

    def scatter_layer(self, layer_id, slots, rows):
        self._set(oracles.write_rows, layer_id - self.geometry.layers.start, slots, rows)

    def move(self, dst, src, disjoint):
        first = self.geometry.first_slot
        self._planes = [oracles.move_rows(plane, dst, src, first) for plane in self._planes]

    def offload(self, slots, chunk_tokens):
        rows = self.gather(slots)
        return rows, rows

    def restore(self, slots, copy, chunk_tokens):
        self.scatter(slots, copy)

    def infos(self):
        layers = [layer for plane in self._planes for layer in plane]
        pages = [layer[: self.geometry.page_size].nbytes for layer in layers]
        content = [
            np.frombuffer(layer.tobytes()[page:], np.uint8)
            for layer, page in zip(layers, pages, strict=True)
        ]
        return [np.array([layer.nbytes for layer in layers]), np.array(pages), *content]


def given(geometry: Any) -> tuple[PlaneSpec, ...]:
    """What ``Peer.write`` takes: as the planes of a pool that is not quantised."""
    return dataclasses.replace(geometry, quantization=None).planes


def stored(geometry: Any, values, scales) -> Arrays:
    """The values as the planes hold them."""
    if geometry.quantization is None:
        return narrowed(geometry, values, scales)
    if isinstance(geometry, MHAGeometry):
        dtype = geometry.planes[0].dtype
        return logical(geometry, [x for value in values for x in oracles.quantize_kv(value, dtype)])
    latent, rope = split(geometry, values[0])
    return logical(geometry, oracles.quantize(latent, rope, geometry.dtype))


def dequantized(geometry: Any, rows: Arrays, dtype: str) -> Arrays:
    """What a model reads of rows of a quantised pool."""
    if isinstance(geometry, MHAGeometry):
        parts = [
            oracles.dequantize_kv(numbers, scale, numbers.dtype, dtype)
            for numbers, scale in (rows[:2], rows[2:])
        ]
    else:
        latent, scale, rope = rows
        parts = oracles.dequantize(latent, scale, rope, dtype)
    return [without_payload(part, dtype) for part in parts]


def narrowed(geometry: Any, values, scales) -> Arrays:
    """The values in the dtypes of planes that are not quantised."""
    return [
        oracles.narrow(value, spec.dtype, scale and scale.number)
        for value, spec, scale in zip(values, geometry.planes, scales, strict=True)
    ]


def parts_of(geometry, rows, dtype) -> Arrays:
    """The two parts of latent rows, cast."""
    rows = without_payload(rows if dtype is None else rows.astype(dtype), dtype)
    return split(geometry, rows)


def split(geometry, rows) -> Arrays:
    """The two parts of latent rows."""
    return [rows[..., : geometry.latent_dim], rows[..., geometry.latent_dim :]]


def without_payload(rows, dtype):
    """Rows whose NaNs, if they were cast, are all the same."""
    return rows if dtype is None else np.where(np.isnan(rows), rows.dtype.type(np.nan), rows)


def is_fp8(dtype) -> bool:
    return np.dtype(dtype).name.startswith("float8")


def logical(geometry, arrays) -> Arrays:
    """Arrays in the planes' own dtypes, where they may be stored in others."""
    return [np.asarray(a).view(s.dtype) for a, s in zip(arrays, geometry.planes, strict=True)]


def of_infos(infos, planes) -> Arrays:
    """What ``Peer.infos`` returns, of addresses, lengths and lengths of a page."""
    addresses, lengths, page_lengths = infos
    layers = [layer for plane in planes for layer in plane]
    assert len(addresses) == len(layers) and all(type(address) is int for address in addresses)
    content = [
        # On a GPU, the host cannot look.
        layer.tobytes() if torch.cuda.is_available() else ctypes.string_at(address, length)
        for address, length, layer in zip(addresses, lengths, layers, strict=True)
    ]
    content = [
        np.frombuffer(raw[page:], np.uint8) for raw, page in zip(content, page_lengths, strict=True)
    ]
    return [np.array(lengths), np.array(page_lengths), *content]
