"""TokenSpeed's pool of keys and values."""

from collections.abc import Sequence
from typing import Any

import torch

from kvjax.geometry import LayerRange, MHAGeometry
from kvtorch.ops.narrow import Scale
from kvtorch.pools.kv_rows import KVRows
from kvtorch.pools.tokenspeed.base import BaseTokenToKVPool, TokenSpeedPlanes


class MHATokenToKVPool(KVRows, TokenSpeedPlanes, BaseTokenToKVPool):
    """Keys and values of multi-head, grouped-query or multi-query attention.

    Parameter names are TokenSpeed's; ``PlanePool`` says what holds for every pool. Layers are
    numbered from 0. Beyond upstream:

    Args:
      start_layer: the number of the first layer, where it is not 0.
      planes: K and V in memory that is there already, instead of new zeros.

    Raises:
      GeometryError: sizes, layers or dtypes that no pool can have, or ``planes`` that do not fit.
      ImportError: the memory saver is asked for and not installed.

    Source: TokenSpeed ``MHATokenToKVPool``.
    """

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: str,
        enable_memory_saver: bool,
        max_batch_size: int,
        max_context_len: int,
        page_size: int,
        rank: int,
        enable_kv_cache_copy: bool = False,
        enable_alt_stream: bool = True,
        *,
        start_layer: int = 0,
        planes: Sequence[torch.Tensor] | None = None,
    ):
        BaseTokenToKVPool.__init__(
            self, size, dtype, device, max_batch_size, max_context_len, page_size, rank
        )
        self.head_num = head_num
        self.head_dim = head_dim
        self.layer_num = layer_num
        self._prepare(enable_memory_saver, None)
        self.geometry = MHAGeometry(
            num_slots=size,
            page_size=page_size,
            layers=LayerRange(start_layer, start_layer + layer_num),
            num_kv_heads=head_num,
            head_dim=head_dim,
            dtype=dtype,  # pyright: ignore[reportArgumentType]
        )
        self._start(enable_kv_cache_copy, enable_alt_stream, planes)

    @property
    def k_data_ptrs(self) -> torch.Tensor:
        """The part of ``data_ptrs`` that is K's."""
        return self.data_ptrs[: self.layer_num]

    @property
    def v_data_ptrs(self) -> torch.Tensor:
        """The part of ``data_ptrs`` that is V's."""
        return self.data_ptrs[self.layer_num :]

    def set_kv_buffer(
        self,
        layer: Any,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Scale = None,
        v_scale: Scale = None,
        layer_id_override: int | None = None,
    ) -> None:
        """Writes a row of K and one of V for each token into one layer.

        Args:
          layer: whose ``layer_id`` is the layer.
          loc: where each token goes, int32 or int64, distinct.
          cache_k: ``[n, head_num, head_dim]``; cast to the pool's dtype as ``ops.narrow`` says,
            and never changed.
          cache_v: likewise, whatever the dtype of ``cache_k``.
          k_scale: what K is divided by before a cast, a number or a tensor of one; ignored where K
            has the pool's dtype already.
          v_scale: likewise for V.
          layer_id_override: the layer, where it is not that of ``layer``.

        Raises:
          GeometryError: the layer is not on this rank, or K or V is not one row a token.
          TypeError: ``loc`` is not of integers, K or V not of floats, or a scale no number.
          ValueError: ``loc`` is not one-dimensional, something is on another device, or a scale is
            not a single number or, as far as the host sees it, 0, infinite or NaN.

        Source: TokenSpeed ``MHATokenToKVPool.set_kv_buffer``, its faults (A-MHA-14, S1) excepted.
        """
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        self._write(layer_id, loc, cache_k, cache_v, k_scale, v_scale)

    def get_cpu_copy(self, indices: torch.Tensor | Sequence[int]) -> list[list[list[torch.Tensor]]]:
        """A copy of rows in host memory: for each layer and chunk ``[k, v]``.

        A chunk is of ``offload_chunk_page_num`` tokens.
        """
        return self._to_host(self._tokens(indices))

    def load_cpu_copy(
        self, kv_cache_cpu: Sequence[Sequence[Any]], indices: torch.Tensor | Sequence[int]
    ) -> None:
        """Writes what ``get_cpu_copy`` returned, at as many ``indices``, not necessarily the same.

        Raises:
          GeometryError: other layers, chunks, shapes or dtypes than it would return.
        """
        self._from_host(kv_cache_cpu, self._tokens(indices))
