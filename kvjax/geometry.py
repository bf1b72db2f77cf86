"""How many rows, pages and bytes a pool has. Standard library only."""

import abc
import dataclasses
import math
import numbers
from typing import Any

from kvjax.errors import GeometryError

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}

LATENT_QUANTIZATION = "per_token_head"
"""Of latent rows, TokenSpeed's name (B-Q): one scale for each token."""

KV_QUANTIZATIONS = {
    "int8_per_token_head": "int8",
    "fp8_per_token_head": "float8_e4m3fn",
}
"""Of K and V, vLLM's names: one scale for each token and head; and what is stored."""

QUANTIZATIONS = (LATENT_QUANTIZATION, *KV_QUANTIZATIONS)

_QUANTIZED_MODEL_DTYPES = ("bfloat16", "float32")


def dtype_name(dtype: Any) -> str:
    """The name of a storage dtype given as a string or as NumPy, JAX or torch spell it.

    Raises:
      GeometryError: a pool cannot store that dtype.
    """
    spellings = (
        dtype,
        getattr(dtype, "name", None),
        getattr(getattr(dtype, "dtype", None), "name", None),
        getattr(dtype, "__name__", None),
    )
    name = next((s for s in spellings if isinstance(s, str)), str(dtype)).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise GeometryError(f"{dtype=} cannot be stored in a pool; allowed: {sorted(DTYPE_BYTES)}")
    return name


def _require_positive(**sizes: Any) -> None:
    for name, value in sizes.items():
        if not _is_integer(value) or value < 1:
            raise GeometryError(f"{name}={value!r} must be an integer of at least 1")


def _is_integer(value: Any) -> bool:
    if hasattr(value, "dtype"):
        return value.dtype.kind in "iu"
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class LayerRange:
    """The model's layers that a pool holds: ``start`` up to, not including, ``stop``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("stop", self.stop)):
            if not _is_integer(value):
                raise GeometryError(f"layers: {name}={value!r} must be an integer")
        if not 0 <= self.start < self.stop:
            raise GeometryError(
                f"layers {self.start}..{self.stop} are empty or negative; need 0 <= start < stop"
            )

    def __len__(self) -> int:
        return self.stop - self.start

    def local(self, layer_id: Any) -> Any:
        """The position of a model layer in this pool.

        A number on the host that is outside the range raises. One on a device, or a traced one,
        cannot be looked at; then the position is one whose rows are not there: written nowhere,
        read as zeros.

        Raises:
          GeometryError: ``layer_id`` is not one integer, or is on the host and not in this range.
        """
        if getattr(layer_id, "shape", ()) != () or not _is_integer(layer_id):
            raise GeometryError(f"{layer_id=} must be one integer")
        if hasattr(layer_id, "__array_interface__"):  # NumPy's, on the host
            layer_id = int(layer_id)
        if isinstance(layer_id, numbers.Integral) and not self.start <= int(layer_id) < self.stop:
            raise GeometryError(f"{layer_id=} is not on this rank, which holds layers {self}")
        return layer_id - self.start if self.start else layer_id

    def __str__(self) -> str:
        return f"{self.start}..{self.stop - 1}"


@dataclasses.dataclass(frozen=True)
class PlaneSpec:
    """One stacked array of a pool, without its ``[layers, rows]`` in front."""

    name: str
    row_shape: tuple[int, ...]
    dtype: str

    @property
    def storage_dtype(self) -> str:
        """The dtype of the array: fp8 is stored as its bits, in ``uint8``.

        XLA rewrites a scatter or an update slice of fp8 into one of float16, and copies the whole
        plane to do so. Source: SGLang 0.4.8 ``store_dtype`` (A-KV-1), for the like reason.
        """
        return "uint8" if self.dtype.startswith("float8") else self.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return 1 if self.dtype == "int8" else DTYPE_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one slot in one layer."""
        return math.prod(self.row_shape) * self.itemsize


