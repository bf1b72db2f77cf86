"""Everything that SGLang's classes offer, kvtorch's offer too, with the same value; or a reason."""

import inspect

import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

from kvtorch import sglang as ours
from tests.equivalence.upstream import require_sglang

DIFFERENT = {  # on purpose
    "alloc_decode_kernel": "A-PG-4: ops.assign_slots does that, and SGLang's pools call no other",
    "alloc_extend_kernel": "A-PG-3: as alloc_decode_kernel",
    "set_mla_kv_buffer_kernel": "A-MLA-1: engines call set_mla_kv_buffer_triton",
    "DoubleSparseTokenToKVPool": "A-DS-5: SGLang itself has dropped it since",
    "MHATokenToKVPool.memory_saver_adapter": "A-MOD-2: a class of each, with the same region()",
    "MHATokenToKVPool.data_ptrs": "A-MHA-2: addresses of each pool's own memory",
    "MLATokenToKVPool.memory_saver_adapter": "A-MOD-2: a class of each, with the same region()",
    "PagedTokenToKVPoolAllocator.ret_values": "A-PG-3: only what its kernels leave a result in",
}
ARGUMENTS = {
    "KVCache": None,
    "BaseTokenToKVPoolAllocator": None,
    "ReqToTokenPool": (5, 12, "cpu", False),
    "MHATokenToKVPool": (20, 4, torch.float8_e5m2, 2, 16, 3, "cpu", False, 2, 5),
    "MLATokenToKVPool": (20, 4, torch.bfloat16, 128, 16, 3, "cpu", False, 2, 5),
    "TokenToKVPoolAllocator": (20, torch.float16, "cpu", None),
    "PagedTokenToKVPoolAllocator": (20, 4, torch.float16, "cpu", None),
}


def differences(theirs, mine, arguments):
    """What ``mine`` lacks, or has with another value or signature. Bases have no ``arguments``."""
    for name, method in inspect.getmembers(theirs, inspect.isfunction):
        if name.startswith("_") and name != "__init__":
            continue
        if not hasattr(mine, name) or not may_be_called_alike(getattr(mine, name), method):
            yield name
    if arguments is not None:
        my_object = mine(*arguments)
        for name, value in vars(theirs(*arguments)).items():
            if not name.startswith("_") and not alike(getattr(my_object, name, None), value):
                yield name


def may_be_called_alike(mine, theirs):
    """Names, kinds and defaults are the same; keywords may be added."""
    actual, expected = (
        [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]
        for method in (mine, theirs)
    )
    added = [kind for _, kind, _ in actual[len(expected) :]]
    return actual[: len(expected)] == expected and set(added) <= {inspect.Parameter.KEYWORD_ONLY}


def alike(actual, expected):
    if type(actual) is not type(expected):
        return False
    if isinstance(expected, torch.Tensor):
        return (actual.dtype, actual.device) == (expected.dtype, expected.device) and torch.equal(
            actual, expected
        )
    if isinstance(expected, list | tuple):
        return len(actual) == len(expected) and all(map(alike, actual, expected))
    return actual == expected


@pytest.mark.parametrize("name", ARGUMENTS)
def test_all_of_a_class(name):
    theirs, mine = vars(require_sglang())[name], getattr(ours, name)
    found = {f"{name}.{what}" for what in differences(theirs, mine, ARGUMENTS[name])}
    assert found == {key for key in DIFFERENT if key.startswith(f"{name}.")}
    # Whoever made a class of SGLang's base can make one of ours.
    assert getattr(mine, "__abstractmethods__", set()) <= theirs.__dict__.get(
        "__abstractmethods__", set()
    )


def test_all_of_the_modules():
    names = {name for name in vars(require_sglang()) if not name.startswith("_")}
    assert {"KVCache", "ReqToTokenPool", "copy_all_layer_kv_cache"} < names
    lacking = {name for name in names if not hasattr(ours, name)}
    assert lacking == {name for name in DIFFERENT if "." not in name}


class Lacking(ours.MHATokenToKVPool):
    def __init__(self, *args):
        super().__init__(*args)
        self.end_layer -= 1
        del self.store_dtype

    def get_flat_data(self, slots):
        return super().get_flat_data(slots)

    def transfer(self, indices, flat_data, stream):
        return super().transfer(indices, flat_data)


def test_what_is_lacking_is_found():
    arguments = ARGUMENTS["MHATokenToKVPool"]
    theirs = require_sglang().MHATokenToKVPool
    found = {*differences(theirs, Lacking, arguments)}
    found -= {*differences(theirs, ours.MHATokenToKVPool, arguments)}
    assert found == {"__init__", "end_layer", "get_flat_data", "store_dtype", "transfer"}
