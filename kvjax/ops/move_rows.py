"""Moves rows within planes, all layers and planes at once, as simultaneous assignment."""

import jax
import jax.numpy as jnp

from kvjax.dispatch import Implementation, select
from kvjax.ops import read_rows, row_copy, write_rows
from kvjax.ops.sides import Side
from kvjax.ops.types import Layer, Planes, Slots
from kvjax.slots import absent_as, are_there

# Overlapping moves stage a few layers at a time. Measured on one H200 with `python -m benchmarks
# move` (4 096 rows, a random permutation): 566 us with 128 MiB, 550 with 512, 596 with 32.
STAGING_BYTES = 128 * 1024 * 1024

# Most blocks that stage have nothing to stage; larger ones are fewer. 1 024 rows of which 1 in 50
# overlaps: 79 us with 8 tokens a block, 80 with 16, 94 with 1.
STAGED_TOKENS = 8

# Up to so many moves, comparing each with all takes less time (1 us) than marking rows (4 us).
COMPARED_TOKENS = 2048


def move_rows(
    planes: Planes,
    dst: Slots,
    src: Slots,
    *,
    first_slot: int,
    disjoint: bool = False,
    implementation: str | None = None,
) -> Planes:
    """Returns ``planes`` with, for every t at once, the old row ``src[t]`` at ``dst[t]``.

    All sources are read before any row is written: chains, swaps and cycles come out right. Bits
    are preserved. A ``dst`` that is not there is skipped, a ``src`` that is not there is a row of
    zeros. Those of ``dst`` that are there are distinct, as in ``write_rows``.

    Args:
      planes: updated in place where they are donated.
      dst: where each row goes.
      src: where each row comes from.
      first_slot: the first slot that is there.
      disjoint: the caller's promise that no ``src`` is another move's ``dst``; a broken promise
        mixes old and new rows.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.

    Source: SGLang 0.4.8 ``move_kv_cache`` (A-MHA-16), its faults (A-MOVE) excepted.
    """
    run = select("move_rows", IMPLEMENTATIONS, implementation, planes)
    return run(planes, dst, src, first_slot=first_slot, disjoint=disjoint)


def reference(
    planes: Planes, dst: Slots, src: Slots, *, first_slot: int, disjoint: bool = False
) -> Planes:
    """The specification, in plain JAX: layer by layer, since layers do not touch each other."""

    def move_in_layer(layer, planes):
        rows = read_rows.reference(planes, layer, src, first_slot=first_slot)
        return write_rows.reference(planes, layer, dst, rows, first_slot=first_slot)

    return jax.lax.fori_loop(0, planes[0].shape[0], move_in_layer, planes)


def _mosaic_gpu(
    planes: Planes, dst: Slots, src: Slots, *, first_slot: int, disjoint: bool
) -> Planes:
    """Stages the rows that some other move overwrites; then writes all, from there or in place.

    One block that reads all its rows before it writes any needs no staging.
    """
    refs = row_copy.as_refs(planes)
    num_tokens, num_layers = dst.shape[0], planes[0].shape[0]

    def place(slots: Slots, layer: Layer = None) -> Side:
        return Side.of(refs, slots=slots, first_slot=first_slot, layer=layer)

    if disjoint or row_copy.fits_one_block(planes, num_tokens):
        row_copy.copy_rows(
            place(dst),
            place(src),
            num_tokens=num_tokens,
            num_layers=num_layers,
            tokens_per_block=None if disjoint else num_tokens,
        )
        return row_copy.frozen(refs, planes)

    conflict = _is_overwritten(dst, src, first_slot, planes[0].shape[1])
    staged_slots = jnp.where(conflict, jnp.arange(num_tokens, dtype=jnp.int32), -1)
    layers_at_once = STAGING_BYTES // (num_tokens * row_copy.token_bytes(planes))
    layers_at_once = max(1, min(layers_at_once, num_layers))
    staged = Side.of(
        [row_copy.empty(layers_at_once, num_tokens, ref.shape[-1], ref.dtype) for ref in refs],
        slots=staged_slots,
    )
    size = {"num_tokens": num_tokens, "num_layers": layers_at_once}

    def move_some_layers(turn, _):
        layer = turn * layers_at_once  # past the last layer there is nothing, so nothing happens
        row_copy.copy_rows(
            staged,
            place(src, layer),
            **size,
            tokens_per_block=min(STAGED_TOKENS, row_copy.max_block_tokens(planes)),
        )
        row_copy.copy_rows(place(dst, layer), staged, place(src, layer), **size)

    jax.lax.fori_loop(0, -(-num_layers // layers_at_once), move_some_layers, None)
    return row_copy.frozen(refs, planes)


def _is_overwritten(dst: Slots, src: Slots, first_slot: int, num_rows: int) -> jax.Array:
    """Which moves read a row that another move writes."""
    if dst.shape[0] <= COMPARED_TOKENS:
        reads_written = (src[:, None] == dst[None, :]).any(axis=1)
    else:
        written = jnp.zeros(num_rows, bool)
        written = written.at[absent_as(num_rows, dst, first_slot)].set(True, mode="drop")
        reads_written = written[src]
    return reads_written & are_there(src, first_slot, num_rows) & (dst != src)


IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation(_mosaic_gpu, row_copy.why_not_rows),
    "reference": Implementation(reference, lambda *_: None),
}
