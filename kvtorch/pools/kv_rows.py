"""Planes of keys and values, for the pools of every engine."""

import torch

from kvjax.geometry import MHAGeometry
from kvtorch.ops.narrow import Scale
from kvtorch.ops.write_rows import write_rows
from kvtorch.pools.plane_pool import PlanePool
from kvtorch.pools.values import as_scale, as_values


class KVRows(PlanePool):
    """What engines call in the same way to reach keys and values."""

    geometry: MHAGeometry
    k_buffer: list[torch.Tensor]
    v_buffer: list[torch.Tensor]
    _BUFFERS = ("k_buffer", "v_buffer")

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of K and of V, padding page included."""
        self._require_here()
        k, v = self.planes
        return k.nbytes, v.nbytes

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Every row of K of one layer, sharing memory with the pool."""
        return self._layer(0, layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Every row of V of one layer, sharing memory with the pool."""
        return self._layer(1, layer_id)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``get_key_buffer`` and ``get_value_buffer``."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def _write(
        self,
        layer_id: int,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Scale,
        v_scale: Scale,
    ) -> None:
        """Writes a row of K and one of V for each token; checks what engines may pass."""
        self._require_here()
        position = self._position(layer_id)
        slots = self._slots("loc", loc, distinct=True)
        num_tokens, on = slots.shape[0], self._on
        k_row, v_row = self._row_shapes
        k = as_values("cache_k", cache_k, (num_tokens, *k_row), on)
        v = as_values("cache_v", cache_v, (num_tokens, *v_row), on)
        if k_scale is None and v_scale is None:
            scales = None
        else:
            scales = (as_scale("k_scale", k_scale, on), as_scale("v_scale", v_scale, on))
        write_rows(
            self.planes,
            position,
            slots,
            (k, v),
            first_slot=self.page_size,
            scales=scales,
            dtypes=self._dtypes,
        )
