"""What the Triton kernels share: their launch, how rows lie in memory, how values narrow."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import cuda

MAX_ROW_ELEMENTS = 65536
"""A program holds at least one row; Triton allows it 2^20 elements."""

FEW_TOKENS = 512
"""Up to so many tokens each is a program of its own."""

E4M3FN_MAX = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)
E5M2_MAX = tl.constexpr(torch.finfo(torch.float8_e5m2).max)

_IS_ROCM = torch.version.hip is not None

_compiled: dict[Any, Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    key: Any,
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[Any],
    num_warps: int = 4,
) -> None:
    """Launches ``kernel`` without asking Triton again what it compiled for the same ``key``.

    To find that out from the arguments costs Triton 13 us of host time, more than everything else
    that a call does (Triton 3.6, host of an H200).

    Args:
      kernel: a ``triton.jit`` function, which calls ``begin(EARLY)`` first. Its parameters are
        the tensors, the numbers, and ``EARLY``.
      grid: how many programs.
      key: what tells two compilations apart, but for where tensors start: dtypes, constants.
      tensors: on one device; the first says on which.
      numbers: constants included.
      num_warps: of each program.
    """
    index = tensors[0].device.index
    if index is not None and index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            return launch(kernel, grid, key, tensors, numbers, num_warps)
    pointers = [tensor.data_ptr() for tensor in tensors]
    together = 0
    for pointer in pointers:
        together |= pointer
    # Triton compiles for what starts where wide loads can, and for what does not.
    aligned = together % 16 == 0 or tuple([pointer % 16 == 0 for pointer in pointers])
    full_key = (kernel, index, num_warps, key, aligned)
    found = _compiled.get(full_key)
    if found is None:  # always so in Triton's interpreter
        early = _starts_early(index)
        options = {"launch_pdl": True} if early else {}
        compiled = kernel[grid](*tensors, *numbers, early, num_warps=num_warps, **options)
        _compiled[full_key] = None if compiled is None else (compiled, early)
        return None
    compiled, early = found
    stream = torch._C._cuda_getCurrentRawStream(index)
    hooks = knobs.runtime
    if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        compiled[grid](*pointers, *numbers, early, stream=stream)
    else:  # and no time for what hooks are told
        what = (compiled.function, compiled.packed_metadata)
        compiled.run(*grid, stream, *what, None, None, None, *pointers, *numbers, early)
    return None


@functools.cache
def _starts_early(index: int | None) -> bool:
    """Whether the device can start a kernel before the one in front of it has ended (Hopper on)."""
    return index is not None and torch.cuda.get_device_capability(index) >= (9, 0)


@triton.jit
def begin(EARLY: tl.constexpr):
    """Lets what is launched next start, and wait likewise; waits for what was launched before.

    In this order: the other way round, a chain of small kernels takes 0.1 us longer each (H200).

    Source: CUDA's programmatic dependent launch.
    """
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``; Triton's own takes 3 us."""
    return 1 << (number - 1).bit_length() if number > 1 else 1


def why_not(*tensors: torch.Tensor) -> str | None:
    """Why no kernel can run on these tensors, or ``None``."""
    if _IS_ROCM:  # whose devices torch calls CUDA devices, too
        return "needs an NVIDIA GPU, this torch is built for ROCm"
    for tensor in tensors:
        if not tensor.is_cuda:
            return f"needs tensors on a CUDA device, one is on {tensor.device}"
    return None


def why_not_rows(planes: Sequence[torch.Tensor]) -> str | None:
    """Why no kernel over whole rows of these planes can run, or ``None``."""
    for plane in planes:
        if (width := plane.stride()[1]) > MAX_ROW_ELEMENTS:
            return f"takes rows of up to {MAX_ROW_ELEMENTS} elements, not {width}"
    return why_not(*planes)


@functools.lru_cache(maxsize=1024)
def of_parts(latent_dim: int, rope_dim: int, tile: int, few: bool) -> tuple[int, ...]:
    """Widths, their blocks, and tokens a program, where programs copy latents and ropes.

    Args:
      latent_dim, rope_dim: the widths.
      tile: elements of the wider one that a program copies.
      few: whether each token is a program of its own.
    """
    blocks = power_of_two(latent_dim), power_of_two(rope_dim)
    return latent_dim, rope_dim, *blocks, 1 if few else max(1, tile // max(blocks))


def as_rows(values: torch.Tensor, width: int) -> tuple[torch.Tensor, int, Any]:
    """``[n, *row]`` with each row contiguous, their stride, and what of that is compiled for."""
    if values.is_contiguous():
        return values, width, None
    values = in_rows(values, values.dim() - 1)
    stride = values.stride()[0]
    return values, stride, (stride % 16 == 0, stride == 1)


def in_rows(values: torch.Tensor, num_row_dims: int) -> torch.Tensor:
    """``values`` with each row contiguous, so that strides say where rows begin; a copy if not."""
    expected = 1
    for dim in range(values.dim() - 1, values.dim() - 1 - num_row_dims, -1):
        if values.shape[dim] != 1 and values.stride(dim) != expected:
            return values.contiguous()
        expected *= values.shape[dim]
    return values


@triton.jit
def divided(values, scale, KIND: tl.constexpr):
    """``values / scale`` in float32, rounded once. KIND: 0 no scale, 1 a number, 2 a tensor."""
    if KIND == 1:
        values = tl.div_rn(values.to(tl.float32), scale)
    elif KIND == 2:
        values = tl.div_rn(values.to(tl.float32), tl.load(scale).to(tl.float32))
    return values


@triton.jit
def widened(values):
    """``values`` in float32; fp8 through float16, the only way from e5m2 that keeps its NaNs."""
    if values.dtype.is_fp8():
        values = values.to(tl.float16)
    return values.to(tl.float32)


@triton.jit
def narrowed(values, dtype: tl.constexpr):
    """``values`` in ``dtype``: fp8 saturates at its largest finite value, NaN stays NaN."""
    if values.dtype.is_fp8():  # Triton's own way from e5m2 to bfloat16 makes numbers of its NaNs
        values = widened(values)
    if dtype == tl.float8e4nv:
        values = values.to(tl.float32)
        values = tl.clamp(values, -E4M3FN_MAX, E4M3FN_MAX, propagate_nan=tl.PropagateNan.ALL)
    elif dtype == tl.float8e5:
        values = values.to(tl.float32)
        values = tl.clamp(values, -E5M2_MAX, E5M2_MAX, propagate_nan=tl.PropagateNan.ALL)
    return values.to(dtype)
