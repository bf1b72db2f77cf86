"""One end of a copy of rows: as callers describe it, and as the kernel finds rows in it."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kvjax.slots import are_there

COPY_BYTES = 16
"""Sizes and addresses of bulk copies are multiples of it (PTX ISA, ``cp.async.bulk``)."""

Part = tuple[Any, int, int]
"""A part of a row: an array or ref ``[layers, rows, width]``, its first column, how many."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One end of a copy: the parts that make up a row, and which rows.

    Attributes:
      parts: of the same number, widths and dtypes at both ends.
      slots: the row of each token, or ``None`` where token t is row t.
      first_slot: the first slot that is there.
      layer: the first layer, or ``None`` for 0.
    """

    parts: tuple[Part, ...]
    slots: jax.Array | None = None
    first_slot: int = 0
    layer: jax.Array | int | None = None

    @classmethod
    def of(cls, arrays: Sequence[Any], **where: Any) -> "Side":
        """A side whose parts are the whole rows of ``arrays``."""
        return cls(tuple((array, 0, array.shape[-1]) for array in arrays), **where)

    @classmethod
    def cut(cls, array: Any, *widths: int, **where: Any) -> "Side":
        """A side whose parts are columns of ``array``, of these widths; empty ones left out."""
        starts = itertools.accumulate(widths, initial=0)
        parts = zip(itertools.repeat(array), starts, widths, strict=False)
        return cls(tuple(part for part in parts if part[-1]), **where)


def is_bulk(width: int, dtype: Any) -> bool:
    """Whether bulk copies can take a part of so many columns."""
    return width * dtype.itemsize % COPY_BYTES == 0


def elements_of(pieces: Iterable[tuple[int, Any]]) -> list[tuple[int, int]]:
    """Part and column of what bulk copies cannot take, of parts of these widths and dtypes."""
    return [
        (part, column)
        for part, piece in enumerate(pieces)
        if not is_bulk(*piece)
        for column in range(piece[0])
    ]


class Operands:
    """The kernel's operands; one that is used twice is passed once."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def position(self, value: Any) -> int:
        for position, known in enumerate(self.values):
            if known is value:
                return position
        self.values.append(value)
        return len(self.values) - 1


class End:
    """A ``Side`` as the kernel sees it, through its operands."""

    def __init__(self, operands: Operands, side: Side):
        self.num_layers, self.num_rows, _ = side.parts[0][0].shape
        self.first_slot = side.first_slot
        self.parts = [(operands.position(array), *columns) for array, *columns in side.parts]
        self.slots = None if side.slots is None else operands.position(side.slots)
        self.layer = (
            None
            if side.layer is None
            else operands.position(jnp.asarray(side.layer, jnp.int32).reshape(1))
        )

    def locate(self, refs: Sequence[Any], layer: Any, token: Any) -> tuple[tuple[Any, Any], Any]:
        """The layer and row of a token, and whether they are there (0 if not)."""
        row, there = token, jnp.bool(True)
        if self.layer is not None:
            layer += refs[self.layer][0]
            there = are_there(layer, 0, self.num_layers)
        if self.slots is not None:
            row = refs[self.slots][token]
            there &= are_there(row, self.first_slot, self.num_rows)
        return (jnp.where(there, layer, 0), jnp.where(there, row, 0)), there

    def at(
        self,
        refs: Sequence[Any],
        part: int,
        place: tuple[Any, Any],
        start: int = 0,
        width: int | None = None,
    ) -> Any:
        """One part of a row, or ``width`` columns of it from ``start`` on."""
        position, first, whole = self.parts[part]
        return refs[position].at[(*place, pl.ds(first + start, width or whole))]
