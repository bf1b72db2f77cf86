"""Pools of SGLang and TokenSpeed, from folders the user has, without the rest of those projects.

Nothing of theirs is kept here. Their modules of pools are imported as they are; what those import
from the rest of their projects, and what that in turn needs installed, is stood in for by modules
made here, which hold a few one-line functions.
"""

import contextlib
import dataclasses
import importlib
import importlib.machinery
import logging
import pathlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any

_SGLANG_FILES = ("sglang/srt/mem_cache/memory_pool.py", "sglang/srt/mem_cache/allocator.py")
_TOKENSPEED = "python/tokenspeed/runtime"
_TOKENSPEED_FILES = (
    f"{_TOKENSPEED}/cache/utils.py",
    f"{_TOKENSPEED}/layers/attention/kv_cache/mha.py",
    f"{_TOKENSPEED}/layers/attention/kv_cache/mla.py",
)


class PeerError(Exception):
    """A peer cannot be loaded, and why."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """A project's own classes.

    Attributes:
      version: as its files say.
      mha, mla, allocator: its classes, ``None`` where it is not measured.
      set_capturing: tells it whether a CUDA graph is being captured, as its engine does.
      set_dependent_launch: whether its kernels are launched before those before them have ended.
    """

    version: str
    mha: Any
    mla: Any
    allocator: Any = None
    set_capturing: Callable[[bool], None] = lambda _: None
    set_dependent_launch: Callable[[bool], None] = lambda _: None


def sglang(folder: pathlib.Path) -> Peer:
    """SGLang 0.4.8 from an unpacked wheel.

    Raises:
      PeerError: its files are not there, or need something that is not.
    """
    _require_files(folder, _SGLANG_FILES, "the folder of an unpacked wheel of sglang")
    _stand_in("sglang", folder / "sglang")
    _stand_in("sglang.srt", folder / "sglang" / "srt")
    _stand_in(
        "sglang.srt.utils",
        debug_timing=lambda function: function,
        get_bool_env_var=lambda *_: False,
        is_cuda=_has_cuda,
        next_power_of_2=lambda n: 1 << max(n - 1, 0).bit_length(),
    )
    _stand_in("sglang.srt.constants", GPU_MEMORY_TYPE_KV_CACHE="kv_cache")
    _stand_in("sglang.srt.torch_memory_saver_adapter", TorchMemorySaverAdapter=_NoSaver)
    _stand_in("sglang.srt.layers")
    _stand_in("sglang.srt.layers.radix_attention", RadixAttention=object)
    _stand_in("sglang.srt.model_executor")
    # Its write asks this each time, whether K and V may go to two streams.
    graph = types.SimpleNamespace(capturing=False)
    _stand_in(
        "sglang.srt.model_executor.cuda_graph_runner",
        get_is_capture_mode=lambda: graph.capturing,
    )
    pools = _import("sglang.srt.mem_cache.memory_pool", folder)
    allocators = _import("sglang.srt.mem_cache.allocator", folder)
    return Peer(
        version=_version(folder / "sglang" / "version.py"),
        mha=pools.MHATokenToKVPool,
        mla=pools.MLATokenToKVPool,
        allocator=allocators.PagedTokenToKVPoolAllocator,
        set_capturing=lambda on: setattr(graph, "capturing", on),
    )


def tokenspeed(folder: pathlib.Path) -> Peer:
    """TokenSpeed from a checkout; its first release is commit 205c53c4.

    Raises:
      PeerError: its files are not there, or need something that is not.
    """
    _require_files(folder, _TOKENSPEED_FILES, "a checkout of github.com/lightseekorg/tokenspeed")
    package = folder / "python" / "tokenspeed"
    _stand_in("tokenspeed", package)
    _stand_in("tokenspeed.runtime", package / "runtime")
    _stand_in("tokenspeed.runtime.layers", package / "runtime" / "layers")
    _stand_in("tokenspeed.runtime.layers.paged_attention", PagedAttention=object)
    _stand_in(
        "tokenspeed.runtime.utils",
        debug_timing=lambda function: function,
        get_colorful_logger=logging.getLogger,
    )
    saver = "tokenspeed.runtime.utils.torch_memory_saver_adapter"
    _stand_in(saver, TorchMemorySaverAdapter=_NoSaver)
    pdl = types.SimpleNamespace(enabled=False)
    _stand_in("tokenspeed.runtime.utils.pdl", pdl_enabled=lambda: pdl.enabled)
    mha = _import("tokenspeed.runtime.layers.attention.kv_cache.mha", folder)
    mla = _import("tokenspeed.runtime.layers.attention.kv_cache.mla", folder)
    return Peer(
        version=_version(folder / "python" / "pyproject.toml"),
        mha=mha.MHATokenToKVPool,
        mla=mla.MLATokenToKVPool,
        set_dependent_launch=lambda on: setattr(pdl, "enabled", on),
    )


class _NoSaver:
    """Memory that is never given back while an engine sleeps."""

    @classmethod
    def create(cls, enable: bool) -> "_NoSaver":
        assert not enable
        return cls()

    def region(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _require_files(folder: pathlib.Path, paths: tuple[str, ...], what: str) -> None:
    for path in paths:
        if not (folder / path).is_file():
            raise PeerError(f"{folder} has no {path}; need {what}")


def _stand_in(name: str, path: pathlib.Path | None = None, **attributes: Any) -> None:
    """Registers a module in the place of ``name``; one with a ``path`` finds the rest there."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=path is not None)
    if path is not None:
        module.__path__ = [str(path)]
    vars(module).update(attributes)
    sys.modules[name] = module


def _import(name: str, folder: pathlib.Path) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever upstream's code does when it is imported
        raise PeerError(f"{name} of {folder}: {type(error).__name__}: {error}") from error


def _version(path: pathlib.Path) -> str:
    text = path.read_text() if path.is_file() else ""
    found = re.search(r"""^(?:__version__|version) = ["'](.*)["']""", text, re.MULTILINE)
    return found.group(1) if found else "unknown version"
