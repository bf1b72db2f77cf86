"""Reads rows of planes, in one layer or all."""

from collections.abc import Sequence

import torch

from kvjax.dispatch import Implementation, select
from kvtorch.ops.narrow import bits
from kvtorch.slots import are_there


def read_rows(
    planes: Sequence[torch.Tensor],
    layer: int | None,
    slots: torch.Tensor,
    *,
    first_slot: int,
    implementation: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """Returns every plane's rows at ``slots``, ``[n, *row]``; of all layers ``[layers, n, *row]``.

    Bits are preserved. Slots that are not there read as zeros.

    Args:
      planes: ``[layers, rows, *row]``, not changed.
      layer: position of the layer; ``None`` for all.
      slots: int32 or int64, ``[n]``, in any order and as often as wanted.
      first_slot: the first slot that is there.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Source: SGLang 0.4.8 ``get_flat_data`` (A-MHA-9).
    """
    run = select("read_rows", IMPLEMENTATIONS, implementation)
    return run(planes, layer, slots, first_slot)


def reference(
    planes: Sequence[torch.Tensor], layer: int | None, slots: torch.Tensor, first_slot: int
) -> tuple[torch.Tensor, ...]:
    """The specification, in plain torch; waits for no device."""
    there = are_there(slots, first_slot, planes[0].shape[1])
    slots = torch.where(there, slots, 0).long()
    results = []
    for plane in planes:
        stored = bits(plane) if layer is None else bits(plane)[layer]
        rows = stored.index_select(stored.dim() - plane.dim() + 1, slots)
        rows.masked_fill_(~there.view(-1, *[1] * (plane.dim() - 2)), 0)
        results.append(rows.view(plane.dtype))
    return tuple(results)


IMPLEMENTATIONS = {"reference": Implementation(reference, lambda *_: None)}
