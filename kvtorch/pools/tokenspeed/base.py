"""What every pool of TokenSpeed is."""

from collections.abc import Sequence
from typing import Any

import torch

from kvtorch.ops.move_rows import move_rows
from kvtorch.ops.narrow import FP8
from kvtorch.pools.plane_pool import PlanePool

CHUNK_TOKENS = 1024
"""Tokens of one layer copied to or from the host at once. Source: TokenSpeed (B-B-1)."""


class BaseTokenToKVPool:
    """TokenSpeed's base class: attributes, and methods for pools to implement.

    Like upstream's it can be instantiated, and raises ``NotImplementedError`` for the rest.

    Attributes:
      offload_chunk_page_num: upstream's name; tokens, not pages.
      token_slot_refs: what was set, for who reads it; pools do not.
      max_batch_size: as given; no pool's size depends on it.
      max_context_len: likewise.

    Source: TokenSpeed ``BaseTokenToKVPool`` (B-B-1 to B-B-4).
    """

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        device: str,
        max_batch_size: int,
        max_context_len: int,
        page_size: int,
        rank: int,
    ):
        self.size = size
        self.dtype = dtype
        self.store_dtype = torch.uint8 if dtype in FP8 else dtype
        self.device = device
        self.max_batch_size = max_batch_size
        self.max_context_len = max_context_len
        self.page_size = page_size
        self.rank = rank
        self.offload_chunk_page_num = CHUNK_TOKENS
        self.token_slot_refs: torch.Tensor | None = None
        self.layer_transfer_counter: Any = None

    @classmethod
    def cell_size(cls) -> int:
        raise NotImplementedError

    def register_layer_transfer_counter(self, layer_transfer_counter: Any) -> None:
        """Makes reads of a layer wait for ``layer_transfer_counter.wait_until``."""
        self.layer_transfer_counter = layer_transfer_counter

    def set_token_slot_refs(self, token_slot_refs: torch.Tensor) -> None:
        """Keeps ``token_slot_refs`` for whoever reads the attribute."""
        self.token_slot_refs = token_slot_refs

    def get_key_buffer(self, layer_id: int) -> Any:
        raise NotImplementedError

    def get_value_buffer(self, layer_id: int) -> Any:
        raise NotImplementedError

    def get_kv_buffer(self, layer_id: int) -> tuple[Any, Any]:
        raise NotImplementedError

    def set_kv_buffer(
        self, layer: Any, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: Any
    ) -> None:
        raise NotImplementedError

    def get_cpu_copy(self, page_indices: Any) -> Any:
        raise NotImplementedError

    def load_cpu_copy(self, kv_cache_cpu: Any, page_indices: Any) -> None:
        raise NotImplementedError

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        raise NotImplementedError

    def get_layerwise_buf_info_offsets(self, start_idx: int = 0) -> list[list[int]]:
        raise NotImplementedError


class TokenSpeedPlanes(PlanePool):
    """What TokenSpeed's pools do beside what those of every engine do.

    Attributes:
      page_size_bytes: bytes of a page, all planes and layers.
      device_module: torch's module for the kind of device.
      alt_stream: a stream of the caller's, which the pool does not use; ``None`` if not asked for,
        or not on CUDA.
    """

    _CHUNK = "offload_chunk_page_num"

    def _start(
        self,
        enable_kv_cache_copy: bool,
        enable_alt_stream: bool,
        planes: Sequence[torch.Tensor] | None,
    ) -> None:
        """Makes the planes, and what depends on them."""
        self.page_size_bytes = self.geometry.bytes_per_page
        self.device_module = torch.get_device_module(self.device)
        self._create_buffers(planes)
        streams = enable_alt_stream and self.planes[0].is_cuda
        self.alt_stream = self.device_module.Stream() if streams else None
        if enable_kv_cache_copy:
            self._init_kv_copy_and_warmup()

    def _init_kv_copy_and_warmup(self) -> None:
        """Compiles the kernel that moves a row, so that the first move waits for no compiler.

        Source: TokenSpeed (B-M-6).
        """
        padding = torch.zeros(1, dtype=torch.int32, device=self._on)
        move_rows(self.planes, padding, padding, first_slot=self.page_size)

    def get_layerwise_buf_info_offsets(self, start_idx: int = 0) -> list[list[int]]:
        """For each layer, where its planes are in the lists of ``get_contiguous_buf_infos``.

        Args:
          start_idx: where this pool's entries start, in lists of several pools.

        Source: TokenSpeed (B-M-12).
        """
        num_layers, planes = len(self.geometry.layers), range(len(self.geometry.planes))
        return [
            [start_idx + plane * num_layers + layer for plane in planes]
            for layer in range(num_layers)
        ]

    def _tokens(self, indices: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """Tokens as a tensor; upstream also takes lists."""
        if isinstance(indices, torch.Tensor):
            return indices
        return torch.tensor(indices, dtype=torch.int64, device=self._on)
