"""SGLang's allocators: against the oracle, on the faults that real ones had, and what they cost."""

import functools
import re
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402

from kvjax.checks_mode import checks  # noqa: E402
from kvjax.dispatch import Implementation  # noqa: E402
from kvjax.errors import GeometryError  # noqa: E402
from kvtorch.allocators import (  # noqa: E402
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from kvtorch.free_list import FreeList  # noqa: E402
from kvtorch.ops import (  # noqa: E402
    assign_next_slots,
    assign_slots,
    launch,
    only_taken,
    take_back,
)
from tests.allocator_machine import OracleAdapter, run_machine  # noqa: E402
from tests.torch.allocator_adapter import TorchAdapter, make  # noqa: E402
from tests.torch.rings import interpreted  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)
families = pytest.mark.parametrize("page_size", [None, 1, 4])


@pytest.fixture(autouse=True)
def _no_debug_mode(monkeypatch):
    monkeypatch.delenv("SGLANG_DEBUG_MEMORY_POOL", raising=False)


def ints(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int64, device=device)


def compare(paged, page_size, device="cpu", **settings):
    run_machine(
        lambda *sizes: TorchAdapter(*sizes, paged=paged, device=device),
        lambda *sizes: OracleAdapter(*sizes, fifo=not paged),
        page_size,
        grows=paged,
        **settings,
    )


@on_devices
@pytest.mark.parametrize(
    "paged, page_size", [(False, 1), (True, 1), (True, 3), (True, 4), (True, 16)]
)
def test_equals_oracle(paged, page_size, device):
    compare(paged, page_size, device, max_examples=20)


@pytest.fixture
def kernels(monkeypatch):
    """Kernels run on the CPU as they do on a GPU."""
    for op in (assign_next_slots, assign_slots, only_taken, take_back):
        runs = Implementation(op._triton, lambda *_: None)
        monkeypatch.setitem(op.IMPLEMENTATIONS, "triton", runs)


@interpreted
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("paged, page_size", [(False, 1), (True, 1), (True, 4)])
def test_kernels_equal_oracle(paged, page_size, monkeypatch):
    for op in (assign_next_slots, assign_slots, only_taken, take_back):
        monkeypatch.setattr(op, "BLOCK", 16)  # 5 s to sort 1024 in the interpreter
    compare(paged, page_size, max_examples=4)


@pytest.mark.parametrize(
    "owner, name, wrong",
    [
        (PagedTokenToKVPoolAllocator, "_put_back", staticmethod(FreeList.put_last)),
        (FreeList, "_before_writing", lambda free_list: None),  # backups are overwritten
    ],
    ids=["order", "backups"],
)
def test_a_wrong_allocator_is_caught(owner, name, wrong, monkeypatch):
    """The comparison above can fail."""
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError):
        compare(True, 4, max_examples=500, phases=[hypothesis.Phase.generate], database=None)


# Names and values of SGLang 0.4.8.


def test_a_rm_1_names():
    kvcache = object()
    allocator = make(6, kvcache=kvcache)
    assert isinstance(allocator, BaseTokenToKVPoolAllocator)
    assert (allocator.size, allocator.page_size, allocator.device) == (6, 1, "cpu")
    assert allocator.dtype == torch.bfloat16
    assert allocator.get_kvcache() is allocator._kvcache is kvcache
    assert allocator.free_group == [] and allocator.is_not_in_free_group
    assert allocator.free_pages.dtype == allocator.free_slots.dtype == torch.int64
    assert allocator.free_pages.tolist() == allocator.free_slots.tolist() == [1, 2, 3, 4, 5, 6]
    assert allocator.available_size() == 6 and allocator.debug_print() == ""
    with pytest.raises(TypeError, match="abstract"):
        BaseTokenToKVPoolAllocator(6, 1, torch.bfloat16, "cpu", kvcache)  # pyright: ignore


