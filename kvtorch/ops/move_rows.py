"""Moves rows within planes, all layers and planes at once, as simultaneous assignment."""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvjax.dispatch import Implementation, select
from kvtorch.ops import launch, library, read_rows, staged_move
from kvtorch.ops.narrow import bits
from kvtorch.slots import are_there

# Elements a program copies where rows do not wait for each other. One H200, bfloat16, 256 rows of
# 2 KB in 64 planes and layers: 19.5 us with 4 096 and 8 warps, hardly another time with others.
TILE = 4096
WARPS = 8

# Simultaneous moves of up to so many rows are made by programs that hold some columns of all rows
# at once: they read everything before they write anything, so that no copy has to be staged.
HELD_TOKENS = 4096
# Bytes a program holds: with more, fewer programs fit beside each other; with less, the columns
# get narrow.
HELD_BYTES = 32 * 1024
MOST_HELD_BYTES = 128 * 1024
BYTES_PER_THREAD = 64
MAX_WARPS = 32
# Columns narrower than what memory reads at once waste some of it.
SECTOR_BYTES = 32
WIDEST_COLUMNS = 512


def move_rows(
    planes: Sequence[torch.Tensor],
    dst: torch.Tensor,
    src: torch.Tensor,
    *,
    first_slot: int,
    disjoint: bool = False,
    implementation: str | None = None,
) -> None:
    """Stores, for every t at once, the old row ``src[t]`` at ``dst[t]``, in every layer and plane.

    One launch moves two planes, of any number of layers; beyond 4 096 rows that may overlap it
    takes several.

    All sources are read before any row is written: chains, swaps and cycles come out right. Bits
    are preserved. A ``dst`` that is not there is skipped, a ``src`` that is not there is a row of
    zeros. Those of ``dst`` that are there are distinct, as in ``write_rows``.

    Args:
      planes: ``[layers, rows, *row]``, contiguous, changed in place.
      dst: where each row goes, int32 or int64, ``[n]``.
      src: where each row comes from, likewise.
      first_slot: the first slot that is there.
      disjoint: the caller's promise that no ``src`` is another move's ``dst``; a broken promise
        mixes old and new rows.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.

    Source: SGLang 0.4.8 ``move_kv_cache`` (A-MHA-16), its faults (A-MOVE) excepted.
    """
    _op(planes, dst, src, first_slot, disjoint, implementation)


def _run(planes, dst, src, first_slot, disjoint, implementation=None) -> None:
    run = select("move_rows", IMPLEMENTATIONS, implementation, planes)
    run(planes, dst, src, first_slot, disjoint)


_op = library.define(
    "move_rows(Tensor(a!)[] planes, Tensor dst, Tensor src, int first_slot, bool disjoint, "
    "str? implementation=None) -> ()",
    _run,
)


def reference(
    planes: Sequence[torch.Tensor],
    dst: torch.Tensor,
    src: torch.Tensor,
    first_slot: int,
    disjoint: bool = False,
) -> None:
    """The specification, in plain torch: layer by layer, since layers do not touch each other."""
    there = are_there(dst, first_slot, planes[0].shape[1])
    dst, src = dst[there].long(), src[there]
    for plane in planes:
        for layer in range(plane.shape[0]):
            (rows,) = read_rows.reference((plane,), layer, src, first_slot)
            bits(plane)[layer, dst] = bits(rows)


@triton.jit
def _copy(
    plane, layer, num_rows, dst, writes, src, reads, column,
    WIDTH: tl.constexpr, MASKED: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    column = column[None, :]
    reads, writes = reads[:, None], writes[:, None]
    if MASKED:
        reads, writes = reads & (column < WIDTH), writes & (column < WIDTH)
    old = plane + ((layer * num_rows + src) * WIDTH)[:, None] + column
    values = tl.load(old, mask=reads, other=0.0)
    if HOLD:
        tl.debug_barrier()  # no warp writes before every warp has read
    tl.store(plane + ((layer * num_rows + dst) * WIDTH)[:, None] + column, values, mask=writes)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "first_slot", "num_layers"])
