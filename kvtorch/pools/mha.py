"""SGLang's pool of keys and values."""

from collections.abc import Sequence
from typing import Any

import torch

from kvjax.geometry import LayerRange, MHAGeometry
from kvtorch.ops.narrow import Scale
from kvtorch.pools.kv_cache import KVCache
from kvtorch.pools.kv_rows import KVRows


class MHATokenToKVPool(KVRows, KVCache):
    """Keys and values of multi-head, grouped-query or multi-query attention.

    Parameter names are SGLang 0.4.8's; ``KVCache`` says what holds for every pool. Beyond upstream:

    Args:
      v_head_dim: of V if it differs from ``head_dim``.
      v_dtype: of V if it differs from ``dtype``.
      planes: K and V in memory that is there already, instead of new zeros.

    Raises:
      GeometryError: sizes, layers or dtypes that no pool can have, or ``planes`` that do not fit.
      ImportError: the memory saver or Mooncake's memory is asked for and not installed.

    Source: SGLang 0.4.8 ``MHATokenToKVPool`` (A-MHA-1 to A-MHA-17).
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: str,
        enable_memory_saver: bool,
        start_layer: int | None = None,
        end_layer: int | None = None,
        *,
        v_head_dim: int | None = None,
        v_dtype: torch.dtype | None = None,
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
        self.head_num = head_num
        self.head_dim = head_dim
        self.geometry = MHAGeometry(
            num_slots=size,
            page_size=page_size,
            layers=LayerRange(self.start_layer, self.start_layer + layer_num),
            num_kv_heads=head_num,
            head_dim=head_dim,
            dtype=dtype,  # pyright: ignore[reportArgumentType]
            v_head_dim=v_head_dim,
            v_dtype=v_dtype,  # pyright: ignore[reportArgumentType]
        )
        self.device_module = torch.get_device_module(device)
        self.alt_stream = None  # K and V are written in one launch, which needs no second stream
        self._create_buffers(planes)

    def set_kv_buffer(
        self,
        layer: Any,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Scale = None,
        v_scale: Scale = None,
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

        Raises:
          GeometryError: the layer is not on this rank, or K or V is not one row a token.
          TypeError: ``loc`` is not of integers, K or V not of floats, or a scale no number.
          ValueError: ``loc`` is not one-dimensional, something is on another device, or a scale is
            not a single number or, as far as the host sees it, 0, infinite or NaN.

        Source: SGLang 0.4.8 (A-MHA-14, A-MHA-15), its faults (a) to (e), (g) and (h) excepted.
        """
        self._write(layer.layer_id, loc, cache_k, cache_v, k_scale, v_scale)
