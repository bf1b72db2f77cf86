"""What a caller may pass as slots, and which slots are there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, Int32

from kvjax.checks_mode import enabled

_INT32 = np.iinfo(np.int32)


def as_slots(slots: Any, *, name: str = "slots") -> Int32[Array, " n"]:
    """Slot numbers as an int32 array, without ever cutting one that does not fit.

    Args:
      slots: a list, or a NumPy or JAX array, of integers; an empty one may have any dtype.
      name: what messages call the argument.

    Returns:
      ``slots`` in int32. A value beyond int32 in a traced or device array, which nobody can look
      at without waiting, becomes -1, a slot that is not there.

    Raises:
      TypeError: the values are not integers.
      ValueError: not one-dimensional.
      OverflowError: a value on the host does not fit.
    """
    on_device = isinstance(slots, jax.Array)
    if on_device and slots.ndim == 1 and slots.dtype == np.int32:
        return slots
    array = slots if on_device else np.asarray(slots)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}, need one dimension")
    if array.size == 0:
        return jnp.zeros(0, jnp.int32)
    # NumPy makes objects of integers that no dtype of its own holds.
    if array.dtype.kind not in "iu" and not (
        isinstance(array, np.ndarray) and all(isinstance(slot, int) for slot in array.flat)
    ):
        raise TypeError(f"{name} has dtype {array.dtype}, need integers")
    if on_device:
        # In 64 bits. Else JAX cuts int64, and compares others with bounds cut to their dtype.
        with jax.enable_x64(True):
            wide = array.astype(jnp.int64)
            fits = (wide >= _INT32.min) & (wide <= _INT32.max)
            return jnp.where(fits, wide, -1).astype(jnp.int32)
    fits = (array >= _INT32.min) & (array <= _INT32.max)
    if not fits.all():
        position = int(np.argmin(fits))
        raise OverflowError(f"{name}[{position}]={array[position]} does not fit int32")
    return jnp.asarray(array.astype(np.int32))


def are_there(slots: Int32[Array, " n"], first: int, stop: int) -> Bool[Array, " n"]:
    """Whether each slot is one of ``first`` up to, not including, ``stop``."""
    return (slots >= first) & (slots < stop)


def absent_as(stop: int, slots: Int32[Array, " n"], first: int) -> Int32[Array, " n"]:
    """``slots`` with ``stop``, one past the last, in place of each that is not there.

    JAX drops a write to it and fills a read of it, where a negative slot would wrap around.
    """
    return jnp.where(are_there(slots, first, stop), slots, stop)


def check(
    slots: Int[Array, " n"],
    first: int,
    stop: int,
    *,
    name: str = "slots",
    distinct: bool = False,
) -> None:
    """In checks mode, raises if a slot is not there or, on request, if one repeats.

    Raises:
      IndexError: names the first slot that is not there, and its position.
      ValueError: names the first slot that repeats, and its position.
    """
    if not enabled() or isinstance(slots, Tracer):
        return
    values = np.asarray(slots)
    there = (values >= first) & (values < stop)
    if not there.all():
        position = int(np.argmin(there))
        raise IndexError(
            f"{name}[{position}]={values[position]} is not there; slots are {first}..{stop - 1}"
        )
    if distinct:
        _, firsts = np.unique(values, return_index=True)
        if repeats := sorted(set(range(values.size)) - set(firsts.tolist())):
            position = repeats[0]
            raise ValueError(f"{name}[{position}]={values[position]} repeats; need distinct {name}")
