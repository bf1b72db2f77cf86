"""KV-cache memory pools for PyTorch engines, sharing their memory with kvjax.

Names load on first use (PEP 562), so that ``import kvtorch`` alone costs nothing. ``__init__.pyi``
says the same to type checkers and editors.
"""

import importlib
from typing import Any

_NAMES = {
    "kvjax.checks_mode": "checks",
    "kvjax.errors": "GeometryError UnsupportedError",
    "kvtorch.allocators": "PagedTokenToKVPoolAllocator TokenToKVPoolAllocator",
    "kvtorch.interop": "adopt",
    "kvtorch.patching": "patch",
    "kvtorch.pools.mha": "MHATokenToKVPool",
    "kvtorch.pools.mla": "MLATokenToKVPool",
    "kvtorch.pools.quantized_mha": "QuantizedMHATokenToKVPool",
    "kvtorch.request_table": "ReqToTokenPool",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = vars(importlib.import_module(_HOMES[name]))[name]
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
