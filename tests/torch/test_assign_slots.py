"""Slots for new tokens: against plain loops, past every size, and compiled once."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")

import hypothesis  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvjax.errors import UnsupportedError  # noqa: E402
from kvtorch.ops import assign_slots as op  # noqa: E402
from kvtorch.ops.assign_slots import assign_slots  # noqa: E402


def oracle(prefix_lens, extend_lens, last_slots, starts, pages, page_size, num_tokens, taken):
    """The contract, one token at a time."""
    result = [-1] * num_tokens
    pages = iter(pages)
    batch = zip(prefix_lens, extend_lens, last_slots, starts, strict=True)
    for prefix_len, extend_len, slot, start in batch:
        page = slot // page_size
        if taken is not None and not (0 <= page < len(taken) and taken[page]):
            slot = -1
        for position in range(prefix_len, prefix_len + extend_len):
            if position % page_size == 0:
                page = next(pages, -1)
                slot = page * page_size if page >= 0 else -1
            elif slot >= 0 and (slot + 1) % page_size == position % page_size:
                slot += 1
            else:
                slot = -1
            if start + position - prefix_len < num_tokens:
                result[start + position - prefix_len] = slot
    return result


@st.composite
def batches(draw, page_size):
    """Sequences, some of them padding, too few pages at times, and last slots of any kind."""
    num = draw(st.integers(0, 7))

    def ints(low, high):
        return draw(st.lists(st.integers(low, high), min_size=num, max_size=num))

    prefix_lens, extend_lens, gaps = ints(-1, 3 * page_size), ints(0, 3 * page_size), ints(0, 2)
    extend_lens = [
        n if prefix_len >= 0 else 0 for prefix_len, n in zip(prefix_lens, extend_lens, strict=True)
    ]
    last_slots = [
        draw(st.sampled_from([-1, 5 * page_size + (prefix_len - 1) % page_size]) | any_slot)
        for prefix_len, any_slot in zip(
            prefix_lens, [st.integers(-3, 12 * page_size)] * num, strict=True
        )
    ]
    starts, start = [], 0
    for extend_len, gap in zip(extend_lens, gaps, strict=True):
        starts.append(start)
        start += extend_len + gap
    pages = draw(st.lists(st.integers(1, 99), max_size=30, unique=True))
    taken = draw(st.none() | st.lists(st.booleans(), min_size=1, max_size=9))
    num_tokens = max(start + draw(st.integers(-2, 3)), 0)
    return prefix_lens, extend_lens, last_slots, starts, pages, page_size, num_tokens, taken


def on(device, batch, dtype=torch.int64):
    """The batch as tensors, with pages as the start of a longer tensor, which must not be seen."""
    *sequences, pages, page_size, num_tokens, taken = batch
    tensors = [torch.tensor(x, dtype=dtype, device=device) for x in sequences]
    pages = torch.tensor([*pages, 10**6, 10**6], dtype=dtype, device=device)[: len(pages)]
    if taken is not None:
        taken = torch.tensor([*taken, True, True], device=device)[: len(taken)]
    return (*tensors, pages, page_size, num_tokens, taken)


IMPLEMENTATIONS = [
    pytest.param(op.reference, "cpu", id="reference"),
    pytest.param(op._triton, "cpu", id="triton-interpreted"),
    pytest.param(op._triton, "cuda", id="triton", marks=pytest.mark.gpu),
    pytest.param(op.reference, "cuda", id="reference-gpu", marks=pytest.mark.gpu),
]
implementations = pytest.mark.parametrize("run, device", IMPLEMENTATIONS)


@pytest.fixture(autouse=True)
def _interpreted_only_without_gpu(request):
    call = getattr(request.node, "callspec", None)
    if call and call.id.startswith("triton-interpreted") and not is_interpreted():
        pytest.skip("interpreter: Triton compiles its kernels here")


def is_interpreted():
    return type(op._kernel).__name__ == "InterpretedFunction"


def check(run, device, batch, dtype=torch.int64):
    result = run(*on(device, batch, dtype))
    assert result.dtype == torch.int64 and result.tolist() == oracle(*batch)


@implementations
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_equals_oracle(run, device, page_size, dtype):
    @hypothesis.settings(max_examples=15, deadline=None)
    @given(batches(page_size))
    def draw_and_check(batch):
        check(run, device, batch, dtype)

    draw_and_check()


def test_a_wrong_implementation_is_caught():
    """The comparison above can fail: as upstream, with any last slot believed."""

    def wrong(prefix_lens, extend_lens, last_slots, *rest):
        believed = torch.arange(len(prefix_lens)) * 0 + prefix_lens.clamp(min=1) - 1
        return op.reference(prefix_lens, extend_lens, believed, *rest)

    @hypothesis.settings(max_examples=200, phases=[hypothesis.Phase.generate], database=None)
    @given(batches(3))
    def draw_and_check(batch):
        check(wrong, "cpu", batch)

    with pytest.raises(AssertionError):
        draw_and_check()


@implementations
def test_no_sequences_and_no_tokens(run, device):
    assert run(*on(device, ([], [], [], [], [], 4, 0, None))).shape == (0,)
    check(run, device, ([], [], [], [], [3], 4, 2, None))
    check(run, device, ([3], [0], [6], [0], [], 4, 0, [True]))


@implementations
def test_al1_pages_past_those_given_are_not_read(run, device):
    check(run, device, ([0, 2], [9, 5], [-1, 6], [0, 9], [7], 4, 14, None))


@implementations
def test_more_sequences_than_a_block_looks_at(run, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(op, "BLOCK", 16)  # 10 ms a sequence in the interpreter
    for num_sequences in (op.BLOCK - 1, op.BLOCK, op.BLOCK + 1, 2 * op.BLOCK + 5):
        prefix_lens = [i % 3 for i in range(num_sequences)]
        lens = [i % 5 for i in range(num_sequences)]
        starts = [sum(lens[:i]) for i in range(num_sequences)]
        last_slots = [4 * i + i % 3 - 1 for i in range(num_sequences)]
        pages = list(range(9000, 9000 + num_sequences * 2))
        check(run, device, (prefix_lens, lens, last_slots, starts, pages, 4, sum(lens), None))


@implementations
def test_al6_past_two_to_the_twenty_tokens(run, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(op, "BLOCK", 1 << 15)  # 5 ms a block in the interpreter
    num_tokens = (1 << 20) + 3
    prefix_lens, extend_lens, last_slots, starts = (
        torch.tensor(x, device=device)
        for x in ([5, 1], [num_tokens - 2, 2], [68, 9], [0, num_tokens - 2])
    )
    pages = torch.arange(2, 2 + (1 << 14), device=device)
    slots = run(prefix_lens, extend_lens, last_slots, starts, pages, 64, num_tokens, None)
    expected = torch.arange(69, 69 + num_tokens, device=device)
    expected[-2:] = -1  # slot 9 is no page's first
    assert torch.equal(slots, expected)


def test_slots_past_int32():
    for run in [op.reference] + [op._triton] * is_interpreted():
        check(run, "cpu", ([0, 7], [9, 2], [-1, 2**40 * 16 + 6], [0, 9], [2**36], 16, 11, None))


def test_a_tensor_on_the_cpu_takes_the_reference_and_never_the_kernel():
    args = on("cpu", ([0], [3], [-1], [0], [4], 4, 3, None))[:5]
    assert assign_slots(*args, page_size=4, num_tokens=3).tolist() == [16, 17, 18]
    with pytest.raises(UnsupportedError, match="triton: needs tensors on a CUDA device"):
        assign_slots(*args, page_size=4, num_tokens=3, implementation="triton")


SIZES = [1, 3, 5, 9, 16, 17, 33, 1024, 1025, (1 << 20) + 3]

COUNT = f"""
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Hopper:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Hopper())
from kvtorch.ops.assign_slots import BLOCK, _kernel
i, b = torch.int64, torch.bool
for n in {SIZES}:
    _kernel.warmup(i, i, i, i, i, b, i, n, n + 1, 2 * n, n, 3, True, BLOCK, True, grid=(1,))
print(len(_kernel.device_caches[0][0]))
"""


def test_al6_compiles_once_for_all_sizes():
    """Compiled for an H200, which need not be there."""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    found = subprocess.run(
        [sys.executable, "-c", COUNT], env=env, capture_output=True, text=True, check=False
    )
    assert found.stdout.strip() == "1", found.stderr


@pytest.mark.gpu
def test_al6_compiles_once_for_all_sizes_and_alignments():
    def run(num_tokens, num_sequences=1, skipped=0):
        def ints(values):
            return torch.tensor([0] * skipped + values, device="cuda")[skipped:]

        zeros = ints([0] * num_sequences)
        pages = torch.arange(1 + num_tokens, device="cuda")[skipped:]
        op._triton(zeros, zeros, zeros, zeros, pages, 7, num_tokens, None)
        return len(op._kernel.device_caches[torch.cuda.current_device()][0])

    before = run(2)
    for num_tokens in SIZES:
        assert run(num_tokens, min(num_tokens, 33), num_tokens % 2) == before
