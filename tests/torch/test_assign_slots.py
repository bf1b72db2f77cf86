"""Slots for new tokens: against plain loops, past every size, and compiled once."""

import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")

import hypothesis  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvjax.errors import UnsupportedError  # noqa: E402
from kvtorch.ops import assign_slots as op  # noqa: E402
from kvtorch.ops.assign_slots import assign_slots  # noqa: E402
from tests.torch import compiled  # noqa: E402
from tests.torch.rings import (  # noqa: E402
    MANY_SIZES,
    implementations,
    is_interpreted,
    ring_of,
    rings,
)


def oracle(prefix_lens, seq_lens, last_slots, ring, page_size, num_new_pages, num_tokens):
    """The contract, one token at a time."""
    result = []
    free_pages, num_pages, *_ = ring
    pages = iter(free_pages[:num_new_pages])
    for prefix_len, seq_len, slot in zip(prefix_lens, seq_lens, last_slots, strict=True):
        page = slot // page_size
        if page in free_pages or not 1 <= page <= num_pages:
            slot = -1
        for position in range(prefix_len, seq_len if prefix_len >= 0 else prefix_len):
            if position % page_size == 0:
                page = next(pages, -1)
                slot = page * page_size if page >= 0 else -1
            elif slot >= 0 and (slot + 1) % page_size == position % page_size:
                slot += 1
            else:
                slot = -1
            result.append(slot)
    return [*result, *[-1] * num_tokens][:num_tokens]


@st.composite
def batches(draw, page_size):
    """Sequences, some of them padding, too few pages at times, and last slots of any kind."""
    num = draw(st.integers(0, 7))

    def ints(low, high):
        return draw(st.lists(st.integers(low, high), min_size=num, max_size=num))

    ring = draw(rings())
    prefix_lens, grow = ints(-2, 3 * page_size), ints(-2, 3 * page_size)
    seq_lens = [a + b for a, b in zip(prefix_lens, grow, strict=True)]
    last_slots = [
        draw(
            st.integers(1, 12).map(lambda page, n=n: page * page_size + (n - 1) % page_size)
            | st.integers(-3, 15 * page_size)
        )
        for n in prefix_lens
    ]
    num_new_pages = draw(st.integers(0, len(ring[0])))
    total = sum(max(n, 0) for n, old in zip(grow, prefix_lens, strict=True) if old >= 0)
    num_tokens = max(total + draw(st.integers(-2, 3)), 0)
    return prefix_lens, seq_lens, last_slots, ring, page_size, num_new_pages, num_tokens


def on(device, batch, dtype=torch.int64):
    *sequences, ring, page_size, num_new_pages, num_tokens = batch
    tensors = [torch.tensor(x, dtype=dtype, device=device) for x in sequences]
    return (*tensors, ring_of(*ring, device=device), page_size, num_new_pages, num_tokens)


def check(run, device, batch, dtype=torch.int64):
    args = on(device, batch, dtype)
    before = [x.clone() for x in args[3][:2]]
    result = run(*args)
    assert result.dtype == torch.int64 and result.tolist() == oracle(*batch)
    assert all(map(torch.equal, before, args[3][:2]))  # nothing is taken


@implementations(op)
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

    def wrong(prefix_lens, seq_lens, last_slots, ring, *rest):
        believed = prefix_lens.clamp(min=1) - 1
        return op.reference(prefix_lens, seq_lens, believed, ring, *rest)

    @hypothesis.settings(max_examples=200, phases=[hypothesis.Phase.generate], database=None)
    @given(batches(3))
    def draw_and_check(batch):
        check(wrong, "cpu", batch)

    with pytest.raises(AssertionError):
        draw_and_check()


@implementations(op)
def test_no_sequences_and_no_tokens(run, device):
    assert run(*on(device, ([], [], [], ([], 3), 4, 0, 0))).shape == (0,)
    check(run, device, ([], [], [], ([3], 3), 4, 1, 2))
    check(run, device, ([3], [3], [6], ([], 0), 4, 0, 0))
    check(run, device, ([3, 0], [5, 1], [6, -1], ([], 0), 4, 0, 3))


