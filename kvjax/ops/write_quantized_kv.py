"""Quantises K and V per token and head and writes what they are stored as, in one launch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Shaped

from kvjax.dispatch import Implementation, select
from kvjax.ops import heads, quantizing, row_copy, write_rows
from kvjax.ops.narrow import narrow
from kvjax.ops.types import Layer, Planes, Slots
from kvjax.slots import are_there

FP8 = "float8_e4m3fn"
"""What planes of ``uint8`` hold the bits of."""

_LARGEST = {
    "int8": float(jnp.iinfo("int8").max),
    "uint8": float(jnp.finfo(FP8).max),
}
_NO_FRACTIONS = 1.5 * 2.0**23
"""A sum of this and a small number is a whole one: float32 has no others around it."""

Values = Float[Array, "n heads _"]


def write_quantized_kv(
    planes: Planes,
    layer: Layer,
    slots: Slots,
    k: Values,
    v: Values,
    *,
    first_slot: int,
    implementation: str | None = None,
) -> Planes:
    """Returns ``planes`` with token t quantised and stored at ``slots[t]``, in all four of them.

    K and V each by itself, and every head of them: its scale is its largest magnitude, at least
    ``SMALLEST_AMAX`` and finite, over the largest value of what stores it, 127 of int8. Its numbers
    are divided by the scale, saturate at that value, and are rounded to nearest even; all in
    float32, each step rounded once. A NaN makes the scale NaN, and so the whole head when it is
    read; in int8 it is stored as 0. An infinity is stored as the largest value beside a scale that
    makes it float32's largest or, by rounding, infinite.

    Slots and layers that are not there, and repeated slots, as in ``write_rows``.

    Args:
      planes: K (int8, or fp8 as its bits), its scales (float32), V, its scales; updated in place
        where they are donated.
      layer: position of the layer, traced or not.
      slots: where each token goes.
      k: of any dtype that float32 holds.
      v: likewise, of as many heads, which may be of another size.
      first_slot: the first slot that is there.
      implementation: a name in ``IMPLEMENTATIONS``; the fastest that can run if ``None``.

    Raises:
      UnsupportedError: the named implementation cannot run.

    Source: vLLM ``int8_per_token_head``, ``fp8_per_token_head``.
    """
    run = select("write_quantized_kv", IMPLEMENTATIONS, implementation, planes, k, v)
    return run(planes, layer, slots, k, v, first_slot=first_slot)


def reference(
    planes: Planes, layer: Layer, slots: Slots, k: Values, v: Values, *, first_slot: int
) -> Planes:
    """The specification, in plain JAX."""
    rows = []
    for values, plane in ((k, planes[0]), (v, planes[2])):
        numbers, scale = _quantized(values.astype(jnp.float32), plane.dtype)
        rows += [numbers, scale[..., None]]
    return write_rows.reference(planes, layer, slots, tuple(rows), first_slot=first_slot)


def _quantized(
    values: Float32[Array, "*n dim"], stored: Any
) -> tuple[Shaped[Array, "*n dim"], Float32[Array, "*n"]]:
    """What each head is stored as, and its scale."""
    amax = quantizing.amax_of(values)
    largest = _LARGEST[stored.name]
    scale = quantizing.scale_of(amax, largest)
    quotients = quantizing.divided(values, scale)
    if stored != jnp.int8:
        return narrow(quotients, FP8), scale
    whole = jnp.clip(jnp.rint(quotients), -largest, largest)  # ties to even
    return jnp.where(jnp.isnan(whole), 0, whole).astype(jnp.int8), scale


def _quantized_in_kernel(
    values: Float32[Array, "*n dim"], stored: Any
) -> tuple[Shaped[Array, "*n dim"], Float32[Array, "*n"]]:
    """As ``_quantized``, without the slow conversions."""
    amax = quantizing.amax_of(values)
    scale = quantizing.scale_of(amax, _LARGEST[stored.name])
    quotients = quantizing.divided_in_kernel(values, amax, scale)
    if stored != jnp.int8:
        return narrow(quotients, FP8), scale
    # The lowest bits of the sum are the whole number.
    whole = jax.lax.bitcast_convert_type(quotients + _NO_FRACTIONS, jnp.int32)
    return jnp.where(jnp.isnan(quotients), 0, whole).astype(jnp.int8), scale


def _mosaic_gpu(
    planes: Planes, layer: Layer, slots: Slots, k: Values, v: Values, *, first_slot: int
) -> Planes:
    if slots.shape[0] == 0:
        return planes
    refs = [jax.new_ref(view) for view in kernel_views(planes)]
    where = jnp.asarray(layer, jnp.int32).reshape(1), slots
    _launch(refs, *where, _castable(k), _castable(v), first_slot)
    return row_copy.frozen(refs, planes)


def kernel_views(planes: Planes) -> list[Array]:
    """The planes as kernels see them: of scales a number for each head."""
    k, k_scale, v, v_scale = planes
    return [k, row_copy.flat(k_scale), v, row_copy.flat(v_scale)]


def _castable(values: Values) -> Values:
    """Not every cast of fp8 is one that the kernel has."""
    return values.astype(jnp.float32) if values.dtype.itemsize == 1 else values


def _launch(planes: Any, layer: Any, slots: Any, k: Any, v: Any, first_slot: int) -> None:
    num_tokens = slots.shape[0]
    num_layers, num_rows, num_heads = planes[1].shape
    given, stored = heads.of(k, v), heads.of(*planes[::2])
    block_tokens = heads.block_tokens((*given, *stored), num_tokens)
    parts = range(2)  # K and V

    @functools.partial(
        plgpu.kernel,
        grid=(pl.cdiv(num_tokens, block_tokens),),
        grid_names=("block",),
        scratch_types=(
            [heads.staged(block_tokens, part) for part in given],
            [heads.staged(block_tokens, part) for part in stored],
            [heads.staged_scales(block_tokens, part) for part in stored],
            plgpu.Barrier(num_arrivals=block_tokens * len(parts)),
        ),
        kernel_name="write_quantized_kv",
    )
    def kernel(layer_gmem, slots_gmem, k_gmem, v_gmem, *refs):
        *planes_gmem, given_smem, stored_smem, scales_smem, loaded = refs
        given_gmem, stored_gmem, scales_gmem = (k_gmem, v_gmem), planes_gmem[::2], planes_gmem[1::2]
        first = jax.lax.axis_index("block") * block_tokens
        of_token = pl.ds(0, num_heads)
        place, targets = layer_gmem[0], []
        for i in range(block_tokens):
            token = jnp.minimum(first + i, num_tokens - 1)
            targets.append(slots_gmem[token])  # now, so that nobody waits for it alone
            for part in parts:
                plgpu.copy_gmem_to_smem(
                    given_gmem[part].at[token],
                    given_smem[part].at[i, of_token],
                    loaded,
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )
        plgpu.barrier_wait(loaded)

        def quantize(i, _):
            for part in parts:
                _, head_dim, dtype = stored[part]
                for some in heads.chunks(num_heads, head_dim):
                    values = plgpu.layout_cast(given_smem[part][i, some], heads.registers(head_dim))
                    numbers, scale = _quantized_in_kernel(values.astype(jnp.float32), dtype)
                    stored_smem[part][i, some] = numbers
                    scales_smem[part][i, some] = scale

        jax.lax.fori_loop(0, block_tokens, quantize, None)
        plgpu.commit_smem()
        for i, slot in enumerate(targets):
            there = are_there(slot, first_slot, num_rows) & are_there(place, 0, num_layers)

            @pl.when(there & (first + i < num_tokens))
            def _store(i=i, slot=slot):
                for part in parts:
                    plgpu.copy_smem_to_gmem(
                        stored_smem[part].at[i, of_token], stored_gmem[part].at[place, slot]
                    )
                    scales = scales_smem[part].at[i, of_token]
                    if heads.are_copied(num_heads):
                        plgpu.copy_smem_to_gmem(scales, scales_gmem[part].at[place, slot])
                    else:
                        for head in range(num_heads):
                            scales_gmem[part][place, slot, head] = scales_smem[part][i, head]

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel(layer, slots, k, v, *planes)


def cannot_write(planes: Planes, k: Values, v: Values) -> str | None:
    """Why the kernel cannot write such heads, whatever the machine."""
    return heads.cannot_stage(heads.of(_castable(k), _castable(v), *planes[::2]))


def _mosaic_gpu_why_not(planes: Planes, k: Values, v: Values) -> str | None:
    return row_copy.why_not(planes[::2]) or cannot_write(planes, k, v)


IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation(_mosaic_gpu, _mosaic_gpu_why_not),
    "reference": Implementation(reference, lambda *_: None),
}
