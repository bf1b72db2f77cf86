"""Pools as index operations of torch, what one writes without a library."""

from typing import Any

import torch


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
