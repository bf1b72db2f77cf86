"""Classes put into an engine: into a stand-in for SGLang, and what SGLang's own would need."""

import gc
import importlib
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

import kvtorch.sglang
from kvjax import UnsupportedError
from kvtorch.patching import _require_same_interface, patch
from tests.equivalence.upstream import require_sglang

CLASSES = [
    "ReqToTokenPool",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "TokenToKVPoolAllocator",
    "PagedTokenToKVPoolAllocator",
]
BASES = ["KVCache", "BaseTokenToKVPoolAllocator"]

MEMORY_POOL = """
    import abc
    import sglang.srt.layers.quantization as first
    assert first.DONE  # else it is in the middle of the circle

    class ReqToTokenPool:
        def __init__(self, size, max_context_len, device, enable_memory_saver): ...
        def write(self, indices, values): ...

    class KVCache(abc.ABC): ...

    class MHATokenToKVPool(KVCache):
        def __init__(self, size, page_size, dtype, head_num, head_dim, layer_num, device,
                     enable_memory_saver, start_layer=None, end_layer=None): ...
        def set_kv_buffer(self, layer, loc, cache_k, cache_v, k_scale=None, v_scale=None): ...
        def transfer(*args, **kwargs): ...
        def _private(self, anything): ...

    class MLATokenToKVPool(KVCache):
        def __init__(self, size, page_size, dtype, kv_lora_rank, qk_rope_head_dim, layer_num,
                     device, enable_memory_saver, start_layer=None, end_layer=None): ...

    class DoubleSparseTokenToKVPool(KVCache): ...
"""
ALLOCATOR = """
    import abc

    class BaseTokenToKVPoolAllocator(abc.ABC): ...

    class TokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
        def __init__(self, size, dtype, device, kvcache): ...
        def alloc(self, need_size): ...

    class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
        def __init__(self, size, page_size, dtype, device, kvcache): ...
"""
RUNNER = """
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import KVCache, MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool as Latent
    NOT_A_CLASS = 3

    def late():
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
        return MLATokenToKVPool
"""
OTHER = "from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool\n"
ENGINE = {
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang/srt/layers/__init__.py": "",
    "sglang/srt/layers/quantization.py": "DONE = False\nimport sglang.srt.lib\nDONE = True\n",
    "sglang/srt/lib.py": "",
    "sglang/srt/mem_cache/__init__.py": "",
    "sglang/srt/mem_cache/memory_pool.py": MEMORY_POOL,
    "sglang/srt/mem_cache/allocator.py": ALLOCATOR,
    "sglang/srt/runner.py": RUNNER,
    "sglangs_other.py": OTHER,
}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Makes the stand-in importable, with some files changed, for the length of a test."""

    def install(changes=()):
        for name in _stand_ins():
            monkeypatch.delitem(sys.modules, name)
        for file, source in (ENGINE | dict(changes)).items():
            path = tmp_path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(source))
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    for name in _stand_ins():
        del sys.modules[name]  # before monkeypatch puts back what was there


def _stand_ins():
    return [name for name in sys.modules if name.partition(".")[0] in ("sglang", "sglangs_other")]


def load(name):
    importlib.import_module("sglang.srt.layers.quantization")
    return importlib.import_module(name)


def homes():
    return [load(f"sglang.srt.mem_cache.{name}") for name in ("memory_pool", "allocator")]


def test_every_name_of_upstream_is_in_one_module():
    functions = ["copy_all_layer_kv_cache", "copy_two_array", "fused_downcast"]
    functions += ["get_mla_kv_buffer_triton", "set_mla_kv_buffer_triton"]
    constants = ["GB", "GPU_MEMORY_TYPE_KV_CACHE"]
    assert sorted(kvtorch.sglang.__all__) == sorted(CLASSES + BASES + functions + constants)
    assert all(hasattr(kvtorch.sglang, name) for name in kvtorch.sglang.__all__)
    assert (kvtorch.sglang.GB, kvtorch.sglang.GPU_MEMORY_TYPE_KV_CACHE) == (2**30, "kv_cache")


def test_every_module_that_took_a_class_has_ours(install):
    install()
    memory_pool, allocator = homes()
    runner, other = load("sglang.srt.runner"), load("sglangs_other")
    theirs = {**vars(memory_pool), **vars(allocator)}

    assert patch("sglang") == {name: theirs[name] for name in CLASSES}
    for name in CLASSES:
        ours = getattr(kvtorch.sglang, name)
        for module in (memory_pool, allocator, runner):
            assert getattr(module, name, ours) is ours
    assert runner.Latent is runner.late() is kvtorch.sglang.MLATokenToKVPool
    assert runner.NOT_A_CLASS == 3
    assert runner.KVCache is memory_pool.KVCache is theirs["KVCache"]
    assert memory_pool.DoubleSparseTokenToKVPool is theirs["DoubleSparseTokenToKVPool"]

    # Others keep what they took, and find our pools to be such.
    assert other.MHATokenToKVPool is theirs["MHATokenToKVPool"]
    pool = runner.MHATokenToKVPool(8, 4, torch.float16, 1, 4, 1, "cpu", False)
    assert isinstance(pool, other.MHATokenToKVPool) and isinstance(pool, theirs["KVCache"])
    assert not isinstance(pool, theirs["MLATokenToKVPool"])
    assert all(issubclass(getattr(kvtorch.sglang, name), theirs[name]) for name in BASES)
    slots = runner.TokenToKVPoolAllocator(8, torch.float16, "cpu", pool)
    assert isinstance(slots, theirs["BaseTokenToKVPoolAllocator"])

    assert patch("sglang") == {}  # ours are there already, and in use


def test_the_engine_may_be_imported_afterwards(install):
    install()
    assert list(patch("sglang")) == CLASSES
    for name in ("sglang.srt.runner", "sglangs_other"):
        assert load(name).MHATokenToKVPool is kvtorch.sglang.MHATokenToKVPool


POOLS, ALLOCATORS = (f"sglang/srt/mem_cache/{name}.py" for name in ("memory_pool", "allocator"))


@pytest.mark.parametrize(
    "file, old, new, message",
    [
        (POOLS, "head_num, ", "heads, ", r"MHATokenToKVPool.__init__\(self, size.* 0\.4\.8"),
        (POOLS, "k_scale=None", "k_scale=1", r"MHATokenToKVPool\.set_kv_buffer"),
        (ALLOCATORS, "alloc(", "alloc_more(", r"TokenToKVPoolAllocator\.alloc_more"),
        (ALLOCATORS, "class Paged", "class Sorted", r"allocator has no PagedTokenToKVPoolAll"),
    ],
)
def test_another_version_is_refused_and_nothing_replaced(file, old, new, message, install):
    source = ENGINE[file].replace(old, new)
    assert source != ENGINE[file]
    install({file: source})
    before = [dict(vars(module)) for module in homes()]
    with pytest.raises(UnsupportedError, match=message):
        patch("sglang")
    assert [vars(module) for module in homes()] == before
    assert not issubclass(kvtorch.sglang.MHATokenToKVPool, before[0]["KVCache"])


@pytest.mark.parametrize("is_heir", [False, True])
def test_an_engine_in_use_is_refused_and_nothing_replaced(is_heir, install):
    install()
    before = [dict(vars(module)) for module in homes()]
    theirs = before[0]["MHATokenToKVPool"]
    pool = (type("Heir", (theirs,), {}) if is_heir else theirs)(*range(8))
    with pytest.raises(RuntimeError, match=r"built \['MHATokenToKVPool'\] already"):
        patch("sglang")
    assert [vars(module) for module in homes()] == before
    assert not issubclass(kvtorch.sglang.MHATokenToKVPool, before[0]["KVCache"])
    del pool
    gc.collect()
    assert list(patch("sglang")) == CLASSES


def test_an_engine_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(ImportError, match=r"needs SGLang.* pip install sglang==0.4.8"):
        patch("sglang")


def test_an_engine_that_is_not_known():
    with pytest.raises(UnsupportedError, match="TokenSpeed"):
        patch("tokenspeed")
    with pytest.raises(ValueError, match="engine='vllm'"):
        patch("vllm")


@pytest.mark.parametrize("name", CLASSES)
def test_sglangs_own_classes_can_be_replaced(name):
    theirs = getattr(require_sglang(), name)
    _require_same_interface(theirs, getattr(kvtorch.sglang, name))