def test_a_pg_1_names_and_keywords():
    allocator = PagedTokenToKVPoolAllocator(
        size=70, page_size=16, dtype=torch.float16, device=torch.device("cpu"), kvcache=None
    )
    assert allocator.num_pages == 4 and allocator.available_size() == 64
    TokenToKVPoolAllocator(size=4, dtype=torch.float16, device="cpu", kvcache=None)


def test_a_rm_6_a_backup_undoes_allocs_and_frees():
    allocator = make(16, 4)
    kept = allocator.alloc(4)
    state = allocator.backup_state()
    allocator.alloc(8)
    allocator.free(kept)
    for _ in range(2):
        allocator.restore_state(state)
        assert allocator.free_pages.tolist() == [2, 3, 4]
        assert allocator.alloc(8).tolist() == list(range(8, 16))
    allocator.restore_state(ints(4, 1))  # as upstream's states are
    assert allocator.free_pages.tolist() == [4, 1]
    with pytest.raises(ValueError, match="another allocator"):
        make(16, 4).restore_state(allocator.backup_state())


@pytest.mark.parametrize("pages", [[1, 1], [0], [5], [-1]])
def test_free_pages_that_cannot_be(pages):
    allocator = make(16, 4)
    with pytest.raises(ValueError, match="distinct and from 1 to 4"):
        allocator.free_pages = ints(*pages)
    assert allocator.free_pages.tolist() == [1, 2, 3, 4]
    allocator.free_pages = ints(3, 1)
    assert allocator.alloc(8).tolist() == [*range(12, 16), *range(4, 8)]
    slots = make(4)
    slots.free_slots = ints(2)
    assert slots.available_size() == 1


def test_a_restore_in_a_group_frees_nothing_of_the_next_owner():
    allocator = make(4)
    state = allocator.backup_state()
    first = allocator.alloc(2)
    allocator.free_group_begin()
    allocator.free(first)
    allocator.restore_state(state)
    assert allocator.alloc(2).tolist() == [1, 2]
    allocator.free_group_end()
    assert allocator.free_pages.tolist() == [3, 4]


def test_a_rm_7_copies_to_the_cpu_are_the_pools():
    class Pool:
        def get_cpu_copy(self, indices):
            return ("copy", indices)

        def load_cpu_copy(self, kv_cache_cpu, indices):
            return (kv_cache_cpu, indices)

    allocator = make(4, kvcache=Pool())
    assert allocator.get_cpu_copy(7) == ("copy", 7)
    assert allocator.load_cpu_copy("copy", 7) == ("copy", 7)
    for name in ("get_cpu_copy", "load_cpu_copy"):
        with pytest.raises(NotImplementedError):
            getattr(make(4, 4, kvcache=Pool()), name)("copy", 7)


def test_a_rm_8_single_slots_do_not_grow():
    for name in ("alloc_extend", "alloc_decode"):
        with pytest.raises(NotImplementedError):
            getattr(make(4), name)(ints(1), ints(2), ints(1), 1)


@families
def test_a_rm_9_clear(page_size):
    allocator = make(4 * (page_size or 1), page_size)
    slots = allocator.alloc(2 * (page_size or 1))
    allocator.free_group_begin()
    allocator.free(slots)
    allocator.clear()
    assert allocator.free_pages.tolist() == [1, 2, 3, 4]
    assert allocator.is_not_in_free_group and allocator.free_group == []


@on_devices
def test_a_pg_7_the_worked_example(device):
    allocator = make(64, 16, device)
    one = torch.ones(1, dtype=torch.int64, device=device)
    assert allocator.alloc_extend(0 * one, 20 * one, -one, 20).tolist() == [*range(16, 36)]
    assert allocator.alloc_extend(20 * one, 36 * one, 35 * one, 16).tolist() == [*range(36, 52)]
    assert allocator.alloc_decode(37 * one, 51 * one).tolist() == [52]


def test_a_mod_7_debug_mode_is_read_when_made(monkeypatch):
    for value, on in {"1": True, "True": True, "0": False, "false": False, "yes": False}.items():
        monkeypatch.setenv("SGLANG_DEBUG_MEMORY_POOL", value)
        allocator = make(4)
        monkeypatch.delenv("SGLANG_DEBUG_MEMORY_POOL")
        assert allocator.debug_mode is on and make(4).debug_mode is False


