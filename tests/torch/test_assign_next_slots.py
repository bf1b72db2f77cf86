"""Slots for each sequence's newest token: against plain loops, past every size, compiled once."""

import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")

import hypothesis  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvjax.errors import UnsupportedError  # noqa: E402
from kvtorch.ops import assign_next_slots as op  # noqa: E402
from kvtorch.ops.assign_next_slots import assign_next_slots  # noqa: E402
from tests.torch import compiled  # noqa: E402
from tests.torch.rings import MANY_SIZES, implementations, ring_of, rings  # noqa: E402


def oracle(seq_lens, last_slots, ring, page_size, num_new_pages):
    """The contract, one sequence at a time."""
    result = []
    free_pages, num_pages, *_ = ring
    pages = iter(free_pages[:num_new_pages])
    for seq_len, slot in zip(seq_lens, last_slots, strict=True):
        page, place = slot // page_size, (seq_len - 1) % page_size
        if seq_len <= 0:
            result.append(-1)
        elif place == 0:
            page = next(pages, -1)
            result.append(page * page_size if page >= 0 else -1)
        elif (slot + 1) % page_size != place or page in free_pages or not 1 <= page <= num_pages:
            result.append(-1)
        else:
            result.append(slot + 1)
    return result


@st.composite
def batches(draw, page_size):
    """Sequences, some of them padding, too few pages at times, and last slots of any kind."""
    ring = draw(rings())
    seq_lens = draw(st.lists(st.integers(-2, 3 * page_size), max_size=40))
    last_slots = [
        draw(
            st.integers(1, 12).map(lambda page, n=n: page * page_size + (n - 2) % page_size)
            | st.integers(-3, 15 * page_size)
        )
        for n in seq_lens
    ]
    return seq_lens, last_slots, ring, page_size, draw(st.integers(0, len(ring[0])))


def on(device, batch, dtype=torch.int64):
    *sequences, ring, page_size, num_new_pages = batch
    tensors = [torch.tensor(x, dtype=dtype, device=device) for x in sequences]
    return (*tensors, ring_of(*ring, device=device), page_size, num_new_pages)


def check(run, device, batch, dtype=torch.int64):
    args = on(device, batch, dtype)
    before = [x.clone() for x in args[2][:2]]
    result = run(*args)
    assert result.dtype == torch.int64 and result.tolist() == oracle(*batch)
    assert all(map(torch.equal, before, args[2][:2]))  # nothing is taken


@implementations(op)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_equals_oracle(run, device, page_size, dtype, monkeypatch):
    monkeypatch.setattr(op, "BLOCK", 16)  # so that there are more

    @hypothesis.settings(max_examples=15, deadline=None)
    @given(batches(page_size))
    def draw_and_check(batch):
        check(run, device, batch, dtype)

    draw_and_check()


def test_a_wrong_implementation_is_caught():
    """The comparison above can fail: as upstream, with any last slot believed."""

    def wrong(seq_lens, last_slots, *rest):
        return op.reference(seq_lens, seq_lens.clamp(min=2) - 2, *rest)

    @hypothesis.settings(max_examples=200, phases=[hypothesis.Phase.generate], database=None)
    @given(batches(3))
    def draw_and_check(batch):
        check(wrong, "cpu", batch)

    with pytest.raises(AssertionError):
        draw_and_check()


@implementations(op)
def test_no_sequences_and_no_pages(run, device):
    assert run(*on(device, ([], [], ([], 3), 4, 0))).shape == (0,)
    check(run, device, ([1, 3, 0], [-1, 5, 5], ([], 0), 4, 0))


@implementations(op)
def test_round_the_ring_and_al1(run, device):
    check(run, device, ([5] * 5, [-1] * 5, ([7, 3, 9, 4], 9, 7), 4, 3))


@implementations(op)
def test_more_sequences_than_a_block(run, device):
    for num_sequences in (op.BLOCK - 1, op.BLOCK, op.BLOCK + 1, 3 * op.BLOCK + 5):
        seq_lens = [i % 3 + i % 5 for i in range(num_sequences)]
        last_slots = [4 * i + 4 + (n - 2) % 4 for i, n in enumerate(seq_lens)]
        ring = list(range(num_sequences + 1, 2 * num_sequences)), 2 * num_sequences, 5
        check(run, device, (seq_lens, last_slots, ring, 4, len(ring[0])))


def test_a_tensor_on_the_cpu_takes_the_reference_and_never_the_kernel():
    *args, page_size, num_new_pages = on("cpu", ([1], [-1], ([4], 4), 4, 1))
    settings = {"page_size": page_size, "num_new_pages": num_new_pages}
    assert assign_next_slots(*args, **settings).tolist() == [16]
    with pytest.raises(UnsupportedError, match="triton: needs tensors on a CUDA device"):
        assign_next_slots(*args, **settings, implementation="triton")


def test_al6_compiles_once_for_all_sizes():
    arguments = "i, i, i, i, i, n, n + 1, 2 * n, n, n, 3, BLOCK, True"
    assert compiled.times("assign_next_slots", arguments, MANY_SIZES) == 1
