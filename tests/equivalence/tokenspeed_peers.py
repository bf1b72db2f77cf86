"""NumPy's pool and kvjax's beside torch's of TokenSpeed's methods.

They are given the tensors that torch's are given, and compared with what those hold and return.
"""

from typing import Any

import numpy as np
import torch

from tests.equivalence.kvjax_peer import KvjaxPeer
from tests.equivalence.machine import assert_same, blaming
from tests.equivalence.peers import Layout, Oracle, Peer, Scale, logical, without_payload
from tests.torch.pools import flattened
from tests.torch.tensors import to_numpy

CHUNK = 3
"""Tokens that are copied to host memory at once."""


class Peers:
    """NumPy's pool and, on request, kvjax's, of the rows that a pool of kvtorch has."""

    def __init__(self, pool: Any, kvjax_peer: type[KvjaxPeer] | None):
        self._geometry = pool.geometry
        planes = self._planes_of(pool)
        self._pools: dict[str, Peer] = {"numpy": Oracle(self._geometry, planes)}
        if kvjax_peer is not None:
            self._pools["kvjax"] = kvjax_peer(self._geometry, planes, "reference")
        self._copies: list[Any] = []

    def _planes_of(self, pool):
        return logical(self._geometry, map(to_numpy, pool.planes))

    def _on_all(self, method, *args):
        """What each returned, which has to be the same."""
        results = []
        for name, pool in self._pools.items():
            with blaming(name):
                results.append(getattr(pool, method)(*args))
                if results[0] is not None:
                    assert_same(results[-1], results[0])
        return results

    def assert_hold(self, pool: Any) -> None:
        """They hold what the pool of kvtorch does."""
        assert_same(self._planes_of(pool), self._on_all("planes")[0])

    def write(self, layer_id, loc, values, scales):
        values = list(map(to_numpy, values))
        divisors = [scale and Scale(scale, "number") for scale in scales]
        self._on_all("write", layer_id, _slots(loc), values, divisors, Layout())

    def write_parts(self, layer_id, loc, parts):
        self._on_all("write_parts", layer_id, _slots(loc), list(map(to_numpy, parts)), Layout())

    def read_parts(self, layer_id, loc, into, found):
        """Compares with the parts that torch found."""
        name = None if into is None else str(into).removeprefix("torch.")
        expected, *_ = self._on_all("read_parts", layer_id, _slots(loc), name)
        assert_same([without_payload(to_numpy(part), name) for part in found], expected)

    def layer(self, layer_id, found):
        """Compares with the layer of each plane that torch found."""
        expected, *_ = self._on_all("layer", layer_id)
        assert_same(logical(self._geometry, map(to_numpy, found)), expected)

    def copy_row(self, layer_id, dst, src):
        """Copies a row of one layer."""
        rows = [plane[[src]] for plane in self._on_all("layer", layer_id)[0]]
        self._on_all("scatter_layer", layer_id, np.array([dst], np.int32), rows)

    def move(self, dst, src):
        self._on_all("move", _slots(dst), _slots(src), False)

    def offload(self, tokens, found):
        """Keeps a copy of each, and compares with that of torch, by layer, chunk and plane."""
        self._copies = self._on_all("offload", _slots(torch.tensor(tokens)), CHUNK)
        if len(tokens):
            _, expected = self._copies[0]
            by_plane = [
                np.stack([np.concatenate([to_numpy(c[i]) for c in chunks]) for chunks in found])
                for i in range(len(expected))
            ]
            assert_same(logical(self._geometry, by_plane), expected)

    def restore(self, loc):
        for pool, (copy, _) in zip(self._pools.values(), self._copies, strict=True):
            pool.restore(_slots(loc), copy, CHUNK)

    def flat_data(self, loc, found, new_loc):
        """Compares with the flat data that torch found, and writes it elsewhere."""
        expected, *_ = self._on_all("gather", _slots(loc))
        tensors = [part for group in flattened(found) for part in group]
        assert_same(logical(self._geometry, map(to_numpy, tensors)), expected)
        self._on_all("scatter", _slots(new_loc), expected)


def _slots(loc: torch.Tensor) -> np.ndarray:
    return to_numpy(loc).astype(np.int32)
