"""Pools inside ``torch.compile``: one graph, and the same as without."""

import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

from kvtorch.pools.quantized_mha import QuantizedMHATokenToKVPool
from tests.torch.pools import DEVICES, Layer, mha, mla, slots

DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
# What eager backends make of it says what it computes; inductor, also that it is code.
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def assert_same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def compare(make_pool, step, backend, device):
    loc = slots(5, 9, -1, device=device)
    eager, compiled = make_pool(), make_pool()
    torch._dynamo.reset()
    run = torch.compile(lambda loc: step(compiled, loc), backend=backend, fullgraph=True)
    assert_same(run(loc), step(eager, loc))
    assert_same(compiled.planes, eager.planes)
    assert any(plane.any() for plane in map(bits, compiled.planes))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values(dtype, backend, device):
    k, v = torch.linspace(-9, 9, 2 * 3 * 2 * 8, device=device).view(2, 3, 2, 8)

    def step(pool, loc):
        pool.set_kv_buffer(Layer(1), loc, k, v, 2.0)
        read = pool.get_key_buffer(1)[5:10].float()
        pool.move_kv_cache(loc + 1, loc)
        pool.set_kv_buffer(Layer(0), loc, v, k)
        return read, pool.get_value_buffer(0)[5:10].float()

    compare(lambda: mha(32, 4, dtype, 2, 8, 2, device), step, backend, device)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_rows(dtype, backend, device):
    latent, rope = torch.linspace(-9, 9, 3 * 24, device=device).view(3, 1, 24).split([16, 8], -1)

    def step(pool, loc):
        pool.set_mla_kv_buffer(Layer(1), loc, latent, rope)
        parts = pool.get_mla_kv_buffer(Layer(1), loc, torch.bfloat16)
        pool.move_kv_cache(loc + 1, loc)
        return *parts, pool.get_key_buffer(1)[5:10].float()

    compare(lambda: mla(32, 4, dtype, 16, 8, 2, device), step, backend, device)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("quantization", ["int8_per_token_head", "fp8_per_token_head"])
def test_quantised_keys_and_values(quantization, backend, device):
    k, v = torch.linspace(-9, 9, 2 * 3 * 2 * 8, device=device).view(2, 3, 2, 8)

    def step(pool, loc):
        pool.set_kv_buffer(Layer(1), loc, k, v)
        read_k, read_v = pool.get_mha_kv_buffer(Layer(1), loc, torch.float32)
        pool.move_kv_cache(loc + 1, loc)
        pool.set_kv_buffer(Layer(0), loc, read_v * 2, read_k)
        values, scales = pool.get_key_buffer(0)
        return *pool.get_mha_kv_buffer(Layer(0), loc), values[5:10].float() * scales[5:10]

    def make():
        options = {"head_num": 2, "head_dim": 8, "layer_num": 2, "quantization": quantization}
        return QuantizedMHATokenToKVPool(
            32, 4, torch.bfloat16, device=device, enable_memory_saver=False, **options
        )

    compare(make, step, backend, device)
