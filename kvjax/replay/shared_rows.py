"""How do JAX and torch take turns on one memory?"""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from kvjax.pools.pool import Pool
from kvjax.replay import content
from kvjax.replay.both_backends import Comparison


class SharedRows:
    """``Rows`` of a torch pool that is lent to JAX every other turn.

    What one backend writes, the other reads, moves and overwrites. The host tier is NumPy's, and
    both copy to it and from it.

    Attributes:
      torch_rows: in the memory that is shared.
    """

    def __init__(
        self,
        torch_rows: Any,
        make_jax_rows: Callable[[Pool], Any],
        host_slots: int,
        turn_len: int,
        comparison: Comparison,
    ) -> None:
        """The first turn is JAX's.

        Args:
          torch_rows: of the pool.
          make_jax_rows: called with the lent pool.
          host_slots: slots of the host tier.
          turn_len: operations that one backend does before it is the other's turn.
          comparison: gets turns and times.
        """
        self.torch_rows = torch_rows
        self.planes = torch_rows.planes
        self.layers = torch_rows.layers
        leading = (len(self.layers), host_slots)
        self._host = [
            np.zeros((*leading, *plane.row_shape), content.bits_dtype(plane.dtype))
            for plane in self.planes
        ]
        self._comparison = comparison
        self._turn_len = self._left = turn_len
        self._lending = contextlib.ExitStack()
        self._lease = self._lending.enter_context(torch_rows.pool.jax())
        self._rows = {"jax": make_jax_rows(self._lease.pool), "torch": torch_rows}
        self._turn = "jax"

    def write(self, slots, tags, positions) -> None:
        self._operate(lambda rows: rows.write(slots, tags, positions))

    def offload(self, slots, host_slots) -> None:
        found = self._operate(lambda rows: rows.read(slots))
        for host, bits in zip(self._host, found, strict=True):
            host[:, host_slots] = bits

    def restore(self, slots, host_slots) -> None:
        self._operate(lambda rows: rows.put(slots, self.read_host(host_slots)))

    def move(self, dst, src) -> None:
        self._operate(lambda rows: rows.move(dst, src))

    def read_layer(self, layer_id, slots) -> tuple[np.ndarray, ...]:
        """As whose turn it is reads it."""
        with self._comparison.timed(self._turn):
            return self._rows[self._turn].read_layer(layer_id, slots)

    def read(self, slots) -> tuple[np.ndarray, ...]:
        """As both read it, one after the other, which has to be the same."""
        found = {}
        for _ in self._rows:
            if found:
                self._pass_on()
            with self._comparison.timed(self._turn):
                found[self._turn] = self._rows[self._turn].read(slots)
        layer_ids = range(self.layers.start, self.layers.stop)
        return self._comparison.same_rows("device", self.planes, layer_ids, slots, found)

    def read_host(self, host_slots) -> tuple[np.ndarray, ...]:
        return tuple(host[:, host_slots] for host in self._host)

    def give_back(self) -> None:
        """Ends the turn if it is JAX's."""
        if self._turn == "jax":
            self._pass_on()

    def _operate(self, operation: Callable[[Any], Any]) -> Any:
        if not self._left:
            self._pass_on()
            self._left = self._turn_len
        self._left -= 1
        with self._comparison.timed(self._turn):
            return operation(self._rows[self._turn])

    def _pass_on(self) -> None:
        jax_rows, torch_rows = self._rows["jax"], self._rows["torch"]
        with self._comparison.timed("lending"):
            if self._turn == "jax":
                self._lease.pool = jax_rows.pool
                self._lending.close()
                self._turn = "torch"
            else:
                self._lease = self._lending.enter_context(torch_rows.pool.jax())
                jax_rows.pool = self._lease.pool
                self._turn = "jax"
        self._comparison.turns += 1
