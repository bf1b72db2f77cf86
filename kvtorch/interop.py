"""One memory, two frameworks: lends a torch pool to JAX, and a JAX pool to torch."""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Self

import jax
import torch
from jax.core import Tracer
from torch.utils import dlpack

from kvjax.errors import GeometryError, UnsupportedError
from kvjax.geometry import Geometry
from kvjax.pools.pool import Pool

_CPU_ALIGNMENT = 64
"""Bytes. On CPU JAX copies what lies elsewhere (DL2). Source: XLA ``MinAlign()`` of the CPU client,
which ``from_dlpack(copy=False)`` names when it refuses."""

_LENDING = threading.Lock()


class Lease:
    """A torch pool's memory in JAX's hands, for the length of one ``with`` block.

    ``lease.pool`` is a kvjax pool over the torch pool's planes. Rebind it to what each update
    returns; leaving the block uses up the last one, and the torch pool then holds what it held.
    Meanwhile every method of the torch pool that touches planes raises.

    On GPU nothing is copied, and nothing waits but torch's current stream. On CPU JAX updates in
    memory of its own; leaving waits for JAX and copies such planes back.

    Attributes:
      copied: after leaving, the planes that had to be copied back. On GPU there are none, unless
        ``pool`` was bound to arrays that came from elsewhere, such as a step that did not donate.
      unknown: after leaving, the planes of which nobody knows the content, because an update
        failed, or because what it returned was not bound to ``pool``.
    """

    def __init__(self, pool: Any):
        """Lends nothing yet; the block does.

        Args:
          pool: of ``kvtorch``; ``pool.jax()`` calls this.
        """
        self.copied: tuple[str, ...] = ()
        self.unknown: tuple[str, ...] = ()
        self._owner: Any = pool
        self._thread = ""
        self._lent: Pool | None = None
        self._pool: Pool | None = None

    def __repr__(self) -> str:
        return f"<Lease to thread {self._thread!r}>" if self._pool else "<Lease, not in a block>"

    @property
    def pool(self) -> Pool:
        """The kvjax pool over the lent memory.

        Binding it raises:
          TypeError: not a kvjax pool, or one of tracers.
          GeometryError: not of the lent pool's geometry or device.
          ValueError: used up.
        """
        if self._pool is None:
            raise RuntimeError("the memory is not lent; use lease.pool inside `with pool.jax()`")
        return self._pool

    @pool.setter
    def pool(self, pool: Pool) -> None:
        _require_usable("lease.pool", pool)
        lent = self.pool
        if pool.geometry != lent.geometry:
            raise GeometryError(f"lease.pool is of {lent.geometry}, not of {pool.geometry}")
        assert self._lent is not None
        device, other = _device(self._lent), _device(pool)
        if other != device:
            raise GeometryError(f"lease.pool is on {device}, not on {other}")
        self._pool = pool

    def __enter__(self) -> Self:
        if self._owner is None or self._pool is not None:
            raise RuntimeError("this lease was entered before; pool.jax() gives a new one")
        _require_no_capture()
        with _LENDING:
            if self._owner._lent_to is not None:
                raise RuntimeError(f"the pool is lent already: {self._owner._lent_to}")
            self._owner._require_here()
            self._owner._lent_to = self
        try:
            self._thread = threading.current_thread().name
            self._lent = Pool(tuple(map(_to_jax, self._owner.planes)), self._owner.geometry)
            self._pool = self._lent
        except BaseException:
            self._owner._lent_to = None
            raise
        return self

    def __exit__(self, _: Any, error: BaseException | None, traceback: Any) -> None:
        if self._pool is None:
            raise RuntimeError("this lease is not in a block")
        reasons: dict[str, str] = {}
        try:
            reasons = self._take_back()
        finally:
            self._owner._lent_to = None
            self._owner = self._lent = self._pool = None
        self.unknown = tuple(reasons)
        if not reasons:
            message = "the torch pool has its memory back, with what lease.pool held last"
        else:
            what = "; ".join(f"plane {name!r}: {reason}" for name, reason in reasons.items())
            message = f"the torch pool has its memory back, but of unknown content; {what}"
        if error is not None:
            error.add_note(message)
        elif reasons:
            raise RuntimeError(message)

    def _take_back(self) -> dict[str, str]:
        """Orders torch after JAX, and copies what lies elsewhere; why planes are unknown, if so."""
        owner, lent, pool = self._owner, self._lent, self.pool
        assert lent is not None
        _require_no_capture()
        try:
            if owner.planes[0].is_cuda and all(map(_lies_in, pool.planes, owner.planes)):
                _hand_over(pool.planes, owner.planes)
                return {}
        except jax.errors.JaxRuntimeError as error:
            _wait_for_jax(lent)
            return {spec.name: _failure(error) for spec in pool.geometry.planes}
        _wait_for_jax(lent)
        reasons, results = {}, {}
        for spec, plane, first, last in zip(
            pool.geometry.planes, owner.planes, lent.planes, pool.planes, strict=True
        ):
            reason = _why_unknown(last)
            if reason is not None:
                reasons[spec.name] = reason
            elif last is not first and not _lies_in(last, plane):
                results[spec.name] = plane, last
        self.copied = tuple(results)
        _copy(list(results.values()), owner.planes)
        for array in (*lent.planes, *pool.planes):
            array.delete()  # else whoever kept one would see what torch writes, in no order
        return reasons


