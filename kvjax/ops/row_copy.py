"""The one Mosaic GPU kernel: rows of planes from one place to another, by bulk copies."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.ops.types import Planes
from kvjax.slots import are_there

COPY_BYTES = 16
"""Sizes and addresses of bulk copies are multiples of it (PTX ISA, ``cp.async.bulk``)."""

BLOCK_BYTES = 16 * 1024
NUM_BLOCKS = 512
MAX_BLOCK_BYTES = 192 * 1024

Part = tuple[Any, int, int]
"""A piece of a row: an array or ref ``[layers, rows, width]``, its first column, how many."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One end of a copy: the parts that make up a row, and which rows.

    Attributes:
      parts: the parts; both sides of a copy have the same number, of the same sizes.
      slots: the row of each token, or ``None`` where token t is row t.
      first_slot: the first slot that is there.
      layer: the first layer, or ``None`` for 0.
    """

    parts: tuple[Part, ...]
    slots: jax.Array | None = None
    first_slot: int = 0
    layer: jax.Array | int | None = None

    @classmethod
    def of(cls, arrays: Sequence[Any], **where: Any) -> "Side":
        """A side whose parts are the whole rows of ``arrays``."""
        return cls(tuple((array, 0, array.shape[-1]) for array in arrays), **where)


def columns(array: Any, *widths: int) -> tuple[Part, ...]:
    """The parts, of these widths, that the rows of ``array`` consist of; empty ones left out."""
    starts = itertools.accumulate(widths, initial=0)
    return tuple(
        (array, start, width) for start, width in zip(starts, widths, strict=False) if width
    )


def flat(plane: jax.Array) -> jax.Array:
    """``[layers, rows, *row]`` as ``[layers, rows, width]``, the kernel's view."""
    return plane.reshape(*plane.shape[:2], math.prod(plane.shape[2:]))


def as_refs(planes: Planes) -> list[Any]:
    """Refs to the planes, flat, for a kernel to write through; ``frozen`` turns them back."""
    return [jax.new_ref(flat(plane)) for plane in planes]


def frozen(refs: Sequence[Any], planes: Planes) -> Planes:
    """What the refs hold now, in the shapes of the planes they were made from."""
    return tuple(
        jax.freeze(ref).reshape(plane.shape) for ref, plane in zip(refs, planes, strict=True)
    )


def token_bytes(planes: Planes) -> int:
    """Bytes of one token in one layer."""
    return sum(plane.dtype.itemsize * math.prod(plane.shape[2:]) for plane in planes)


def fits_one_block(planes: Planes, num_tokens: int) -> bool:
    """Whether one block can read the rows of all tokens before it writes any."""
    return num_tokens * token_bytes(planes) <= MAX_BLOCK_BYTES


def why_not(planes: Planes, *widths: int) -> str | None:
    """Why the kernel cannot copy rows of these planes, or ``None``.

    ``widths`` are those of the parts where a row is not copied whole.
    """
    backend = jax.default_backend()
    if backend != "gpu":
        return f"needs a GPU, the default backend is {backend!r}"
    capability = getattr(jax.devices()[0], "compute_capability", "none")
    if capability == "none" or float(capability) < 9.0:
        return f"needs compute capability 9.0 (Hopper) or later, the GPU has {capability}"
    return cannot_copy(planes, *widths)


def cannot_copy(planes: Planes, *widths: int) -> str | None:
    """The part of ``why_not`` that depends on the rows and not on the machine."""
    for plane in planes:
        for width in filter(None, widths or (math.prod(plane.shape[2:]),)):
            if (num_bytes := width * plane.dtype.itemsize) % COPY_BYTES:
                return f"a row (or part) of {num_bytes} bytes is not a multiple of {COPY_BYTES}"
    if (num_bytes := token_bytes(planes)) > MAX_BLOCK_BYTES:
        return f"a token's {num_bytes} bytes are more than the {MAX_BLOCK_BYTES} a block holds"
    return None


def gather(source: Side, *, num_tokens: int, num_layers: int) -> list[jax.Array]:
    """The parts of ``source`` as arrays ``[num_layers, num_tokens, width]``."""
    refs = [
        jax.new_ref(jax.lax.empty((num_layers, num_tokens, width), array.dtype))
        for array, _, width in source.parts
    ]
    copy_rows(Side.of(refs), source, num_tokens=num_tokens, num_layers=num_layers)
    return [jax.freeze(ref) for ref in refs]


