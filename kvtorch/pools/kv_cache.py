"""What every pool of SGLang is."""

import abc
from collections.abc import Sequence
from typing import Any

import torch

from kvtorch.ops.narrow import FP8
from kvtorch.pools import cpu_copy
from kvtorch.pools.memory import custom_mem_pool
from kvtorch.pools.plane_pool import PlanePool


class KVCache(PlanePool, abc.ABC):
    """SGLang's base class. Parameter names are SGLang 0.4.8's; ``loc``, ``indices`` are our slots.

    ``PlanePool`` says what slots that are not there do, and what else holds. Layers are numbered as
    in the model.

    Attributes:
      start_layer: the first layer here, 0 if not given.
      end_layer: as given, the last layer here if not given. For engines that read it: upstream's
        default is the last layer, but its engine gives the one behind.

    Source: SGLang 0.4.8 ``KVCache`` (A-KV-1 to A-KV-6).
    """

    _CHUNK = "cpu_offloading_chunk_size"

    @abc.abstractmethod
    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layer_num: int,
        device: str,
        enable_memory_saver: bool,
        start_layer: int | None = None,
        end_layer: int | None = None,
    ):
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.store_dtype = torch.uint8 if dtype in FP8 else dtype
        self.layer_num = layer_num
        self.start_layer = 0 if start_layer is None else start_layer  # not `or`: 0 is a layer
        self.end_layer = self.start_layer + layer_num - 1 if end_layer is None else end_layer
        self.cpu_offloading_chunk_size = cpu_copy.CHUNK_TOKENS
        self.layer_transfer_counter: Any = None
        self._prepare(enable_memory_saver, custom_mem_pool(device))

    @abc.abstractmethod
    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Every row of K of one layer, sharing memory with the pool."""

    @abc.abstractmethod
    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Every row of V of one layer, sharing memory with the pool."""

    @abc.abstractmethod
    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``get_key_buffer`` and ``get_value_buffer``."""

    @abc.abstractmethod
    def set_kv_buffer(
        self, layer: Any, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: Any
    ) -> None:
        """Writes a row for each token into one layer."""

    def register_layer_transfer_counter(self, layer_transfer_counter: Any) -> None:
        """Makes the ``get_…_buffer`` methods wait for ``layer_transfer_counter.wait_until``."""
        self.layer_transfer_counter = layer_transfer_counter

    def maybe_get_custom_mem_pool(self) -> Any:
        """The ``torch.cuda.MemPool`` that the planes are in, or ``None``."""
        return self.custom_mem_pool

    def get_cpu_copy(self, indices: torch.Tensor) -> list[list[Any]]:
        """A copy of rows in host memory, for each layer and each chunk of ``indices``.

        A tensor where there is one plane, else a list of them; ``cpu_copy.get`` has the contract.

        Source: SGLang 0.4.8 (A-MHA-7, A-MLA-12).
        """
        copies = self._to_host(indices)
        if len(self.planes) > 1:
            return copies
        return [[rows for (rows,) in layer] for layer in copies]

    def load_cpu_copy(self, kv_cache_cpu: Sequence[Sequence[Any]], indices: torch.Tensor) -> None:
        """Writes what ``get_cpu_copy`` returned, at as many ``indices``, not necessarily the same.

        Raises:
          GeometryError: other layers, chunks, shapes or dtypes than it would return.

        Source: SGLang 0.4.8 (A-MHA-8, A-MLA-12).
        """
        self._from_host(kv_cache_cpu, indices)
