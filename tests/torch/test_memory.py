"""Where torch pools take their memory from, with stand-ins for the packages that give some."""

import contextlib
import sys
import types

import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

from kvtorch.pools import memory
from kvtorch.pools.memory import custom_mem_pool, memory_region
from kvtorch.request_table import ReqToTokenPool
from tests.torch.pools import mha, mla

VARIABLE = "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"
POOLS = {
    "mha": lambda **options: mha(8, 4, torch.float16, 1, 4, 2, **options),
    "mla": lambda **options: mla(8, 4, torch.float16, 4, 4, 2, **options),
}


class Recorder:
    """Blocks of a stand-in, and which tensors were made inside them."""

    def __init__(self, monkeypatch):
        self.opened, self.open, self.made_inside = [], 0, 0
        zeros = torch.zeros

        def recording(*args, **kwargs):
            self.made_inside += bool(self.open)
            return zeros(*args, **kwargs)

        monkeypatch.setattr(torch, "zeros", recording)

    @contextlib.contextmanager
    def block(self, *args, **kwargs):
        self.opened.append((args, kwargs))
        self.open += 1
        yield
        self.open -= 1


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


@pytest.fixture
def saver(monkeypatch, recorder):
    module = types.ModuleType("torch_memory_saver")
    module.torch_memory_saver = types.SimpleNamespace(region=recorder.block)
    monkeypatch.setitem(sys.modules, "torch_memory_saver", module)
    return recorder


@pytest.fixture
def mooncake(monkeypatch, recorder):
    """Mooncake and ``torch.cuda``'s pools, which need a GPU."""
    devices = []

    class NVLinkAllocator:
        @staticmethod
        def get_allocator(device):
            devices.append(device)
            return types.SimpleNamespace(allocator=lambda: "an allocator")

    for name in ("mooncake", "mooncake.allocator"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["mooncake.allocator"].NVLinkAllocator = NVLinkAllocator
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"a pool of {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", recorder.block)
    recorder.devices = devices
    return recorder


KV_CACHE = [((), {"tag": "kv_cache"})]


@pytest.mark.parametrize("kind", POOLS)
def test_a_mod_1_planes_are_allocated_under_the_tag(kind, saver):
    pool = POOLS[kind](saver=True)
    assert saver.opened == KV_CACHE and saver.made_inside == len(pool.planes)
    pool._clear_buffers()
    pool._create_buffers()
    assert saver.opened == KV_CACHE * 2


def test_a_mod_1_the_request_table_too(saver):
    ReqToTokenPool(4, 8, "cpu", True)
    assert saver.opened == KV_CACHE and saver.made_inside == 1


def test_a_mod_1_an_adapter_as_upstreams(saver):
    with POOLS["mha"](saver=True).memory_saver_adapter.region("other"):
        pass
    assert saver.opened == [*KV_CACHE, ((), {"tag": "other"})]


@pytest.mark.parametrize("kind", POOLS)
def test_a_mod_2_nothing_is_saved_unless_asked_for(kind, saver):
    POOLS[kind]()
    with memory_region(False):
        pass
    assert saver.opened == [] and saver.made_inside == 0


@pytest.mark.parametrize("kind", POOLS)
def test_a_mod_2_a_saver_that_is_not_installed(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    for call in (lambda: POOLS[kind](saver=True), lambda: memory_region(True)):
        with pytest.raises(ImportError, match=r"=True needs .* pip install"):
            call()
    POOLS[kind]()


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("value", ["1", "true", "True", "TRUE"])
def test_a_mod_6_mooncakes_memory_if_asked_for(kind, value, mooncake, monkeypatch):
    monkeypatch.setenv(VARIABLE, value)
    pool = POOLS[kind]()
    assert pool.maybe_get_custom_mem_pool() == pool.custom_mem_pool == "a pool of an allocator"
    assert pool.enable_custom_mem_pool is True and mooncake.devices == ["cpu"]
    assert mooncake.opened == [(("a pool of an allocator",), {})]
    assert mooncake.made_inside == len(pool.planes)
    over = POOLS[kind](planes=pool.planes)  # memory from elsewhere
    assert over.maybe_get_custom_mem_pool() is None and over.enable_custom_mem_pool is False
    monkeypatch.delenv(VARIABLE)  # it is read at each construction
    assert POOLS[kind]().maybe_get_custom_mem_pool() is None


@pytest.mark.parametrize("value, warns", [("0", 0), ("False", 0), ("yes", 1), ("", 1), ("2", 1)])
def test_a_mod_6_plain_memory_otherwise(value, warns, mooncake, monkeypatch, caplog):
    monkeypatch.setattr(memory, "_misunderstood", set())
    monkeypatch.setenv(VARIABLE, value)
    for _ in range(2):
        pool = POOLS["mha"]()
        assert pool.maybe_get_custom_mem_pool() is None and pool.enable_custom_mem_pool is False
    assert mooncake.opened == [] and len(caplog.records) == warns


def test_a_mod_6_mooncake_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(ImportError, match=f"{VARIABLE}=1 needs .* unset"):
        custom_mem_pool("cpu")
