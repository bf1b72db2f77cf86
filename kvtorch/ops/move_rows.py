"""Moves rows within planes, all layers and planes at once, as simultaneous assignment."""

import dataclasses
import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvjax.dispatch import Implementation, select
from kvtorch.ops import launch, library, read_rows
from kvtorch.ops.narrow import bits
from kvtorch.slots import are_there

# Elements a program copies where rows do not wait for each other. One H200, bfloat16, 256 rows of
# 2 KB in 64 planes and layers: 20.4 us with 4 096 and 8 warps, 20.6 with 2 048 and 4.
TILE = 4096
WARPS = 8

# Simultaneous moves of up to so many rows are made by programs that hold some columns of all rows
# at once: they read everything before they write anything, so that no copy has to be staged.
HELD_TOKENS = 4096
# Bytes a program holds: with more, fewer programs fit beside each other; with less, the columns
# get narrow. Bytes a thread: with more, registers spill.
HELD_BYTES = 32 * 1024
MOST_HELD_BYTES = 128 * 1024
BYTES_PER_THREAD = 64
MAX_WARPS = 32
# Columns narrower than what memory reads at once waste some of it.
SECTOR_BYTES = 32
WIDEST_COLUMNS = 512

# Larger ones stage the rows that some other move overwrites, a few layers at a time.
STAGING_BYTES = 128 * 1024 * 1024

_STRAIGHT, _STAGE, _FINISH = range(3)


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
    plane, staged, layer, turn, token, num_tokens, num_rows, dst, writes, src, reads, conflict,
    column, WIDTH: tl.constexpr, MASKED: tl.constexpr, STEP: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """Copies columns of some tokens' rows in one layer of one plane.

    STEP: 0 straight from ``src`` to ``dst``; 1 the rows in conflict to where they are staged; 2
    those from there and the others straight.
    """
    column = column[None, :]
    old = plane + ((layer * num_rows + src) * WIDTH)[:, None] + column
    new = plane + ((layer * num_rows + dst) * WIDTH)[:, None] + column
    kept = staged + ((turn * num_tokens + token) * WIDTH)[:, None] + column
    reads, writes, conflict = reads[:, None], writes[:, None], conflict[:, None]
    if MASKED:
        reads, writes = reads & (column < WIDTH), writes & (column < WIDTH)
    if STEP == 1:
        tl.store(kept, tl.load(old, mask=reads & conflict), mask=reads & conflict)
    else:
        if STEP == 2:
            old = tl.where(conflict, kept, old)
        values = tl.load(old, mask=reads, other=0.0)
        if HOLD:
            tl.debug_barrier()  # no warp writes before every warp has read
        tl.store(new, values, mask=writes)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "first_slot", "num_layers", "first_layer"])
