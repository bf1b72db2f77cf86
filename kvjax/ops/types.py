"""The shapes that operations on planes speak of."""

from jaxtyping import Array, Int, Int32, Shaped

Planes = tuple[Shaped[Array, "layers rows *_"], ...]
"""Arrays ``[layers, rows, *row]`` that agree on layers and rows, not on row or dtype."""

SourcePlanes = tuple[Shaped[Array, "layers source_rows *_"], ...]
"""Planes of another pool, which has its own number of rows."""

Rows = tuple[Shaped[Array, "..."], ...]
"""For each plane ``[n, *row]``, or ``[layers, n, *row]`` where all layers are meant."""

Slots = Int32[Array, " n"]

Layer = Int[Array, ""] | int | None
"""Position of a layer in the planes, traced or not; ``None`` means all layers."""
