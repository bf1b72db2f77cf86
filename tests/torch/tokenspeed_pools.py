"""TokenSpeed's pools as its engine makes them, with names for what tests vary."""

import torch

from kvtorch.tokenspeed import MHATokenToKVPool, MLATokenToKVPool

FP8 = torch.float8_e4m3fn
PER_TOKEN_HEAD = "per_token_head"


def mha(size=12, page_size=4, dtype=torch.bfloat16, heads=2, dim=4, layers=2, device="cpu", **more):
    return MHATokenToKVPool(
        size, dtype, heads, dim, layers, device, False, 8, 64, page_size, 0, **more
    )


def plain(
    size=12, page_size=4, dtype=torch.bfloat16, lora=4, rope=3, layers=2, device="cpu", **more
):
    return MLATokenToKVPool(
        *(size, torch.bfloat16, dtype, more.pop("quant_method", None), lora, rope, layers, device),
        *(False, 8, 64, page_size, 0),
        **more,
    )


def quantized(
    size=12, page_size=4, model=torch.bfloat16, lora=4, rope=3, layers=2, device="cpu", **more
):
    return MLATokenToKVPool(
        *(size, model, more.pop("dtype", FP8), PER_TOKEN_HEAD, lora, rope, layers, device),
        *(False, 8, 64, page_size, 0),
        **more,
    )


KINDS = {"mha": mha, "mla": plain, "mla, quantised": quantized}
