"""Which slot each token of each running request is in.

A function that returns a table updates the given one in place and uses it up; if it raises, the
given one is as good as before. Arrays of integers may be lists, NumPy or JAX arrays;
``slots.as_slots`` says what it refuses.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, Int32

from kvjax import free_list
from kvjax.errors import GeometryError
from kvjax.free_list import FreeList
from kvjax.slots import as_slots, check

type Ints = Int[ArrayLike, " n"] | Sequence[int]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RequestTable:
    """A row of slots for each request that runs.

    Rows are 0 to ``num_requests - 1``, those freed first handed out first. A request keeps its row
    until the row is freed, however many steps or chunks it takes (RQ1). From then on the number is
    the next owner's, so the old one should set its own to -1. Padded entries of a batch have row
    -1, never 0, which is a request's (RQ2).

    Neither ``free`` nor ``clear`` erases a row, and the next owner finds what the last one wrote.
    ``read`` shows of it only what lies below the length it is given.

    Attributes:
      slots: the slot of each position of each row, 0 where none was ever written.
      free_rows: the rows that no request has.

    Source: SGLang 0.4.8 ``ReqToTokenPool`` (A-RT-1 to A-RT-6).
    """

    slots: Int32[Array, "num_requests max_context_len"]
    free_rows: FreeList

    @classmethod
    def create(cls, num_requests: int, max_context_len: int) -> "RequestTable":
        """A table for ``num_requests`` requests at a time, of ``max_context_len`` tokens each.

        Raises:
          TypeError: a size is not an integer.
          GeometryError: a size is less than 1, or does not fit int32.
        """
        size = functools.partial(free_list.as_count, least=1, error=GeometryError)
        num_requests = size("num_requests", num_requests)
        max_context_len = size("max_context_len", max_context_len)
        slots = jnp.zeros((num_requests, max_context_len), jnp.int32)
        return cls(slots, free_list.create(0, num_requests))


def alloc(
    table: RequestTable, num_rows: int
) -> tuple[RequestTable, Int32[Array, "{num_rows}"], Bool[Array, ""]]:
    """Hands out ``num_rows`` rows, or none (-1 for each, and ``ok`` False) if there are too few.

    Raises:
      TypeError: ``num_rows``, which is static, is not an integer.
      ValueError: it is negative, or does not fit int32.

    Source: A-RT-4.
    """
    num_rows = free_list.as_count("num_rows", num_rows)
    free_rows, rows, ok = free_list.take(table.free_rows, num_rows, capacity=num_rows)
    return dataclasses.replace(table, free_rows=free_rows), rows, ok


def free(table: RequestTable, rows: Ints) -> RequestTable:
    """Takes ``rows`` back. Those that no request has are ignored: free, negative or too large.

    Raises:
      ValueError: in checks mode, a row is named twice or no request has it.

    Source: A-RT-5, AL4.
    """
    rows = free_list.as_returned(table.free_rows, "rows", rows)
    return dataclasses.replace(table, free_rows=free_list.append(table.free_rows, rows))


def write(table: RequestTable, rows: Ints, positions: Ints, slots: Ints) -> RequestTable:
    """Stores ``slots[i]`` at ``positions[i]`` of row ``rows[i]``.

    Nothing is stored where the row or the position is not there. Of several slots for one position
    one is stored, which one is unspecified.

    Raises:
      ValueError: the arguments' lengths differ.
      IndexError: in checks mode, a row or a position is not there.

    Source: A-RT-2.
    """
    rows = as_slots(rows, name="rows")
    positions = as_slots(positions, name="positions")
    slots = as_slots(slots)
    if not rows.size == positions.size == slots.size:
        raise ValueError(f"{rows.size=}, {positions.size=} and {slots.size=} must be equal")
    num_requests, max_context_len = table.slots.shape
    check(rows, 0, num_requests, name="rows")
    check(positions, 0, max_context_len, name="positions")
    return dataclasses.replace(table, slots=_write(table.slots, rows, positions, slots))


def read(
    table: RequestTable, rows: Ints, seq_lens: Ints, max_seq_len: int
) -> Int32[Array, "sequences {max_seq_len}"]:
    """Returns the slots at positions 0 to ``seq_len - 1`` of each row, and -1 from there on.

    A row that is not there gives -1 throughout. Within one ``jit``, read after writing: for a write
    that follows a read and does not depend on it, XLA copies the table (seen on CPU).

    Args:
      table: what to read; stays usable.
      rows: may repeat.
      seq_lens: tokens of each row to show.
      max_seq_len: static; no more are shown.

    Raises:
      ValueError: the arguments' lengths differ, or a row of the table is shorter than
        ``max_seq_len``.
      IndexError: in checks mode, a row is not there.
    """
    rows = as_slots(rows, name="rows")
    seq_lens = as_slots(seq_lens, name="seq_lens")
    if rows.size != seq_lens.size:
        raise ValueError(f"{rows.size=} and {seq_lens.size=} must be equal")
    num_requests, max_context_len = table.slots.shape
    max_seq_len = free_list.as_count("max_seq_len", max_seq_len)
    if max_seq_len > max_context_len:
        raise ValueError(f"{max_seq_len=} must be at most {max_context_len=}")
    check(rows, 0, num_requests, name="rows")
    return _read(table.slots, rows, seq_lens, max_seq_len=max_seq_len)


def clear(table: RequestTable) -> RequestTable:
    """The table with all rows free, in their first order; as ``free``, it erases nothing.

    Source: A-RT-6.
    """
    return dataclasses.replace(table, free_rows=free_list.reset(table.free_rows))


def available(table: RequestTable) -> Int32[Array, ""]:
    """How many rows are free (A-RT-3)."""
    # Copied, so that it outlives the table.
    return jnp.copy(table.free_rows.num_free)


@functools.partial(jax.jit, donate_argnums=0)
def _write(table_slots, rows, positions, slots):
    return table_slots.at[rows, positions].set(slots, mode="drop", wrap_negative_indices=False)


@functools.partial(jax.jit, static_argnames="max_seq_len")
def _read(table_slots, rows, seq_lens, *, max_seq_len):
    found = table_slots.at[rows, :max_seq_len].get(
        mode="fill", fill_value=free_list.NOBODY, wrap_negative_indices=False
    )
    is_shown = jnp.arange(max_seq_len, dtype=jnp.int32) < seq_lens[:, None]
    # Fenced, as in free_list.take.
    return jax.lax.optimization_barrier(jnp.where(is_shown, found, free_list.NOBODY))
