"""TokenSpeed's functions on single buffers, for who calls them without a pool.

What ``pools.functions`` says holds here too. Upstream's ``enable_pdl`` asks for programmatic
dependent launch, of which results do not depend. Kernels here are launched so on every device that
can, and each waits for all that was launched before it; ``enable_pdl`` changes nothing about that.
"""

from collections.abc import Sequence

import torch

from kvtorch.pools import functions


def set_mla_kv_buffer_triton(
    kv_buffer: torch.Tensor,
    loc: torch.Tensor,
    cache_k_nope: torch.Tensor,
    cache_k_rope: torch.Tensor,
    enable_pdl: bool = False,
) -> None:
    """Writes rows of two parts into one buffer; ``ops.write_latent_rope`` has the contract.

    Args:
      kv_buffer: ``[rows, 1, width]`` or ``[rows, width]``, of floats, or of ``uint8`` if both
        parts are.
      loc: the row of each token, int32 or int64, distinct.
      cache_k_nope: ``[n, 1, _]`` or ``[n, _]``.
      cache_k_rope: likewise; the two widths add up to the buffer's.
      enable_pdl: upstream's hint; the device decides.

    Raises:
      GeometryError: shapes do not fit, or ``kv_buffer`` is not contiguous.
      TypeError: a dtype does not fit.
      ValueError: something is on another device.

    Source: TokenSpeed (B-K-1), its faults excepted.
    """
    del enable_pdl
    functions.set_mla_kv_buffer_triton(_with_head(kv_buffer), loc, cache_k_nope, cache_k_rope)


def get_mla_kv_buffer_triton(
    kv_buffer: torch.Tensor,
    loc: torch.Tensor,
    cache_k_nope: torch.Tensor,
    cache_k_rope: torch.Tensor,
    enable_pdl: bool = False,
) -> None:
    """Fills ``cache_k_nope`` and ``cache_k_rope`` with the two parts of the rows at ``loc``.

    Shapes, dtypes and ``enable_pdl`` are as for ``set_mla_kv_buffer_triton``; each part is cast to
    the dtype of its output. Rows that are not there are zeros.

    Source: TokenSpeed (B-K-2).
    """
    del enable_pdl
    functions.get_mla_kv_buffer_triton(_with_head(kv_buffer), loc, cache_k_nope, cache_k_rope)


def move_kv_cache_native(
    k_buffer: Sequence[torch.Tensor],
    v_buffer: Sequence[torch.Tensor],
    tgt_loc: torch.Tensor,
    src_loc: torch.Tensor,
) -> None:
    """Moves rows within each of the buffers at once; ``ops.move_rows`` has the contract.

    Args:
      k_buffer: ``[rows, *row]`` each, of one number of rows.
      v_buffer: likewise, of the same.
      tgt_loc: where each row goes, int32 or int64, of any shape, distinct.
      src_loc: where each row comes from, as many.

    Raises:
      GeometryError: a buffer is not contiguous, or has another number of rows.
      ValueError: the two differ in length, or something is on another device.

    Source: TokenSpeed (B-M-9).
    """
    functions.copy_all_layer_kv_cache([*k_buffer, *v_buffer], tgt_loc.flatten(), src_loc.flatten())


def copy_all_layer_kv_cache_tiled(
    buffers: Sequence[torch.Tensor], tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Moves rows within each of ``buffers`` at once, as ``move_kv_cache_native`` does.

    Not upstream's signature: that is a kernel, started with tables of addresses and strides, which
    say nothing of the buffers' ends, and with tiles that this chooses itself. This takes the
    buffers, such as ``k_buffer + v_buffer``.

    Source: TokenSpeed (B-M-8), its faults (S5) excepted.
    """
    functions.copy_all_layer_kv_cache(buffers, tgt_loc.flatten(), src_loc.flatten())


def _with_head(kv_buffer: torch.Tensor) -> torch.Tensor:
    return kv_buffer.unsqueeze(1) if kv_buffer.dim() == 2 else kv_buffer
