"""KV-cache memory pools for JAX, updated in place.

Names load on first use (PEP 562): ``import kvjax`` and ``import kvjax.geometry`` load neither JAX
nor NumPy. ``__init__.pyi`` says the same to type checkers and editors.
"""

import importlib
from typing import Any

_NAMES = {
    "kvjax": "allocators host",
    "kvjax.allocators": "PageAllocator SlotAllocator",
    "kvjax.checks_mode": "checks",
    "kvjax.errors": "GeometryError UnsupportedError",
    "kvjax.geometry": "LayerRange MHAGeometry MLAGeometry",
    "kvjax.pools": "mha mla",
    "kvjax.pools.planes": "copy_pages copy_rows gather move scatter scatter_layer zero",
    "kvjax.pools.pool": "Pool create fork layer page_view",
    "kvjax.request_table": "RequestTable",
    "kvjax.transfer": "buffer_infos offload restore",
}
_MODULES = {"allocators", "host", "mha", "mla"}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    value = (
        importlib.import_module(f"{home.__name__}.{name}") if name in _MODULES else vars(home)[name]
    )
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
