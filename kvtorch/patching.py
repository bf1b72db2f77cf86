"""Puts this package's classes into an installed engine."""

import abc
import gc
import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

from kvjax.errors import UnsupportedError

_SGLANG = {
    "sglang.srt.mem_cache.memory_pool": "ReqToTokenPool MHATokenToKVPool MLATokenToKVPool",
    "sglang.srt.mem_cache.allocator": "TokenToKVPoolAllocator PagedTokenToKVPoolAllocator",
}
_SGLANG_BASES = {
    "sglang.srt.mem_cache.memory_pool": "KVCache",
    "sglang.srt.mem_cache.allocator": "BaseTokenToKVPoolAllocator",
}


def patch(engine: str) -> dict[str, type]:
    """Replaces the pool classes of ``engine`` by ours, in every module of it that is loaded.

    Call it before the engine builds its pools, and in each process that builds some. SGLang starts
    its schedulers by importing the main script once more, so call it there at top level, not under
    ``if __name__ == "__main__"``. Our pools and allocators then count as subclasses of those they
    replace, also for who holds on to these; SGLang's base classes stay, and count ours as theirs.

    Args:
      engine: ``"sglang"``, of version 0.4.8.

    Returns:
      The classes that were replaced, by name; none if they were before.

    Raises:
      ImportError: the engine is not installed, or cannot be imported.
      UnsupportedError: its classes are not those of the version that ours were written for, or it
        is TokenSpeed. Nothing is replaced.
      RuntimeError: it has built pools already, which would go on as they are. Nothing is replaced.
      ValueError: no such engine.
    """
    if engine == "tokenspeed":
        raise UnsupportedError(
            "TokenSpeed cannot be patched yet; its pools are in kvtorch.tokenspeed, for import"
        )
    if engine != "sglang":
        raise ValueError(f"{engine=} is not known; 'sglang' is")
    ours = importlib.import_module("kvtorch.sglang")
    try:
        # Its modules import each other in a circle, which works from here on only.
        importlib.import_module("sglang.srt.layers.quantization")
        homes = {name: importlib.import_module(name) for name in _SGLANG}
    except ImportError as error:
        raise ImportError(
            f"patch('sglang') needs SGLang, which cannot be imported ({error}); "
            "pip install sglang==0.4.8"
        ) from error
    replaced = {}
    for home, names in _SGLANG.items():
        for name in names.split():
            theirs = _class_of(homes[home], name)
            if theirs is not getattr(ours, name):
                replaced[name] = theirs
    for name, theirs in replaced.items():
        _require_same_interface(theirs, getattr(ours, name))
    _require_not_in_use(tuple(replaced.values()))
    for home, name in _SGLANG_BASES.items():
        _class_of(homes[home], name).register(getattr(ours, name))
    for name, theirs in replaced.items():
        if isinstance(theirs, abc.ABCMeta):
            theirs.register(getattr(ours, name))
        _replace_everywhere("sglang", theirs, getattr(ours, name))
    return replaced


def _class_of(home: ModuleType, name: str) -> Any:
    try:
        return vars(home)[name]
    except KeyError:
        raise UnsupportedError(f"{home.__name__} has no {name}; written for SGLang 0.4.8") from None


def _require_same_interface(theirs: type, ours: type) -> None:
    """Raises unless ``ours`` can be called however ``theirs`` can.

    Raises:
      UnsupportedError: says which method cannot.
    """
    for name, method in inspect.getmembers(theirs, inspect.isfunction):
        if name.startswith("_") and name != "__init__":
            continue
        wanted = _parameters(method)
        if any(kind is inspect.Parameter.VAR_POSITIONAL for _, kind, _ in wanted):
            continue  # a decorated one, whose parameters do not show
        if not hasattr(ours, name) or _parameters(getattr(ours, name))[: len(wanted)] != wanted:
            raise UnsupportedError(
                f"the installed {theirs.__name__}.{name}{inspect.signature(method)} is not the one "
                "of SGLang 0.4.8, which ours was written for"
            )


def _parameters(function: Any) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in parameters]


def _require_not_in_use(classes: tuple[type, ...]) -> None:
    # By the classes' own list of ancestors: asking an object could run anything.
    in_use = {
        cls.__name__ for thing in gc.get_objects() for cls in type(thing).__mro__ if cls in classes
    }
    if in_use:
        raise RuntimeError(
            f"the engine has built {sorted(in_use)} already; patch it before it builds its pools"
        )


def _replace_everywhere(package: str, old: type, new: type) -> None:
    for name, module in list(sys.modules.items()):
        if module is not None and (name == package or name.startswith(f"{package}.")):
            for attribute, value in list(vars(module).items()):
                if value is old:
                    setattr(module, attribute, new)
