"""TokenSpeed's own modules of pools, from a checkout, without anything that TokenSpeed needs.

The environment variable ``TOKENSPEED_SRC`` names the checkout, of commit 205c53c4. Nothing of it is
part of this repository.
"""

import functools
import os
import sys
import types
from pathlib import Path

import pytest

from benchmarks import peers
from tests.equivalence.upstream import torch_without_device

COMMIT = "205c53c4"
_PACKAGE = "tokenspeed"


@functools.cache
def tokenspeed() -> types.SimpleNamespace | str:
    """What the modules define, by name, or why there is nothing."""
    named = os.environ.get("TOKENSPEED_SRC")
    if named is None:
        return f"TOKENSPEED_SRC names no checkout (of commit {COMMIT})"
    before = _take_out()
    try:
        peers.tokenspeed(Path(named))
        loaded = _take_out()
    except peers.PeerError as error:
        return str(error)
    finally:
        _take_out()
        sys.modules.update(before)
    names = {}
    for module_name, module in loaded.items():
        if "kv_cache." not in module_name and not module_name.endswith("cache.utils"):
            continue
        vars(module)["torch"] = torch_without_device()  # copies wait for a device (B-M-18)
        names |= {
            name: value
            for name, value in vars(module).items()
            # A kernel is an object whose ``fn`` is the function.
            if getattr(getattr(value, "fn", value), "__module__", None) == module_name
        }
    return types.SimpleNamespace(**names)


def _take_out() -> dict[str, types.ModuleType]:
    """Removes the package from the modules that others see; what it was."""
    names = [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]
    return {name: sys.modules.pop(name) for name in names}


def require_tokenspeed() -> types.SimpleNamespace:
    """What the modules define; skips the test where they cannot be had."""
    classes = tokenspeed()
    if isinstance(classes, str):
        pytest.skip(f"tokenspeed: {classes}")
    return classes
