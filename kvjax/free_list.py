"""Which of a range of numbers nobody has, and in what order they are handed out."""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int32

from kvjax.checks_mode import enabled
from kvjax.slots import as_slots

NOBODY = -1
"""Pads what is handed out; ignored where it comes back."""

_FREE = -1
_TAKEN = np.iinfo(np.int32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FreeList:
    """The numbers that nobody has, the next one first, and a mark for every number.

    An operation costs what its own numbers cost, however many there are in all; those that return
    a list update the given one in place and use it up. Build one with ``create``.

    Attributes:
      ring: ``num_free`` free numbers from position ``head`` on, wrapping round; the rest is stale.
      mark: ``_TAKEN`` or ``_FREE`` for each number from 0 on. A number below the first one counts
        as free without ever being in the ring, so it is neither handed out nor taken back.
    """

    ring: Int32[Array, " numbers"]
    head: Int32[Array, ""]
    num_free: Int32[Array, ""]
    mark: Int32[Array, "first+numbers"]

    @property
    def first(self) -> int:
        """The lowest number there is."""
        return self.mark.size - self.ring.size


def create(first: int, count: int) -> FreeList:
    """All of ``first`` to ``first + count - 1``, in this order."""
    return FreeList(
        ring=jnp.arange(first, first + count, dtype=jnp.int32),
        head=jnp.zeros((), jnp.int32),
        num_free=jnp.full((), count, jnp.int32),
        mark=jnp.full(first + count, _FREE, jnp.int32),
    )


# keep_unused: the memory is donated although no value in it is read.
@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def reset(free: FreeList) -> FreeList:
    """The list as ``create`` made it."""
    return create(free.first, free.ring.size)


@functools.partial(jax.jit, donate_argnums=0, static_argnames="capacity")
def take(
    free: FreeList, count: Int32[Array, ""] | int, *, capacity: int
) -> tuple[FreeList, Int32[Array, " capacity"], Bool[Array, ""]]:
    """Takes the next ``count`` numbers, at most ``capacity``, or none if there are not so many.

    Returns the list, the numbers followed by ``NOBODY``, and whether there were enough.
    """
    enough = count <= free.num_free
    count = jnp.where(enough, count, 0)
    step = jnp.arange(capacity, dtype=jnp.int32)
    numbers = jnp.where(step < count, free.ring[_around(free, free.head, step)], NOBODY)
    # Fenced: a read that is fused into what uses it can end up after the next update, and for that
    # XLA copies the whole array.
    numbers, ring = jax.lax.optimization_barrier((numbers, free.ring))
    taken = FreeList(
        ring=ring,
        head=_around(free, free.head, count),
        num_free=free.num_free - count,
        mark=_set(free.mark, numbers, _TAKEN),
    )
    return taken, numbers, enough


@functools.partial(jax.jit, donate_argnums=0)
def append(free: FreeList, numbers: Int32[Array, " n"]) -> FreeList:
    """Takes ``numbers`` back, to be handed out last, in the order given.

    Numbers that nobody has, or that came earlier in ``numbers``, are ignored.
    """
    mark, returned = _release(free.mark, numbers)
    end = _around(free, free.head, free.num_free)
    place = _around(free, end, jnp.cumsum(returned, dtype=jnp.int32) - 1)
    return dataclasses.replace(
        free,
        ring=_set(free.ring, jnp.where(returned, place, NOBODY), numbers),
        num_free=free.num_free + returned.sum(dtype=jnp.int32),
        mark=mark,
    )


@functools.partial(jax.jit, donate_argnums=0)
def prepend_sorted(free: FreeList, numbers: Int32[Array, " n"]) -> FreeList:
    """Takes ``numbers`` back, to be handed out next, in ascending order.

    Numbers that nobody has, or that came earlier in ``numbers``, are ignored.
    """
    mark, returned = _release(free.mark, numbers)
    count = returned.sum(dtype=jnp.int32)
    head = _around(free, free.head, free.ring.size - count)
    step = jnp.arange(numbers.size, dtype=jnp.int32)
    place = jnp.where(step < count, _around(free, head, step), NOBODY)
    ascending = jnp.sort(jnp.where(returned, numbers, _TAKEN))
    return dataclasses.replace(
        free,
        ring=_set(free.ring, place, ascending),
        head=head,
        num_free=free.num_free + count,
        mark=mark,
    )


def is_taken(free: FreeList, numbers: Int32[Array, " n"]) -> Bool[Array, " n"]:
    """Whether somebody has each number; nobody has one that is not there."""
    return _get(free.mark, numbers) == _TAKEN


def as_returned(
    free: FreeList,
    name: str,
    values: Any,
    *,
    per_number: int = 1,
    earlier: tuple[Int32[Array, " _"], ...] = (),
) -> Int32[Array, " padded"]:
    """``values`` as ``as_slots`` makes them, in checks mode if they can be given back, each once.

    Those on the host are followed by ``NOBODY`` up to a power of two, so that few sizes compile.

    Args:
      free: what they are given back to.
      name: what the caller calls ``values``.
      values: of which ``per_number`` consecutive ones belong to one number.
      per_number: more than one where the numbers are pages.
      earlier: values given back already but not yet in the list.

    Raises:
      ValueError: somebody does not have one of them. Not raised where values are traced.
    """
    array = values if isinstance(values, jax.Array) else np.asarray(values)
    num_values = array.size
    # as_slots refuses most of the rest; unsigned ones stay as they are.
    if isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind == "i":
        array = np.pad(array, (0, padded(num_values) - num_values), constant_values=NOBODY)
    slots = as_slots(array, name=name)
    if not enabled() or any(isinstance(x, Tracer) for x in (free.mark, slots, *earlier)):
        return slots
    taken = is_taken(free, slots // per_number).tolist()
    seen = set(np.concatenate([[], *earlier]).tolist())
    for position, value in enumerate(slots.tolist()[:num_values]):
        if not taken[position] or value in seen:
            what = "named twice" if taken[position] else "not taken"
            low, high = free.first * per_number, free.mark.size * per_number - 1
            raise ValueError(
                f"{name}[{position}]={value} is {what}; "
                f"allowed: {name} from {low} to {high} that were handed out, each once"
            )
        seen.add(value)
    return slots


def padded(num_values: int) -> int:
    """The next power of two."""
    return 1 << max(num_values - 1, 0).bit_length()


def as_count(name: str, value: Any, *, least: int = 0, error: type[ValueError] = ValueError) -> int:
    """``value`` as a Python int, from ``least`` to the highest int32.

    Raises:
      TypeError: not an integer, or a traced one.
      ValueError: out of range; ``error``, if another is given.
    """
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} must be a static integer") from None
    if not least <= count <= _TAKEN:
        raise error(f"{name}={count} must be from {least} to {_TAKEN}")
    return count


def _release(
    mark: Int32[Array, " all"], numbers: Int32[Array, " n"]
) -> tuple[Int32[Array, " all"], Bool[Array, " n"]]:
    """Marks ``numbers`` free, and says which positions are the first to name one that was taken."""
    # The lowest position wins a number that is taken. The mark of a free one is lower than any.
    position = jnp.arange(numbers.size, dtype=jnp.int32)
    mark = mark.at[numbers].min(position, mode="drop", wrap_negative_indices=False)
    first = _get(mark, numbers) == position
    # As in take.
    mark, first = jax.lax.optimization_barrier((mark, first))
    return _set(mark, jnp.where(first, numbers, NOBODY), _FREE), first


def _around(
    free: FreeList, start: Int32[Array, ""], step: Int32[Array, "*shape"]
) -> Int32[Array, "*shape"]:
    """The position ``step`` places on from ``start``; their plain sum may not fit int32."""
    to_end = free.ring.size - start
    return jnp.where(step < to_end, start + step, step - to_end)


def _set(
    array: Int32[Array, " size"], index: Int32[Array, " n"], value: Int32[Array, " n"] | int
) -> Int32[Array, " size"]:
    return array.at[index].set(value, mode="drop", wrap_negative_indices=False)


def _get(array: Int32[Array, " size"], index: Int32[Array, " n"]) -> Int32[Array, " n"]:
    return array.at[index].get(mode="fill", fill_value=_FREE, wrap_negative_indices=False)
