"""SGLang 0.4.8's memory pools under SGLang's names, as one module."""

from kvtorch.allocators import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from kvtorch.pools.functions import (
    copy_all_layer_kv_cache,
    copy_two_array,
    fused_downcast,
    get_mla_kv_buffer_triton,
    set_mla_kv_buffer_triton,
)
from kvtorch.pools.kv_cache import KVCache
from kvtorch.pools.memory import GB, GPU_MEMORY_TYPE_KV_CACHE
from kvtorch.pools.mha import MHATokenToKVPool
from kvtorch.pools.mla import MLATokenToKVPool
from kvtorch.request_table import ReqToTokenPool

__all__ = [
    "GB",
    "GPU_MEMORY_TYPE_KV_CACHE",
    "BaseTokenToKVPoolAllocator",
    "KVCache",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "PagedTokenToKVPoolAllocator",
    "ReqToTokenPool",
    "TokenToKVPoolAllocator",
    "copy_all_layer_kv_cache",
    "copy_two_array",
    "fused_downcast",
    "get_mla_kv_buffer_triton",
    "set_mla_kv_buffer_triton",
]