def _kernel(
    dst_slots,
    src_slots,
    k_plane,
    v_plane,
    num_tokens,
    num_rows,
    first_slot,
    num_layers,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    HOLD: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch.begin(EARLY)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    of_batch = token < num_tokens
    dst = tl.load(dst_slots + token, mask=of_batch, other=-1).to(tl.int64)
    src = tl.load(src_slots + token, mask=of_batch, other=-1).to(tl.int64)
    writes = of_batch & (dst >= first_slot) & (dst < num_rows)
    reads = of_batch & (src >= first_slot) & (src < num_rows)
    layer = (tl.program_id(2) % num_layers).to(tl.int64)
    if tl.program_id(2) < num_layers:
        _copy(
            k_plane, layer, num_rows, dst, writes, src, reads,
            tl.program_id(1) * K_BLOCK + tl.arange(0, K_BLOCK),
            K_WIDTH, K_WIDTH != K_BLOCK * COLUMNS, HOLD,
        )  # fmt: skip
    else:
        _copy(
            v_plane, layer, num_rows, dst, writes, src, reads,
            tl.program_id(1) * V_BLOCK + tl.arange(0, V_BLOCK),
            V_WIDTH, V_WIDTH != V_BLOCK * COLUMNS, HOLD,
        )  # fmt: skip


def _triton(
    planes: Sequence[torch.Tensor],
    dst: torch.Tensor,
    src: torch.Tensor,
    first_slot: int,
    disjoint: bool,
) -> None:
    if not dst.shape[0]:
        return
    dst, src = dst.contiguous(), src.contiguous()
    for i in range(0, len(planes), 2):
        if disjoint or dst.shape[0] <= HELD_TOKENS:
            _move(planes[i : i + 2], dst, src, first_slot, disjoint)
        else:
            staged_move.move(planes[i : i + 2], dst, src, first_slot)


def _move(
    planes: Sequence[torch.Tensor],
    dst: torch.Tensor,
    src: torch.Tensor,
    first_slot: int,
    disjoint: bool,
) -> None:
    # One plane stands for both, and has its own programs only.
    k, v = planes[0], planes[-1]
    num_tokens, (num_layers, num_rows) = dst.shape[0], k.shape[:2]
    widths = (k.stride(1), v.stride(1))
    if disjoint:
        constants, num_warps = _by_rows(*widths), WARPS
    else:
        tokens = launch.power_of_two(num_tokens)
        constants, num_warps = _by_columns(*widths, k.itemsize, v.itemsize, tokens)
    columns, tokens = constants[4], constants[5]
    launch.launch(
        _kernel,
        (-(-num_tokens // tokens), columns, len(planes) * num_layers),
        (dst.dtype, src.dtype, k.dtype, v.dtype, constants),
        (dst, src, k, v),
        (num_tokens, num_rows, first_slot, num_layers, *constants),
        num_warps,
    )


@functools.lru_cache(maxsize=1024)
def _by_rows(k_width: int, v_width: int) -> tuple[int, ...]:
    """The kernel's constants where a program copies whole rows of some tokens."""
    blocks = launch.power_of_two(k_width), launch.power_of_two(v_width)
    return k_width, v_width, *blocks, 1, max(1, TILE // max(blocks)), False


@functools.lru_cache(maxsize=1024)
def _by_columns(
    k_width: int, v_width: int, k_bytes: int, v_bytes: int, tokens: int
) -> tuple[tuple[int, ...], int]:
    """The constants, and the warps, where a program copies some columns of every token's row."""
    held = min(max(HELD_BYTES, tokens * 2 * SECTOR_BYTES), MOST_HELD_BYTES)
    column_bytes = max(SECTOR_BYTES, min(held // tokens, WIDEST_COLUMNS))
    k_block = min(column_bytes // k_bytes, launch.power_of_two(k_width))
    v_block = min(column_bytes // v_bytes, launch.power_of_two(v_width))
    columns = max(-(-k_width // k_block), -(-v_width // v_block))
    num_warps = min(max(4, tokens * column_bytes // (32 * BYTES_PER_THREAD)), MAX_WARPS)
    return (k_width, v_width, k_block, v_block, columns, tokens, True), num_warps


def _triton_why_not(planes) -> str | None:
    return launch.why_not_rows(planes)


IMPLEMENTATIONS = {
    "triton": Implementation(_triton, _triton_why_not),
    "reference": Implementation(reference, lambda *_: None),
}
