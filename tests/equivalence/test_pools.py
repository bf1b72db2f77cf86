"""kvjax, kvtorch and SGLang agree bit for bit with NumPy, whatever is done in whatever order."""

import dataclasses

import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

from kvjax import LayerRange, MHAGeometry, MLAGeometry
from kvjax.geometry import DTYPE_BYTES
from kvtorch.pools.mha import MHATokenToKVPool
from kvtorch.pools.mla import MLATokenToKVPool
from tests.equivalence.kvjax_peer import KvjaxPeer
from tests.equivalence.machine import CALLS, Case, drive, finds
from tests.equivalence.sglang_peer import SglangPeer
from tests.equivalence.torch_peer import TorchPeer
from tests.equivalence.upstream import require_sglang, sglang


def mha(dtype, v_dtype=None, **sizes):
    small = MHAGeometry(20, 4, LayerRange(2, 5), 2, 16, dtype, None, v_dtype)
    return dataclasses.replace(small, **{"v_head_dim": sizes.get("head_dim", 16)} | sizes)


def mla(dtype, **sizes):
    return dataclasses.replace(MLAGeometry(20, 4, LayerRange(2, 5), 128, 16, dtype), **sizes)


QUICK = {
    "mha-float16": Case(mha("float16"), ("float32",)),
    "mha-float8_e5m2": Case(mha("float8_e5m2"), ("float32",)),
    "mha-bfloat16+float8_e4m3fn": Case(mha("bfloat16", "float8_e4m3fn"), ("float32",)),
    "mla-bfloat16": Case(mla("bfloat16"), ("float16",)),
    "mla-float8_e4m3fn": Case(mla("float8_e4m3fn"), ("bfloat16",)),
}
ALL = {
    **{f"mha-{dtype}": Case(mha(dtype), sizes=(0, 1, 5, 17)) for dtype in DTYPE_BYTES},
    **{f"mla-{dtype}": Case(mla(dtype), sizes=(0, 1, 5, 17)) for dtype in DTYPE_BYTES},
    "mha-float8_e5m2+float32": Case(mha("float8_e5m2", "float32", v_head_dim=24)),
    "mha-odd": Case(mha("bfloat16", num_kv_heads=3, head_dim=5, page_size=1, layers=1)),
    "mla-odd": Case(mla("float16", latent_dim=100, rope_dim=28, page_size=10, layers=2)),
    "mla-no-rope": Case(mla("bfloat16", latent_dim=64, rope_dim=0)),
}
ON_GPU = {  # few shapes: kvjax compiles a kernel for each, in most of a second
    "mha-float8_e4m3fn": Case(mha("float8_e4m3fn"), ("float32",), sizes=(5,)),
    "mha-bfloat16+float8_e5m2": Case(mha("bfloat16", "float8_e5m2"), ()),
    "mla-bfloat16": Case(mla("bfloat16"), ("float16",), sizes=(5,)),
}


def torch_pool(classes, geometry, device="cpu"):
    """A pool of SGLang's constructor."""
    first = (geometry.num_slots, geometry.page_size, getattr(torch, geometry.dtype))
    layers = geometry.layers
    last = (len(layers), device, False, layers.start, layers.stop)
    if isinstance(geometry, MLAGeometry):
        return classes[1](*first, geometry.latent_dim, geometry.rope_dim, *last)
    other = {}
    if geometry.v_dtype != geometry.dtype:
        other["v_dtype"] = getattr(torch, geometry.v_dtype)
    if geometry.v_head_dim != geometry.head_dim:
        other["v_head_dim"] = geometry.v_head_dim
    return classes[0](*first, geometry.num_kv_heads, geometry.head_dim, *last, **other)


def all_peers(geometry, device="cpu"):
    classes = sglang()
    is_upstreams_too = not isinstance(geometry, MHAGeometry) or (
        (geometry.dtype, geometry.head_dim) == (geometry.v_dtype, geometry.v_head_dim)
    )

    def make(planes):
        run_by = "reference" if device == "cpu" else "mosaic_gpu"
        ours = torch_pool((MHATokenToKVPool, MLATokenToKVPool), geometry, device)
        peers = {
            "kvjax": KvjaxPeer(geometry, planes, run_by),
            "kvtorch": TorchPeer(geometry, planes, ours),
        }
        if is_upstreams_too and not isinstance(classes, str):
            theirs = (classes.MHATokenToKVPool, classes.MLATokenToKVPool)
            pool = torch_pool(theirs, geometry, device)
            peers["sglang"] = SglangPeer(geometry, planes, pool)
        return peers

    return make


def test_sglang_is_compared_too():
    """The tests below leave it out, and this one says why, where it cannot be had."""
    require_sglang()


@pytest.mark.parametrize("name", QUICK)
def test_everybody_agrees(name):
    case = QUICK[name]
    num_steps = drive(case, all_peers(case.geometry), max_examples=4, stateful_step_count=CALLS)
    assert num_steps >= CALLS  # some examples are short


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_everybody_agrees_for_long(name):
    case = ALL[name]
    num_steps = drive(case, all_peers(case.geometry), max_examples=24, stateful_step_count=CALLS)
    assert num_steps >= 15 * CALLS


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_everybody_agrees_on_a_gpu(name):
    case = ON_GPU[name]
    peers = all_peers(case.geometry, "cuda")
    assert drive(case, peers, max_examples=4, stateful_step_count=25) >= 25


class WrapsNegativeSlots(MHATokenToKVPool):
    def set_kv_buffer(self, layer, loc, *args):
        super().set_kv_buffer(layer, torch.where(loc < 0, loc + len(self.k_buffer[0]), loc), *args)


