"""TokenSpeed's memory pools under TokenSpeed's names, as one module.

Upstream is TokenSpeed's first release, commit 205c53c4.
"""

from kvtorch.pools.tokenspeed.base import BaseTokenToKVPool
from kvtorch.pools.tokenspeed.functions import (
    copy_all_layer_kv_cache_tiled,
    get_mla_kv_buffer_triton,
    move_kv_cache_native,
    set_mla_kv_buffer_triton,
)
from kvtorch.pools.tokenspeed.mha import MHATokenToKVPool
from kvtorch.pools.tokenspeed.mla import MLATokenToKVPool

__all__ = [
    "BaseTokenToKVPool",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "copy_all_layer_kv_cache_tiled",
    "get_mla_kv_buffer_triton",
    "move_kv_cache_native",
    "set_mla_kv_buffer_triton",
]
