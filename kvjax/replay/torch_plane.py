"""How are a data plane's parts done with kvtorch?

The only module of the replay that imports torch: nothing else here has to have it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from kvjax.geometry import DTYPE_BYTES, Geometry, MLAGeometry, PlaneSpec
from kvjax.replay import content
from kvjax.replay.data_plane import no_room
from kvjax.replay.scheduler import Settings
from kvtorch.allocators import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from kvtorch.pools import planes
from kvtorch.pools.from_geometry import pool_over

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}

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
      pool: the device tier, of one of SGLang's classes or, of quantised rows, of TokenSpeed's.
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
        index = _tensor(slots, self._device)
        geometry = self.pool.geometry
        if isinstance(geometry, MLAGeometry) and geometry.quantization is not None:
            return tuple(map(_bits, self._read_quantized(layer_id, index)))
        if isinstance(geometry, MLAGeometry):
            parts = self.pool.get_mla_kv_buffer(_Layer(layer_id), index)
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
        pool, layer_ids = self.pool, range(self.layers.start, self.layers.stop)
        geometry = pool.geometry
        by_plane = [
            row_bits(plane, number, layer_ids, tags, positions).view(getattr(torch, plane.dtype))
            for number, plane in enumerate(self.planes)
        ]
        for layer_id, *rows in zip(layer_ids, *by_plane, strict=True):
            if isinstance(geometry, MLAGeometry) and geometry.quantization is not None:
                latent, scale, rope = rows
                parts = (part.float() * scale for part in (latent, rope))
                pool.set_mla_kv_buffer(_Layer(layer_id), slots, *parts)
            elif isinstance(geometry, MLAGeometry):
                parts = rows[0].split([geometry.latent_dim, geometry.rope_dim], dim=-1)
                pool.set_mla_kv_buffer(_Layer(layer_id), slots, *parts)
            else:
                pool.set_kv_buffer(_Layer(layer_id), slots, *rows)

    def _read_quantized(self, layer_id: int, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What is stored, by way of the numbers that a model reads, as ``KvjaxRows`` does it.

        Scales are powers of two, times which the first number of a latent is the largest of its
        dtype. They are computed with as bits.
        """
        latent_spec, _, rope_spec = self.planes
        latent, rope = self.pool.get_mla_kv_buffer(_Layer(layer_id), slots, torch.float32)
        one = content.float_bits(1, "float32")
        largest = content.float_bits(ml_dtypes.finfo(latent_spec.dtype).max, "float32")
        scale = latent[..., :1].abs().view(torch.int32) - largest + one
        inverse = (one + one - scale).view(torch.float32)
        return (
            (latent * inverse).to(getattr(torch, latent_spec.dtype)),
            scale.view(torch.float32),
            (rope * inverse).to(getattr(torch, rope_spec.dtype)),
        )

    def _flat(self, slots: np.ndarray) -> Sequence[torch.Tensor]:
        flat = self.pool.get_flat_data(_tensor(slots, self._device))
        return [flat] if len(self.planes) == 1 else list(flat)

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def row_bits(
    plane: PlaneSpec,
    plane_number: int,
    layer_ids: Sequence[int],
    tags: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """What ``content.row_bits`` defines, as signed integers, ``[len(layer_ids), n, *row]``.

    Torch has little arithmetic on uint32. That of int32 has the same bits, except that a shift to
    the right fills with the sign.

    Args:
      plane: of the pool.
      plane_number: its place among the pool's planes.
      layer_ids: the model's layer numbers.
      tags: int32, one for each row, of the bits of a uint32.
      positions: likewise.
    """
    places = [layer_id * 64 + plane_number for layer_id in layer_ids]
    rows = _mix(_mix(tags.clone()) + positions)
    rows = _mix(rows + torch.tensor(places, dtype=torch.int32, device=tags.device)[:, None])
    width = math.prod(plane.row_shape)
    elements = torch.arange(width, dtype=torch.int32, device=tags.device) * _signed(0x9E3779B9)
    num_bytes = DTYPE_BYTES[plane.dtype]
    words = _mix(rows[..., None] + elements, only_high_half=num_bytes <= 2)
    if num_bytes < 4:
        words = (words >> (32 - 8 * num_bytes)).to(_INTEGERS[num_bytes])
    words &= ~(1 << ml_dtypes.finfo(plane.dtype).nmant)
    return _quantized(plane, words).view(*words.shape[:2], *plane.row_shape)


def _quantized(plane: PlaneSpec, words: torch.Tensor) -> torch.Tensor:
    """``content``'s change of the words where the plane is one of a quantised pool, in place."""
    match plane.name:
        case "latent":
            largest = content.float_bits(ml_dtypes.finfo(plane.dtype).max, plane.dtype)
            first = words[..., 0]
            first.bitwise_and_(-(1 << (8 * words.element_size() - 1))).bitwise_or_(largest)
        case "scale":
            words >>= 16
            words &= content.NUM_SCALES - 1
            words <<= ml_dtypes.finfo(plane.dtype).nmant
            words += content.float_bits(1, plane.dtype)
        case "rope":
            second = 1 << (8 * words.element_size() - 3)
            opposite = (~words & second) << 1
            words &= ~(second << 1)
            words |= opposite
    return words


def _mix(words: torch.Tensor, *, only_high_half: bool = False) -> torch.Tensor:
    """``content``'s mixing of words, in place; the last step changes only their low halves."""
    shifted = torch.empty_like(words)

    def fold(places: int) -> None:
        torch.bitwise_right_shift(words, places, out=shifted)
        shifted.bitwise_and_((1 << (32 - places)) - 1)
        words.bitwise_xor_(shifted)

    fold(16)
    words.mul_(_signed(0x7FEB352D))
    fold(15)
    words.mul_(_signed(0x846CA68B))
    if not only_high_half:
        fold(16)
    return words


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


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
    return rows.view(_INTEGERS[rows.element_size()])


def _bits(rows: torch.Tensor) -> np.ndarray:
    array = _as_integers(rows).cpu().numpy()
    return array.view(f"uint{8 * array.itemsize}")
