"""Upstream's functions on single buffers, for who calls them without a pool.

They know no padding page: every row of a buffer is there, the first one too. Otherwise slots mean
what they mean to the operations that are called.
"""

from collections.abc import Sequence

import torch

from kvjax.errors import GeometryError
from kvtorch.ops.move_rows import move_rows
from kvtorch.ops.narrow import FP8, Scale, narrow
from kvtorch.ops.read_latent_rope import read_latent_rope
from kvtorch.ops.write_latent_rope import write_latent_rope
from kvtorch.ops.write_rows import write_rows
from kvtorch.pools.values import as_scale, as_values
from kvtorch.slots import as_slots, check


def set_mla_kv_buffer_triton(
    kv_buffer: torch.Tensor,
    loc: torch.Tensor,
    cache_k_nope: torch.Tensor,
    cache_k_rope: torch.Tensor,
) -> None:
    """Writes rows of two parts into one buffer; ``ops.write_latent_rope`` has the contract.

    Args:
      kv_buffer: ``[rows, 1, width]``, of floats, or of ``uint8`` if both parts are.
      loc: the row of each token, int32 or int64, distinct.
      cache_k_nope: ``[n, 1, _]`` or ``[n, _]``.
      cache_k_rope: likewise; the two widths add up to the buffer's.

    Raises:
      GeometryError: shapes do not fit, or ``kv_buffer`` is not contiguous.
      TypeError: a dtype does not fit.
      ValueError: something is on another device.

    Source: SGLang 0.4.8 (A-MLA-2), its faults excepted.
    """
    plane = _plane("kv_buffer", kv_buffer)
    slots = _slots("loc", loc, plane, distinct=True)
    parts = _parts(kv_buffer, slots, cache_k_nope=cache_k_nope, cache_k_rope=cache_k_rope)
    write_latent_rope(plane, 0, slots, *parts, first_slot=0)


def get_mla_kv_buffer_triton(
    kv_buffer: torch.Tensor, loc: torch.Tensor, nope_out: torch.Tensor, rope_out: torch.Tensor
) -> None:
    """Fills ``nope_out`` and ``rope_out`` with the two parts of the rows at ``loc``.

    Shapes and dtypes are as for ``set_mla_kv_buffer_triton``; each part is cast to the dtype of
    its output. Rows that are not there are zeros.

    Source: TokenSpeed (B-K-2).
    """
    plane = _plane("kv_buffer", kv_buffer)
    slots = _slots("loc", loc, plane)
    outputs = _parts(kv_buffer, slots, nope_out=nope_out, rope_out=rope_out)
    parts = read_latent_rope(plane, 0, slots, outputs[0].shape[-1], first_slot=0)
    for output, part in zip(outputs, parts, strict=True):
        output.copy_(narrow(part, output.dtype).view(output.shape))


def copy_all_layer_kv_cache(
    buffers: Sequence[torch.Tensor], tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Moves rows within each of ``buffers`` at once; ``ops.move_rows`` has the contract.

    Not upstream's signature: that is a kernel, started with tables of addresses and strides (those
    of ``k_buffer + v_buffer``), which say nothing of the buffers' ends. This takes the buffers.

    Args:
      buffers: ``[rows, *row]`` each, of one number of rows.
      tgt_loc: where each row goes, int32 or int64, distinct.
      src_loc: where each row comes from, as many.

    Raises:
      GeometryError: a buffer is not contiguous, or has another number of rows.
      ValueError: the two differ in length, or something is on another device.

    Source: SGLang 0.4.8 (A-MHA-17), its faults (A-MOVE) excepted.
    """
    if not buffers:
        return
    planes = [_plane(f"buffers[{i}]", buffer) for i, buffer in enumerate(buffers)]
    if len({(plane.shape[1], plane.device) for plane in planes}) > 1:
        found = [f"{plane.shape[1]} on {plane.device}" for plane in planes]
        raise GeometryError(f"buffers have {found} rows; need as many, on one device")
    dst = _slots("tgt_loc", tgt_loc, planes[0], distinct=True)
    src = _slots("src_loc", src_loc, planes[0])
    if len(dst) != len(src):
        raise ValueError(f"tgt_loc has {len(dst)} entries, src_loc {len(src)}; need as many")
    move_rows(planes, dst, src, first_slot=0)


def fused_downcast(
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    k_scale: Scale,
    v_scale: Scale,
    dtype: torch.dtype,
    store_dtype: torch.dtype,
    max_fp8: float,
    min_fp8: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V divided by their scales, clamped, cast to ``dtype`` and viewed as ``store_dtype``.

    The quotient is in float32; the arguments are not changed.

    Source: SGLang 0.4.7 (A-RM-10).
    """

    def downcast(name: str, values: torch.Tensor, scale: Scale) -> torch.Tensor:
        scale = as_scale(name, scale, values.device)
        if isinstance(scale, float):
            # By a tensor: by a number, torch multiplies with its inverse on GPU.
            scale = torch.full((), scale, dtype=torch.float32, device=values.device)
        quotient = values.float() if scale is None else values.float() / scale
        return narrow(quotient.clamp(min_fp8, max_fp8), dtype).view(store_dtype)

    return downcast("k_scale", cache_k, k_scale), downcast("v_scale", cache_v, v_scale)


