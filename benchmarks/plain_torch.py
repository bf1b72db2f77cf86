"""Pools as index operations of torch, what one writes without a library."""

from typing import Any

import torch

FP8 = torch.float8_e4m3fn
SMALLEST_AMAX = 1e-26  # so that rows of zeros have a scale


class IndexPool:
    """A list of layers for each plane, with the methods of SGLang's pools.

    Negative slots are Python's, others past the end raise, and nothing is cast.
    """

    def __init__(
        self,
        shapes: list[tuple[int, ...]],
        num_layers: int,
        latent_dim: int,
        dtype: torch.dtype,
        device: str,
    ):
        self.latent_dim = latent_dim
        self.planes = [
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
            for shape in shapes
        ]

    def set_kv_buffer(
        self, layer: Any, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
    ) -> None:
        k_layers, v_layers = self.planes
        k_layers[layer.layer_id][loc] = cache_k
        v_layers[layer.layer_id][loc] = cache_v

    def set_mla_kv_buffer(
        self, layer: Any, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None:
        self.planes[0][layer.layer_id][loc] = torch.cat([cache_k_nope, cache_k_rope], -1)

    def get_mla_kv_buffer(self, layer: Any, loc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.planes[0][layer.layer_id][loc]
        return rows[..., : self.latent_dim], rows[..., self.latent_dim :]

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        for layers in self.planes:
            for layer in layers:
                layer[tgt_loc] = layer[src_loc]


class ContiguousCopy:
    """Copies as many bytes as a pool's rows have, in one piece: rows that lie apart cost more."""

    def __init__(self, num_rows: int, row_bytes: int, device: str):
        self._source, self._target = (
            torch.zeros((num_rows, row_bytes // 2), dtype=torch.int16, device=device)
            for _ in range(2)
        )

    def _copy(self, layer: Any, loc: torch.Tensor, *_: Any) -> None:
        """Other bytes for another layer, so that none are in a cache."""
        num_tokens = loc.numel()
        start = layer.layer_id * num_tokens % (len(self._source) - num_tokens + 1)
        rows = slice(start, start + num_tokens)
        self._target[rows].copy_(self._source[rows])

    set_kv_buffer = set_mla_kv_buffer = get_mla_kv_buffer = get_mha_kv_buffer = _copy


class QuantizedLatentIndexPool:
    """Latents in fp8, their scales, and ropes, with the methods of TokenSpeed's pool of such rows.

    For finite values: what overflows is not looked after.
    """

    def __init__(
        self,
        num_rows: int,
        num_layers: int,
        latent_dim: int,
        rope_dim: int,
        dtype: torch.dtype,
        device: str,
    ):
        planes = ((latent_dim, torch.uint8), (1, torch.float32), (rope_dim, dtype))
        self.kv_buffer = [
            tuple(torch.zeros((num_rows, 1, n), dtype=t, device=device) for n, t in planes)
            for _ in range(num_layers)
        ]

    def set_mla_kv_buffer(
        self, layer: Any, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None:
        latents, scales, ropes = self.kv_buffer[layer.layer_id]
        latent = cache_k_nope.float()
        amax = latent.abs().amax(-1, keepdim=True)
        scale = amax.clamp(min=SMALLEST_AMAX) / torch.finfo(FP8).max
        latents[loc] = (latent / scale).to(FP8).view(torch.uint8)
        scales[loc] = scale
        ropes[loc] = (cache_k_rope.float() / scale).to(ropes.dtype)

    def get_mla_kv_buffer(
        self, layer: Any, loc: torch.Tensor, dst_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        latent, scale, rope = (plane[loc] for plane in self.kv_buffer[layer.layer_id])
        latent = latent.view(FP8).float() * scale
        return latent.to(dst_dtype), (rope.float() * scale).to(dst_dtype)


class QuantizedIndexPool:
    """K and V in int8 and their scales, with the methods of kvtorch's pool of such rows.

    For finite values.
    """

    def __init__(
        self,
        num_rows: int,
        num_layers: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
    ):
        self.dtype = dtype

        def layers(width: int, stored: torch.dtype) -> list[torch.Tensor]:
            shape = (num_rows, heads, width)
            return [torch.zeros(shape, dtype=stored, device=device) for _ in range(num_layers)]

        self.k_buffer, self.k_scale_buffer = layers(head_dim, torch.int8), layers(1, torch.float32)
        self.v_buffer, self.v_scale_buffer = layers(head_dim, torch.int8), layers(1, torch.float32)

    def set_kv_buffer(
        self, layer: Any, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
    ) -> None:
        for values, buffer, scales in (
            (cache_k.float(), self.k_buffer, self.k_scale_buffer),
            (cache_v.float(), self.v_buffer, self.v_scale_buffer),
        ):
            amax = values.abs().amax(-1, keepdim=True)
            scale = amax.clamp(min=SMALLEST_AMAX) / torch.iinfo(torch.int8).max
            buffer[layer.layer_id][loc] = (values / scale).round().to(torch.int8)
            scales[layer.layer_id][loc] = scale

    def get_mha_kv_buffer(self, layer: Any, loc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, k_scale, v, v_scale = (
            layers[layer.layer_id][loc]
            for layers in (self.k_buffer, self.k_scale_buffer, self.v_buffer, self.v_scale_buffer)
        )
        return (k.float() * k_scale).to(self.dtype), (v.float() * v_scale).to(self.dtype)
