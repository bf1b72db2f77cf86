"""What tests of torch pools share: layers, slots, pools, and calls of every method."""

import dataclasses

import pytest
import torch

from kvtorch.pools.mha import MHATokenToKVPool
from kvtorch.pools.mla import MLATokenToKVPool
from tests.interop.torch_pools import GEOMETRIES

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = list(GEOMETRIES)


@dataclasses.dataclass
class Layer:
    """What pools look at of an engine's layer."""

    layer_id: int


@dataclasses.dataclass
class Counter:
    """What pools look at of an engine's transfer counter."""

    waits: list[int] = dataclasses.field(default_factory=list)

    def wait_until(self, threshold):
        self.waits.append(threshold)


def slots(*numbers, dtype=torch.int64, device="cpu"):
    return torch.tensor(numbers, dtype=dtype, device=device)


def mha(size, page_size, dtype, head_num, head_dim, layer_num, device="cpu", saver=False, **more):
    return MHATokenToKVPool(
        size, page_size, dtype, head_num, head_dim, layer_num, device, saver, **more
    )


def mla(size, page_size, dtype, lora, rope, layer_num, device="cpu", saver=False, **more):
    return MLATokenToKVPool(size, page_size, dtype, lora, rope, layer_num, device, saver, **more)


def values(pool, num_tokens):
    """A tensor of ones for each plane, as ``write`` wants them."""
    return [
        torch.ones((num_tokens, *spec.row_shape), device=pool.device)
        for spec in pool.geometry.planes
    ]


def write(pool, layer_id, loc, new, *scales):
    """``set_kv_buffer`` for whatever kind of pool."""
    if len(new) == 3:  # quantised rows, which are given as the model has them
        latent, _, rope = new
        new = [torch.cat([latent, rope], -1)]
    elif len(new) == 4:
        new = new[::2]
    new = new if len(new) == 2 else [*new, None]
    pool.set_kv_buffer(Layer(layer_id), loc, *new, *scales)


def flat(pool, num_tokens, *, all_layers=True):
    """Flat data of ones."""
    leading = (pool.layer_num, num_tokens) if all_layers else (num_tokens,)
    parts = [
        torch.ones((*leading, *spec.row_shape)).to(getattr(torch, spec.dtype))
        for spec in pool.geometry.planes
    ]
    return parts[0] if len(parts) == 1 else parts


def flattened(nested):
    """The tensors of what a method that reads returns."""
    return (
        [leaf for part in nested for leaf in flattened(part)]
        if isinstance(nested, list | tuple)
        else [nested]
    )


READS = {
    "get_flat_data": lambda pool, loc: pool.get_flat_data(loc),
    "get_cpu_copy": lambda pool, loc: [pool.get_cpu_copy(loc)],
}
WRITES = {
    "set_kv_buffer": lambda pool, loc: write(pool, 3, loc, values(pool, len(loc))),
    "transfer": lambda pool, loc: pool.transfer(loc, flat(pool, len(loc))),
    "transfer_per_layer": lambda pool, loc: pool.transfer_per_layer(
        loc, flat(pool, len(loc), all_layers=False), 3
    ),
    "load_cpu_copy": lambda pool, loc: pool.load_cpu_copy(
        pool.get_cpu_copy(torch.full_like(loc, pool.page_size)), loc
    ),
    "move_kv_cache": lambda pool, loc: pool.move_kv_cache(
        loc, torch.full_like(loc, pool.page_size)
    ),
}
CALLS = READS | WRITES
"""Methods that take slots, called with some, of layer 3 if of one."""
