"""Reads quantised latent rows as numbers, latent and rope, in one launch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Shaped

from kvjax.dispatch import Implementation, select
from kvjax.ops import latents, read_rows, row_copy
from kvjax.ops.narrow import narrow, typed
from kvjax.ops.types import Layer, Planes, Slots
from kvjax.ops.write_quantized import LATENT_DTYPE
from kvjax.slots import are_there

Part = Float[Array, "n 1 _"]


def read_quantized(
    planes: Planes,
    layer: Layer,
    slots: Slots,
    *,
    first_slot: int,
    dtype: str,
    implementation: str | None = None,
) -> tuple[Part, Part]:
    """Returns latent and rope at ``slots``, each times the token's scale, in ``dtype``.

    The product is rounded to float32 (on CPU, XLA takes its subnormal numbers for zeros), then cast
    as ``narrow`` does. Slots and layers that are not there read as zeros, as in ``read_rows``.

    Args:
      planes: as ``write_quantized`` leaves them; read, not changed.
      layer: position of the layer, traced or not.
      slots: which tokens, in any order and as often as wanted.
      first_slot: the first slot that is there.
      dtype: of both results.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.

    Source: TokenSpeed ``per_token_head`` (B-Q).
    """
    run = select("read_quantized", IMPLEMENTATIONS, implementation, planes, dtype)
    return run(planes, layer, slots, first_slot=first_slot, dtype=dtype)


def reference(
    planes: Planes, layer: Layer, slots: Slots, *, first_slot: int, dtype: str
) -> tuple[Part, Part]:
    """The specification, in plain JAX."""
    latent, scale, rope = read_rows.reference(planes, layer, slots, first_slot=first_slot)
    latent, rope = (narrow(part * scale, dtype) for part in _as_float32(latent, rope))
    return typed(latent, dtype), typed(rope, dtype)


def _as_float32(
    latent: Shaped[Array, "*shape"], rope: Shaped[Array, "*_"]
) -> tuple[Float32[Array, "*shape"], Float32[Array, "*_"]]:
    latent = jax.lax.bitcast_convert_type(latent, LATENT_DTYPE)
    return latent.astype(jnp.float32), rope.astype(jnp.float32)


def _mosaic_gpu(
    planes: Planes, layer: Layer, slots: Slots, *, first_slot: int, dtype: str
) -> tuple[Part, Part]:
    num_tokens = slots.shape[0]
    sources = [row_copy.flat(plane) for plane in planes]
    stored = "uint8" if dtype.startswith("float8") else dtype
    latent_dim, _, rope_dim = (source.shape[-1] for source in sources)
    parts = [row_copy.empty(1, num_tokens, width, stored) for width in (latent_dim, rope_dim)]
    if num_tokens:
        _launch(sources, jnp.asarray(layer, jnp.int32).reshape(1), slots, parts, first_slot, dtype)
    latent, rope = (
        typed(jax.freeze(part).reshape(num_tokens, 1, part.shape[-1]), dtype) for part in parts
    )
    return latent, rope


def _launch(planes: Any, layer: Any, slots: Any, parts: Any, first_slot: int, dtype: str) -> None:
    num_tokens = slots.shape[0]
    num_layers, num_rows, _ = planes[0].shape
    block_tokens = latents.block_tokens(num_tokens)
    widths = [part.shape[-1] for part in parts]

    @functools.partial(
        plgpu.kernel,
        grid=(pl.cdiv(num_tokens, block_tokens),),
        grid_names=("block",),
        scratch_types=(
            [latents.staged(block_tokens, plane) for plane in planes[::2]],
            [latents.staged(block_tokens, part) for part in parts],
            plgpu.Barrier(num_arrivals=block_tokens * len(parts)),
        ),
        # Safe: a warp alone touches its tokens' rows, and they are committed before copies do.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="read_quantized",
    )
    def kernel(layer_gmem, slots_gmem, latents_gmem, scales_gmem, ropes_gmem, *refs):
        *parts_gmem, stored_smem, read_smem, loaded = refs
        first = jax.lax.axis_index("block") * block_tokens
        sources = []
        for i in range(block_tokens):
            place, slot = layer_gmem[0], slots_gmem[jnp.minimum(first + i, num_tokens - 1)]
            there = are_there(slot, first_slot, num_rows) & are_there(place, 0, num_layers)
            sources.append((jnp.where(there, place, 0), jnp.where(there, slot, 0), there))

        @plgpu.warp_map
        def _load(warp):
            for i, (place, slot, _) in enumerate(sources):

                @pl.when(warp == latents.row_of(i)[1])
                def _load_token(i=i, place=place, slot=slot):
                    for gmem, smem, width in zip(
                        (latents_gmem, ropes_gmem), stored_smem, widths, strict=True
                    ):
                        plgpu.copy_gmem_to_smem(
                            gmem.at[place, slot],
                            smem.at[*latents.row_of(i), pl.ds(0, width)],
                            loaded,
                            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                        )

        scales = [scales_gmem[place, slot, 0] for place, slot, _ in sources]
        plgpu.barrier_wait(loaded)
        for turn in range(latents.turns(block_tokens)):
            numbers = _as_float32(
                *(
                    plgpu.layout_cast(smem[turn], latents.registers(width))
                    for smem, width in zip(stored_smem, widths, strict=True)
                )
            )
            for part, smem, width in zip(numbers, read_smem, widths, strict=True):
                rows = plgpu.broadcasted_iota(
                    jnp.int32, part.shape, 0, layout=latents.registers(width)
                )
                by_row, is_there = jnp.zeros_like(part), rows < 0
                for i, (scale, (_, _, there)) in enumerate(zip(scales, sources, strict=True)):
                    if latents.row_of(i)[0] == turn:
                        is_row = rows == latents.row_of(i)[1]
                        by_row = jnp.where(is_row, scale, by_row)
                        is_there |= is_row & there
                smem[turn] = narrow(jnp.where(is_there, part * by_row, 0.0), dtype)
        plgpu.commit_smem()

        @plgpu.warp_map
        def _store(warp):
            for i in range(block_tokens):

                @pl.when((warp == latents.row_of(i)[1]) & (first + i < num_tokens))
                def _store_token(i=i):
                    for smem, gmem, width in zip(read_smem, parts_gmem, widths, strict=True):
                        plgpu.copy_smem_to_gmem(
                            smem.at[*latents.row_of(i), pl.ds(0, width)],
                            gmem.at[0, first + i],
                            commit_group=False,
                        )

            plgpu.commit_smem_to_gmem_group()
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel(layer, slots, *planes, *parts)


def cannot_read(planes: Planes, dtype: str) -> str | None:
    """Why the kernel cannot read such rows in ``dtype``, whatever the machine."""
    widths = [planes[i].shape[-1] for i in (0, 2)]
    num_bytes = [width * jnp.dtype(dtype).itemsize for width in widths]
    return (
        row_copy.cannot_copy((planes[0], planes[2]))
        or row_copy.cannot_copy(planes[:1], *num_bytes)  # it is a plane of bytes
        or latents.cannot_stage(*widths)
    )


def _mosaic_gpu_why_not(planes: Planes, dtype: str) -> str | None:
    return row_copy.why_not((planes[0], planes[2])) or cannot_read(planes, dtype)


IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation(_mosaic_gpu, _mosaic_gpu_why_not),
    "reference": Implementation(reference, lambda *_: None),
}
