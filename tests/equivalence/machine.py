"""A state machine that does the same to several pools, and compares them bit for bit."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvjax.geometry import MHAGeometry
from tests import oracles
from tests.equivalence.peers import Arrays, Layout, Oracle, Peer, Scale, given, is_fp8, split
from tests.pools.junk import numbers, rows_of
from tests.strategies import random_rows, seeds, some_moves, some_slots
from tests.torch.tensors import LAYOUTS

CALLS = 50
"""Of an example at most."""

EDGES = [0, -0.0, 2.0**-10, 2.0**-17, 448, 464, 480, 57344, 61440, 65504, 65520, 3e38]
EDGES += [np.inf, -np.inf]
"""Numbers where formats end; drawn as float32."""

scales = st.none() | st.builds(
    Scale,
    st.sampled_from([0.5, 2.0, 0.3, 1.7, 3e-3, 100.0]),
    st.sampled_from(["number", "no dimension", "one element"]),
)
layouts = st.builds(
    Layout,
    slots=st.sampled_from([torch.int64, torch.int32]),
    strided_slots=st.booleans(),
    values=st.sampled_from(LAYOUTS),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is compiled.

    Attributes:
      geometry: the pools'.
      sources: dtypes that callers pass, beside those of the planes.
      sizes: how many slots a call is given.
    """

    geometry: Any
    sources: tuple[str, ...] = ("float32", "bfloat16")
    sizes: tuple[int, ...] = (0, 5)

    def planes(self, seed: int = 0) -> Arrays:
        """Rows of any bits, and a padding page of zeros."""
        geometry = self.geometry
        rows = stored_rows(seed, geometry, len(geometry.layers), geometry.num_rows)
        planes = [plane.copy() for plane in rows]
        for plane in planes:
            oracles.bits(plane)[:, : geometry.first_slot] = 0
        return planes


def stored_rows(seed: int, geometry: Any, *leading: int) -> Arrays:
    """Rows of any bits, but for scales and what else is multiplied by them.

    That are numbers whose products XLA on CPU takes for no zeros; some scales are NaN.
    """
    rows = [*random_rows(seed, rows_of(geometry), *leading)]
    rng = np.random.default_rng(seed)
    for position, spec in enumerate(geometry.planes):
        shape = (*leading, *spec.row_shape)
        if spec.name.endswith("scale"):
            scale = (10.0 ** rng.uniform(-6, 6, shape)).astype(spec.dtype)
            rows[position] = np.where(rng.random(shape) < 0.9, scale, np.float32(np.nan))
        elif spec.name == "rope":
            rows[position] = numbers(seed, shape, spec.dtype, any_bits=False)
    return rows


def values_of(seed: int, shape: Sequence[int], source: str, stored: str | None) -> np.ndarray:
    """Numbers to narrow or quantise: ordinary ones, or any, or those where formats end; or bits.

    Bits to keep, if ``source`` is what is stored. No cast gets a NaN, because what it carries need
    not survive, nor a number that is subnormal in float32, which XLA on CPU takes for zero; casts
    have tests of their own.
    """
    if source == stored:
        return numbers(seed, shape, source, any_bits=True)
    rng = np.random.default_rng(seed)
    ordinary = (3 * rng.standard_normal(shape)).astype(source)
    kind = rng.integers(4)
    if kind < 2:
        return ordinary
    others = numbers(seed, shape, source, any_bits=False)
    if kind == 3 and not is_fp8(source):
        with np.errstate(over="ignore"):
            others = rng.choice(EDGES, shape).astype(np.float32).astype(source)
    chosen = shape
    if stored is None and rng.random() < 0.5:  # some heads, so that others are ordinary
        chosen = (*shape[:-1], 1)
    return np.where(rng.random(chosen) < 0.5, ordinary, others)


def without_tiny_ropes(latent: np.ndarray, rope: np.ndarray) -> None:
    """Takes out of ``rope`` what, quantised, XLA on CPU takes for zeros."""
    _, scale, _ = oracles.quantize(latent, rope, "float32")
    rope[oracles.meets_subnormals(rope, scale)] = 0


