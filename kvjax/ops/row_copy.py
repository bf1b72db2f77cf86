"""The one Mosaic GPU kernel: rows of planes from one place to another, by bulk copies.

Parts of a row that bulk copies cannot take, such as a scale, go with it element by element.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.ops.sides import COPY_BYTES, End, Operands, Side, elements_of, is_bulk
from kvjax.ops.types import Planes

# Of the 227 KiB that there are from compute capability 9.0 on. The rest is lost where the rows of
# four planes, and the barrier, begin at multiples of 1 KiB.
MAX_SHARED_BYTES = 222 * 1024
"""What a block stages at most."""

# Chosen, not measured: 64 tokens of 4 elements fit one block, and 255 registers are far away.
MAX_ELEMENTS = 64
"""How many elements that bulk copies cannot take a warp holds at most, in a register each."""

# Measured on one H200 with `python -m benchmarks` (2 x 2 KB rows): moving 256 rows in 32 layers
# takes 19.4 us with blocks of 8 KiB, 19.6 with 4 and 16, 21 with 64; 1 024 rows and more do not
# care, nor do reads and writes. Few rows want many blocks.
BLOCK_BYTES = 8 * 1024
NUM_BLOCKS = 512

# An overlapping move of 48 rows in 32 layers takes 8.2 us in one block a layer, 9.5 us staged.
ONE_BLOCK_TOKENS = 64

# Later ones that are no data-centre GPUs have the copies, but half the shared memory.
_CAPABILITIES = {"9", "10"}

WARPS, LANES = 4, 32  # of a warpgroup, of a warp
_ZERO_BYTES = 1024  # what a warpgroup sets at once: 128 threads, 8 bytes each


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
    """Why there can be no bulk copies of rows of these planes, or ``None``.

    ``widths`` are those of the parts where rows are not copied whole.
    """
    return _cannot_run() or cannot_copy(planes, *widths)


def why_not_rows(planes: Planes) -> str | None:
    """Why the kernel cannot copy whole rows of these planes, or ``None``."""
    return _cannot_run() or cannot_copy_rows(planes)


def _cannot_run() -> str | None:
    backend = jax.default_backend()
    if backend != "gpu":
        return f"needs a GPU, the default backend is {backend!r}"
    capability = str(getattr(jax.devices()[0], "compute_capability", None))
    if capability.partition(".")[0] not in _CAPABILITIES:
        return f"needs an NVIDIA GPU of compute capability 9 or 10, this one has {capability}"
    return None


def cannot_copy(planes: Planes, *widths: int) -> str | None:
    """The part of ``why_not`` that depends on the rows and not on the machine."""
    for plane in planes:
        for width in filter(None, widths or (math.prod(plane.shape[2:]),)):
            if not is_bulk(width, plane.dtype):
                num_bytes = width * plane.dtype.itemsize
                return f"a row (or part) of {num_bytes} bytes is not a multiple of {COPY_BYTES}"
    return _cannot_stage(planes)


def cannot_copy_rows(planes: Planes) -> str | None:
    """The part of ``why_not_rows`` that depends on the rows and not on the machine."""
    if (num_elements := len(elements_of(map(_piece, planes)))) > MAX_ELEMENTS:
        return (
            f"{num_elements} elements a token, more than {MAX_ELEMENTS}, are in rows whose bytes "
            f"are not a multiple of {COPY_BYTES}"
        )
    return _cannot_stage(planes)


def _cannot_stage(planes: Planes) -> str | None:
    if max_block_tokens(planes) < 1:
        return f"a token's {token_bytes(planes)} bytes are more than a block can stage"
    return None


def max_block_tokens(planes: Planes) -> int:
    """How many tokens a block can stage, beside zeros for each plane."""
    num_tokens = (MAX_SHARED_BYTES - _ZERO_BYTES * len(planes)) // token_bytes(planes)
    return _at_most(num_tokens, len(elements_of(map(_piece, planes))))


def _piece(plane: jax.Array) -> tuple[int, Any]:
    return math.prod(plane.shape[2:]), plane.dtype


def _at_most(num_tokens: int, num_elements: int) -> int:
    """``num_tokens`` or, where they are fewer, those of which a block holds the elements."""
    return min(num_tokens, WARPS * (MAX_ELEMENTS // num_elements)) if num_elements else num_tokens


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
    operands = Operands()
    into = End(operands, target)
    out_of = [End(operands, source) for source in sources]
    pieces = [(width, array.dtype) for array, _, width in target.parts]
    bulk = {part: piece for part, piece in enumerate(pieces) if is_bulk(*piece)}
    elements = elements_of(pieces)
    if tokens_per_block is None:
        row_bytes = sum(width * dtype.itemsize for width, dtype in pieces)
        enough_blocks = num_tokens * num_layers // NUM_BLOCKS
        tokens_per_block = max(1, min(BLOCK_BYTES // row_bytes, enough_blocks))
        tokens_per_block = _at_most(tokens_per_block, len(elements))
    blocks_per_layer = pl.cdiv(num_tokens, tokens_per_block)

    @functools.partial(
        plgpu.kernel,
        # One dimension, because the others end at 65 535.
        grid=(num_layers * blocks_per_layer,),
        grid_names=("block",),
        scratch_types=(
            [plgpu.SMEM((tokens_per_block, width), dtype) for width, dtype in bulk.values()],
            [plgpu.SMEM((_ZERO_BYTES // dtype.itemsize,), dtype) for _, dtype in bulk.values()],
            plgpu.Barrier(num_arrivals=tokens_per_block * len(bulk) + WARPS * bool(elements)),
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
                    for part, rows in zip(bulk, rows_smem, strict=True):
                        plgpu.copy_gmem_to_smem(
                            end.at(refs, part, place),
                            rows.at[i],
                            loaded,
                            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                        )

                skipped &= _not(missing & there)
                missing &= _not(there)

            @pl.when(skipped)
            def _skip():
                for _ in bulk:
                    plgpu.barrier_arrive(loaded)

        def store(i):
            place, wanted, origins = locate(i)
            there = functools.reduce(jnp.logical_or, [t for _, t in origins], jnp.bool(False))

            @pl.when(wanted & there)
            def _store():
                for part, rows in zip(bulk, rows_smem, strict=True):
                    plgpu.copy_smem_to_gmem(
                        rows.at[i], into.at(refs, part, place), commit_group=False
                    )

            @pl.when(wanted & _not(there))
            def _store_zeros():
                for (part, (whole, _)), zeros in zip(bulk.items(), zeros_smem, strict=True):
                    for start in range(0, whole, zeros.shape[0]):
                        width = min(zeros.shape[0], whole - start)
                        plgpu.copy_smem_to_gmem(
                            zeros.at[pl.ds(0, width)],
                            into.at(refs, part, place, start, width),
                            commit_group=False,
                        )

        def each_token(body):
            """Runs ``body`` for each token of the block; every warp takes its share of them."""

            def share_of(warp):
                def turn(j, _):
                    i = warp + j * WARPS
                    pl.when(i < tokens_per_block)(lambda: body(i))

                jax.lax.fori_loop(0, pl.cdiv(tokens_per_block, WARPS), turn, None)
                plgpu.commit_smem_to_gmem_group()
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            plgpu.warp_map(share_of)

        def find_elements(i):
            """Where those of token i go, whether they do, and what they are."""
            inside, i = i < tokens_per_block, jnp.minimum(i, tokens_per_block - 1)
            target_place, wanted, origins = locate(i)
            missing, values = wanted, [jnp.zeros((), pieces[part][1]) for part, _ in elements]
            for end, ((layer, row), there) in zip(out_of, origins, strict=True):
                found = missing & there
                place = jnp.where(found, layer, 0), jnp.where(found, row, 0)
                values = [
                    jnp.where(found, end.at(refs, part, place, column, 1)[0], value)
                    for (part, column), value in zip(elements, values, strict=True)
                ]
                missing &= _not(there)
            return target_place, wanted & inside, values

        def move_elements(warp):
            """Loads those of all the warp's tokens, to wait for memory once, then stores them."""
            share = range(pl.cdiv(tokens_per_block, WARPS))
            found = [find_elements(warp + j * WARPS) for j in share]
            if out_of:  # what is loaded here may be what another warp of the block overwrites
                plgpu.barrier_arrive(loaded)
                plgpu.barrier_wait(loaded)
            for place, wanted, values in found:

                @pl.when(wanted)
                def _store(place=place, values=values):
                    for (part, column), value in zip(elements, values, strict=True):
                        into.at(refs, part, place, column, 1)[0] = value

        if out_of:
            each_token(load)
        for zeros in zeros_smem:
            zeros[...] = jnp.zeros_like(zeros)
        plgpu.commit_smem()
        if elements:
            plgpu.warp_map(move_elements)
        elif out_of:
            plgpu.barrier_wait(loaded)
        each_token(store)

    kernel(*operands.values)


def _not(condition: Any) -> Any:
    """``~condition``, which a single warp does not have in JAX 0.11."""
    return jnp.where(condition, False, True)