class WritesToThePaddingPage(MHATokenToKVPool):
    def set_kv_buffer(self, layer, loc, k, *args):
        super().set_kv_buffer(layer, loc, k, *args)
        padding = ((loc >= 0) & (loc < self.page_size)).nonzero()[:, 0]
        buffer = self.get_key_buffer(layer.layer_id)
        buffer[loc[padding].long()] = k[padding].to(buffer.dtype)


class IgnoresTheScaleOfV(MHATokenToKVPool):
    def set_kv_buffer(self, layer, loc, k, v, k_scale=None, v_scale=None):
        super().set_kv_buffer(layer, loc, k, v, k_scale, k_scale)


class DividesInTheCallersDtype(MHATokenToKVPool):
    def set_kv_buffer(self, layer, loc, k, v, k_scale=None, v_scale=None):
        if k.dtype == torch.bfloat16 and k_scale is not None:
            k, k_scale = k / k_scale, None
        super().set_kv_buffer(layer, loc, k, v, k_scale, v_scale)


class DividesInPlace(MHATokenToKVPool):
    def set_kv_buffer(self, layer, loc, k, v, k_scale=None, v_scale=None):
        super().set_kv_buffer(layer, loc, k, v, k_scale, v_scale)
        if k.dtype == torch.float32 and k_scale is not None:
            k.div_(k_scale)


class RoundsTwice(MHATokenToKVPool):
    def set_kv_buffer(self, layer, loc, k, v, k_scale=None, v_scale=None):
        if k.dtype == torch.float32 and k_scale is None:
            k = k.bfloat16()
        super().set_kv_buffer(layer, loc, k, v, k_scale, v_scale)


class OverflowsToInfinity(MHATokenToKVPool):
    def set_kv_buffer(self, layer, loc, k, v, k_scale=None, v_scale=None):
        if k.dtype == torch.bfloat16 and k_scale is None:
            k = k.to(self.dtype)
        super().set_kv_buffer(layer, loc, k, v, k_scale, v_scale)


class ForgetsVInAMove(MHATokenToKVPool):
    def move_kv_cache(self, tgt_loc, src_loc, *, disjoint=False):
        kept = self.planes[1].clone()
        super().move_kv_cache(tgt_loc, src_loc, disjoint=disjoint)
        self.planes[1].copy_(kept)


class MovesOneByOne(MHATokenToKVPool):
    def move_kv_cache(self, tgt_loc, src_loc, *, disjoint=False):
        for tgt, src in zip(tgt_loc.split(1), src_loc.split(1), strict=True):
            super().move_kv_cache(tgt, src)


class HandsOutCopies(MHATokenToKVPool):
    def get_value_buffer(self, layer_id):
        return super().get_value_buffer(layer_id).clone()


class ReadsTheLastRowForAbsentOnes(MHATokenToKVPool):
    def get_flat_data(self, indices):
        return super().get_flat_data(indices.clamp(max=self.size + self.page_size - 1))


class OffloadsLate(MHATokenToKVPool):
    def get_cpu_copy(self, indices):
        self.offloaded = indices
        return super().get_cpu_copy(indices)

    def load_cpu_copy(self, kv_cache_cpu, indices):
        super().load_cpu_copy(super().get_cpu_copy(self.offloaded), indices)


class RestoresTheLayersInReverse(MHATokenToKVPool):
    def load_cpu_copy(self, kv_cache_cpu, indices):
        super().load_cpu_copy(kv_cache_cpu[::-1], indices)


class CountsBytesOfASlotForThoseOfAPage(MHATokenToKVPool):
    def get_contiguous_buf_infos(self):
        addresses, lengths, pages = super().get_contiguous_buf_infos()
        return addresses, lengths, [page // self.page_size for page in pages]


class IgnoresTheFirstLayer(MLATokenToKVPool):
    def set_mla_kv_buffer(self, layer, *args):
        local = self.start_layer + layer.layer_id % self.layer_num
        super().set_mla_kv_buffer(type(layer)(local), *args)


class CastsTheRopeLikeTheLatent(MLATokenToKVPool):
    def set_mla_kv_buffer(self, layer, loc, cache_k_nope, cache_k_rope):
        super().set_mla_kv_buffer(layer, loc, cache_k_nope, cache_k_rope.to(cache_k_nope.dtype))


class PutsTheRopeFirst(MLATokenToKVPool):
    def get_mla_kv_buffer(self, layer, loc, dst_dtype=None):
        latent, rope = super().get_mla_kv_buffer(layer, loc, dst_dtype)
        rows = torch.cat([rope.view(torch.uint8), latent.view(torch.uint8)], -1).view(latent.dtype)
        return rows.split([latent.shape[-1], rope.shape[-1]], -1)


OF_MHA = [
    mutant for mutant in vars().values() if MHATokenToKVPool in getattr(mutant, "__bases__", ())
]
OF_MLA = [
    mutant for mutant in vars().values() if MLATokenToKVPool in getattr(mutant, "__bases__", ())
]


class IgnoresScales(KvjaxPeer):
    def write(self, layer_id, slots, values, scales, layout):
        super().write(layer_id, slots, values, [None] * len(scales), layout)


@pytest.mark.parametrize("mutant", [*OF_MHA, *OF_MLA], ids=lambda mutant: mutant.__name__)
def test_a_wrong_pool_is_caught(mutant):
    geometry = mla("bfloat16") if mutant in OF_MLA else mha("float8_e5m2")

    def make(planes):
        return {"wrong": TorchPeer(geometry, planes, torch_pool([mutant] * 2, geometry))}

    assert finds(Case(geometry, sizes=(5,)), make)


def test_a_wrong_function_is_caught():
    geometry = mha("float16")
    assert finds(Case(geometry), lambda planes: {"wrong": IgnoresScales(geometry, planes)})
