"""What is done to rows of planes, whatever they hold, and whichever engine the pool is for."""

import logging
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from kvjax import checks_mode
from kvjax.geometry import Geometry
from kvtorch.ops.move_rows import move_rows
from kvtorch.ops.read_rows import read_rows
from kvtorch.ops.write_rows import write_rows
from kvtorch.pools import cpu_copy
from kvtorch.pools.memory import GB, GPU_MEMORY_TYPE_KV_CACHE, MemorySaver, use_mem_pool
from kvtorch.pools.planes import Planes, as_rows, create, joined, require_planes
from kvtorch.pools.timing import transfer_time
from kvtorch.slots import as_slots, check

logger = logging.getLogger(__name__)


class PlanePool:
    """Planes, and the names under which engines read them.

    A slot that is not there (of the padding page, negative or past the end) is written nowhere and
    read as zeros; in checks mode it raises ``IndexError``. A call that raises has changed nothing.
    While the pool is lent (``jax``), or after ``_clear_buffers``, what touches rows raises
    ``RuntimeError``.

    Attributes:
      geometry: sizes, layers and dtypes.
      planes: ``[layers, rows, *row]`` in the storage dtype, for each of ``geometry.planes``.
      layer_transfer_counter: what reading a layer's buffers waits for, if not ``None``.
      data_ptrs: addresses of the layers of each plane, on the device; in the order of the buffers
        that ``_BUFFERS`` names.
      data_strides: bytes of their rows, likewise.
    """

    geometry: Geometry
    size: int
    page_size: int
    layer_num: int
    device: str
    layer_transfer_counter: Any
    _BUFFERS: ClassVar[tuple[str, ...]] = ()
    """Which attributes list the layers of the planes, in the order of the planes.

    A single attribute of several planes lists a tuple for each layer."""
    _CHUNK: ClassVar[str]
    """Which attribute says how many tokens to copy to the host at once."""

    def _prepare(self, enable_memory_saver: bool, custom_mem_pool: Any) -> None:
        """Sets what there is before there are planes."""
        self.memory_saver_adapter = MemorySaver(enable_memory_saver)
        self.custom_mem_pool = custom_mem_pool
        self.enable_custom_mem_pool = custom_mem_pool is not None
        self.planes: Planes = ()
        self._dtypes: tuple[torch.dtype, ...] | None = None  # where uint8 stands for fp8
        self._layers: list[torch.Tensor] = []  # the layers of the first of these, then the next
        self._lent_to: object | None = None

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Addresses, bytes, and bytes a page, of the layers of the first plane, then of the next.

        Source: SGLang 0.4.8 (A-MHA-5, A-MLA-5).
        """
        self._require_here()
        layers = [layer for plane in self.planes for layer in plane]
        return (
            [layer.data_ptr() for layer in layers],
            [layer.nbytes for layer in layers],
            [layer[0].nbytes * self.page_size for layer in layers],
        )

    def move_kv_cache(
        self, tgt_loc: torch.Tensor, src_loc: torch.Tensor, *, disjoint: bool = False
    ) -> None:
        """Moves rows within the pool, in every layer; ``ops.move_rows`` has the contract.

        Raises:
          ValueError: ``tgt_loc`` and ``src_loc`` differ in length.

        Source: SGLang 0.4.8 (A-MHA-16), its faults (A-MOVE) excepted.
        """
        self._require_here()
        dst = self._slots("tgt_loc", tgt_loc, distinct=True)
        src = self._slots("src_loc", src_loc)
        if dst.shape != src.shape:
            raise ValueError(f"tgt_loc has {len(dst)} entries, src_loc {len(src)}; need as many")
        move_rows(self.planes, dst, src, first_slot=self.page_size, disjoint=disjoint)

    def get_flat_data(self, indices: torch.Tensor) -> Any:
        """A copy of rows in every layer, in the storage dtype, on the device.

        Returns:
          ``[layers, n, *row]``. Several planes are stacked, or a tuple if their rows differ.

        Source: SGLang 0.4.8 (A-MHA-9, A-MLA-11).
        """
        self._require_here()
        slots = self._slots("indices", indices)
        return joined(read_rows(self.planes, None, slots, first_slot=self.page_size))

    def transfer(self, indices: torch.Tensor, flat_data: Any) -> None:
        """Writes what ``get_flat_data`` returns, wherever it is, into every layer.

        Raises:
          GeometryError: not the rows of this pool's planes and layers, or not one a slot.

        Source: SGLang 0.4.8 (A-MHA-10, A-MLA-11).
        """
        self._require_here()
        self._transfer(None, indices, flat_data, self.layer_num)

    def transfer_per_layer(self, indices: torch.Tensor, flat_data: Any, layer_id: int) -> None:
        """Writes one layer of flat data, ``[n, *row]`` of each plane.

        Raises:
          GeometryError: as for ``transfer``, or the layer is not on this rank.

        Source: SGLang 0.4.8 (A-MHA-11, A-MLA-11).
        """
        self._require_here()
        self._transfer(self._position(layer_id), indices, flat_data)

    def _transfer(self, layer: int | None, indices: torch.Tensor, flat: Any, *leading: int) -> None:
        slots = self._slots("indices", indices, distinct=True)
        parts = as_rows("flat_data", flat, self.geometry, *leading, len(slots))
        with transfer_time(len(slots), self._on):
            # Blocking, so that the caller may reuse the host's memory at once.
            parts = [part.to(self._on) for part in parts]
            write_rows(self.planes, layer, slots, parts, first_slot=self.page_size)

    def _to_host(self, indices: torch.Tensor) -> list[list[list[torch.Tensor]]]:
        """A copy of rows in host memory: for each layer and chunk a list of each plane's."""
        self._require_here()
        slots = self._slots("indices", indices)
        return cpu_copy.get(self.planes, self.geometry, slots, self._chunk_tokens())

    def _from_host(self, copies: Sequence[Sequence[Any]], indices: torch.Tensor) -> None:
        """Writes what ``_to_host`` returned, at as many slots; a single plane's also by itself."""
        self._require_here()
        slots = self._slots("indices", indices, distinct=True)
        cpu_copy.load(self.planes, self.geometry, copies, slots, self._chunk_tokens())

    def _chunk_tokens(self) -> int:
        chunk_tokens = getattr(self, self._CHUNK)
        if chunk_tokens < 1:
            raise ValueError(f"{self._CHUNK}={chunk_tokens} must be at least 1")
        return chunk_tokens

    def clear(self) -> None:
        """Zeroes every row; for memory that the saver resumed, whose content nobody knows (X5)."""
        self._require_here()
        for plane in self.planes:
            plane.zero_()

    def jax(self) -> Any:
        """The pool as one of kvjax, in the same memory, for the length of a ``with`` block."""
        from kvtorch import interop

        return interop.Lease(self)

    def audit(self) -> list[str]:
        """What is wrong with the pool, in sentences; an empty list if nothing is.

        The padding page has to be zero, ``k_buffer`` and its like the layers of the planes, and
        ``data_ptrs`` and ``data_strides`` theirs. Waits for the device.
        """
        self._require_here()
        found = []
        for name, layers, plane in zip(*self._named_buffers(), self.planes, strict=True):
            if list(map(_place, layers)) != list(map(_place, plane)):
                found.append(f"{name} is not the layers of its plane")
            padding = plane[:, : self.page_size].contiguous().view(torch.uint8)
            for position, is_dirty in enumerate(padding.flatten(1).any(1).tolist()):
                if is_dirty:
                    layer_id = self.geometry.layers.start + position
                    found.append(f"{name}: the padding page of layer {layer_id} is not zero")
        addresses, strides = self._tables()
        if self.data_ptrs.tolist() != addresses:
            found.append("data_ptrs is not the addresses of the layers")
        if self.data_strides.tolist() != strides:
            found.append("data_strides is not the bytes of a row")
        return found

    def _create_buffers(self, planes: Sequence[torch.Tensor] | None = None) -> None:
        """Makes the planes, or takes these, and everything that refers to them."""
        if planes is None:
            region = self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE)
            with region, use_mem_pool(self.custom_mem_pool):
                self.planes = create(self.geometry, self.device)
        else:
            self.planes = require_planes(planes, self.geometry)
            self.custom_mem_pool, self.enable_custom_mem_pool = None, False
        self._on = self.planes[0].device
        self._row_shapes = tuple(spec.row_shape for spec in self.geometry.planes)
        dtypes = tuple(getattr(torch, spec.dtype) for spec in self.geometry.planes)
        self._dtypes = None if dtypes == tuple(p.dtype for p in self.planes) else dtypes
        self._layers = [layer for plane in self.planes for layer in plane]
        for name, layers in zip(self._BUFFERS, self._layers_by_buffer(), strict=True):
            setattr(self, name, layers)
        layers = self.geometry.layers
        self._positions = {id_: layers.local(id_) for id_ in range(layers.start, layers.stop)}
        addresses, strides = self._tables()
        self.data_ptrs = torch.tensor(addresses, dtype=torch.uint64, device=self._on)
        self.data_strides = torch.tensor(strides, dtype=torch.int64, device=self._on)
        sizes = [
            f"{spec.name} {plane.nbytes / GB:.2f} GB"
            for spec, plane in zip(self.geometry.planes, self.planes, strict=True)
        ]
        logger.info("KV cache is allocated. #tokens: %s, %s", self.size, ", ".join(sizes))

    def _clear_buffers(self) -> None:
        """Frees the planes, as far as nobody else holds them; ``_create_buffers`` makes new ones.

        Source: SGLang 0.4.8 (A-MHA-3), without the addresses it leaves behind.
        """
        self._require_here()
        for name in self._BUFFERS:
            delattr(self, name)
        del self.data_ptrs, self.data_strides
        self.planes, self._layers = (), []

    def _layers_by_buffer(self) -> list[list[Any]]:
        """What each of ``_BUFFERS`` lists."""
        num_layers = len(self.geometry.layers)
        starts = range(0, len(self._layers), num_layers)
        by_plane = [self._layers[start : start + num_layers] for start in starts]
        return (
            by_plane if len(self._BUFFERS) == len(by_plane) else [list(zip(*by_plane, strict=True))]
        )

    def _named_buffers(self) -> tuple[list[str], Sequence[Sequence[torch.Tensor]]]:
        """For each plane what to call the layers that engines see, and these."""
        names, buffers = list(self._BUFFERS), [getattr(self, name) for name in self._BUFFERS]
        if len(buffers) < len(self.planes):
            names = [f"plane {spec.name!r}: {names[0]}" for spec in self.geometry.planes]
            buffers = [[layer[i] for layer in buffers[0]] for i in range(len(self.planes))]
        return names, buffers

    def _tables(self) -> tuple[list[int], list[int]]:
        together = len(self._BUFFERS) < len(self.planes)
        ordered = zip(*self.planes, strict=True) if together else self.planes
        layers = [layer for group in ordered for layer in group]
        return [layer.data_ptr() for layer in layers], [layer[0].nbytes for layer in layers]

    def _require_here(self) -> None:
        if self._lent_to is not None:
            raise RuntimeError(f"the pool is lent: {self._lent_to}; leave that block first")
        if not self.planes:
            raise RuntimeError("the pool has no memory; _create_buffers() makes some")

    def _position(self, layer_id: int) -> int:
        """The position of a model layer in the planes.

        Raises:
          GeometryError: the layer is not on this rank.
        """
        position = self._positions.get(layer_id)
        if position is None:
            position = self.geometry.layers.local(operator.index(layer_id))
        return position

    def _slots(self, name: str, slots: torch.Tensor, *, distinct: bool = False) -> torch.Tensor:
        if isinstance(slots, torch.Tensor) and slots.is_cpu:
            slots = slots.to(self._on)  # torch's own indexing takes them too
        slots = as_slots(slots, self._on, name=name)
        if checks_mode.ever_enabled:
            check(slots, self.page_size, self.geometry.num_rows, name=name, distinct=distinct)
        return slots

    def _ready(self, layer_id: int) -> int:
        """The position of a model layer, once it has been transferred."""
        self._require_here()
        position = self._position(layer_id)
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(position)
        return position

    def _layer(self, plane: int, layer_id: int) -> torch.Tensor:
        """One layer of a plane, in the dtype it stands for, once it has been transferred."""
        return self._layer_at(plane, self._ready(layer_id))

    def _layer_at(self, plane: int, position: int) -> torch.Tensor:
        """The layer at that position of a plane, in the dtype it stands for."""
        layer = self._layers[plane * self.layer_num + position]
        # Viewed here, not once for all: torch compiles no graph that changes one tensor and reads
        # another of the same memory in another dtype.
        return layer if self._dtypes is None else layer.view(self._dtypes[plane])


def _place(layer: torch.Tensor) -> tuple[Any, ...]:
    return layer.data_ptr(), layer.dtype, layer.shape, layer.stride()