@dataclasses.dataclass(frozen=True)
class Geometry(abc.ABC):
    """What every kind of pool has: slots in pages, for a range of layers.

    Attributes:
      num_slots: tokens the pool can hold, a multiple of ``page_size``; the padding page is extra.
      page_size: slots a page.
      layers: a ``LayerRange``, or a number of layers counted from 0.
      padding_page: whether page 0 is one that is never handed out and stays zero. A pool of the
        host tier has none: its slot 0 is a slot.
    """

    num_slots: int
    page_size: int
    layers: LayerRange
    padding_page: bool = dataclasses.field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        _require_positive(num_slots=self.num_slots, page_size=self.page_size)
        if self.num_slots % self.page_size:
            raise GeometryError(
                f"num_slots={self.num_slots} is not a multiple of page_size={self.page_size}; "
                f"the nearest below is {self.num_slots // self.page_size * self.page_size}"
            )
        if self.num_rows > 2**31 - 1:
            raise GeometryError(f"num_slots={self.num_slots} does not fit int32 slot numbers")
        layers: Any = self.layers
        if _is_integer(layers):
            _require_positive(layers=layers)
            object.__setattr__(self, "layers", LayerRange(0, int(layers)))
        elif not isinstance(layers, LayerRange):
            raise GeometryError(f"{layers=} must be a number or a LayerRange")

    @property
    @abc.abstractmethod
    def planes(self) -> tuple[PlaneSpec, ...]:
        """The pool's arrays, in the order of the pool's fields."""

    @property
    def num_pages(self) -> int:
        """Pages that can be handed out (the padding page is not one)."""
        return self.num_slots // self.page_size

    @property
    def num_rows(self) -> int:
        """Rows a layer of a plane has: the slots and, in front of them, the padding page."""
        return self.num_slots + self.first_slot

    @property
    def first_slot(self) -> int:
        """The first slot that is there; those below are the padding page."""
        return self.page_size if self.padding_page else 0

    @property
    def bytes_per_token_per_layer(self) -> int:
        """Bytes of one token in one layer, all planes."""
        return sum(plane.row_bytes for plane in self.planes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token, all planes and all layers of this pool."""
        return self.bytes_per_token_per_layer * len(self.layers)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page, all planes and all layers of this pool."""
        return self.bytes_per_token * self.page_size

    @property
    def bytes(self) -> int:
        """Bytes of the whole pool, padding page included."""
        return self.bytes_per_token * self.num_rows


@dataclasses.dataclass(frozen=True)
class MHAGeometry(Geometry):
    """Keys and values of multi-head, grouped-query or multi-query attention.

    ``num_kv_heads`` is the number this pool stores. ``v_head_dim`` and ``v_dtype`` are those of K
    unless given.

    With a ``quantization``, one of ``KV_QUANTIZATIONS``, K and V are each stored in 8 bits beside
    what each head was divided by; ``dtype``, that of both, is then the model's.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str
    v_head_dim: int | None = None
    v_dtype: str | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        _require_positive(
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, v_head_dim=self.v_head_dim
        )
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        v_dtype = self.dtype if self.v_dtype is None else dtype_name(self.v_dtype)
        object.__setattr__(self, "v_dtype", v_dtype)
        if self.quantization is not None:
            self._check_quantization()

    def _check_quantization(self) -> None:
        if self.quantization not in KV_QUANTIZATIONS:
            raise GeometryError(
                f"quantization={self.quantization!r} is not for K and V; allowed: "
                f"{sorted(KV_QUANTIZATIONS)} or None"
            )
        if self.v_dtype != self.dtype:
            raise GeometryError(
                f"v_dtype={self.v_dtype!r} differs from dtype={self.dtype!r}, which is the "
                f"model's where a pool is quantised"
            )
        if self.dtype.startswith("float8"):
            raise GeometryError(
                f"dtype={self.dtype!r} is the model's where a pool is quantised, of 16 bits or more"
            )

    @property
    def planes(self) -> tuple[PlaneSpec, ...]:
        assert self.v_head_dim is not None and self.v_dtype is not None
        k, v = (self.num_kv_heads, self.head_dim), (self.num_kv_heads, self.v_head_dim)
        if self.quantization is not None:
            stored, scale = KV_QUANTIZATIONS[self.quantization], (self.num_kv_heads, 1)
            return (
                PlaneSpec("k", k, stored),
                PlaneSpec("k_scale", scale, "float32"),
                PlaneSpec("v", v, stored),
                PlaneSpec("v_scale", scale, "float32"),
            )
        return PlaneSpec("k", k, self.dtype), PlaneSpec("v", v, self.v_dtype)


@dataclasses.dataclass(frozen=True)
class MLAGeometry(Geometry):
    """Latent rows of multi-head latent attention: ``latent_dim`` values, then ``rope_dim``.

    ``rope_dim`` may be 0, for models whose latent carries no separate rope part.

    With ``quantization="per_token_head"`` a row is three: the latent in fp8, what it was divided
    by, and the rope, divided by the same, in ``dtype``, which is then the model's.
    """

    latent_dim: int
    rope_dim: int
    dtype: str
    quantization: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(latent_dim=self.latent_dim)
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.quantization is not None:
            self._check_quantization()
        if self.rope_dim != 0:
            _require_positive(rope_dim=self.rope_dim)

    def _check_quantization(self) -> None:
        if self.quantization != LATENT_QUANTIZATION:
            raise GeometryError(
                f"quantization={self.quantization!r} is not for latent rows; allowed: "
                f"{LATENT_QUANTIZATION!r} or None"
            )
        if self.dtype not in _QUANTIZED_MODEL_DTYPES:
            raise GeometryError(
                f"dtype={self.dtype!r} is the model's where a pool is quantised, one of "
                f"{_QUANTIZED_MODEL_DTYPES}: the rope is stored in it, divided by the latent's "
                f"scale, which takes it out of the range of float16 and fp8"
            )
        if self.rope_dim == 0:
            raise GeometryError(
                "rope_dim=0 leaves a quantised pool a plane of nothing; need at least 1"
            )

    @property
    def planes(self) -> tuple[PlaneSpec, ...]:
        if self.quantization is not None:
            return (
                PlaneSpec("latent", (1, self.latent_dim), "float8_e4m3fn"),
                PlaneSpec("scale", (1, 1), "float32"),
                PlaneSpec("rope", (1, self.rope_dim), self.dtype),
            )
        return (PlaneSpec("rows", (1, self.latent_dim + self.rope_dim), self.dtype),)


def fit[G: Geometry](geometry: G, budget_bytes: int) -> G:
    """``geometry`` with as many slots as ``budget_bytes`` bytes hold, padding page included.

    Raises:
      GeometryError: not even one page fits beside the padding page.
    """
    pages = budget_bytes // geometry.bytes_per_page - geometry.padding_page
    if pages < 1:
        smallest = (1 + geometry.padding_page) * geometry.bytes_per_page
        raise GeometryError(
            f"{budget_bytes=} holds no page; the smallest pool takes {smallest} bytes"
        )
    return dataclasses.replace(geometry, num_slots=pages * geometry.page_size)
