"""SGLang's pool of latent rows."""

from collections.abc import Sequence
from typing import Any

import torch

from kvjax.geometry import LayerRange, MLAGeometry
from kvtorch.pools.kv_cache import KVCache
from kvtorch.pools.latent_rows import LatentRows


class MLATokenToKVPool(LatentRows, KVCache):
    """Latent and rope rows of multi-head latent attention.

    Parameter names are SGLang 0.4.8's; ``KVCache`` says what holds for every pool. Beyond upstream:

    Args:
      planes: the rows in memory that is there already, instead of new zeros.

    Raises:
      GeometryError: sizes, layers or dtypes that no pool can have, or ``planes`` that do not fit.
      ImportError: the memory saver or Mooncake's memory is asked for and not installed.

    Source: SGLang 0.4.8 ``MLATokenToKVPool`` (A-MLA-3 to A-MLA-13).
    """

    kv_buffer: list[torch.Tensor]

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        layer_num: int,
        device: str,
        enable_memory_saver: bool,
        start_layer: int | None = None,
        end_layer: int | None = None,
        *,
        planes: Sequence[torch.Tensor] | None = None,
    ):
        super().__init__(
            size,
            page_size,
            dtype,
            layer_num,
            device,
            enable_memory_saver,
            start_layer,
            end_layer,
        )
        self.kv_lora_rank = kv_lora_rank
        self.qk_rope_head_dim = qk_rope_head_dim
        self.geometry = MLAGeometry(
            num_slots=size,
            page_size=page_size,
            layers=LayerRange(self.start_layer, self.start_layer + layer_num),
            latent_dim=kv_lora_rank,
            rope_dim=qk_rope_head_dim,
            dtype=dtype,  # pyright: ignore[reportArgumentType]
        )
        self._create_buffers(planes)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Every row of one layer, latent first, sharing memory with the pool."""
        return self._layer(0, layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """The latent part of ``get_key_buffer``, sharing memory with the pool."""
        return self._layer(0, layer_id)[..., : self.kv_lora_rank]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def get_mla_kv_buffer(
        self, layer: Any, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of latent ``[n, 1, kv_lora_rank]`` and rope, in the pool's dtype or another.

        Raises:
          GeometryError: the layer is not on this rank.

        Source: TokenSpeed ``get_mla_kv_buffer`` (B-M-17).
        """
        return self._read_parts(layer.layer_id, loc, dst_dtype)

    def set_kv_buffer(
        self, layer: Any, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: Any
    ) -> None:
        """Writes a whole row for each token into one layer.

        Args:
          layer: whose ``layer_id`` is the layer.
          loc: where each token goes, int32 or int64, distinct.
          cache_k: ``[n, 1, kv_lora_rank + qk_rope_head_dim]``; cast to the pool's dtype as
            ``ops.narrow`` says.
          cache_v: upstream's parameter; V is the first part of ``cache_k``, so engines give
            ``None`` or that part.

        Raises:
          GeometryError: the layer is not on this rank, or ``cache_k`` is not one row a token.
          TypeError: ``loc`` is not of integers, or ``cache_k`` not of floats.
          ValueError: ``loc`` is not one-dimensional, or something is on another device.

        Source: SGLang 0.4.8 (A-MLA-9).
        """
        self._write_joined(layer.layer_id, loc, cache_k)

    def set_mla_kv_buffer(
        self,
        layer: Any,
        loc: torch.Tensor,
        cache_k_nope: torch.Tensor,
        cache_k_rope: torch.Tensor,
    ) -> None:
        """Writes the two parts of a row for each token into one layer; else as ``set_kv_buffer``.

        Args:
          layer: whose ``layer_id`` is the layer.
          loc: where each token goes, int32 or int64, distinct.
          cache_k_nope: ``[n, 1, kv_lora_rank]``, or without the 1.
          cache_k_rope: ``[n, 1, qk_rope_head_dim]``, or without the 1; cast by itself.

        Source: SGLang 0.4.8 (A-MLA-10), its faults excepted.
        """
        self._write_parts(layer.layer_id, loc, cache_k_nope, cache_k_rope)
