"""How are a data plane's parts done with kvtorch?

Of the replay, only this module and ``torch_content`` import torch: nothing else has to have it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvjax.geometry import Geometry, MLAGeometry
from kvjax.replay import content, torch_content
from kvjax.replay.data_plane import no_room
from kvjax.replay.scheduler import Settings
from kvtorch.allocators import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from kvtorch.pools import planes
from kvtorch.pools.from_geometry import pool_over

# Elements of a plane whose bits are computed at once. On CPU they should stay in its cache: one
# core takes 1.7 ns each with 2^16, 1.9 with 2^18, 3.5 with 2^22.
_MOST_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}


def create(geometry: Geometry, settings: Settings, device: str) -> tuple["TorchPages", "TorchRows"]:
    """Allocates everything.

    Raises:
      MemoryError: there is no room.
    """
    host_slots = settings.host_units * settings.unit_len
    try:
        rows = TorchRows(geometry, host_slots, device)
    except RuntimeError as error:
        reason = RuntimeError(str(error).partition("\n")[0])
        raise no_room(geometry, host_slots * geometry.bytes_per_token, reason) from None
    return TorchPages(rows.pool, settings), rows


def default_device() -> str:
    """Where pools go: the GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def use_one_thread() -> None:
    """Keeps torch from splitting what it does on CPU, for the whole process.

    Operations here are small, and while JAX's threads or other programs have the cores, torch's
    wait for each other in each of them: on two busy cores that made a replay ten times slower.
    """
    torch.set_num_threads(1)


class TorchPages:
    """``Pages`` of the allocator that SGLang would take: of single slots where those are pages."""

    def __init__(self, pool: Any, settings: Settings) -> None:
        self._page_size = settings.page_size
        self._device = pool.device
        common = {"dtype": pool.dtype, "device": pool.device, "kvcache": pool}
        if self._page_size == 1:
            self._allocator = TokenToKVPoolAllocator(pool.size, **common)
        else:
            self._allocator = PagedTokenToKVPoolAllocator(pool.size, self._page_size, **common)

    def extend(self, prefix_lens, seq_lens) -> np.ndarray:
        total = int((seq_lens - prefix_lens).sum())
        if self._page_size == 1:
            return _handed_out(self._allocator.alloc(total))
        return _handed_out(
            self._allocator.alloc_extend(
                _tensor(prefix_lens, self._device),
                _tensor(seq_lens, self._device),
                torch.full((len(seq_lens),), -1, device=self._device),
                total,
                prefix_lens_cpu=prefix_lens,
                seq_lens_cpu=seq_lens,
            )
        )

    def decode(self, seq_lens, last_slots) -> np.ndarray:
        if self._page_size == 1:
            return _handed_out(self._allocator.alloc(len(seq_lens)))
        return _handed_out(
            self._allocator.alloc_decode(
                _tensor(seq_lens, self._device),
                _tensor(last_slots, self._device),
                seq_lens_cpu=seq_lens,
            )
        )

    def free(self, pages) -> None:
        # One slot of a page frees it.
        self._allocator.free(_tensor(pages * self._page_size, self._device))

    def clear(self) -> None:
        self._allocator.clear()

    def num_free(self) -> int:
        return self._allocator.available_size() // self._page_size