class Adoption:
    """A kvjax pool's memory in torch's hands, until ``release`` or the end of a ``with`` block.

    ``adoption.pool`` is a torch pool over the kvjax pool's planes. Meanwhile the kvjax pool can be
    read, once torch has finished writing, and not be updated: on GPU JAX refuses ("Donation
    requested for buffer with external reference"), and the pool is as good as before; on CPU the
    update returns a pool of its own memory, which torch does not see.
    """

    def __init__(self, pool: Pool):
        _require_usable("pool", pool)
        _device(pool)
        if not pool.geometry.padding_page:
            raise GeometryError("a pool of the host tier has no padding page, as torch pools have")
        jax.block_until_ready(pool.planes)  # which raises if an update failed
        planes = tuple(map(_to_torch, pool.planes))
        _wait_for_jax(pool)  # torch may write at once, so reads under way have to be over
        self._kvjax_pool = pool
        self._pool: Any = _torch_pool(planes, pool.geometry)

    def __repr__(self) -> str:
        return "<Adoption of a kvjax pool>" if self._pool else "<Adoption, released>"

    @property
    def pool(self) -> Any:
        """The torch pool, SGLang's or, of quantised latent rows, TokenSpeed's."""
        if self._pool is None:
            raise RuntimeError("the memory was given back to JAX by release()")
        return self._pool

    def release(self) -> Pool:
        """Waits for torch and gives the memory back to JAX; the torch pool raises from then on.

        Tensors over the planes that the caller kept keep JAX from updating the pool on GPU.

        Returns:
          The kvjax pool that was adopted.

        Raises:
          RuntimeError: released before, or lent to JAX by ``adoption.pool.jax()``.
        """
        pool = self.pool
        with _LENDING:
            pool._require_here()
            if pool.planes[0].is_cuda:
                torch.cuda.synchronize(pool.planes[0].device)
            pool._clear_buffers()
            self._pool = None
        return self._kvjax_pool

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._pool is not None:
            self.release()


def adopt(pool: Pool) -> Adoption:
    """Lends a kvjax pool to torch, ``adoption.pool``, until ``adoption.release()``.

    At once, and until the end of the block if it is used in a ``with`` statement.

    Args:
      pool: on one device, in order; neither copied nor used up.

    Raises:
      TypeError: not a kvjax pool, or one of tracers.
      ValueError: used up.
      GeometryError: on several devices, or of the host tier.
      UnsupportedError: torch does not have the device.
    """
    return Adoption(pool)


def _torch_pool(planes: tuple[torch.Tensor, ...], geometry: Geometry) -> Any:
    # Not at the top: pools come here, too, when they are asked to lend themselves.
    from kvtorch.pools.from_geometry import pool_over

    return pool_over(planes, geometry)


def _require_usable(name: str, pool: Any) -> None:
    if not isinstance(pool, Pool):
        raise TypeError(f"{name} is {type(pool)}, need a kvjax Pool")
    for spec, plane in zip(pool.geometry.planes, pool.planes, strict=True):
        if not isinstance(plane, jax.Array) or isinstance(plane, Tracer):
            raise TypeError(f"{name} has {type(plane)} for plane {spec.name!r}, need an array")
        if plane.is_deleted():
            raise ValueError(f"{name} was used up by an update; bind what the update returned")
        shape = (len(pool.geometry.layers), pool.geometry.num_rows, *spec.row_shape)
        if plane.shape != shape or plane.dtype != spec.storage_dtype:
            raise GeometryError(
                f"{name} has {plane.dtype}{list(plane.shape)} for plane {spec.name!r}, "
                f"need {spec.storage_dtype}{list(shape)}"
            )


