"""Casts values to what a plane stores."""

import torch

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

type Scale = float | torch.Tensor | None


def narrow(values: torch.Tensor, dtype: torch.dtype, scale: Scale = None) -> torch.Tensor:
    """Returns ``values / scale`` in ``dtype``; the very tensor if it has that dtype already.

    Values of ``dtype`` keep their bits, and the scale is ignored. Else the division is done in
    float32 and rounded once, and the cast rounds to nearest even. A cast to fp8 saturates at the
    largest finite value, infinities included; NaN stays NaN.

    Source: SGLang 0.4.8 ``set_kv_buffer`` (A-MHA-14), overflow settled here (A-FP8).
    """
    if values.dtype == dtype:
        return values
    if scale is not None:
        # A number on the host, or a tensor there, would be made a multiplication by its inverse.
        scale = torch.as_tensor(scale, dtype=torch.float32, device=values.device)
        values = values.float() / scale.reshape(())
    if dtype in FP8:
        limit = torch.finfo(dtype).max
        values = values.float().clamp(-limit, limit)
    return values.to(dtype)


def bits(plane: torch.Tensor) -> torch.Tensor:
    """``plane`` as torch can index it: fp8 as ``uint8``, sharing memory."""
    return plane.view(torch.uint8) if plane.dtype in FP8 else plane
