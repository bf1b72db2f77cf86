"""Where a pool's memory comes from: plain, one that can be released, or one for disaggregation."""

import contextlib
import importlib
import logging
import os
from contextlib import AbstractContextManager
from typing import Any

import torch

GPU_MEMORY_TYPE_KV_CACHE = "kv_cache"
"""The tag under which an engine releases pools and request tables. Source: A-MOD-1."""

GB = 1024**3
"""What logs call a GB. Source: SGLang 0.4.8 (A-MOD-3)."""

_CUSTOM_POOL = "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"

logger = logging.getLogger(__name__)
_misunderstood: set[str] = set()


class MemorySaver:
    """Gives allocations to torch_memory_saver, or leaves them alone.

    Raises:
      ImportError: it is asked for and not installed.

    Source: SGLang 0.4.8 ``TorchMemorySaverAdapter.create`` (A-MOD-2).
    """

    def __init__(self, enable: bool):
        self._saver: Any = None
        if enable:
            try:
                module = importlib.import_module("torch_memory_saver")
            except ImportError as error:
                raise ImportError(
                    f"enable_memory_saver=True needs the package torch_memory_saver ({error}); "
                    "pip install torch-memory-saver, or pass False"
                ) from error
            self._saver = module.torch_memory_saver

    def region(self, tag: str) -> AbstractContextManager[Any]:
        """A block whose allocations can be released and resumed under ``tag``."""
        return self._saver.region(tag=tag) if self._saver else contextlib.nullcontext()


def memory_region(enable_memory_saver: bool) -> AbstractContextManager[Any]:
    """A block whose allocations the engine can release as its KV cache, if that is asked for.

    Raises:
      ImportError: it is asked for, and torch_memory_saver is not installed.
    """
    return MemorySaver(enable_memory_saver).region(GPU_MEMORY_TYPE_KV_CACHE)


def custom_mem_pool(device: torch.device | str) -> Any:
    """Mooncake's NVLink memory as a ``torch.cuda.MemPool`` if the environment asks for it.

    ``SGLANG_MOONCAKE_CUSTOM_MEM_POOL`` is ``true`` or ``1``, in any case; ``false``, ``0`` or not
    set give ``None``, and so does anything else, with one warning. Read at each call.

    Raises:
      ImportError: it is asked for, and Mooncake is not installed.

    Source: SGLang 0.4.8 (A-MOD-6).
    """
    value = os.environ.get(_CUSTOM_POOL, "false").lower()
    if value not in ("true", "1"):
        if value not in ("false", "0") and value not in _misunderstood:
            _misunderstood.add(value)
            logger.warning("%s=%s is neither true nor false; taken as false", _CUSTOM_POOL, value)
        return None
    try:
        allocators = importlib.import_module("mooncake.allocator")
    except ImportError as error:
        raise ImportError(
            f"{_CUSTOM_POOL}={value} needs the package mooncake-transfer-engine ({error}); "
            "install it, or unset the variable"
        ) from error
    allocator = allocators.NVLinkAllocator.get_allocator(device)
    return torch.cuda.MemPool(allocator.allocator())


def use_mem_pool(pool: Any) -> AbstractContextManager[Any]:
    """A block whose allocations come from ``pool``, or from where they always do if ``None``."""
    return contextlib.nullcontext() if pool is None else torch.cuda.use_mem_pool(pool)