class TorchRows:
    """``Rows`` of a kvtorch pool, and of tensors in host memory, pinned if the pool is on a GPU.

    Attributes:
      pool: the device tier, of one of SGLang's classes or, of quantised latent rows, of
        TokenSpeed's.
      host: the host tier, ``[layers, slots, *row]`` for each plane in its storage dtype.
    """

    def __init__(self, geometry: Geometry, host_slots: int, device: str) -> None:
        self.planes = geometry.planes
        self.layers = geometry.layers
        self.pool = pool_over(planes.create(geometry, device), geometry)
        self.host = [
            torch.zeros(
                (len(geometry.layers), host_slots, *plane.row_shape),
                dtype=getattr(torch, plane.storage_dtype),
                pin_memory=device == "cuda",
            )
            for plane in geometry.planes
        ]
        self._is_mla = isinstance(geometry, MLAGeometry)
        self._device = device

    def write(self, slots, tags, positions) -> None:
        device = self._device
        arrays = [_tensor(a.astype(np.int64), device).int() for a in (slots, tags, positions)]
        elements = len(self.layers) * max(math.prod(plane.row_shape) for plane in self.planes)
        size = max(1, _MOST_ELEMENTS[device] // elements)
        for chunk in zip(*(array.split(size) for array in arrays), strict=True):
            self._write(*chunk)
        self._wait()

    def offload(self, slots, host_slots) -> None:
        rows = self._flat(slots)
        index = _tensor(host_slots, "cpu").long()
        for host, part in zip(self.host, rows, strict=True):
            host.index_copy_(1, index, part.cpu())

    def restore(self, slots, host_slots) -> None:
        index = _tensor(host_slots, "cpu").long()
        rows = [host.index_select(1, index) for host in self.host]
        self.pool.transfer(_tensor(slots, self._device), rows)
        self._wait()

    def move(self, dst, src) -> None:
        self.pool.move_kv_cache(_tensor(dst, self._device), _tensor(src, self._device))
        self._wait()

    def put(self, slots, rows) -> None:
        """Writes the bits that ``read`` returns."""
        typed = [
            _tensor(bits, self._device).view(getattr(torch, plane.storage_dtype))
            for plane, bits in zip(self.planes, rows, strict=True)
        ]
        self.pool.transfer(_tensor(slots, self._device), typed)
        self._wait()

    def read_layer(self, layer_id, slots) -> tuple[np.ndarray, ...]:
        layer, index = _Layer(layer_id), _tensor(slots, self._device)
        if content.are_quantized(self.planes):
            read_parts = (
                self.pool.get_mla_kv_buffer if self._is_mla else self.pool.get_mha_kv_buffer
            )
            parts = read_parts(layer, index, torch.float32)
            return tuple(map(_bits, torch_content.stored(self.planes, parts)))
        if self._is_mla:
            parts = self.pool.get_mla_kv_buffer(layer, index)
            return (np.concatenate([_bits(part) for part in parts], axis=-1),)
        return tuple(
            _bits(_as_integers(buffer)[index]) for buffer in self.pool.get_kv_buffer(layer_id)
        )

    def read(self, slots) -> tuple[np.ndarray, ...]:
        return tuple(_bits(part) for part in self._flat(slots))

    def read_host(self, host_slots) -> tuple[np.ndarray, ...]:
        index = _tensor(host_slots, "cpu").long()
        return tuple(_bits(host.index_select(1, index)) for host in self.host)

    def _write(self, slots: torch.Tensor, tags: torch.Tensor, positions: torch.Tensor) -> None:
        """Computes the rows of all layers, then writes them layer by layer, as a model does."""
        pool, geometry = self.pool, self.pool.geometry
        layer_ids = range(self.layers.start, self.layers.stop)
        by_plane = [
            torch_content.row_bits(self.planes, number, layer_ids, tags, positions).view(
                getattr(torch, plane.dtype)
            )
            for number, plane in enumerate(self.planes)
        ]
        write_parts = pool.set_mla_kv_buffer if self._is_mla else pool.set_kv_buffer
        for layer_id, *parts in zip(layer_ids, *by_plane, strict=True):
            if content.are_quantized(self.planes):
                parts = torch_content.values(parts)
            elif self._is_mla:
                parts = parts[0].split([geometry.latent_dim, geometry.rope_dim], dim=-1)
            write_parts(_Layer(layer_id), slots, *parts)

    def _flat(self, slots: np.ndarray) -> Sequence[torch.Tensor]:
        flat = self.pool.get_flat_data(_tensor(slots, self._device))
        return [flat] if len(self.planes) == 1 else list(flat)

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


@dataclasses.dataclass(frozen=True)
class _Layer:
    """What SGLang's pools want to know of a model's layer."""

    layer_id: int


def _tensor(array: np.ndarray, device: str) -> torch.Tensor:
    return torch.from_numpy(array.copy()).to(device)  # JAX's arrays are read-only


def _handed_out(slots: torch.Tensor | None) -> np.ndarray:
    assert slots is not None, "the scheduler asked for more pages than are free"
    array = slots.cpu().numpy().astype(np.int32)
    assert (array >= 0).all(), "the allocator knows another last slot than the scheduler"
    return array


def _as_integers(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch_content.INTEGERS[rows.element_size()])


def _bits(rows: torch.Tensor) -> np.ndarray:
    array = _as_integers(rows).cpu().numpy()
    return array.view(f"uint{8 * array.itemsize}")
