"""TokenSpeed's pool of latent rows, whole ones or quantised."""

from collections.abc import Sequence
from typing import Any

import torch

from kvjax.errors import GeometryError, UnsupportedError
from kvjax.geometry import LayerRange, MLAGeometry
from kvtorch.ops.read_quantized import read_quantized
from kvtorch.ops.write_quantized import STORED, write_quantized
from kvtorch.pools.latent_rows import LatentRows
from kvtorch.pools.tokenspeed.base import BaseTokenToKVPool, TokenSpeedPlanes

PER_TOKEN_HEAD = "per_token_head"
PLAIN = (None, "none")
"""How TokenSpeed's arguments say that nothing is quantised."""


class MLATokenToKVPool(LatentRows, TokenSpeedPlanes, BaseTokenToKVPool):
    """Latent and rope rows of multi-head latent attention.

    Parameter names are TokenSpeed's; ``PlanePool`` says what holds for every pool. Layers are
    numbered from 0. With ``quant_method="per_token_head"``, ``kv_buffer`` lists a tuple of three
    tensors for each layer, latent, scale and rope; ``ops.write_quantized`` says what they hold.
    ``data_ptrs`` and ``data_strides`` list the three of the first layer, then those of the next;
    ``get_contiguous_buf_infos`` all latents, then all scales, then all ropes (B-M-5).

    Args:
      model_dtype: of the rope in a quantised pool, and of what is read from it.
      dtype: of the rows; ``float8_e4m3fn`` in a quantised pool.
      quant_method: ``None``, ``"none"`` or ``"per_token_head"``.
      start_layer: beyond upstream, the number of the first layer, where it is not 0.
      planes: beyond upstream, the rows in memory that is there already, instead of new zeros.

    Raises:
      GeometryError: sizes, layers or dtypes that no pool can have, a ``quant_method`` that is not
        known, or ``planes`` that do not fit.
      ImportError: the memory saver is asked for and not installed.

    Source: TokenSpeed ``MLATokenToKVPool`` (B-M-1 to B-M-19, B-Q).
    """

    kv_buffer: list[Any]

    def __init__(
        self,
        size: int,
        model_dtype: torch.dtype,
        dtype: torch.dtype,
        quant_method: str | None,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
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
        self.model_dtype = model_dtype
        self.quant_method = quant_method
        self.kv_lora_rank = kv_lora_rank
        self.qk_rope_head_dim = qk_rope_head_dim
        self.layer_num = layer_num
        self.kv_cache_dim = kv_lora_rank + qk_rope_head_dim
        self._prepare(enable_memory_saver, None)
        self._is_quantized = quant_method not in PLAIN
        if self._is_quantized and quant_method != PER_TOKEN_HEAD:
            raise GeometryError(
                f"{quant_method=} is unknown; need one of {PLAIN}, {PER_TOKEN_HEAD!r}"
            )
        if self._is_quantized and dtype != STORED:
            raise GeometryError(
                f"{dtype=} with {quant_method=}: latents are stored in {STORED} whatever dtype is "
                f"given, so that any other would misread them; need dtype={STORED}"
            )
        self.geometry = MLAGeometry(
            num_slots=size,
            page_size=page_size,
            layers=LayerRange(start_layer, start_layer + layer_num),
            latent_dim=kv_lora_rank,
            rope_dim=qk_rope_head_dim,
            dtype=model_dtype if self._is_quantized else dtype,  # pyright: ignore[reportArgumentType]
            quantization=PER_TOKEN_HEAD if self._is_quantized else None,
        )
        self._start(enable_kv_cache_copy, enable_alt_stream, planes)

    def get_key_buffer(self, layer_id: int) -> Any:
        """Every row of one layer, latent first; of a quantised pool its three tensors.

        They share memory with the pool; the latents of a quantised one are ``uint8``.

        Source: TokenSpeed (B-M-13).
        """
        if self._is_quantized:
            position = self._ready(layer_id)  # which raises where there is no buffer
            return self.kv_buffer[position]
        return self._layer(0, layer_id)

    def get_value_buffer(self, layer_id: int) -> Any:
        """The latent part of ``get_key_buffer``; of a quantised pool latents and scales.

        Source: TokenSpeed (B-M-14).
        """
        if self._is_quantized:
            return self.get_key_buffer(layer_id)[:2]
        return self._layer(0, layer_id)[..., : self.kv_lora_rank]

    def get_kv_buffer(self, layer_id: int) -> tuple[Any, Any]:
        """``get_key_buffer`` and ``get_value_buffer``."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def set_kv_buffer(
        self,
        layer: Any,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: Any,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> None:
        """Writes a whole row for each token into one layer.

        Args:
          layer: whose ``layer_id`` is the layer.
          loc: where each token goes, int32 or int64, distinct.
          cache_k: ``[n, 1, kv_lora_rank + qk_rope_head_dim]``; cast to the pool's dtype as
            ``ops.narrow`` says, or quantised as ``ops.write_quantized`` does.
          cache_v: upstream's parameter; V is the first part of ``cache_k``, so engines give
            ``None`` or that part.
          k_scale: ``None`` or the number 1; upstream ignores any other.
          v_scale: likewise.

        Raises:
          GeometryError: the layer is not on this rank, or ``cache_k`` is not one row a token.
          TypeError: ``loc`` is not of integers, or ``cache_k`` not of floats.
          UnsupportedError: another scale.
          ValueError: ``loc`` is not one-dimensional, or something is on another device.

        Source: TokenSpeed (B-M-15), its faults (S3) excepted.
        """
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None and (isinstance(scale, torch.Tensor) or scale != 1):
                raise UnsupportedError(
                    f"{name}={scale}: latent rows are stored without a scale from outside; divide "
                    "them before the call, and pass None"
                )
        if not self._is_quantized:
            return self._write_joined(layer.layer_id, loc, cache_k)
        position, slots, rows = self._joined(layer.layer_id, loc, cache_k)
        parts = rows.split((self.kv_lora_rank, self.qk_rope_head_dim), -1)
        return write_quantized(self.planes, position, slots, *parts, first_slot=self.page_size)

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

        Source: TokenSpeed (B-M-16), its faults excepted.
        """
        if not self._is_quantized:
            return self._write_parts(layer.layer_id, loc, cache_k_nope, cache_k_rope)
        position, slots, *parts = self._parts(layer.layer_id, loc, cache_k_nope, cache_k_rope)
        return write_quantized(self.planes, position, slots, *parts, first_slot=self.page_size)

    def get_mla_kv_buffer(
        self, layer: Any, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of latent ``[n, 1, kv_lora_rank]`` and rope ``[n, 1, qk_rope_head_dim]``.

        Args:
          layer: whose ``layer_id`` is the layer; it is waited for.
          loc: which rows, int32 or int64, in any order and as often as wanted.
          dst_dtype: of the result; the pool's if ``None``, of a quantised pool the model's.

        Raises:
          GeometryError: the layer is not on this rank.

        Source: TokenSpeed (B-M-17), its faults excepted.
        """
        if not self._is_quantized:
            return self._read_parts(layer.layer_id, loc, dst_dtype)
        position, slots = self._ready(layer.layer_id), self._slots("loc", loc)
        return read_quantized(
            self.planes, position, slots, first_slot=self.page_size, dtype=dst_dtype
        )

    def get_cpu_copy(
        self, token_indices: torch.Tensor | Sequence[int]
    ) -> list[list[list[torch.Tensor]]]:
        """A copy of rows in host memory: for each layer and chunk ``[rows]``.

        Of a quantised pool ``[latent, scale, rope]``. A chunk is of ``offload_chunk_page_num``
        tokens.

        Source: TokenSpeed (B-M-18).
        """
        return self._to_host(self._tokens(token_indices))

    def load_cpu_copy(
        self, kv_cache_cpu: Sequence[Sequence[Any]], token_indices: torch.Tensor | Sequence[int]
    ) -> None:
        """Writes what ``get_cpu_copy`` returned, at as many tokens, not necessarily the same.

        Raises:
          GeometryError: other layers, chunks, shapes or dtypes than it would return.

        Source: TokenSpeed (B-M-19).
        """
        self._from_host(kv_cache_cpu, self._tokens(token_indices))