def _kernel(
    dst_slots,
    src_slots,
    conflicts,
    num_tokens,
    num_rows,
    first_slot,
    num_layers,
    first_layer,
    k_plane,
    k_staged,
    v_plane,
    v_staged,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
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
    conflict = writes
    if STEP != 0:
        conflict = tl.load(conflicts + token, mask=of_batch, other=0) != 0
    turn = (tl.program_id(2) % num_layers).to(tl.int64)
    layer = first_layer + turn
    if tl.program_id(2) < num_layers:
        k_column = tl.program_id(1) * K_BLOCK + tl.arange(0, K_BLOCK)
        _copy(
            k_plane, k_staged, layer, turn, token, num_tokens, num_rows, dst, writes, src, reads,
            conflict, k_column, K_WIDTH, K_WIDTH != K_BLOCK * COLUMNS, STEP, HOLD,
        )  # fmt: skip
    else:
        v_column = tl.program_id(1) * V_BLOCK + tl.arange(0, V_BLOCK)
        _copy(
            v_plane, v_staged, layer, turn, token, num_tokens, num_rows, dst, writes, src, reads,
            conflict, v_column, V_WIDTH, V_WIDTH != V_BLOCK * COLUMNS, STEP, HOLD,
        )  # fmt: skip


def _triton(
    planes: Sequence[torch.Tensor],
    dst: torch.Tensor,
    src: torch.Tensor,
    first_slot: int,
    disjoint: bool,
) -> None:
    num_tokens = dst.shape[0]
    if not num_tokens:
        return
    dst, src = dst.contiguous(), src.contiguous()
    sizes = tuple((plane.stride(1), plane.element_size()) for plane in planes)
    if disjoint:
        _launch(planes, dst, src, first_slot, _by_rows(sizes, num_tokens))
    elif num_tokens <= HELD_TOKENS:
        _launch(planes, dst, src, first_slot, _by_columns(sizes, launch.power_of_two(num_tokens)))
    else:
        _move_staged(planes, dst, src, first_slot, sizes)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What one program copies: columns of each plane's rows, for some tokens."""

    tokens: int
    blocks: tuple[int, ...]
    num_columns: int
    num_warps: int
    hold: bool


type Sizes = tuple[tuple[int, int], ...]  # elements of a row, bytes of an element; for each plane


def _by_rows(sizes: Sizes, num_tokens: int) -> _Shape:
    blocks = tuple(launch.power_of_two(width) for width, _ in sizes)
    tokens = max(1, min(TILE // max(blocks), launch.power_of_two(num_tokens)))
    return _Shape(tokens, blocks, num_columns=1, num_warps=WARPS, hold=False)


@functools.lru_cache(maxsize=1024)
def _by_columns(sizes: Sizes, tokens: int) -> _Shape:
    held = min(max(HELD_BYTES, tokens * 2 * SECTOR_BYTES), MOST_HELD_BYTES)
    column_bytes = max(SECTOR_BYTES, min(held // tokens, WIDEST_COLUMNS))
    blocks = tuple(
        min(column_bytes // item_bytes, launch.power_of_two(width)) for width, item_bytes in sizes
    )
    num_columns = max(-(-width // block) for (width, _), block in zip(sizes, blocks, strict=True))
    num_warps = min(max(4, tokens * column_bytes // (32 * BYTES_PER_THREAD)), MAX_WARPS)
    return _Shape(tokens, blocks, num_columns, num_warps, hold=True)


def _move_staged(
    planes: Sequence[torch.Tensor],
    dst: torch.Tensor,
    src: torch.Tensor,
    first_slot: int,
    sizes: Sizes,
) -> None:
    num_tokens = dst.shape[0]
    num_layers, num_rows = planes[0].shape[:2]
    written = torch.zeros(num_rows, dtype=torch.bool, device=dst.device)
    # Row 0 stands for what is not there. At worst, rows are staged that need not be.
    written.index_fill_(0, torch.where(are_there(dst, first_slot, num_rows), dst, 0).long(), True)
    sources = torch.where(are_there(src, first_slot, num_rows), src, 0).long()
    conflicts = written[sources] & (dst != src)
    token_bytes = sum(width * item_bytes for width, item_bytes in sizes)
    at_once = max(1, min(num_layers, STAGING_BYTES // (num_tokens * token_bytes)))
    staged = [plane.new_empty(at_once * num_tokens * plane.stride(1)) for plane in planes]
    shape = _by_rows(sizes, num_tokens)
    for first_layer in range(0, num_layers, at_once):
        layers = range(first_layer, min(first_layer + at_once, num_layers))
        for step in (_STAGE, _FINISH):
            _launch(planes, dst, src, first_slot, shape, layers, step, conflicts, staged)


def _launch(
    planes: Sequence[torch.Tensor],
    dst: torch.Tensor,
    src: torch.Tensor,
    first_slot: int,
    shape: _Shape,
    layers: range | None = None,
    step: int = _STRAIGHT,
    conflicts: torch.Tensor | None = None,
    staged: Sequence[torch.Tensor] | None = None,
) -> None:
    num_tokens, num_rows = dst.shape[0], planes[0].shape[1]
    layers = range(planes[0].shape[0]) if layers is None else layers
    both = 2 // len(planes)
    buffers = [x for pair in zip(planes, staged or planes, strict=True) for x in pair]
    widths = [plane.stride(1) for plane in planes]
    key = (
        (dst.dtype, src.dtype, step, shape),
        *((plane.dtype, plane.stride(1)) for plane in planes),
        launch.alignment(dst, src, *buffers),
    )
    launch.launch(
        _kernel,
        (-(-num_tokens // shape.tokens), shape.num_columns, len(planes) * len(layers)),
        key,
        (
            dst,
            src,
            dst if conflicts is None else conflicts,
            num_tokens,
            num_rows,
            first_slot,
            len(layers),
            layers.start,
            *buffers * both,
            *widths * both,
            *shape.blocks * both,
            shape.num_columns,
            shape.tokens,
            step,
            shape.hold,
        ),
        dst.device,
        shape.num_warps,
    )


def _triton_why_not(planes) -> str | None:
    return launch.why_not_rows(planes)


IMPLEMENTATIONS = {
    "triton": Implementation(_triton, _triton_why_not),
    "reference": Implementation(reference, lambda *_: None),
}