def machine(case: Case, make_peers: Callable[[Arrays], dict[str, Peer]]):
    """The state machine of the oracle's pool and of those that ``make_peers`` makes of its planes.

    Its attribute ``num_steps`` counts the calls that all pools were given.
    """
    geometry = case.geometry
    layers, first, stop = geometry.layers, geometry.first_slot, geometry.num_rows
    is_mha = isinstance(geometry, MHAGeometry)
    is_quantized = geometry.quantization is not None
    specs = given(geometry)
    layer_ids = st.integers(layers.start, layers.stop - 1)
    sizes = st.sampled_from(case.sizes)
    sources = ["stored", *case.sources]
    chunks = st.sampled_from([2, 8192])

    def slots(data, *, distinct=True):
        return data.draw(some_slots(data.draw(sizes), first, stop, distinct=distinct))

    def values(data, seed, num_tokens, shape, stored, source):
        source = stored if source == "stored" else source
        return values_of(seed, (num_tokens, *shape), source, None if is_quantized else stored)

    class Machine(RuleBasedStateMachine):
        num_steps = 0

        def __init__(self):
            super().__init__()
            planes = case.planes()
            self.oracle = Oracle(geometry, planes)
            self.peers = make_peers(planes)
            self.copies: Any = None

        def on_all(self, method, *args):
            """Makes the same call on all pools; what each returned."""
            Machine.num_steps += 1
            results = {"oracle": getattr(self.oracle, method)(*args)}
            for name, peer in self.peers.items():
                with blaming(name):
                    results[name] = getattr(peer, method)(*args)
                    if results["oracle"] is not None:
                        assert_same(results[name], results["oracle"])
            return results

        @invariant()
        def planes_are_equal(self):
            expected = self.oracle.planes()
            for name, peer in self.peers.items():
                with blaming(name):
                    assert_same(peer.planes(), expected)

        @rule(
            data=st.data(),
            seed=seeds,
            layer_id=layer_ids,
            source=st.sampled_from(sources),
            scales=st.tuples(scales, scales),
            layout=layouts,
        )
        def write(self, data, seed, layer_id, source, scales, layout):
            where = slots(data)
            rows, others = [], st.sampled_from(sources)
            for position, spec in enumerate(specs):
                if position and data.draw(st.integers(0, 3)) == 3:
                    source = data.draw(others)
                rows.append(
                    values(data, seed + position, where.size, spec.row_shape, spec.dtype, source)
                )
            if is_quantized and not is_mha:
                without_tiny_ropes(*split(geometry, rows[0]))
            takes_scales = is_mha and not is_quantized
            divisors = [scale if takes_scales else None for scale in scales[: len(rows)]]
            self.on_all("write", layer_id, where, rows, divisors, layout)

        @precondition(lambda self: not is_mha)
        @rule(
            data=st.data(),
            seed=seeds,
            layer_id=layer_ids,
            pair=st.tuples(st.sampled_from(sources), st.sampled_from(sources)),
            layout=layouts,
        )
        def write_parts(self, data, seed, layer_id, pair, layout):
            where, (spec,) = slots(data), specs
            widths = (geometry.latent_dim, geometry.rope_dim)
            parts = [
                values(data, seed + i, where.size, (1, width), spec.dtype, source)
                for i, (width, source) in enumerate(zip(widths, pair, strict=True))
            ]
            if is_quantized:
                without_tiny_ropes(*parts)
            self.on_all("write_parts", layer_id, where, parts, layout)

        @precondition(lambda self: is_quantized or not is_mha)
        @rule(data=st.data(), layer_id=layer_ids, dtype=st.sampled_from([None, "float32"]))
        def read_parts(self, data, layer_id, dtype):
            self.on_all("read_parts", layer_id, slots(data, distinct=False), dtype)

        @rule(layer_id=layer_ids)
        def layer(self, layer_id):
            self.on_all("layer", layer_id)

        @rule(data=st.data())
        def gather(self, data):
            self.on_all("gather", slots(data, distinct=False))

        @rule(data=st.data(), seed=seeds)
        def scatter(self, data, seed):
            where = slots(data)
            rows = stored_rows(seed, geometry, len(layers), where.size)
            self.on_all("scatter", where, rows)

        @rule(data=st.data(), seed=seeds, layer_id=layer_ids)
        def scatter_layer(self, data, seed, layer_id):
            where = slots(data)
            rows = stored_rows(seed, geometry, where.size)
            self.on_all("scatter_layer", layer_id, where, rows)

        @rule(data=st.data(), disjoint=st.booleans())
        def move(self, data, disjoint):
            dst, src = data.draw(some_moves(data.draw(sizes), first, stop))
            if disjoint:
                src = np.where(np.isin(src, dst), -1, src)
            self.on_all("move", dst, src, disjoint)

        @rule(data=st.data(), chunk_tokens=chunks)
        def offload(self, data, chunk_tokens):
            where = slots(data, distinct=False)
            results = self.on_all("offload", where, chunk_tokens)
            self.copies = where.size, chunk_tokens, results

        @precondition(lambda self: self.copies is not None)
        @rule(data=st.data())
        def restore(self, data):
            """The copies are still what they were, whatever has happened to the pools."""
            num_tokens, chunk_tokens, copies = self.copies
            where = data.draw(some_slots(num_tokens, first, stop))
            Machine.num_steps += 1
            for name, peer in {"oracle": self.oracle, **self.peers}.items():
                with blaming(name):
                    copy, _ = copies[name]
                    peer.restore(where, copy, chunk_tokens)

        @rule()
        def infos(self):
            self.on_all("infos")

    return Machine


@contextlib.contextmanager
def blaming(name):
    try:
        yield
    except Exception as error:
        error.add_note(f"pool of {name}")
        raise


def assert_same(actual, expected):
    """Arrays, or a copy in host memory with the arrays that it stands for."""
    if isinstance(expected, tuple):
        (_, actual), (_, expected) = actual, expected
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        oracles.assert_same_bits(one, other)


def drive(case: Case, make_peers: Callable[[Arrays], dict[str, Peer]], **options) -> int:
    """Runs the machine; the number of calls that were compared."""
    Machine = machine(case, make_peers)
    run_state_machine_as_test(Machine, settings=settings(report_multiple_bugs=False, **options))
    return Machine.num_steps


def finds(case: Case, make_peers: Callable[[Arrays], dict[str, Peer]]) -> bool:
    """Whether the machine finds what is wrong."""
    options = {"phases": [Phase.generate], "derandomize": True, "database": None}
    try:
        drive(case, make_peers, max_examples=300, stateful_step_count=CALLS, **options)
    except AssertionError:
        return True
    return False