@implementations(op)
def test_al1_pages_past_those_given_are_not_read(run, device):
    check(run, device, ([0, 2], [9, 7], [-1, 6], ([7, 3], 9), 4, 1, 14))


@implementations(op)
def test_round_the_ring(run, device):
    check(run, device, ([0, 2], [9, 7], [-1, 5], ([7, 3, 9, 4], 9, 7), 4, 4, 14))


@implementations(op)
def test_more_sequences_than_a_block_looks_at(run, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(op, "BLOCK", 16)  # 10 ms a sequence in the interpreter
    for num_sequences in (op.BLOCK - 1, op.BLOCK, op.BLOCK + 1, 2 * op.BLOCK + 5):
        prefix_lens = [i % 3 for i in range(num_sequences)]
        seq_lens = [i % 3 + i % 5 for i in range(num_sequences)]
        last_slots = [4 * i + 4 + i % 3 - 1 for i in range(num_sequences)]
        ring = list(range(num_sequences + 1, 3 * num_sequences)), 3 * num_sequences, 5
        num_tokens = sum(seq_lens) - sum(prefix_lens)
        check(run, device, (prefix_lens, seq_lens, last_slots, ring, 4, len(ring[0]), num_tokens))


@implementations(op)
def test_al6_past_two_to_the_twenty_tokens(run, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(op, "BLOCK", 1 << 15)  # 5 ms a block in the interpreter
    num_tokens, num_pages = (1 << 20) + 3, 1 + (1 << 14)
    prefix_lens, seq_lens, last_slots = (
        torch.tensor(x, device=device) for x in ([5, 1], [num_tokens + 3, 3], [68, 9])
    )
    ring = ring_of(range(2, num_pages + 1), num_pages, device=device)
    slots = run(prefix_lens, seq_lens, last_slots, ring, 64, ring.num_free, num_tokens)
    expected = torch.arange(69, 69 + num_tokens, device=device)
    expected[-2:] = -1  # slot 9 is no page's first
    assert torch.equal(slots, expected)


def test_slots_past_int32():
    page_size = 2**36
    for run in [op.reference] + [op._triton] * is_interpreted():
        batch = ([0, 7], [9, 9], [-1, 3 * page_size + 6], ([5], 9), page_size, 1, 11)
        check(run, "cpu", batch)


def test_a_tensor_on_the_cpu_takes_the_reference_and_never_the_kernel():
    *args, page_size, num_new_pages, num_tokens = on("cpu", ([0], [3], [-1], ([4], 4), 4, 1, 3))
    settings = {
        "page_size": page_size,
        "num_new_pages": num_new_pages,
        "num_tokens": num_tokens,
    }
    assert assign_slots(*args, **settings).tolist() == [16, 17, 18]
    with pytest.raises(UnsupportedError, match="triton: needs tensors on a CUDA device"):
        assign_slots(*args, **settings, implementation="triton")


def test_al6_compiles_once_for_all_sizes():
    arguments = "i, i, i, i, i, i, n, n + 1, 2 * n, n, n, n, 3, BLOCK, True"
    assert compiled.times("assign_slots", arguments, MANY_SIZES) == 1


@pytest.mark.gpu
def test_al6_compiles_once_for_all_sizes_and_alignments():
    def run(num_tokens, num_sequences=1, skipped=0):
        zeros = torch.tensor([0] * (skipped + num_sequences), device="cuda")[skipped:]
        ring = ring_of(range(1, num_tokens), num_tokens, device="cuda")
        op._triton(zeros, zeros, zeros, ring, 7, 0, num_tokens)
        return len(op._kernel.device_caches[torch.cuda.current_device()][0])

    before = run(2)
    for num_tokens in MANY_SIZES:
        assert run(num_tokens, min(num_tokens, 33), num_tokens % 2) == before
