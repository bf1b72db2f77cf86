"""SGLang 0.4.8's own pools and allocators, from its wheel, without anything that SGLang needs.

The environment variable ``SGLANG_048`` names a folder that the wheel was unpacked to. Without it,
pip fetches the wheel into ``.sglang/`` once. Nothing of it is part of this repository.
"""

import builtins
import contextlib
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path

import pytest

VERSION = "0.4.8"
CACHE = Path(__file__).parents[2] / ".sglang"
DOWNLOAD_SECONDS = 120
_FOLDER = Path("sglang", "srt", "mem_cache")
_FILES = ("memory_pool.py", "allocator.py")


@functools.cache
def sglang() -> types.SimpleNamespace | str:
    """What the two modules define, by name, or why there is nothing."""
    folder = _folder()
    if isinstance(folder, str):
        return folder
    names = {}
    for file in _FILES:
        module = _load(folder / _FOLDER / file)
        names |= {
            name: value
            for name, value in vars(module).items()
            # A kernel is an object whose ``fn`` is the function.
            if getattr(getattr(value, "fn", value), "__module__", None) == module.__name__
        }
    return types.SimpleNamespace(**names)


def require_sglang() -> types.SimpleNamespace:
    """What the two modules define; skips the test where they cannot be had."""
    classes = sglang()
    if isinstance(classes, str):
        pytest.skip(f"sglang: {classes}")
    return classes


def _folder() -> Path | str:
    named = os.environ.get("SGLANG_048")
    folder = CACHE if named is None else Path(named)
    if all((folder / _FOLDER / file).is_file() for file in _FILES):
        return folder
    return _download() if named is None else f"SGLANG_048={named} has no {_FOLDER / _FILES[0]}"


def _download() -> Path | str:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    pip += ["--disable-pip-version-check", "--quiet", "--retries=1", "--timeout=15"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run(
                [*pip, f"--dest={folder}", f"sglang=={VERSION}"],
                check=True,
                capture_output=True,
                text=True,
                timeout=DOWNLOAD_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"downloading the wheel took more than {DOWNLOAD_SECONDS} s"
        except subprocess.CalledProcessError as error:
            return f"pip cannot download the wheel: {error.stderr.strip().splitlines()[-1:]}"
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            _store(CACHE / ".gitignore", b"*\n")
            for file in _FILES:
                _store(CACHE / _FOLDER / file, archive.read((_FOLDER / file).as_posix()))
    return CACHE


def _store(path: Path, content: bytes) -> None:
    """Atomically: several test processes may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)


def _load(path: Path) -> types.ModuleType:
    """The module, whose imports, also later ones in its functions, go through ``_import``.

    So neither ``sys.modules`` nor torch changes for anybody else.
    """
    spec = importlib.util.spec_from_file_location(f"sglang_{VERSION}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    names = {"__import__": _import} | ({} if _has_cuda() else {"range": _range})
    vars(module)["__builtins__"] = vars(builtins) | names
    spec.loader.exec_module(module)
    return module


def _import(name, *args):
    if name.startswith("sglang."):
        return _stand_ins()[name.removeprefix("sglang.srt.")]
    module = builtins.__import__(name, *args)
    return torch_without_device() if name == "torch" else module


def _range(*bounds):
    """``range``, also of an interpreted kernel's numbers.

    Triton 3.6 cannot make a Python number of them where NumPy is 2.4 or newer.
    """
    return range(*(b if isinstance(b, int) else b.handle.data.item() for b in bounds))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@functools.cache
def _stand_ins() -> dict[str, types.SimpleNamespace]:
    """What the two modules take from the rest of SGLang, without its being there."""
    import triton

    class MemorySaver:
        @staticmethod
        def create(enable):
            assert not enable
            return MemorySaver()

        def region(self, tag):
            return contextlib.nullcontext()

    return {
        "constants": types.SimpleNamespace(GPU_MEMORY_TYPE_KV_CACHE="kv_cache"),
        "layers.radix_attention": types.SimpleNamespace(RadixAttention=object),
        "mem_cache.memory_pool": types.SimpleNamespace(KVCache=object),
        "model_executor.cuda_graph_runner": types.SimpleNamespace(
            get_is_capture_mode=lambda: False
        ),
        "torch_memory_saver_adapter": types.SimpleNamespace(TorchMemorySaverAdapter=MemorySaver),
        "utils": types.SimpleNamespace(
            debug_timing=lambda function: function,
            get_bool_env_var=lambda name, default="false": False,
            is_cuda=lambda: False,  # asked only for a second stream, used in CUDA graphs (A-MHA-15)
            next_power_of_2=lambda n: triton.next_power_of_2(max(n, 1)),
        ),
    }


@functools.cache
def torch_without_device():
    """torch, but where there is no CUDA device, waiting for it is no error (A-MHA-7)."""
    import torch

    if _has_cuda():
        return torch
    cuda = _Overlay(torch.cuda, synchronize=lambda: None)
    return _Overlay(torch, cuda=cuda)


class _Overlay:
    """A module some of whose names are others."""

    def __init__(self, module, **names):
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)