def copy_two_array(
    loc: torch.Tensor,
    dst_1: torch.Tensor,
    src_1: torch.Tensor,
    dst_2: torch.Tensor,
    src_2: torch.Tensor,
    dtype: torch.dtype,
    store_dtype: torch.dtype,
) -> None:
    """Writes ``src_1`` into ``dst_1`` and ``src_2`` into ``dst_2``, both at ``loc``.

    Args:
      loc: the row of each token, int32 or int64, distinct.
      dst_1: ``[rows, *row]`` of ``store_dtype``.
      src_1: ``[n, *row]``, cast as ``ops.narrow`` says.
      dst_2: likewise.
      src_2: likewise.
      dtype: what the rows stand for.
      store_dtype: ``uint8`` where ``dtype`` is fp8, else ``dtype``.

    Raises:
      GeometryError: shapes or dtypes do not fit, or a ``dst`` is not contiguous.
      TypeError: a dtype is not of floats.
      ValueError: something is on another device.

    Source: SGLang 0.4.7 (A-RM-11).
    """
    writes = []
    for number, dst, src in ((1, dst_1, src_1), (2, dst_2, src_2)):
        if dst.dtype != store_dtype or store_dtype not in (dtype, *[torch.uint8] * (dtype in FP8)):
            raise GeometryError(f"dst_{number} is {dst.dtype}, {store_dtype=} for {dtype=}")
        plane = _plane(f"dst_{number}", dst.view(dtype))
        slots = _slots("loc", loc, plane, distinct=True)
        shape = (len(slots), *dst.shape[1:])
        writes.append((plane, slots, as_values(f"src_{number}", src, shape, plane.device)))
    for plane, slots, rows in writes:
        write_rows((plane,), 0, slots, (rows,), first_slot=0)


def _plane(name: str, buffer: torch.Tensor) -> torch.Tensor:
    """A buffer as the only layer of a plane; bits as fp8, for operations to copy."""
    if buffer.dim() < 2 or not buffer.is_contiguous():
        raise GeometryError(
            f"{name} has shape {list(buffer.shape)} and strides {buffer.stride()}, "
            "need [rows, *row], contiguous"
        )
    return _as_fp8(buffer).unsqueeze(0)


def _as_fp8(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.float8_e4m3fn) if values.dtype == torch.uint8 else values


def _slots(
    name: str, loc: torch.Tensor, plane: torch.Tensor, *, distinct: bool = False
) -> torch.Tensor:
    slots = as_slots(loc, plane.device, name=name).contiguous()
    check(slots, 0, plane.shape[1], name=name, distinct=distinct)
    return slots


def _parts(
    kv_buffer: torch.Tensor, slots: torch.Tensor, **parts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two named parts of rows of ``kv_buffer``, if they are such; bits as fp8."""
    widths = {name: part.shape[-1] for name, part in parts.items()}
    shape = list(kv_buffer.shape)
    if shape[1:] != [1, sum(widths.values())]:
        raise GeometryError(f"kv_buffer has shape {shape}, need [rows, 1, width] for {widths}")
    dtypes = {name: part.dtype for name, part in parts.items()} | {"kv_buffer": kv_buffer.dtype}
    if torch.uint8 in dtypes.values() and set(dtypes.values()) != {torch.uint8}:
        raise TypeError(f"dtypes are {dtypes}; need all uint8 or none")
    as_values("kv_buffer", _as_fp8(kv_buffer), kv_buffer.shape, kv_buffer.device)
    first, second = (
        as_values(
            name,
            _as_fp8(part),
            (len(slots), *[1] * (part.dim() - 2), widths[name]),
            kv_buffer.device,
        )
        for name, part in parts.items()
    )
    return first, second
