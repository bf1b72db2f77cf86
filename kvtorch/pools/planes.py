"""Stacked tensors as a geometry describes them, and rows on their way into or out of them."""

from collections.abc import Sequence
from typing import Any

import torch

from kvjax.errors import GeometryError
from kvjax.geometry import Geometry

Planes = tuple[torch.Tensor, ...]


def create(geometry: Geometry, device: torch.device | str) -> Planes:
    """Zeros, ``[layers, rows, *row]`` in the storage dtype, for each plane."""
    leading = (len(geometry.layers), geometry.num_rows)
    return tuple(
        torch.zeros(
            (*leading, *spec.row_shape), dtype=getattr(torch, spec.storage_dtype), device=device
        )
        for spec in geometry.planes
    )


def require_planes(planes: Sequence[torch.Tensor], geometry: Geometry) -> Planes:
    """``planes`` if they are what ``create`` would make, whatever their content.

    Raises:
      GeometryError: says what they are instead.
    """
    planes = as_rows("planes", planes, geometry, len(geometry.layers), geometry.num_rows)
    for plane, spec in zip(planes, geometry.planes, strict=True):
        if not plane.is_contiguous() or plane.device != planes[0].device:
            raise GeometryError(
                f"plane {spec.name!r} on {plane.device} has strides {plane.stride()}; "
                "need contiguous planes on one device"
            )
    return planes


def as_rows(name: str, rows: Any, geometry: Geometry, *leading: int) -> Planes:
    """Rows of each plane, ``[*leading, *row]``, in the storage dtypes; fp8 as its bits.

    Args:
      name: what messages call them.
      rows: a tensor for each plane, in a sequence or stacked, in either dtype; where there is only
        one plane, or a sequence of one.
      geometry: what they are of.
      leading: the dimensions in front of a row.

    Raises:
      GeometryError: another number of planes, another shape or another dtype.
      TypeError: no tensors.
    """
    specs = geometry.planes
    alone = isinstance(rows, torch.Tensor) and len(specs) == 1
    parts = (rows,) if alone else tuple(rows)
    if len(parts) != len(specs):
        raise GeometryError(f"{name} has {len(parts)} planes, need {len(specs)}")
    for part, spec in zip(parts, specs, strict=True):
        if not isinstance(part, torch.Tensor):
            raise TypeError(f"{name} of plane {spec.name!r} is {type(part)}, need a tensor")
        shape = (*leading, *spec.row_shape)
        dtypes = [getattr(torch, dtype) for dtype in (spec.dtype, spec.storage_dtype)]
        if part.shape != shape or part.dtype not in dtypes:
            raise GeometryError(
                f"{name} of plane {spec.name!r} is {part.dtype}{list(part.shape)}, "
                f"need {dtypes[1]}{list(shape)}"
            )
    dtypes = [getattr(torch, spec.storage_dtype) for spec in specs]
    # A view costs host time, also one of the same dtype.
    return tuple(
        part if part.dtype == dtype else part.view(dtype)
        for part, dtype in zip(parts, dtypes, strict=True)
    )


def joined(rows: Planes) -> Any:
    """Rows of one plane as they are, of several stacked, or a tuple where they differ in form."""
    if len(rows) == 1:
        return rows[0]
    alike = len({(part.shape, part.dtype) for part in rows}) == 1
    return torch.stack(rows) if alike else rows
