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

MAX_SHARED_BYTES = 224 * 1024
"""What a block stages at most, of the 227 KiB that it may have from compute capability 9.0 on."""

# Measured on one H200 with `python -m benchmarks` (2 x 2 KB rows): moving 256 rows in 32 layers
# takes 19.4 us with blocks of 8 KiB, 19.6 with 4 and 16, 21 with 64; 1 024 rows and more do not
# care, nor do reads and writes. Few rows want many blocks.
BLOCK_BYTES = 8 * 1024
NUM_BLOCKS = 512

# An overlapping move of 48 rows in 32 layers takes 8.2 us in one block a layer, 9.5 us staged.
ONE_BLOCK_TOKENS = 64

# Later ones that are no data-centre GPUs have the copies, but half the shared memory.
_CAPABILITIES = {"9", "10"}

_WARPS = 4  # of a warpgroup
_ZERO_BYTES = 1024  # what a warpgroup sets at once: 128 threads, 8 bytes each

Part = tuple[Any, int, int]
"""A part of a row: an array or ref ``[layers, rows, width]``, its first column, how many."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One end of a copy: the parts that make up a row, and which rows.

    Attributes:
      parts: of the same number, widths and dtypes at both ends.
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

    @classmethod
    def cut(cls, array: Any, *widths: int, **where: Any) -> "Side":
        """A side whose parts are columns of ``array``, of these widths; empty ones left out."""
        starts = itertools.accumulate(widths, initial=0)
        parts = zip(itertools.repeat(array), starts, widths, strict=False)
        return cls(tuple(part for part in parts if part[-1]), **where)


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


def empty(num_layers: int, num_tokens: int, width: int, dtype: Any) -> Any:
    """A ref to memory that nobody has written yet."""
    return jax.new_ref(jax.lax.empty((num_layers, num_tokens, width), dtype))


def token_bytes(planes: Planes) -> int:
    """Bytes of one token in one layer."""
    return sum(plane.dtype.itemsize * math.prod(plane.shape[2:]) for plane in planes)


def why_not(planes: Planes, *widths: int) -> str | None:
    """Why the kernel cannot copy rows of these planes, or ``None``.

    ``widths`` are those of the parts where rows are not copied whole.
    """
    backend = jax.default_backend()
    if backend != "gpu":
        return f"needs a GPU, the default backend is {backend!r}"
    capability = str(getattr(jax.devices()[0], "compute_capability", None))
    if capability.partition(".")[0] not in _CAPABILITIES:
        return f"needs an NVIDIA GPU of compute capability 9 or 10, this one has {capability}"
    return cannot_copy(planes, *widths)


def cannot_copy(planes: Planes, *widths: int) -> str | None:
    """The part of ``why_not`` that depends on the rows and not on the machine."""
    for plane in planes:
        for width in filter(None, widths or (math.prod(plane.shape[2:]),)):
            if (num_bytes := width * plane.dtype.itemsize) % COPY_BYTES:
                return f"a row (or part) of {num_bytes} bytes is not a multiple of {COPY_BYTES}"
    if max_block_tokens(planes) < 1:
        return f"a token's {token_bytes(planes)} bytes are more than a block can stage"
    return None


def max_block_tokens(planes: Planes) -> int:
    """How many tokens a block can stage, beside zeros for each plane."""
    return (MAX_SHARED_BYTES - _ZERO_BYTES * len(planes)) // token_bytes(planes)


def fits_one_block(planes: Planes, num_tokens: int) -> bool:
    """Whether one block does well to read the rows of all tokens before it writes any."""
    return num_tokens <= min(ONE_BLOCK_TOKENS, max_block_tokens(planes))


def copy_rows(
    target: Side,
    *sources: Side,
    num_tokens: int,
    num_layers: int,
    tokens_per_block: int | None = None,
) -> None:
    """Writes each token's row, in ``num_layers`` layers, from the first source that has it.

    Where none has it, the row is zeros. Rows of ``target`` that are not there are skipped, and no
    other byte is touched. Blocks run in any order; each reads all its rows before it writes any.
    """
    if num_tokens == 0:
        return
    operands = _Operands()
    into = _End(operands, target)
    out_of = [_End(operands, source) for source in sources]
    pieces = [(width, array.dtype) for array, _, width in target.parts]
    if tokens_per_block is None:
        row_bytes = sum(width * dtype.itemsize for width, dtype in pieces)
        enough_blocks = num_tokens * num_layers // NUM_BLOCKS
        tokens_per_block = max(1, min(BLOCK_BYTES // row_bytes, enough_blocks))
    blocks_per_layer = pl.cdiv(num_tokens, tokens_per_block)
    parts = range(len(pieces))

    @functools.partial(
        plgpu.kernel,
        # One dimension, because the others end at 65 535.
        grid=(num_layers * blocks_per_layer,),
        grid_names=("block",),
        scratch_types=(
            [plgpu.SMEM((tokens_per_block, width), dtype) for width, dtype in pieces],
            [plgpu.SMEM((_ZERO_BYTES // dtype.itemsize,), dtype) for _, dtype in pieces],
            plgpu.Barrier(num_arrivals=tokens_per_block * len(pieces)),
        ),
        # Safe: asynchronous copies alone touch the rows, and zeros are committed before use.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="copy_rows",
    )
    def kernel(*refs):
        *refs, rows_smem, zeros_smem, loaded = refs
        block = jax.lax.axis_index("block")
        layer, first = block // blocks_per_layer, block % blocks_per_layer * tokens_per_block

        def locate(i):
            """Where token i of the block goes, whether it does, and where it may come from."""
            token, inside = first + i, True
            if num_tokens % tokens_per_block:
                inside, token = token < num_tokens, jnp.minimum(token, num_tokens - 1)
            place, wanted = into.locate(refs, layer, token)
            return place, wanted & inside, [end.locate(refs, layer, token) for end in out_of]

        def load(i):
            _, missing, origins = locate(i)
            skipped = jnp.bool(True)
            for end, (place, there) in zip(out_of, origins, strict=True):

                @pl.when(missing & there)
                def _load(end=end, place=place):
                    for part in parts:
                        plgpu.copy_gmem_to_smem(
                            end.at(refs, part, place),
                            rows_smem[part].at[i],
                            loaded,
                            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                        )

                skipped &= _not(missing & there)
                missing &= _not(there)

            @pl.when(skipped)
            def _skip():
                for _ in parts:
                    plgpu.barrier_arrive(loaded)

        def store(i):
            place, wanted, origins = locate(i)
            there = functools.reduce(jnp.logical_or, [t for _, t in origins], jnp.bool(False))

            @pl.when(wanted & there)
            def _store():
                for part in parts:
                    plgpu.copy_smem_to_gmem(
                        rows_smem[part].at[i], into.at(refs, part, place), commit_group=False
                    )

            @pl.when(wanted & _not(there))
            def _store_zeros():
                for part, zeros in enumerate(zeros_smem):
                    for start in range(0, pieces[part][0], zeros.shape[0]):
                        width = min(zeros.shape[0], pieces[part][0] - start)
                        plgpu.copy_smem_to_gmem(
                            zeros.at[pl.ds(0, width)],
                            into.at(refs, part, place, start, width),
                            commit_group=False,
                        )

        def each_token(body):
            """Runs ``body`` for each token of the block; every warp takes its share of them."""

            def share_of(warp):
                def turn(j, _):
                    i = warp + j * _WARPS
                    pl.when(i < tokens_per_block)(lambda: body(i))

                jax.lax.fori_loop(0, pl.cdiv(tokens_per_block, _WARPS), turn, None)
                plgpu.commit_smem_to_gmem_group()
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            plgpu.warp_map(share_of)

        if out_of:
            each_token(load)
        for zeros in zeros_smem:
            zeros[...] = jnp.zeros_like(zeros)
        plgpu.commit_smem()
        if out_of:
            plgpu.barrier_wait(loaded)
        each_token(store)

    kernel(*operands.values)


def _not(condition: Any) -> Any:
    """``~condition``, which a single warp does not have in JAX 0.11."""
    return jnp.where(condition, False, True)


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
        self.parts = [(operands.position(array), *columns) for array, *columns in side.parts]
        self.slots = None if side.slots is None else operands.position(side.slots)
        self.layer = (
            None
            if side.layer is None
            else operands.position(jnp.asarray(side.layer, jnp.int32).reshape(1))
        )

    def locate(self, refs: Sequence[Any], layer: Any, token: Any) -> tuple[tuple[Any, Any], Any]:
        """The layer and row of a token, and whether they are there (0 if not)."""
        row, there = token, jnp.bool(True)
        if self.layer is not None:
            layer += refs[self.layer][0]
            there = are_there(layer, 0, self.num_layers)
        if self.slots is not None:
            row = refs[self.slots][token]
            there &= are_there(row, self.first_slot, self.num_rows)
        return (jnp.where(there, layer, 0), jnp.where(there, row, 0)), there

    def at(
        self,
        refs: Sequence[Any],
        part: int,
        place: tuple[Any, Any],
        start: int = 0,
        width: int | None = None,
    ) -> Any:
        """One part of a row, or ``width`` columns of it from ``start`` on."""
        position, first, whole = self.parts[part]
        return refs[position].at[(*place, pl.ds(first + start, width or whole))]
