"""Which slot each token of each running request is in."""

import operator
from collections.abc import Iterable
from typing import Any, SupportsIndex

import torch

from kvtorch.free_list import as_count
from kvtorch.pools.memory import memory_region


class ReqToTokenPool:
    """A row of slots for each request that runs.

    Rows are 0 to ``size - 1``, those freed first handed out first. A request keeps its row until
    the row is freed, however many steps or chunks it takes (RQ1). Row 0 is a request's, too: what
    pads a batch must not be written through it (RQ2). Neither ``free`` nor ``clear`` erases a row.

    Attributes:
      size: how many rows there are.
      max_context_len: tokens a row.
      device: as given.
      req_to_token: int32, ``[size, max_context_len]``, 0 where nothing was ever written.
      free_slots: the rows that no request has, the next one first. To be read only: the table also
        knows which rows it has handed out.

    Source: SGLang 0.4.8 ``ReqToTokenPool`` (A-RT-1 to A-RT-6).
    """

    def __init__(
        self,
        size: int,
        max_context_len: int,
        device: torch.device | str,
        enable_memory_saver: bool,
    ):
        """All rows, free."""
        self.size = as_count("size", size)
        self.max_context_len = as_count("max_context_len", max_context_len)
        self.device = device
        with memory_region(enable_memory_saver):
            self.req_to_token = torch.zeros(
                (self.size, self.max_context_len), dtype=torch.int32, device=device
            )
        self.clear()

    def write(self, indices: Any, values: Any) -> None:
        """Stores ``values``, cast to int32, at ``indices``, any index that torch takes (A-RT-2)."""
        if isinstance(values, torch.Tensor):
            values = values.to(torch.int32)
        self.req_to_token[indices] = values

    def available_size(self) -> int:
        """How many rows are free (A-RT-3)."""
        return len(self.free_slots)

    def alloc(self, need_size: int) -> list[int] | None:
        """Hands out ``need_size`` rows, or None, and no row, if there are too few (A-RT-4).

        Raises:
          TypeError: ``need_size`` is not an integer.
          ValueError: it is negative.
        """
        num_rows = as_count("need_size", need_size)
        if num_rows > len(self.free_slots):
            return None
        rows = self.free_slots[:num_rows]
        del self.free_slots[:num_rows]
        self._taken.update(rows)
        return rows

    def free(self, free_index: SupportsIndex | Iterable[SupportsIndex]) -> None:
        """Takes a row or several back, in the order given.

        Raises:
          TypeError: one is not an integer; no row was taken back.
          ValueError: one is named twice or no request has it; no row was taken back.

        Source: A-RT-5, AL4.
        """
        rows = _as_rows(free_index)
        seen = set()
        for position, row in enumerate(rows):
            if row not in self._taken or row in seen:
                what = "named twice" if row in seen else "not taken"
                raise ValueError(
                    f"free_index[{position}]={row} is {what}; "
                    f"allowed: rows from 0 to {self.size - 1} that were handed out, each once"
                )
            seen.add(row)
        self._taken -= seen
        self.free_slots += rows

    def clear(self) -> None:
        """All rows are free, in their first order; what was written stays (A-RT-6)."""
        self.free_slots = list(range(self.size))
        self._taken: set[int] = set()


def _as_rows(free_index: Any) -> list[int]:
    if isinstance(free_index, torch.Tensor):
        if free_index.is_floating_point() and free_index.numel():
            raise TypeError(f"free_index has dtype {free_index.dtype}, need integers")
        free_index = free_index.tolist()  # all of them at once
    if not isinstance(free_index, Iterable) or getattr(free_index, "ndim", None) == 0:
        free_index = [free_index]
    rows = []
    for position, row in enumerate(free_index):
        try:
            if isinstance(row, bool) or getattr(row, "dtype", None) == torch.bool:
                raise TypeError
            rows.append(operator.index(row))
        except TypeError:
            raise TypeError(f"free_index[{position}]={row!r} must be an integer") from None
    return rows
