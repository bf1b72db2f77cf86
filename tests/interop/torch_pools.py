"""Torch pools of known bits, beside the NumPy planes that they should equal."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from kvjax import MHAGeometry
from kvtorch import tokenspeed
from kvtorch.pools.mha import MHATokenToKVPool
from kvtorch.pools.mla import MLATokenToKVPool
from kvtorch.pools.quantized_mha import QuantizedMHATokenToKVPool
from tests import oracles
from tests.pools.junk import GEOMETRIES as _ALL
from tests.pools.junk import rows_of
from tests.strategies import random_rows

GEOMETRIES = {name: geometry for name, geometry in _ALL.items() if geometry.padding_page}


def torch_pool(geometry, planes):
    """A pool as an engine makes it, over planes that are there already."""
    options = {
        "size": geometry.num_slots,
        "page_size": geometry.page_size,
        "dtype": getattr(torch, geometry.dtype),
        "layer_num": len(geometry.layers),
        "device": str(planes[0].device),
        "enable_memory_saver": False,
        "start_layer": geometry.layers.start,
        "planes": planes,
    }
    if isinstance(geometry, MHAGeometry):
        options |= {
            "head_num": geometry.num_kv_heads,
            "head_dim": geometry.head_dim,
            "v_head_dim": geometry.v_head_dim,
        }
        if geometry.quantization is None:
            return MHATokenToKVPool(v_dtype=getattr(torch, geometry.v_dtype), **options)
        return QuantizedMHATokenToKVPool(quantization=geometry.quantization, **options)
    options |= {"kv_lora_rank": geometry.latent_dim, "qk_rope_head_dim": geometry.rope_dim}
    if geometry.quantization is None:
        return MLATokenToKVPool(**options)
    options |= {"model_dtype": options["dtype"], "dtype": torch.float8_e4m3fn}
    return tokenspeed.MLATokenToKVPool(
        quant_method="per_token_head", max_batch_size=8, max_context_len=64, rank=0, **options
    )


def empty_planes(geometry, device="cpu"):
    leading = (len(geometry.layers), geometry.num_rows)
    return [
        torch.zeros((*leading, *spec.row_shape), dtype=dtype_of(spec), device=device)
        for spec in geometry.planes
    ]


def dtype_of(spec):
    return getattr(torch, spec.storage_dtype)


def zero_pool(geometry, device="cpu"):
    return torch_pool(geometry, empty_planes(geometry, device))


def junk_planes(geometry, seed=0):
    """Any bits, but none on the padding page."""
    planes = random_rows(seed, rows_of(geometry), len(geometry.layers), geometry.num_rows)
    planes = [plane.copy() for plane in planes]
    for plane in planes:
        plane[:, : geometry.first_slot] = 0
    return planes


def junk_pool(geometry, seed=0, device="cpu"):
    pool, planes = zero_pool(geometry, device), junk_planes(geometry, seed)
    fill(pool, planes)
    return pool, planes


def fill(pool, planes):
    for tensor, plane in zip(pool.planes, planes, strict=True):
        tensor.view(torch.uint8).copy_(torch.from_numpy(plane.view(np.uint8)))


def assert_holds(pool, planes):
    for tensor, plane in zip(pool.planes, planes, strict=True):
        oracles.assert_same_bits(tensor.view(torch.uint8).cpu().numpy(), plane.view(np.uint8))


@jax.jit
def read_late(plane, work):
    """The first rows of a plane, read after some milliseconds of other work."""
    start = (jnp.sort(work)[0] * 0).astype(jnp.int32)
    return jax.lax.dynamic_slice_in_dim(plane[0], start, 64)


def slow_work():
    return jnp.ones(1 << 21)
