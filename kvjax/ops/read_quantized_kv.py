"""Reads quantised K and V as numbers, in one launch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Shaped

from kvjax.dispatch import Implementation, select
from kvjax.ops import heads, read_rows, row_copy
from kvjax.ops.narrow import narrow, typed
from kvjax.ops.types import Layer, Planes, Slots
from kvjax.ops.write_quantized_kv import FP8, kernel_views
from kvjax.slots import are_there

Values = Float[Array, "n heads _"]


def read_quantized_kv(
    planes: Planes,
    layer: Layer,
    slots: Slots,
    *,
    first_slot: int,
    dtype: str,
    implementation: str | None = None,
) -> tuple[Values, Values]:
    """Returns K and V at ``slots``, each head times its scale, in ``dtype``.

    The product is rounded to float32 (on CPU, XLA takes its subnormal numbers for zeros), then cast
    as ``narrow`` does. Slots and layers that are not there read as zeros, as in ``read_rows``.

    Args:
      planes: as ``write_quantized_kv`` leaves them; read, not changed.
      layer: position of the layer, traced or not.
      slots: which tokens, in any order and as often as wanted.
      first_slot: the first slot that is there.
      dtype: of both results.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.

    Source: vLLM ``int8_per_token_head``, ``fp8_per_token_head``.
    """
    run = select("read_quantized_kv", IMPLEMENTATIONS, implementation, planes, dtype)
    return run(planes, layer, slots, first_slot=first_slot, dtype=dtype)


def reference(
    planes: Planes, layer: Layer, slots: Slots, *, first_slot: int, dtype: str
) -> tuple[Values, Values]:
    """The specification, in plain JAX."""
    rows = read_rows.reference(planes, layer, slots, first_slot=first_slot)
    k, v = (
        typed(_numbers(stored, scale[..., 0], dtype), dtype)
        for stored, scale in zip(rows[::2], rows[1::2], strict=True)
    )
    return k, v


def _numbers(
    stored: Shaped[Array, "*n dim"], scale: Float32[Array, "*n"], dtype: str
) -> Shaped[Array, "*n dim"]:
    """What each head stores times its scale, as ``narrow`` returns it."""
    if stored.dtype != jnp.int8:
        stored = jax.lax.bitcast_convert_type(stored, FP8)
    by_head = jax.lax.broadcast_in_dim(scale, stored.shape, range(stored.ndim - 1))
    return narrow(stored.astype(jnp.float32) * by_head, dtype)


def _mosaic_gpu(
    planes: Planes, layer: Layer, slots: Slots, *, first_slot: int, dtype: str
) -> tuple[Values, Values]:
    num_tokens = slots.shape[0]
    parts = [
        jax.new_ref(jax.lax.empty((num_tokens, *plane.shape[2:]), _read_as(dtype)))
        for plane in planes[::2]
    ]
    if num_tokens:
        where = jnp.asarray(layer, jnp.int32).reshape(1), slots
        _launch(kernel_views(planes), *where, parts, first_slot, dtype)
    k, v = (typed(jax.freeze(part), dtype) for part in parts)
    return k, v


def _read_as(dtype: str) -> str:
    return "uint8" if dtype.startswith("float8") else dtype


def _launch(planes: Any, layer: Any, slots: Any, parts: Any, first_slot: int, dtype: str) -> None:
    num_tokens = slots.shape[0]
    num_layers, num_rows, num_heads = planes[1].shape
    stored, read = heads.of(*planes[::2]), heads.of(*parts)
    block_tokens = heads.block_tokens((*stored, *read), num_tokens)
    scales_are_copied = heads.are_copied(num_heads)
    copies = 4 if scales_are_copied else 2

    @functools.partial(
        plgpu.kernel,
        grid=(pl.cdiv(num_tokens, block_tokens),),
        grid_names=("block",),
        scratch_types=(
            [heads.staged(block_tokens, part) for part in stored],
            [heads.staged_scales(block_tokens, part) for part in stored],
            [heads.staged(block_tokens, part) for part in read],
            plgpu.Barrier(num_arrivals=block_tokens * copies),
        ),
        kernel_name="read_quantized_kv",
    )
    def kernel(layer_gmem, slots_gmem, *refs):
        *gmem, stored_smem, scales_smem, read_smem, loaded = refs
        stored_gmem, scales_gmem, read_gmem = gmem[:4:2], gmem[1:4:2], gmem[4:]
        first = jax.lax.axis_index("block") * block_tokens
        of_token = pl.ds(0, num_heads)

        def locate(i):
            """Where token i of the block comes from (0 if from nowhere), and whether it does."""
            place, slot = layer_gmem[0], slots_gmem[jnp.minimum(first + i, num_tokens - 1)]
            there = are_there(slot, first_slot, num_rows) & are_there(place, 0, num_layers)
            return (jnp.where(there, place, 0), jnp.where(there, slot, 0)), there

        sources = [locate(i)[0] for i in range(block_tokens)]
        copied = [*zip(stored_gmem, stored_smem, strict=True)]
        loose = []  # all on their way before the first is stored
        for gmem, smem in zip(scales_gmem, scales_smem, strict=True):
            if scales_are_copied:
                copied.append((gmem, smem))
            else:
                loose += [
                    (smem, i, head, gmem[(*source, head)])
                    for i, source in enumerate(sources)
                    for head in range(num_heads)
                ]
        for i, source in enumerate(sources):
            for gmem, smem in copied:
                plgpu.copy_gmem_to_smem(
                    gmem.at[source],
                    smem.at[i, of_token],
                    loaded,
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )
        for smem, i, head, scale in loose:
            smem[i, head] = scale
        plgpu.barrier_wait(loaded)

        def dequantize(i, _):
            _, there = locate(i)
            for part, (_, head_dim, _) in enumerate(stored):
                layout = heads.registers(head_dim)
                for some in heads.chunks(num_heads, head_dim):

                    @pl.when(there)
                    def _read(part=part, some=some, layout=layout):
                        numbers = plgpu.layout_cast(stored_smem[part][i, some], layout)
                        scale = scales_smem[part][i, some]
                        read_smem[part][i, some] = _numbers(numbers, scale, dtype)

                    @pl.when(jnp.logical_not(there))
                    def _read_zeros(part=part, some=some, layout=layout):
                        nothing = jnp.zeros((some.size, stored[part][1]), read_smem[part].dtype)
                        read_smem[part][i, some] = plgpu.layout_cast(nothing, layout)

        jax.lax.fori_loop(0, block_tokens, dequantize, None)
        plgpu.commit_smem()
        for i in range(block_tokens):

            @pl.when(first + i < num_tokens)
            def _store(i=i):
                for smem, gmem in zip(read_smem, read_gmem, strict=True):
                    plgpu.copy_smem_to_gmem(smem.at[i, of_token], gmem.at[first + i])

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel(layer, slots, *planes, *parts)


def cannot_read(planes: Planes, dtype: str) -> str | None:
    """Why the kernel cannot read such heads in ``dtype``, whatever the machine."""
    stored = heads.of(*planes[::2])
    read = [(num_heads, head_dim, _read_as(dtype)) for num_heads, head_dim, _ in stored]
    return heads.cannot_stage((*stored, *read))


def _mosaic_gpu_why_not(planes: Planes, dtype: str) -> str | None:
    return row_copy.why_not(planes[::2]) or cannot_read(planes, dtype)


IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation(_mosaic_gpu, _mosaic_gpu_why_not),
    "reference": Implementation(reference, lambda *_: None),
}
