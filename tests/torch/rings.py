"""Rings of free pages for operations, with junk wherever anything may be."""

import random

import pytest
import torch
from hypothesis import strategies as st

from kvtorch.ops import launch
from kvtorch.ops.ring import Ring

MANY_SIZES = [1, 3, 5, 9, 16, 17, 33, 1024, 1025, (1 << 20) + 3]


def ring_of(free_pages, num_pages, head=0, seed=0, device="cpu"):
    """``free_pages``, in order, from ``head`` on."""
    junk = random.Random(seed)
    num_places = max(num_pages, 1)
    pages = [junk.randrange(num_pages + 1) for _ in range(num_places)]
    places = [-1, *(junk.randrange(num_places) for _ in range(num_pages)), -1]
    for i, page in enumerate(free_pages):
        pages[(head + i) % num_places] = page
        places[page] = (head + i) % num_places
    # What lies behind must not be seen.
    behind = [10**6] * 2
    pages = torch.tensor(pages + behind, device=device)[:num_places]
    places = torch.tensor(places + behind, device=device)[: num_pages + 2]
    return Ring(pages, places, head, len(free_pages))


def in_order(ring):
    """The pages of a ring that are free; it is checked to say the same of each page."""
    pages = [int(ring.pages[(ring.head + i) % len(ring.pages)]) for i in range(ring.num_free)]
    every = torch.arange(-2, ring.num_pages + 5, device=ring.pages.device)
    taken = [page for page in range(1, ring.num_pages + 1) if page not in pages]
    assert every[ring.is_taken(every)].tolist() == taken
    return pages


@st.composite
def rings(draw, max_pages=12):
    """(free pages in order, how many pages there are, head, seed of junk): as ``ring_of`` takes."""
    num_pages = draw(st.integers(0, max_pages))
    free = draw(st.permutations(range(1, num_pages + 1)))
    free = free[: draw(st.integers(0, num_pages))]
    head = draw(st.integers(0, max(num_pages - 1, 0)))
    return free, num_pages, head, draw(st.integers(0, 99))


def implementations(op):
    """Parameters ``run`` and ``device``: an operation's, compared with its oracle."""
    return pytest.mark.parametrize(
        "run, device",
        [
            pytest.param(op.reference, "cpu", id="reference"),
            pytest.param(op._triton, "cpu", id="triton-interpreted", marks=interpreted),
            pytest.param(op._triton, "cuda", id="triton", marks=pytest.mark.gpu),
            pytest.param(op.reference, "cuda", id="reference-gpu", marks=pytest.mark.gpu),
        ],
    )


def is_interpreted():
    return type(launch.begin).__name__ == "InterpretedFunction"


interpreted = pytest.mark.skipif(
    not is_interpreted(), reason="interpreter: Triton compiles its kernels here"
)
