"""Planes of latent rows, for the pools of every engine."""

from typing import Any

import torch

from kvjax.geometry import MLAGeometry
from kvtorch.ops.read_latent_rope import read_latent_rope
from kvtorch.ops.write_latent_rope import write_latent_rope
from kvtorch.ops.write_rows import write_rows
from kvtorch.pools.plane_pool import PlanePool
from kvtorch.pools.values import as_values


class LatentRows(PlanePool):
    """Checks what engines may pass as rows or parts of them, and calls the operations.

    ``_write_joined``, ``_write_parts`` and ``_read_parts`` are for one plane of whole rows.
    """

    geometry: MLAGeometry
    dtype: torch.dtype
    kv_lora_rank: int
    qk_rope_head_dim: int
    _BUFFERS = ("kv_buffer",)

    def get_kv_size_bytes(self) -> int:
        """Bytes of all rows, padding page included."""
        self._require_here()
        return sum([plane.nbytes for plane in self.planes])

    def _read_parts(
        self, layer_id: int, loc: torch.Tensor, dtype: torch.dtype | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return read_latent_rope(
            self.planes[0],
            self._ready(layer_id),
            self._slots("loc", loc),
            self.kv_lora_rank,
            first_slot=self.page_size,
            dtype=dtype,
            stored_dtype=self.dtype,
        )

    def _write_joined(self, layer_id: int, loc: torch.Tensor, rows: Any) -> None:
        position, slots, rows = self._joined(layer_id, loc, rows)
        write_rows(
            self.planes,
            position,
            slots,
            (rows,),
            first_slot=self.page_size,
            dtypes=self._dtypes,
        )

    def _write_parts(self, layer_id: int, loc: torch.Tensor, latent: Any, rope: Any) -> None:
        position, slots, latent, rope = self._parts(layer_id, loc, latent, rope)
        write_latent_rope(
            self.planes[0],
            position,
            slots,
            latent,
            rope,
            first_slot=self.page_size,
            dtype=None if self._dtypes is None else self.dtype,
        )

    def _joined(
        self, layer_id: int, loc: torch.Tensor, rows: Any
    ) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Where whole rows go, and these, if they are such."""
        self._require_here()
        position = self._position(layer_id)
        slots = self._slots("loc", loc, distinct=True)
        shape = (len(slots), 1, self.kv_lora_rank + self.qk_rope_head_dim)
        return position, slots, as_values("cache_k", rows, shape, self._on)

    def _parts(
        self, layer_id: int, loc: torch.Tensor, latent: Any, rope: Any
    ) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where rows of two parts go, and these, if they are such."""
        self._require_here()
        position = self._position(layer_id)
        slots = self._slots("loc", loc, distinct=True)
        n = slots.shape[0]
        latent = self._part("cache_k_nope", latent, n, self.kv_lora_rank)
        rope = self._part("cache_k_rope", rope, n, self.qk_rope_head_dim)
        return position, slots, latent, rope

    def _part(self, name: str, part: Any, num_tokens: int, width: int) -> torch.Tensor:
        flat = isinstance(part, torch.Tensor) and part.dim() == 2
        shape = (num_tokens, width) if flat else (num_tokens, 1, width)
        return as_values(name, part, shape, self._on)
