"""Moves rows within planes, all layers and planes at once, as simultaneous assignment."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvjax.dispatch import Implementation, select
from kvtorch.ops import launch, read_rows
from kvtorch.ops.narrow import bits
from kvtorch.slots import are_there


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
    run = select("move_rows", IMPLEMENTATIONS, implementation, planes, dst, src)
    run(planes, dst, src, first_slot, disjoint)


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


IMPLEMENTATIONS = {"reference": Implementation(reference, lambda *_: None)}