def copy_rows(
    target: Side,
    source: Side | None,
    *,
    num_tokens: int,
    num_layers: int,
    tokens_per_block: int | None = None,
) -> None:
    """Writes each token's row of ``source`` to its row of ``target``, in ``num_layers`` layers.

    Rows of ``target`` that are not there are skipped; rows of ``source`` that are not there (all
    of them if there is no ``source``) are zeros. No other byte is touched. Blocks run in any
    order; each reads all its rows before it writes any.
    """
    if num_tokens == 0:
        return
    widths = [width for _, _, width in target.parts]
    pieces = [(width, array.dtype) for array, _, width in target.parts]
    if tokens_per_block is None:
        row_bytes = sum(width * dtype.itemsize for width, dtype in pieces)
        enough_blocks = num_tokens * num_layers // NUM_BLOCKS
        tokens_per_block = max(1, min(BLOCK_BYTES // row_bytes, enough_blocks))
    operands = _Operands()
    into = _End(operands, target)
    # Without a source nothing is read, and the target stands in for where it would be.
    out_of = _End(operands, source or target)
    parts = range(len(widths))

    @functools.partial(
        plgpu.kernel,
        grid=(pl.cdiv(num_tokens, tokens_per_block), num_layers),
        grid_names=("block", "layer"),
        scratch_types=(
            [plgpu.SMEM((tokens_per_block, width), dtype) for width, dtype in pieces],
            # A warpgroup of 128 threads stores multiples of 128 elements.
            [plgpu.SMEM((pl.cdiv(width, 128) * 128,), dtype) for width, dtype in pieces],
            plgpu.Barrier(num_arrivals=tokens_per_block * len(widths)),
        ),
        # Safe: asynchronous copies alone touch the rows, and zeros are committed before use.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="copy_rows",
    )
    def kernel(*refs):
        *refs, rows_smem, zeros_smem, loaded = refs
        first = jax.lax.axis_index("block") * tokens_per_block

        def locate(i):
            """Where token i of the block goes and comes from, and whether it does."""
            token, inside = first + i, True
            if num_tokens % tokens_per_block:
                inside, token = token < num_tokens, jnp.minimum(token, num_tokens - 1)
            to, wanted = into.locate(refs, token)
            place, there = out_of.locate(refs, token)
            return to, wanted & inside, place, there & (source is not None)

        def load(i, _):
            _, wanted, place, there = locate(i)

            @pl.when(wanted & there)
            def _load():
                for part in parts:
                    plgpu.copy_gmem_to_smem(
                        out_of.at(refs, part, *place),
                        rows_smem[part].at[i],
                        loaded,
                        oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                    )

            @pl.when(~(wanted & there))
            def _skip():
                for _ in parts:
                    plgpu.barrier_arrive(loaded)

        def store(i, _):
            place, wanted, _, there = locate(i)

            @pl.when(wanted & there)
            def _store():
                for part in parts:
                    plgpu.copy_smem_to_gmem(
                        rows_smem[part].at[i], into.at(refs, part, *place), commit_group=False
                    )

            @pl.when(wanted & ~there)
            def _store_zeros():
                for part in parts:
                    plgpu.copy_smem_to_gmem(
                        zeros_smem[part].at[pl.ds(0, widths[part])],
                        into.at(refs, part, *place),
                        commit_group=False,
                    )

        if source is not None:
            jax.lax.fori_loop(0, tokens_per_block, load, None)
        for zeros in zeros_smem:
            zeros[...] = jnp.zeros_like(zeros)
        plgpu.commit_smem()
        if source is not None:
            plgpu.barrier_wait(loaded)
        jax.lax.fori_loop(0, tokens_per_block, store, None)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel(*operands.values)


class _Operands:
    """The kernel's operands; one that is used twice is passed once."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def position(self, value: Any) -> int:
        for position, known in enumerate(self.values):
            if known is value:
                return position
        self.values.append(value)
        return len(self.values) - 1


class _End:
    """A ``Side`` as the kernel sees it, through its operands."""

    def __init__(self, operands: _Operands, side: Side):
        self.num_layers, self.num_rows, _ = side.parts[0][0].shape
        self.first_slot = side.first_slot
        self.parts = [(operands.position(array), *part) for array, *part in side.parts]
        self.slots = None if side.slots is None else operands.position(side.slots)
        self.layer = (
            None
            if side.layer is None
            else operands.position(jnp.asarray(side.layer, jnp.int32).reshape(1))
        )

    def locate(self, refs: Sequence[Any], token: Any) -> tuple[tuple[Any, Any], Any]:
        """The layer and row of a token, and whether they are there (0 if not)."""
        layer, row, there = jax.lax.axis_index("layer"), token, jnp.bool(True)
        if self.layer is not None:
            layer += refs[self.layer][0]
            there = are_there(layer, 0, self.num_layers)
        if self.slots is not None:
            row = refs[self.slots][token]
            there &= are_there(row, self.first_slot, self.num_rows)
        return (jnp.where(there, layer, 0), jnp.where(there, row, 0)), there

    def at(self, refs: Sequence[Any], part: int, layer: Any, row: Any) -> Any:
        """One part of a row."""
        position, first, width = self.parts[part]
        return refs[position].at[layer, row, pl.ds(first, width)]
