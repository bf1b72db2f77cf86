"""How many kernels a call launches, as the profiler sees it."""

import types

import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

from kvtorch import MHATokenToKVPool, MLATokenToKVPool, tokenspeed

PAGE_SIZE = 16
NUM_SLOTS = 8192
FIRST = types.SimpleNamespace(layer_id=0)


def mha(dtype):
    return MHATokenToKVPool(NUM_SLOTS, PAGE_SIZE, dtype, 8, 128, 3, "cuda", False)


def mla():
    return MLATokenToKVPool(NUM_SLOTS, PAGE_SIZE, torch.bfloat16, 512, 64, 3, "cuda", False)


def quantized():
    return tokenspeed.MLATokenToKVPool(
        size=NUM_SLOTS,
        model_dtype=torch.bfloat16,
        dtype=torch.float8_e4m3fn,
        quant_method="per_token_head",
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        layer_num=3,
        device="cuda",
        enable_memory_saver=False,
        max_batch_size=1,
        max_context_len=1,
        page_size=PAGE_SIZE,
        rank=0,
    )


def kv(num_tokens):
    return [torch.ones((num_tokens, 8, 128), dtype=torch.bfloat16, device="cuda")] * 2


def parts(num_tokens):
    return [
        torch.ones((num_tokens, 1, width), dtype=torch.bfloat16, device="cuda")
        for width in (512, 64)
    ]


CALLS = {
    "write K+V": (lambda: mha(torch.bfloat16), kv, "set_kv_buffer"),
    "write K+V, scaled to fp8": (
        lambda: mha(torch.float8_e5m2),
        lambda n: [*kv(n), 2.0, 3.0],
        "set_kv_buffer",
    ),
    "write latent+rope": (mla, parts, "set_mla_kv_buffer"),
    "read latent+rope": (mla, lambda _: [], "get_mla_kv_buffer"),
    "write quantised latent+rope": (quantized, parts, "set_mla_kv_buffer"),
    "read quantised latent+rope": (quantized, lambda _: [torch.bfloat16], "get_mla_kv_buffer"),
}
"""The pool, what a call is given besides layer and slots, and the method."""


def launched(call):
    """The names of the kernels and copies that a call launches; it is called once before."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [
        event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def some_slots(num_tokens):
    return PAGE_SIZE + torch.randperm(NUM_SLOTS, device="cuda")[:num_tokens]


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 64, 4096])
@pytest.mark.parametrize("name", CALLS)
def test_one_launch(name, num_tokens):
    make, arguments, method = CALLS[name]
    call = getattr(make(), method)
    inputs = FIRST, some_slots(num_tokens), *arguments(num_tokens)
    assert len(launched(lambda: call(*inputs))) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 64, 4096])
@pytest.mark.parametrize("disjoint", [False, True])
def test_one_launch_moves_every_layer_of_k_and_v(num_tokens, disjoint):
    pool = mha(torch.bfloat16)
    dst, src = some_slots(num_tokens), some_slots(num_tokens)
    assert len(launched(lambda: pool.move_kv_cache(dst, src, disjoint=disjoint))) == 1


@pytest.mark.gpu
def test_two_launches_are_counted():
    a, b = torch.ones(8, device="cuda"), torch.ones(8, device="cuda")
    assert len(launched(lambda: torch.add(a, b).neg_())) == 2
