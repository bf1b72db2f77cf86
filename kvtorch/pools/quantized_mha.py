"""A pool of keys and values in 8 bits, with SGLang's constructor and methods."""

from collections.abc import Sequence
from typing import Any

import torch

from kvjax.errors import GeometryError
from kvjax.geometry import LayerRange, MHAGeometry, dtype_name
from kvtorch.ops.read_quantized_kv import read_quantized_kv
from kvtorch.ops.write_quantized_kv import write_quantized_kv
from kvtorch.pools.kv_cache import KVCache
from kvtorch.pools.values import as_values


class QuantizedMHATokenToKVPool(KVCache):
    """Keys and values of attention, each token's heads with a scale of their own.

    Parameter names are those of SGLang 0.4.8's ``MHATokenToKVPool``; ``KVCache`` says what holds
    for every pool, and ``ops.write_quantized_kv`` what the planes hold. ``data_ptrs``,
    ``data_strides`` and ``get_contiguous_buf_infos`` list the layers of K, then of its scales, of V
    and of its scales. Unlike upstream's:

    Args:
      dtype: the model's, which is what is read; K and V are stored in 8 bits.
      quantization: ``"int8_per_token_head"`` or ``"fp8_per_token_head"``, which is of e4m3fn.
      v_head_dim: of V if it differs from ``head_dim``.
      planes: K, its scales, V and its scales in memory that is there already, instead of new zeros.

    Raises:
      GeometryError: sizes, layers or dtypes that no pool can have, a ``quantization`` that is not
        known, or ``planes`` that do not fit.
      ImportError: the memory saver or Mooncake's memory is asked for and not installed.
    """

    k_buffer: list[torch.Tensor]
    k_scale_buffer: list[torch.Tensor]
    v_buffer: list[torch.Tensor]
    v_scale_buffer: list[torch.Tensor]
    _BUFFERS = ("k_buffer", "k_scale_buffer", "v_buffer", "v_scale_buffer")

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
        quantization: str,
        v_head_dim: int | None = None,
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
        self.quantization = quantization
        if quantization is None:
            raise GeometryError(
                f"{quantization=} is no format of 8 bits; MHATokenToKVPool stores K and V whole"
            )
        self.geometry = MHAGeometry(
            num_slots=size,
            page_size=page_size,
            layers=LayerRange(self.start_layer, self.start_layer + layer_num),
            num_kv_heads=head_num,
            head_dim=head_dim,
            dtype=dtype,  # pyright: ignore[reportArgumentType]
            v_head_dim=v_head_dim,
            quantization=quantization,
        )
        self.store_dtype = getattr(torch, self.geometry.planes[0].storage_dtype)
        self.device_module = torch.get_device_module(device)
        self.alt_stream = None  # K and V are written in one launch, which needs no second stream
        self._create_buffers(planes)

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of K and of V, each with its scales, padding page included."""
        self._require_here()
        k, k_scale, v, v_scale = (plane.nbytes for plane in self.planes)
        return k + k_scale, v + v_scale

    def get_key_buffer(self, layer_id: int) -> Any:
        """Every row of K of one layer as it is stored, and its scales, sharing memory.

        Returns:
          values: ``[rows, head_num, head_dim]`` of ``int8`` or ``float8_e4m3fn``.
          scales: ``[rows, head_num, 1]`` of float32, which values are to be multiplied by.
        """
        return self._with_scales(0, self._ready(layer_id))

    def get_value_buffer(self, layer_id: int) -> Any:
        """Every row of V of one layer, and its scales; as ``get_key_buffer``."""
        return self._with_scales(2, self._ready(layer_id))

    def get_kv_buffer(self, layer_id: int) -> tuple[Any, Any]:
        """``get_key_buffer`` and ``get_value_buffer``."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def set_kv_buffer(
        self,
        layer: Any,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: None = None,
        v_scale: None = None,
    ) -> None:
        """Quantises a row of K and one of V for each token, and writes them into one layer.

        Args:
          layer: whose ``layer_id`` is the layer.
          loc: where each token goes, int32 or int64, distinct.
          cache_k: ``[n, head_num, head_dim]`` of any float dtype of at most 32 bits; never changed.
          cache_v: likewise, whatever the dtype of ``cache_k``.
          k_scale: ``None``; upstream's scale of all of K, which this pool has no use for.
          v_scale: likewise.

        Raises:
          GeometryError: the layer is not on this rank, or K or V is not one row a token.
          TypeError: ``loc`` is not of integers, or K or V not of floats.
          ValueError: a scale is given, ``loc`` is not one-dimensional, or something is on another
            device.
        """
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None:
                raise ValueError(
                    f"{name}={scale}: the pool makes its own scales, one for each token and head; "
                    "pass None, and K and V as the model has them"
                )
        self._require_here()
        position = self._position(layer.layer_id)
        slots = self._slots("loc", loc, distinct=True)
        num_tokens, on = slots.shape[0], self._on
        k_row, _, v_row, _ = self._row_shapes
        k = as_values("cache_k", cache_k, (num_tokens, *k_row), on)
        v = as_values("cache_v", cache_v, (num_tokens, *v_row), on)
        write_quantized_kv(self.planes, position, slots, k, v, first_slot=self.page_size)

    def get_mha_kv_buffer(
        self, layer: Any, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of K ``[n, head_num, head_dim]`` and V, times their scales.

        Args:
          layer: whose ``layer_id`` is the layer; it is waited for.
          loc: which rows, int32 or int64, in any order and as often as wanted.
          dst_dtype: of the result; the model's if ``None``.

        Raises:
          GeometryError: the layer is not on this rank, or ``dst_dtype`` is not of floats of at most
            32 bits.

        Source: TokenSpeed's ``get_mla_kv_buffer`` of quantised pools (B-M-17), of K and V.
        """
        position, slots = self._ready(layer.layer_id), self._slots("loc", loc)
        if dst_dtype is None:
            dst_dtype = self.dtype
        elif dst_dtype != self.dtype:
            dtype_name(dst_dtype)  # which raises
        return read_quantized_kv(
            self.planes, position, slots, first_slot=self.page_size, dtype=dst_dtype
        )

    def _with_scales(self, plane: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer of a plane, and of the plane behind it."""
        return self._layer_at(plane, position), self._layer_at(plane + 1, position)