def _device(pool: Pool) -> Any:
    devices = {device for plane in pool.planes for device in plane.sharding.device_set}
    if len(devices) > 1:
        raise GeometryError(f"the pool is on {len(devices)} devices, need one: {devices}")
    return devices.pop()


def _require_no_capture() -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph is being captured, which cannot hold JAX's work")


def _to_jax(plane: torch.Tensor) -> jax.Array:
    """An array over a tensor's memory, ordered after torch's current stream."""
    if not plane.is_cuda and plane.is_pinned():
        raise UnsupportedError("JAX takes pinned memory for another kind; lend a pool without it")
    try:
        with _current(plane.device):
            array = jax.dlpack.from_dlpack(plane)
    except (RuntimeError, ValueError, BufferError) as error:
        message = f"JAX cannot use memory on {plane.device}; its devices are {jax.devices()}"
        raise UnsupportedError(message) from error
    if plane.is_cuda or plane.data_ptr() % _CPU_ALIGNMENT == 0:
        assert array.unsafe_buffer_pointer() == plane.data_ptr(), "JAX copied a plane"
    return array


def _to_torch(array: jax.Array) -> torch.Tensor:
    """A tensor over an array's memory; torch's current stream is ordered after it.

    While it lives, JAX on GPU cannot donate the array.
    """
    try:
        tensor = dlpack.from_dlpack(array)
    except (RuntimeError, AssertionError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            raise
        raise UnsupportedError(f"torch cannot use memory on {array.sharding}") from error
    assert tensor.data_ptr() == array.unsafe_buffer_pointer(), "the export copied a plane"
    return tensor


@contextlib.contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Torch exports behind the stream that is current on the current device, not the tensor's."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield


@partial(jax.jit, donate_argnums=0)
def _same(planes: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The planes, ready when everything that reads or writes them is over."""
    return planes


def _hand_over(arrays: tuple[jax.Array, ...], planes: tuple[torch.Tensor, ...]) -> None:
    """Makes torch's current stream wait for JAX's work on the planes, and uses the arrays up.

    An exported array orders torch after what wrote it only. A donation waits for what reads it
    too, so the arrays are donated to an empty program, and its results exported.
    """
    _raise_failure(arrays)
    for array, plane in zip(_same(arrays), planes, strict=True):
        _raise_failure([array])
        tensor = _to_torch(array)
        assert tensor.data_ptr() == plane.data_ptr(), "a donated plane was not updated in place"
        del tensor
        array.delete()


def _raise_failure(arrays: Iterable[Any]) -> None:
    """Raises the error of a failed update, as far as JAX knows it; waits for nothing.

    JAX 0.11.2 on GPU ends the process when it is asked to export the result of one.
    """
    for array in arrays:
        if array.is_ready():
            array.block_until_ready()


def _lies_in(array: jax.Array, plane: torch.Tensor) -> bool:
    return not array.is_deleted() and array.unsafe_buffer_pointer() == plane.data_ptr()


def _why_unknown(array: jax.Array) -> str | None:
    if array.is_deleted():
        return "used up by an update that failed, or whose result was not bound to lease.pool"
    try:
        array.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        return _failure(error)
    return None


def _failure(error: Exception) -> str:
    return f"its update failed: {str(error).partition(chr(10))[0]}"


def _wait_for_jax(pool: Pool) -> None:
    """Waits for all that JAX does on the pool's device, reads of arrays deleted since included.

    On CPU a read may run after the array was deleted and its memory returned: its result is what
    there is to wait for (DL5).
    """
    device = _device(pool)
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # of any program, however long ago
        jax.effects_barrier()
    for array in jax.live_arrays(device.platform):
        with contextlib.suppress(RuntimeError):  # failed, or used up by another thread just now
            array.block_until_ready()
    if device.platform == "gpu":
        torch.cuda.synchronize(device.local_hardware_id)


def _copy(results: list[tuple[torch.Tensor, jax.Array]], planes: tuple[torch.Tensor, ...]) -> None:
    lent = {plane.data_ptr() for plane in planes}
    tensors = [_to_torch(array) for _, array in results]
    # Planes that changed places: all sources are read before any is written.
    tensors = [tensor.clone() if tensor.data_ptr() in lent else tensor for tensor in tensors]
    for (plane, _), tensor in zip(results, tensors, strict=True):
        plane.copy_(tensor)
    if results and planes[0].is_cuda:
        # JAX may reuse the memory as soon as the tensors are gone.
        torch.cuda.current_stream(planes[0].device).synchronize()