# What real allocators got wrong, by the ids of the collection of public faults.


def test_al1_capacity_is_decided_first():
    allocator = make(16, 4)
    slots = allocator.alloc_extend(ints(0), ints(10), ints(-1), 10)
    assert slots.tolist() == list(range(4, 14))
    assert allocator.alloc_extend(ints(10), ints(17), ints(13), 7) is None
    assert allocator.free_pages.tolist() == [4]
    slots = allocator.alloc_extend(ints(10), ints(16), ints(13), 6)
    assert slots.tolist() == [14, 15, 16, 17, 18, 19] and allocator.available_size() == 0
    assert allocator.alloc_decode(ints(17), ints(19)) is None
    assert allocator.alloc_decode(ints(16), ints(18)).tolist() == [19]
    assert allocator.alloc(4) is None


@on_devices
def test_al1_an_empty_batch(device):
    allocator, none = make(16, 4, device), ints(device=device)
    for slots in (
        allocator.alloc_extend(none, none, none, 0),
        allocator.alloc_decode(none, none),
        allocator.alloc(0),
        make(4, None, device).alloc(0),
    ):
        assert slots.shape == (0,) and slots.dtype == torch.int64
    assert allocator.alloc_extend(none, none, none, 3).tolist() == [-1] * 3
    assert allocator.available_size() == 16


def test_al3_a_group_ended_twice():
    allocator = make(6)
    slots = allocator.alloc(3)
    allocator.free_group_begin()
    allocator.free(slots)
    assert allocator.available_size() == 3 and not allocator.is_not_in_free_group
    allocator.free_group_end()
    allocator.free_group_end()
    assert allocator.free_pages.tolist() == [4, 5, 6, 1, 2, 3] and allocator.is_not_in_free_group


def test_al3_nested_groups():
    allocator = make(6)
    slots = allocator.alloc(4)
    allocator.free_group_begin()
    allocator.free(slots[:2])
    allocator.free_group_begin()
    allocator.free(slots[2:])
    allocator.free_group_end()
    assert allocator.available_size() == 2
    allocator.free_group_end()
    assert allocator.free_pages.tolist() == [5, 6, 1, 2, 3, 4]


def test_al3_an_empty_group():
    allocator = make(6)
    allocator.free_group_begin()
    allocator.free_group_end()
    assert allocator.available_size() == 6


def drain(allocator, num_slots):
    slots = []
    while (more := allocator.alloc(num_slots)) is not None:
        slots += more.tolist()
    return slots


