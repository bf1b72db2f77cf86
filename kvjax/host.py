"""Pools of the host tier: pinned memory that the GPU reads and writes where it lies."""

import contextlib
import ctypes
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax

from kvjax.geometry import Geometry, PlaneSpec
from kvjax.pools import pool
from kvjax.pools.pool import Pool

# cuda.h: cuMemHostAlloc's flags, so that every context sees the memory, at a device address.
_PORTABLE_AND_MAPPED = 0x01 | 0x02
# dlpack.h: kDLCUDA, and (kind, bits) of the dtypes that planes are stored in.
_DL_CUDA = 2
_DL_DTYPES = {
    "int8": (0, 8),
    "uint8": (1, 8),
    "float16": (2, 16),
    "float32": (2, 32),
    "bfloat16": (4, 16),
}


def create(geometry: Geometry) -> Pool:
    """A pool of zeros in host memory, for ``copy_rows`` from and to pools of the device tier.

    It has no padding page: its slots are 0 to ``num_slots - 1``. On a GPU its planes are pinned
    memory, mapped into the GPU's address space; JAX takes them for arrays on the device, so every
    function on pools works on them, at the speed of the bus. Elsewhere they are plain arrays.

    Args:
      geometry: sizes, layers and dtypes; those of the device pool but for ``num_slots``.

    Raises:
      MemoryError: so much memory cannot be pinned.
    """
    geometry = dataclasses.replace(geometry, padding_page=False)
    if jax.default_backend() != "gpu" or not _has_cuda():
        return pool.create(geometry)
    leading = (len(geometry.layers), geometry.num_rows)
    planes = tuple(_pinned((*leading, *spec.row_shape), spec) for spec in geometry.planes)
    return Pool(planes, geometry)


def _has_cuda() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:  # a GPU of another make
        return False


def _pinned(shape: tuple[int, ...], spec: PlaneSpec) -> jax.Array:
    return jax.dlpack.from_dlpack(_Pinned(shape, spec.storage_dtype))


class _Pinned:
    """Pinned memory as an exporter of DLPack; freed when whoever imports it lets go of it."""

    def __init__(self, shape: tuple[int, ...], dtype: str):
        self._shape = shape
        self._dtype = dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DL_CUDA, 0

    def __dlpack__(self, **_: Any) -> Any:
        kind, bits = _DL_DTYPES[self._dtype]
        num_bytes = math.prod(self._shape) * bits // 8
        address = _allocate(num_bytes)
        ctypes.memset(address, 0, num_bytes)
        shape = (ctypes.c_int64 * len(self._shape))(*self._shape)
        managed = _ManagedTensor(
            data=address,
            device_type=_DL_CUDA,
            ndim=len(shape),
            kind=kind,
            bits=bits,
            lanes=1,
            shape=shape,
            deleter=_free,
        )
        _ALIVE[ctypes.addressof(managed)] = (managed, shape)
        return _new_capsule(ctypes.byref(managed), b"dltensor", None)


class _ManagedTensor(ctypes.Structure):
    """dlpack.h: ``DLManagedTensor``, with the structs inside it spread out."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("kind", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_context", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


_ALIVE: dict[int, tuple[_ManagedTensor, Any]] = {}
"""What importers still hold, by the address they call the deleter with."""

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


@functools.cache
def _driver() -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """The CUDA driver and the context that JAX uses, the first device's primary one."""
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    _require(driver.cuInit(0), "cuInit")
    _require(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), "cuDevicePrimaryCtxRetain")
    return driver, context


@contextlib.contextmanager
def _current_context() -> Iterator[ctypes.CDLL]:
    """The driver, with the context current in this thread, whichever it is."""
    driver, context = _driver()
    _require(driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
    try:
        yield driver
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _allocate(num_bytes: int) -> int:
    address = ctypes.c_void_p()
    with _current_context() as driver:
        status = driver.cuMemHostAlloc(
            ctypes.byref(address), ctypes.c_size_t(num_bytes), _PORTABLE_AND_MAPPED
        )
    _require(status, f"pinning {num_bytes} bytes of host memory")
    assert address.value is not None
    return address.value


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _free(managed: int) -> None:
    tensor, _ = _ALIVE.pop(managed)
    with _current_context() as driver:
        status = driver.cuMemFreeHost(ctypes.c_void_p(tensor.data))
    _require(status, "freeing host memory")


def _require(status: int, what: str) -> None:
    if status:
        raise MemoryError(f"{what} failed with CUDA error {status}")
