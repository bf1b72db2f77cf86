"""Quantises latent rows per token and writes what they are stored as, in one launch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from kvjax.dispatch import Implementation, select
from kvjax.ops import latents, quantizing, row_copy, write_rows
from kvjax.ops.narrow import narrow, quotient
from kvjax.ops.types import Layer, Planes, Slots
from kvjax.slots import are_there

LATENT_DTYPE = "float8_e4m3fn"

_LARGEST = float(jnp.finfo(LATENT_DTYPE).max)

Part = Float[Array, "n 1 _"]


def write_quantized(
    planes: Planes,
    layer: Layer,
    slots: Slots,
    latent: Part,
    rope: Part,
    *,
    first_slot: int,
    implementation: str | None = None,
) -> Planes:
    """Returns ``planes`` with token t quantised and stored at ``slots[t]``, in all three of them.

    The scale of a token is its latent's largest magnitude, at least ``SMALLEST_AMAX`` and finite,
    over the largest value of fp8 e4m3fn. Latent and rope are divided by it, saturate at the largest
    finite value of what stores them, and are rounded to nearest even; all in float32, each step
    rounded once (on CPU, XLA takes its subnormal numbers for zeros). So an infinite latent is
    stored as the largest value beside a scale that makes it float32's largest or, by rounding,
    infinite; a NaN in the latent makes the whole token NaN; one in the rope stays where it is.

    Slots and layers that are not there, and repeated slots, as in ``write_rows``.

    Args:
      planes: latent (fp8, as its bits), scale (float32) and rope; updated in place where they are
        donated.
      layer: position of the layer, traced or not.
      slots: where each token goes.
      latent: the first part of each token.
      rope: the second, whatever the dtype of ``latent``.
      first_slot: the first slot that is there.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.

    Source: TokenSpeed ``per_token_head`` (B-Q), its overflows excepted.
    """
    run = select("write_quantized", IMPLEMENTATIONS, implementation, planes, latent, rope)
    return run(planes, layer, slots, latent, rope, first_slot=first_slot)


def reference(
    planes: Planes, layer: Layer, slots: Slots, latent: Part, rope: Part, *, first_slot: int
) -> Planes:
    """The specification, in plain JAX."""
    latent, rope = latent.astype(jnp.float32), rope.astype(jnp.float32)
    amax = quantizing.amax_of(latent)
    scale = quantizing.scale_of(amax, _LARGEST)
    stored = narrow(quantizing.divided(latent, scale), LATENT_DTYPE)
    scale = scale[..., None]
    rows = stored, scale, _scaled(rope, scale, planes[2])
    return write_rows.reference(planes, layer, slots, rows, first_slot=first_slot)


def _scaled(
    rope: Float32[Array, "*shape"], scale: Float32[Array, "*_"], plane: Any
) -> Float[Array, "*shape"]:
    limit = float(jnp.finfo(plane.dtype).max)
    return jnp.clip(quotient(rope, scale), -limit, limit).astype(plane.dtype)


def _mosaic_gpu(
    planes: Planes, layer: Layer, slots: Slots, latent: Part, rope: Part, *, first_slot: int
) -> Planes:
    if slots.shape[0] == 0:
        return planes
    refs = row_copy.as_refs(planes)
    where = jnp.asarray(layer, jnp.int32).reshape(1), slots
    _launch(refs, *where, _flat(latent), _flat(rope), first_slot)
    return row_copy.frozen(refs, planes)


def _flat(part: Part) -> Float[Array, "n _"]:
    if part.dtype.itemsize == 1:  # not every cast of fp8 is one that the kernel has
        part = part.astype(jnp.float32)
    return part.reshape(part.shape[0], part.shape[-1])


def _launch(planes: Any, layer: Any, slots: Any, latent: Any, rope: Any, first_slot: int) -> None:
    num_tokens = slots.shape[0]
    num_layers, num_rows, _ = planes[0].shape
    block_tokens = latents.block_tokens(num_tokens)
    parts = latent, rope
    widths = [part.shape[-1] for part in parts]

    @functools.partial(
        plgpu.kernel,
        grid=(pl.cdiv(num_tokens, block_tokens),),
        grid_names=("block",),
        scratch_types=(
            [latents.staged(block_tokens, part) for part in parts],
            [latents.staged(block_tokens, plane) for plane in planes[::2]],
            plgpu.SMEM((latents.turns(block_tokens), row_copy.WARPS), planes[1].dtype),
            plgpu.Barrier(num_arrivals=block_tokens * len(parts)),
        ),
        # Safe: a warp alone touches its tokens' rows, and what others or copies read is committed.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="write_quantized",
    )
    def kernel(layer_gmem, slots_gmem, latent_gmem, rope_gmem, *refs):
        latents_gmem, scales_gmem, ropes_gmem, given_smem, stored_smem, scales_smem, loaded = refs
        first = jax.lax.axis_index("block") * block_tokens

        @plgpu.warp_map
        def _load(warp):
            for i in range(block_tokens):
                token = jnp.minimum(first + i, num_tokens - 1)

                @pl.when(warp == latents.row_of(i)[1])
                def _load_token(i=i, token=token):
                    for gmem, smem, width in zip(
                        (latent_gmem, rope_gmem), given_smem, widths, strict=True
                    ):
                        plgpu.copy_gmem_to_smem(
                            gmem.at[token],
                            smem.at[*latents.row_of(i), pl.ds(0, width)],
                            loaded,
                            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                        )

        # Now, so that nobody waits for them alone.
        place = layer_gmem[0]
        targets = [slots_gmem[jnp.minimum(first + i, num_tokens - 1)] for i in range(block_tokens)]
        plgpu.barrier_wait(loaded)
        for turn in range(latents.turns(block_tokens)):
            latent, rope = (
                plgpu.layout_cast(smem[turn], latents.registers(width)).astype(jnp.float32)
                for smem, width in zip(given_smem, widths, strict=True)
            )
            amax = quantizing.amax_of(latents.without_padding(latent, widths[0]))
            scale = quantizing.scale_of(amax, _LARGEST)
            quotients = quantizing.divided_in_kernel(latent, amax, scale)
            stored_smem[0][turn] = narrow(quotients, LATENT_DTYPE)
            by_row = jax.lax.broadcast_in_dim(scale, rope.shape, (0,))
            stored_smem[1][turn] = _scaled(rope, by_row, stored_smem[1])
            scales_smem[turn] = scale
        plgpu.commit_smem()
        # Here, because a warp by itself cannot load them in JAX 0.11.
        scales = [scales_smem[latents.row_of(i)] for i in range(block_tokens)]

        @plgpu.warp_map
        def _store(warp):
            for i, (slot, scale) in enumerate(zip(targets, scales, strict=True)):
                there = are_there(slot, first_slot, num_rows) & are_there(place, 0, num_layers)

                @pl.when((warp == latents.row_of(i)[1]) & there & (first + i < num_tokens))
                def _store_token(i=i, slot=slot, scale=scale):
                    scales_gmem[place, slot, 0] = scale
                    for smem, gmem, width in zip(
                        stored_smem, (latents_gmem, ropes_gmem), widths, strict=True
                    ):
                        plgpu.copy_smem_to_gmem(
                            smem.at[*latents.row_of(i), pl.ds(0, width)],
                            gmem.at[place, slot],
                            commit_group=False,
                        )

            plgpu.commit_smem_to_gmem_group()
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel(layer, slots, latent, rope, *planes)


def cannot_write(planes: Planes, latent: Part, rope: Part) -> str | None:
    """Why the kernel cannot write such rows, whatever the machine."""
    return (
        row_copy.cannot_copy((planes[0], planes[2]))
        or row_copy.cannot_copy((latent[None], rope[None]))
        or latents.cannot_stage(latent.shape[-1], rope.shape[-1])
    )


def _mosaic_gpu_why_not(planes: Planes, latent: Part, rope: Part) -> str | None:
    return row_copy.why_not((planes[0], planes[2])) or cannot_write(planes, latent, rope)


IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation(_mosaic_gpu, _mosaic_gpu_why_not),
    "reference": Implementation(reference, lambda *_: None),
}