@on_devices
@families
@pytest.mark.parametrize("debug", ["off", "environment", "checks"])
@pytest.mark.parametrize("how", ["direct", "grouped", "in one call"])
def test_al4_double_free(page_size, debug, how, device, monkeypatch):
    monkeypatch.setenv("SGLANG_DEBUG_MEMORY_POOL", "1" if debug == "environment" else "0")
    num_slots = 4 * (page_size or 1)
    allocator = make(num_slots, page_size, device)
    slots = allocator.alloc(num_slots // 2)
    if how == "grouped":
        allocator.free_group_begin()
    if how == "in one call":
        twice = torch.cat((slots, slots))
    else:
        allocator.free(slots)
        twice = slots
    with checks(debug == "checks"):
        if debug == "off":
            allocator.free(twice)
        else:
            with pytest.raises(ValueError, match=rf"free_index\[\d\]={page_size or 1} is free"):
                allocator.free(twice)
            if how == "in one call":
                assert allocator.available_size() == num_slots // 2
                allocator.free(slots)
    allocator.free_group_end()
    assert allocator.available_size() == num_slots
    handed_out = drain(allocator, num_slots // 2)
    assert len(handed_out) == len(set(handed_out)) == num_slots


@families
@pytest.mark.parametrize("slot", ["padding", -1, "past the end", 2**32, "never handed out"])
@pytest.mark.parametrize("grouped", [False, True])
def test_al4_foreign_slots(page_size, slot, grouped, monkeypatch):
    size = page_size or 1
    allocator = make(4 * size, page_size)
    allocator.alloc(2 * size)
    slot = {"padding": size - 1, "past the end": 5 * size, "never handed out": 4 * size}.get(
        slot, slot
    )
    if grouped:
        allocator.free_group_begin()
    allocator.free(ints(slot, size))
    with checks(), pytest.raises(ValueError, match=rf"free_index\[0\]={slot} is free"):
        allocator.free(ints(slot))
    allocator.free_group_end()
    pages = allocator.free_pages.tolist()
    assert pages == ([3, 4, 1] if page_size is None else [1, 3, 4])


def test_al4_a_group_does_not_free_what_is_handed_out_after_the_call():
    allocator = make(4)
    allocator.alloc(2)
    allocator.free_group_begin()
    allocator.free(ints(3))
    assert allocator.alloc(1).tolist() == [3]
    allocator.free_group_end()
    assert allocator.free_pages.tolist() == [4]


def test_al4_a_last_slot_that_nobody_has():
    allocator = make(16, 4)
    allocator.alloc(4)
    for last_loc in (9, 1, -3, 21, 2**40 + 1, 4):  # free, padding, …, of another place
        assert allocator.alloc_decode(ints(3), ints(last_loc)).tolist() == [-1]
        assert allocator.alloc_extend(ints(2), ints(3), ints(last_loc), 1).tolist() == [-1]
        with checks(), pytest.raises(ValueError, match=rf"last_loc\[0\]={last_loc} cannot hold"):
            allocator.alloc_decode(ints(3), ints(last_loc))
    slots = allocator.alloc_extend(ints(0, 2), ints(2, 7), ints(-1, 9), 7)
    assert slots.tolist() == [8, 9, -1, -1, 12, 13, 14]  # 9 was nobody's when the call was made


def test_al5_parts_of_a_page_in_one_group():
    allocator = make(16, 4)
    slots = allocator.alloc(8)
    allocator.free_group_begin()
    with checks():
        allocator.free(slots[:2])
        allocator.free(slots[2:4])
    allocator.free_group_end()
    assert allocator.available_size() == 12 and allocator.free_pages.tolist() == [1, 3, 4]


def test_al5_parts_of_a_page_in_two_calls():
    allocator = make(16, 4)
    slots = allocator.alloc(8)
    allocator.free(slots[:2])
    with checks(), pytest.raises(ValueError, match=r"free_index\[0\]=6"):
        allocator.free(slots[2:4])
    allocator.free(slots[2:4])
    assert allocator.free_pages.tolist() == [1, 3, 4]
    assert allocator.free(ints()) is allocator.free(torch.tensor([])) is None


@on_devices
def test_al6_past_two_to_the_twenty_tokens(device):
    num_tokens = (1 << 20) + 3
    allocator = make(16385 * 64, 64, device)
    one = torch.ones(1, dtype=torch.int64, device=device)
    allocator.alloc_extend(0 * one, 5 * one, -one, 5)
    slots = allocator.alloc_extend(5 * one, (5 + num_tokens) * one, 68 * one, num_tokens)
    assert torch.equal(slots, torch.arange(69, 69 + num_tokens, device=device))
    assert allocator.available_size() == 0


def test_x1_pages_freed_come_first_and_sorted():
    allocator = make(16, 4)
    slots = allocator.alloc(12)
    allocator.free(slots[4:8])
    allocator.free(slots[:4])
    assert allocator.available_size() == 12
    assert allocator.alloc(4).tolist() == [4, 5, 6, 7]
    allocator.free(torch.cat((slots[8:12], slots[:4])))
    assert allocator.free_pages.tolist() == [1, 3, 2, 4]


def test_s8_ten_slots_are_two_pages_of_four():
    allocator = make(10, 4)
    assert allocator.available_size() == 8 and allocator.num_pages == 2
    for need_size in (6, 10, -4, -1):
        with pytest.raises(ValueError, match=f"need_size={need_size} must"):
            allocator.alloc(need_size)
    assert allocator.alloc(12) is None
    assert allocator.alloc(8).tolist() == list(range(4, 12))


@families
def test_ho2_what_is_handed_out_is_no_view(page_size):
    size = page_size or 1
    allocator = make(20 * size, page_size)
    slots = allocator.alloc(8 * size)
    assert slots.untyped_storage().nbytes() == 64 * size
    slots.fill_(0)
    assert allocator.alloc(size).tolist() == list(range(9 * size, 10 * size))
    pages = allocator.free_pages
    pages.fill_(0)
    assert allocator.alloc(size).tolist() == list(range(10 * size, 11 * size))
    given = allocator.alloc(size)
    allocator.free_group_begin()
    allocator.free(given)
    given.fill_(0)
    allocator.free_group_end()
    assert allocator.available_size() == 10 * size


# Refused calls.

REFUSED = {
    "negative": (ValueError, lambda a: a.alloc(-4)),
    "float": (TypeError, lambda a: a.alloc(4.0)),
    "bool": (TypeError, lambda a: a.alloc(True)),
    "none": (TypeError, lambda a: a.alloc(None)),
    "float slots": (TypeError, lambda a: a.free(torch.tensor([4.0]))),
    "list": (TypeError, lambda a: a.free([4])),
    "matrix": (ValueError, lambda a: a.free(torch.zeros((2, 2), dtype=torch.int64))),
    "sizes": (ValueError, lambda a: a.alloc_extend(ints(0), ints(1, 2), ints(-1), 8)),
    "decode sizes": (ValueError, lambda a: a.alloc_decode(ints(1, 2), ints(-1))),
    "negative tokens": (ValueError, lambda a: a.alloc_extend(ints(0), ints(1), ints(-1), -1)),
    "float tokens": (TypeError, lambda a: a.alloc_extend(ints(0), ints(1), ints(-1), 1.0)),
    "more tokens": (ValueError, lambda a: a.alloc_extend(ints(0), ints(3), ints(-1), 2)),
    "float lens": (TypeError, lambda a: a.alloc_decode(torch.ones(1), ints(-1))),
    "lists": (TypeError, lambda a: a.alloc_decode([1], [-1])),
    "host size": (ValueError, lambda a: a.alloc_decode(ints(1), ints(-1), seq_lens_cpu=[1, 2])),
    "host dtype": (TypeError, lambda a: a.alloc_decode(ints(1), ints(-1), seq_lens_cpu=[1.5])),
}
CHECKED = {
    "shrinks": (
        r"seq_lens\[1\]=3",
        lambda a: a.alloc_extend(ints(0, 4), ints(4, 3), ints(-1, 7), 8),
    ),
    "negative": (r"seq_lens\[0\]=-1", lambda a: a.alloc_decode(ints(-1), ints(5))),
    "one slot": (
        r"last_loc\[1\]=5 .*last_loc\[0\]",
        lambda a: a.alloc_decode(ints(3, 3), ints(5, 5)),
    ),
    "one page": (
        r"last_loc\[1\]=4 .*last_loc\[0\]",
        lambda a: a.alloc_extend(ints(2, 1), ints(3, 2), ints(5, 4), 2),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_call_changes_nothing(case):
    error, call = REFUSED[case]
    allocator = make(16, 4)
    slots = allocator.alloc(8)
    with pytest.raises(error):
        call(allocator)
    assert allocator.free_pages.tolist() == [3, 4]
    allocator.free(slots)
    assert allocator.available_size() == 16


@pytest.mark.parametrize("case", CHECKED)
def test_debug_mode_refuses_sequences_that_cannot_grow(case, monkeypatch):
    message, call = CHECKED[case]
    monkeypatch.setenv("SGLANG_DEBUG_MEMORY_POOL", "true")
    debugged = make(16, 4)
    monkeypatch.delenv("SGLANG_DEBUG_MEMORY_POOL")
    for allocator, context in ((debugged, checks(False)), (make(16, 4), checks())):
        allocator.alloc(8)
        with context, pytest.raises(ValueError, match=message):
            call(allocator)
        assert allocator.available_size() == 8
    allocator = make(16, 4)
    allocator.alloc(8)
    call(allocator)  # otherwise not looked at


def test_debug_mode_refuses_to_grow_what_an_open_group_frees():
    allocator = make(16, 4)
    allocator.free_group_begin()
    allocator.free(allocator.alloc(4))
    with checks(), pytest.raises(ValueError, match=r"last_loc\[0\]=5 .*not freed"):
        allocator.alloc_decode(ints(3), ints(5))


@pytest.mark.parametrize("sizes, error", [((8, 0), GeometryError), ((-1, 4), ValueError)])
def test_sizes_that_are_none(sizes, error):
    with pytest.raises(error):
        make(*sizes)


def test_integers_of_any_kind():
    allocator = make(np.int64(16), np.int32(4))
    assert allocator.alloc(np.uint8(4)).tolist() == [4, 5, 6, 7]
    lens = torch.tensor([0], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    assert allocator.alloc_extend(*lens, ints(-1), torch.tensor(2)).tolist() == [8, 9]
    assert allocator.alloc_decode(lens[1] + 1, torch.tensor([9], dtype=torch.int32)).tolist() == [
        10
    ]
    allocator.free(torch.tensor([8], dtype=torch.int32))
    assert allocator.free_pages.tolist() == [2, 3, 4]


# Cost.


OPERATIONS = {  # which, page size: operations of torch at most, launches of kernels
    ("alloc_extend", 64): (1, 1),
    ("alloc_decode", 64): (1, 1),
    ("alloc", 64): (4, 0),
    ("alloc", None): (2, 0),
    ("free", 64): (2, 1),
    ("free", None): (2, 1),
    ("free in a group", 64): (1, 1),
    ("end of a group", 64): (2, 1),
    ("trial", 64): (4, 0),
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name, page_size", OPERATIONS)
def test_few_operations(name, page_size, monkeypatch):
    """Each takes some microseconds of host time, whatever it does."""
    from torch.utils._python_dispatch import TorchDispatchMode

    launched, operations = [], []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.name() != "aten::detach":  # of numpy()
                operations.append(func.name())
            return func(*args, **(kwargs or {}))

    def counted(kernel, grid, key, tensors, numbers, num_warps=4):
        launched.append(kernel)
        if kernel is take_back._kernel:
            tensors[-1].zero_()  # what it counts

    allocator = make(4096, page_size, "cpu")
    slots = allocator.alloc(1024)
    lens = torch.tensor([5] * 8)
    host = {"prefix_lens_cpu": torch.tensor([5] * 8), "seq_lens_cpu": torch.tensor([16] * 8)}
    last_loc = slots[4:516:64].clone()

    def trial():
        state = allocator.backup_state()
        allocator.alloc(64)
        allocator.restore_state(state)

    function, *args = {
        "alloc_extend": (allocator.alloc_extend, lens, lens + 11, last_loc, 88),
        "alloc_decode": (allocator.alloc_decode, lens + 1, last_loc),
        "alloc": (allocator.alloc, 1024),
        "trial": (trial,),
        "end of a group": (allocator.free_group_end,),
    }.get(name, (allocator.free, slots))
    if name == "alloc_extend":
        function = functools.partial(function, **host)
    if "group" in name:
        allocator.free_group_begin()
    if name == "end of a group":
        allocator.free(slots)
    with monkeypatch.context() as patched, Counting():
        patched.setattr(launch, "launch", counted)
        operations.clear()
        function(*args)
    operations = [name for name in operations if name != "aten::zero_"]
    most, launches = OPERATIONS[name, page_size]
    assert len(launched) == launches
    assert len(operations) <= most, operations


def elements_touched(function):
    """The elements of the largest tensor that an operation of ``function`` makes or changes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    views = {"aten::slice.Tensor", "aten::detach"}

    class Largest(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            in_place = func._schema.name.endswith("_")
            # Those write only what they are given indices of.
            by_index = re.search("scatter|index_fill", func._schema.name)
            if func.name() not in views and not (in_place and by_index):
                outputs = result if isinstance(result, tuple | list) else [result]
                sizes = [x.numel() for x in outputs if isinstance(x, torch.Tensor)]
                self.largest = max(self.largest, *sizes, 0)
            return result

    with Largest() as mode:
        function()
    return mode.largest


@pytest.mark.parametrize("page_size", [None, 4])
def test_a_large_pool_costs_no_more(page_size):
    size = page_size or 1
    num_pages = 1 << 16
    allocator = make(num_pages * size, page_size)
    allocator.alloc(num_pages * size - 100 * size)

    def step():
        state = allocator.backup_state()
        slots = allocator.alloc(8 * size)
        allocator.restore_state(state)
        del state
        slots = allocator.alloc(8 * size)
        if page_size:
            lens = torch.full((8,), page_size - 1)
            allocator.alloc_decode(lens, slots[::page_size])
            allocator.alloc_extend(lens, lens + 2, slots[::page_size], 16)
        allocator.free_group_begin()
        allocator.free(slots)
        allocator.free_group_end()

    for _ in range(20):  # round the ring
        assert 0 < elements_touched(step) <= 8 * size + 1
    assert elements_touched(lambda: allocator.free_pages) >= 1


def test_the_cost_of_a_large_pool_would_show():
    """The comparison above can fail: a backup that is kept over a free is a copy."""
    allocator = make(1 << 16)
    slots = allocator.alloc(8)
    state = allocator.backup_state()
    assert elements_touched(lambda: allocator.free(slots)) == (1 << 16) - 8
    del state
    assert elements_touched(lambda: allocator.free(allocator.alloc(8))) == 8


def synchronisations(function):
    """How often ``function`` waits for the GPU, as torch sees it."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            function()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in seen)


@pytest.mark.gpu
def test_lengths_on_the_host_need_no_synchronisation():
    allocator = make(400, 4, "cuda")
    slots = allocator.alloc(8)
    two = torch.tensor([2, 2], device="cuda")
    last_loc = slots[1::4].clone()
    host = {"prefix_lens_cpu": [2, 2], "seq_lens_cpu": torch.tensor([9, 3])}
    results = []

    def run():
        state = allocator.backup_state()
        results.append(allocator.alloc(40))
        allocator.restore_state(state)
        seq_lens = two + torch.tensor([7, 1]).to("cuda", non_blocking=True)
        results.append(allocator.alloc_extend(two, seq_lens, last_loc, 8, **host))
        results.append(allocator.alloc_decode(two + 1, last_loc, seq_lens_cpu=[3, 3]))
        lens = torch.tensor([2, 2]), torch.tensor([9, 3])
        results.append(allocator.alloc_extend(*lens, last_loc, 8))
        allocator.free_group_begin()
        allocator.free(results[0][:4])

    run()  # compiles
    allocator.free_group_end()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    allocator.free_group_end()
    assert results[5].tolist()[:2] == [6, 7] and results[6].tolist() == [6, 10]


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 4])
def test_synchronisations_are_counted(page_size):
    """Once for lengths on the device, once for a free; as upstream, whose token free had none."""
    allocator = make(400, page_size, "cuda")
    slots = allocator.alloc(40)
    assert synchronisations(lambda: slots.sum().item()) == 1  # it can count
    if page_size:
        lens = torch.tensor([2, 2], device="cuda")
        args = (lens, lens + 1, slots[1:9:4], 2)
        assert synchronisations(lambda: allocator.alloc_extend(*args)) == 1
        assert synchronisations(lambda: allocator.alloc_decode(lens + 1, slots[1:9:4])) == 1
    assert synchronisations(lambda: allocator.free(slots)) == 1
    assert synchronisations(lambda: allocator.alloc(40)) == 0


@pytest.mark.gpu
def test_slots_of_another_device_are_refused():
    with pytest.raises(ValueError, match="free_index is on cpu"):
        make(16, 4, "cuda").free(ints(4))
