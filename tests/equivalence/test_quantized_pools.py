"""kvjax and kvtorch agree bit for bit with NumPy on quantised pools, in any order of calls."""

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

from kvjax import LayerRange, MHAGeometry, MLAGeometry
from kvjax.geometry import KV_QUANTIZATIONS
from kvtorch.pools.quantized_mha import QuantizedMHATokenToKVPool
from tests.equivalence.kvjax_peer import KvjaxPeer
from tests.equivalence.machine import CALLS, Case, drive, finds
from tests.equivalence.peers import Peer
from tests.equivalence.torch_peer import TorchPeer
from tests.interop.torch_pools import zero_pool

INT8, FP8 = KV_QUANTIZATIONS


def heads(quantization, dtype, **sizes):
    small = MHAGeometry(20, 4, LayerRange(2, 5), 2, 16, dtype, quantization=quantization)
    return dataclasses.replace(small, **sizes)


def latent(dtype, **sizes):
    small = MLAGeometry(20, 4, LayerRange(2, 5), 128, 16, dtype, quantization="per_token_head")
    return dataclasses.replace(small, **sizes)


QUICK = {
    "heads-int8": Case(heads(INT8, "bfloat16", v_head_dim=24), ("float32",)),
    "heads-fp8": Case(heads(FP8, "float16"), ("float32",)),
    "latent": Case(latent("bfloat16"), ("float32",)),
}
MODELS = ("float32", "bfloat16", "float16")
ODD = {
    "num_kv_heads": 3,
    "head_dim": 5,
    "v_head_dim": 1,
    "page_size": 1,
    "layers": LayerRange(0, 1),
}
ALL = {
    **{
        f"heads-{quantization}-{dtype}": Case(heads(quantization, dtype), MODELS, (0, 1, 5, 17))
        for quantization in KV_QUANTIZATIONS
        for dtype in MODELS
    },
    **{f"latent-{dtype}": Case(latent(dtype), MODELS, (0, 1, 5, 17)) for dtype in MODELS[:2]},
    **{f"heads-odd-{name}": Case(heads(name, "bfloat16", **ODD)) for name in KV_QUANTIZATIONS},
    "latent-odd": Case(latent("float32", latent_dim=100, rope_dim=28, page_size=10)),
}
ON_GPU = {  # few shapes: kvjax compiles a kernel for each, in most of a second
    "heads-int8": Case(heads(INT8, "bfloat16", head_dim=64, v_head_dim=128), (), sizes=(5,)),
    "heads-fp8": Case(heads(FP8, "float16"), ("float32",), sizes=(5,)),
    "latent": Case(latent("bfloat16"), (), sizes=(5,)),
}


def both(geometry, device="cpu"):
    run_by = "reference" if device == "cpu" else "mosaic_gpu"

    def make(planes):
        return {
            "kvjax": KvjaxPeer(geometry, planes, run_by),
            "kvtorch": TorchPeer(geometry, planes, zero_pool(geometry, device)),
        }

    return make


@pytest.mark.parametrize("name", QUICK)
def test_everybody_agrees(name):
    case = QUICK[name]
    num_steps = drive(case, both(case.geometry), max_examples=4, stateful_step_count=CALLS)
    assert num_steps >= CALLS  # some examples are short


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_everybody_agrees_for_long(name):
    case = ALL[name]
    num_steps = drive(case, both(case.geometry), max_examples=24, stateful_step_count=CALLS)
    assert num_steps >= 15 * CALLS


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_everybody_agrees_on_a_gpu(name):
    case = ON_GPU[name]
    peers = both(case.geometry, "cuda")
    assert drive(case, peers, max_examples=4, stateful_step_count=25) >= 25


class LeavesTheScaleBehind(QuantizedMHATokenToKVPool):
    def move_kv_cache(self, tgt_loc, src_loc, **more):
        kept = self.planes[3].clone()
        super().move_kv_cache(tgt_loc, src_loc, **more)
        self.planes[3].copy_(kept)


class RoundsFirst(QuantizedMHATokenToKVPool):
    def set_kv_buffer(self, layer, loc, cache_k, cache_v, *scales):
        super().set_kv_buffer(layer, loc, cache_k.to(self.dtype), cache_v, *scales)


class ReadsByWayOfTheModelsDtype(QuantizedMHATokenToKVPool):
    def get_mha_kv_buffer(self, layer, loc, dst_dtype=None):
        k, v = super().get_mha_kv_buffer(layer, loc)
        return k.to(dst_dtype or k.dtype), v.to(dst_dtype or v.dtype)


class DecidesAScaleForAllHeads(QuantizedMHATokenToKVPool):
    def set_kv_buffer(self, layer, loc, cache_k, cache_v, *scales):
        super().set_kv_buffer(layer, loc, cache_k, cache_v, *scales)
        there = loc[(loc >= self.page_size) & (loc < self.size + self.page_size)].long()
        of_layer = self.k_scale_buffer[layer.layer_id - self.start_layer]
        of_layer[there] = of_layer[there].amax(1, keepdim=True).expand(-1, self.head_num, -1)


class CorruptsAScale(QuantizedMHATokenToKVPool):
    def set_kv_buffer(self, layer, loc, cache_k, cache_v, *scales):
        super().set_kv_buffer(layer, loc, cache_k, cache_v, *scales)
        self.planes[1].view(torch.int32)[-1, -1, -1] ^= 1


class StoresTheLowestOfInt8(QuantizedMHATokenToKVPool):
    def set_kv_buffer(self, layer, loc, cache_k, cache_v, *scales):
        super().set_kv_buffer(layer, loc, cache_k, cache_v, *scales)
        self.planes[0][self.planes[0] == -127] = -128


MUTANTS = [
    mutant
    for mutant in vars().values()
    if QuantizedMHATokenToKVPool in getattr(mutant, "__bases__", ())
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_pool_is_caught(mutant):
    geometry = heads(INT8, "bfloat16")

    def make(planes) -> dict[str, Peer]:
        pool = mutant(20, 4, torch.bfloat16, 2, 16, 3, "cpu", False, 2, quantization=INT8)
        return {"wrong": TorchPeer(geometry, planes, pool)}

    assert finds(Case(geometry), make)


class ForgetsScales(KvjaxPeer):
    def scatter(self, slots, rows):
        super().scatter(slots, [rows[0], np.ones_like(rows[1]), rows[2]])


def test_a_wrong_function_is_caught():
    geometry = latent("bfloat16")
    assert finds(
        Case(geometry, (), (5,)), lambda planes: {"wrong": ForgetsScales(geometry, planes)}
    )
