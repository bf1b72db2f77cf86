"""Pages that come back: against plain loops, in order, past every size, and compiled once."""

import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")

import hypothesis  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvjax.errors import UnsupportedError  # noqa: E402
from kvtorch.ops import only_taken as filter_op  # noqa: E402
from kvtorch.ops import take_back as op  # noqa: E402
from kvtorch.ops.only_taken import only_taken  # noqa: E402
from kvtorch.ops.take_back import take_back  # noqa: E402
from tests.torch import compiled  # noqa: E402
from tests.torch.rings import (  # noqa: E402
    MANY_SIZES,
    implementations,
    in_order,
    ring_of,
    rings,
)

either_way = pytest.mark.parametrize("first", [True, False], ids=["first", "last"])


def oracle(slots, ring, page_size, first):
    """The free pages in order, afterwards."""
    free_pages, num_pages, *_ = ring
    back = []
    for slot in slots:
        page = slot // page_size
        if 1 <= page <= num_pages and page not in [*free_pages, *back]:
            back.append(page)
    return [*sorted(back), *free_pages] if first else [*free_pages, *back]


@st.composite
def frees(draw, page_size, max_pages=40):
    ring = draw(rings(max_pages))
    slots = st.integers(-2 * page_size, (ring[1] + 3) * page_size)
    return draw(st.lists(slots, max_size=70)), ring, page_size


def check(run, device, free, first, dtype=torch.int64):
    slots, given_ring, page_size = free
    ring = ring_of(*given_ring, device=device)
    slots = torch.tensor(slots, dtype=dtype, device=device)
    before = slots.clone()
    count = run(slots, ring, page_size, first)
    expected = oracle(*free, first)
    assert type(count) is int and count == len(expected) - ring.num_free
    head = (ring.head - count) % len(ring.pages) if first else ring.head
    assert in_order(ring._replace(head=head, num_free=ring.num_free + count)) == expected
    assert torch.equal(slots, before)


@implementations(op)
@either_way
@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_equals_oracle(run, device, page_size, first, dtype, monkeypatch):
    monkeypatch.setattr(op, "BLOCK", 16)  # so that there are more, also of pages

    @hypothesis.settings(max_examples=15, deadline=None)
    @given(frees(page_size))
    def draw_and_check(free):
        check(run, device, free, first, dtype)

    draw_and_check()


@either_way
def test_a_wrong_implementation_is_caught(first):
    """The comparison above can fail: pages in the other order."""

    def wrong(slots, ring, page_size, first):
        return op.reference(slots if first else slots.sort().values, ring, page_size, False)

    @hypothesis.settings(max_examples=200, phases=[hypothesis.Phase.generate], database=None)
    @given(frees(3))
    def draw_and_check(free):
        check(wrong, "cpu", free, first)

    with pytest.raises(AssertionError):
        draw_and_check()


@implementations(op)
@either_way
def test_nothing_comes_back(run, device, first):
    for slots in ([], [5, 9, -1], [2**32]):
        check(run, device, (slots, ([2, 1, 3], 3, 2), 4), first)
    check(run, device, ([4, 0], ([], 0), 4), first)


@implementations(op)
@either_way
def test_a_page_of_slots_each(run, device, first):
    slots = [page * 4 + place for page in (7, 2, 9) for place in range(4)]
    check(run, device, (slots, ([8, 1], 9, 8), 4), first)


@pytest.mark.gpu
@either_way
@pytest.mark.parametrize("num_pages", [1024, 1025, 40000])
def test_many_pages_in_any_order(first, num_pages):
    generator = torch.Generator(device="cuda").manual_seed(num_pages)
    pages = 1 + torch.randperm(num_pages, generator=generator, device="cuda")
    slots = torch.stack((pages, pages.flip(0)), 1).view(-1)
    ring = ring_of([], num_pages, head=num_pages // 3, device="cuda")
    assert op._triton(slots, ring, 1, first) == num_pages
    head = (ring.head - num_pages * first) % num_pages
    ring = ring._replace(head=head, num_free=num_pages)
    expected = pages.sort().values if first else torch.tensor([*dict.fromkeys(slots.tolist())])
    assert torch.equal(ring.window(head, num_pages).cpu(), expected.cpu())
    assert not ring.is_taken(pages).any()


def test_which_runs():
    slots = torch.tensor([4])
    assert take_back(slots, ring_of([], 3), page_size=4, first=True) == 1
    assert only_taken(slots, ring_of([], 3), page_size=4).tolist() == [4]
    for function, more in ((take_back, {"first": True}), (only_taken, {})):
        with pytest.raises(UnsupportedError, match="triton: needs tensors on a CUDA device"):
            function(slots, ring_of([], 3), page_size=4, implementation="triton", **more)
    many = torch.zeros(op.MAX_SLOTS + 1, dtype=torch.int64)
    with pytest.raises(UnsupportedError, match="triton: takes up to 65536 slots, not 65537"):
        take_back(many, ring_of([], 3), page_size=4, first=True, implementation="triton")


@either_way
def test_compiles_once_for_all_sizes(first):
    arguments = f"i, i, i, i, n, n + 1, 2 * n, n, 3, {first}, BLOCK, True, num_warps=8"
    assert compiled.times("take_back", arguments, MANY_SIZES) == 1


# Which of the slots somebody has.


@implementations(filter_op)
@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_only_slots_that_somebody_has(run, device, page_size, dtype, monkeypatch):
    monkeypatch.setattr(filter_op, "BLOCK", 16)

    @hypothesis.settings(max_examples=15, deadline=None)
    @given(frees(page_size))
    def draw_and_check(free):
        slots, ring, _ = free
        taken = set(range(1, ring[1] + 1)) - set(ring[0])
        result = run(
            torch.tensor(slots, dtype=dtype, device=device),
            ring_of(*ring, device=device),
            page_size,
        )
        assert result.dtype == torch.int64
        assert result.tolist() == [s if s // page_size in taken else -1 for s in slots]

    draw_and_check()


def test_the_filter_compiles_once_for_all_sizes():
    arguments = "i, i, i, i, n, n + 1, 2 * n, n, 3, BLOCK, True"
    assert compiled.times("only_taken", arguments, MANY_SIZES) == 1
