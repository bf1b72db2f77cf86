"""How ``move_rows`` moves more rows at once than programs can hold: through staged copies."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvtorch.ops import launch
from kvtorch.slots import are_there

STAGING_BYTES = 128 * 1024 * 1024
"""Copies are staged a few layers at a time."""

# Elements a program copies.
TILE = 4096
WARPS = 8

_STAGE, _FINISH = range(2)


def move(
    planes: Sequence[torch.Tensor], dst: torch.Tensor, src: torch.Tensor, first_slot: int
) -> None:
    """Stages the rows that some other move overwrites; then writes all, from there or in place."""
    num_tokens = dst.shape[0]
    num_layers, num_rows = planes[0].shape[:2]
    written = torch.zeros(num_rows, dtype=torch.bool, device=dst.device)
    # Row 0 stands for what is not there. At worst, rows are staged that need not be.
    written.index_fill_(0, torch.where(are_there(dst, first_slot, num_rows), dst, 0).long(), True)
    sources = torch.where(are_there(src, first_slot, num_rows), src, 0).long()
    conflicts = written[sources] & (dst != src)
    token_bytes = sum(plane.stride(1) * plane.itemsize for plane in planes)
    at_once = max(1, min(num_layers, STAGING_BYTES // (num_tokens * token_bytes)))
    staged = [plane.new_empty(at_once * num_tokens * plane.stride(1)) for plane in planes]
    block = launch.power_of_two(max(plane.stride(1) for plane in planes))
    tokens = max(1, TILE // block)
    tensors = (dst, src, conflicts, planes[0], staged[0], planes[-1], staged[-1])
    widths = (planes[0].stride(1), planes[-1].stride(1))
    for first_layer in range(0, num_layers, at_once):
        layers = min(at_once, num_layers - first_layer)
        for step in (_STAGE, _FINISH):
            constants = (*widths, block, tokens, step)
            launch.launch(
                _kernel,
                (-(-num_tokens // tokens), len(planes) * layers, 1),
                (*(tensor.dtype for tensor in tensors), constants),
                tensors,
                (num_tokens, num_rows, first_slot, layers, first_layer, *constants),
                WARPS,
            )


@triton.jit
def _copy(
    plane, staged, layer, turn, token, num_tokens, num_rows, dst, writes, src, reads, conflict,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < WIDTH
    old = plane + ((layer * num_rows + src) * WIDTH)[:, None] + column
    kept = staged + ((turn * num_tokens + token) * WIDTH)[:, None] + column
    if STEP == 0:
        mask = (reads & conflict)[:, None] & inside
        tl.store(kept, tl.load(old, mask=mask), mask=mask)
    else:
        old = tl.where(conflict[:, None], kept, old)
        values = tl.load(old, mask=reads[:, None] & inside, other=0.0)
        new = plane + ((layer * num_rows + dst) * WIDTH)[:, None] + column
        tl.store(new, values, mask=writes[:, None] & inside)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "first_slot", "num_layers", "first_layer"])
def _kernel(
    dst_slots,
    src_slots,
    conflicts,
    k_plane,
    k_staged,
    v_plane,
    v_staged,
    num_tokens,
    num_rows,
    first_slot,
    num_layers,
    first_layer,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """STEP: 0 stages the rows in conflict; 1 writes these from there, and the others straight."""
    launch.begin(EARLY)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    of_batch = token < num_tokens
    dst = tl.load(dst_slots + token, mask=of_batch, other=-1).to(tl.int64)
    src = tl.load(src_slots + token, mask=of_batch, other=-1).to(tl.int64)
    conflict = tl.load(conflicts + token, mask=of_batch, other=0) != 0
    writes = of_batch & (dst >= first_slot) & (dst < num_rows)
    reads = of_batch & (src >= first_slot) & (src < num_rows)
    turn = (tl.program_id(1) % num_layers).to(tl.int64)
    if tl.program_id(1) < num_layers:
        _copy(
            k_plane, k_staged, first_layer + turn, turn, token, num_tokens, num_rows,
            dst, writes, src, reads, conflict, K_WIDTH, BLOCK, STEP,
        )  # fmt: skip
    else:
        _copy(
            v_plane, v_staged, first_layer + turn, turn, token, num_tokens, num_rows,
            dst, writes, src, reads, conflict, V_WIDTH, BLOCK, STEP,
        )  # fmt: skip
