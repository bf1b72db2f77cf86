"""Which pool stands for which geometry."""

from typing import Any

import torch

from kvjax.geometry import Geometry, MHAGeometry, MLAGeometry
from kvtorch.pools import mha, mla
from kvtorch.pools.planes import Planes
from kvtorch.pools.quantized_mha import QuantizedMHATokenToKVPool
from kvtorch.pools.tokenspeed.mla import MLATokenToKVPool as QuantizedMLATokenToKVPool


def pool_over(planes: Planes, geometry: Geometry) -> Any:
    """A pool over memory that is there: SGLang's or, of quantised latent rows, TokenSpeed's.

    Of quantised K and V it is our own, which SGLang has none of.

    Raises:
      GeometryError: ``planes`` do not fit.
    """
    common = {
        "size": geometry.num_slots,
        "page_size": geometry.page_size,
        "layer_num": len(geometry.layers),
        "device": str(planes[0].device),
        "enable_memory_saver": False,
        "start_layer": geometry.layers.start,
        "planes": planes,
    }
    if isinstance(geometry, MHAGeometry):
        common |= {
            "dtype": getattr(torch, geometry.dtype),
            "head_num": geometry.num_kv_heads,
            "head_dim": geometry.head_dim,
            "v_head_dim": geometry.v_head_dim,
        }
        if geometry.quantization is None:
            return mha.MHATokenToKVPool(v_dtype=getattr(torch, str(geometry.v_dtype)), **common)
        return QuantizedMHATokenToKVPool(quantization=geometry.quantization, **common)
    assert isinstance(geometry, MLAGeometry)
    common |= {"kv_lora_rank": geometry.latent_dim, "qk_rope_head_dim": geometry.rope_dim}
    if geometry.quantization is None:
        return mla.MLATokenToKVPool(dtype=getattr(torch, geometry.dtype), **common)
    return QuantizedMLATokenToKVPool(
        model_dtype=getattr(torch, geometry.dtype),
        dtype=getattr(torch, geometry.planes[0].dtype),
        quant_method=geometry.quantization,
        max_batch_size=0,
        max_context_len=0,
        rank=0,
        enable_alt_stream=False,
        **common,
    )
