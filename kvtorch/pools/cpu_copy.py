"""Copies rows to host memory and back, a chunk of a layer at a time."""

from collections.abc import Sequence
from typing import Any

import torch

from kvjax.errors import GeometryError
from kvjax.geometry import Geometry
from kvtorch.ops.read_rows import read_rows
from kvtorch.ops.write_rows import write_rows
from kvtorch.pools.planes import Planes, as_rows

CHUNK_TOKENS = 8192
"""Tokens of one layer moved at once, which bounds the device memory needed beside the pool.
Source: SGLang 0.4.8 ``cpu_offloading_chunk_size`` (A-KV-1)."""


def get(
    planes: Planes, geometry: Geometry, slots: torch.Tensor, chunk_tokens: int
) -> list[list[list[torch.Tensor]]]:
    """Returns, for each layer and chunk of ``slots``, a list of each plane's rows in host memory.

    They are in the storage dtype, pinned if they come from a GPU. Waits until they are there.

    Args:
      planes: in the storage dtypes.
      geometry: of the planes.
      slots: which rows; one that is not there gives zeros.
      chunk_tokens: how many tokens to move at once, at least 1.
    """
    chunks = _chunks(slots, chunk_tokens)
    _wait_for_all_work(planes)
    copies: list[list[list[torch.Tensor]]] = []
    for layer in range(len(geometry.layers)):
        copies.append([])
        for chunk in chunks:
            rows = read_rows(planes, layer, chunk, first_slot=geometry.first_slot)
            copies[-1].append([_on_host(part) for part in rows])
    _wait_for_own_work(planes)
    return copies


def load(
    planes: Planes,
    geometry: Geometry,
    copies: Sequence[Sequence[Any]],
    slots: torch.Tensor,
    chunk_tokens: int,
) -> None:
    """Writes what ``get`` returned at ``slots``, as many as there were; waits until it is done.

    The rows of a single plane may also come without a list around them.

    Raises:
      GeometryError: there are other layers, chunks, shapes or dtypes than ``get`` would give;
        nothing is written.
    """
    chunks = _chunks(slots, chunk_tokens)
    layers = range(len(geometry.layers))
    if len(copies) != len(layers):
        raise GeometryError(f"kv_cache_cpu has {len(copies)} layers, need {len(layers)}")
    checked = []
    for layer, of_layer in zip(layers, copies, strict=True):
        if len(of_layer) != len(chunks):
            raise GeometryError(
                f"kv_cache_cpu[{layer}] has {len(of_layer)} chunks, need {len(chunks)}, for "
                f"{slots.numel()} slots in chunks of {chunk_tokens}"
            )
        for i, (chunk, rows) in enumerate(zip(chunks, of_layer, strict=True)):
            rows = as_rows(f"kv_cache_cpu[{layer}][{i}]", rows, geometry, chunk.numel())
            checked.append((layer, chunk, rows))
    _wait_for_all_work(planes)
    for layer, chunk, rows in checked:
        rows = [part.to(planes[0].device, non_blocking=True) for part in rows]
        write_rows(planes, layer, chunk, rows, first_slot=geometry.first_slot)
    _wait_for_own_work(planes)


def _chunks(slots: torch.Tensor, chunk_tokens: int) -> Sequence[torch.Tensor]:
    return slots.split(chunk_tokens) if slots.numel() else ()


def _on_host(rows: torch.Tensor) -> torch.Tensor:
    if not rows.is_cuda:
        return rows.cpu()
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    return host.copy_(rows, non_blocking=True)


def _wait_for_all_work(planes: Planes) -> None:
    # An engine's forward pass runs on a stream of its own, and may still be writing rows that are
    # to be copied, or reading those of a request that gave its slots back (X6).
    if planes[0].is_cuda:
        torch.cuda.synchronize(planes[0].device)


def _wait_for_own_work(planes: Planes) -> None:
    if planes[0].is_cuda:
        torch.cuda.current_stream(planes[0].device).synchronize()
