"""TokenSpeed's own pools and ours agree in any order of calls, and kvtorch's in their names."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

from kvtorch import tokenspeed as ours
from tests.equivalence.kvjax_peer import KvjaxPeer
from tests.equivalence.test_public_names import differences, may_be_called_alike
from tests.equivalence.tokenspeed_machine import (
    CASES,
    E4M3,
    LATENT,
    LAYERS,
    assert_same,
    drive,
    machine,
)
from tests.equivalence.upstream_tokenspeed import require_tokenspeed
from tests.torch.pools import Counter

WITH_KVJAX = {"quantised-bfloat16", "quantised-float32-kernel", "mha-e5m2", "mla-e4m3fn"}
"""Cases that kvjax is in; for one more it compiles for some seconds. NumPy is in all."""


@pytest.mark.parametrize("case", CASES)
def test_all_do_the_same(case):
    kvjax_peer = KvjaxPeer if case in WITH_KVJAX else None
    pools = machine(require_tokenspeed(), case, kvjax_peer=kvjax_peer)
    drive(pools, max_examples=5)
    assert pools.num_steps >= 30


# 512 tokens and more are another kernel's.
@pytest.mark.parametrize(
    "num_tokens, dtype", [(1, torch.uint8), (5, torch.bfloat16), (513, torch.bfloat16)]
)
def test_functions_do_the_same(num_tokens, dtype):
    results = []
    for functions in (ours, require_tokenspeed()):
        generator = torch.Generator().manual_seed(num_tokens)
        loc, other = torch.randperm(1200, generator=generator)[: 2 * num_tokens].view(2, -1)
        rows = torch.randint(256, (num_tokens, 1, LATENT + 16), generator=generator).to(dtype)
        parts = [part.contiguous() for part in rows.split([LATENT, 16], -1)]
        buffer = torch.full((1200, 1, LATENT + 16), 7, dtype=dtype)
        functions.set_mla_kv_buffer_triton(buffer, loc, *parts)
        found = [torch.empty_like(part) for part in parts]
        functions.get_mla_kv_buffer_triton(buffer, loc.flip(0), *found)
        k, v = [buffer.clone()], [buffer + 1]
        functions.move_kv_cache_native(k, v, torch.stack([loc, other]), torch.stack([other, loc]))
        results.append([buffer, *found, *k, *v])
    assert_same(*results)
    assert not torch.equal(results[0][0], results[0][3])


class IgnoresTheNamedLayer(ours.MHATokenToKVPool):
    def set_kv_buffer(self, layer, loc, k, v, k_scale=None, v_scale=None, layer_id_override=None):
        super().set_kv_buffer(layer, loc, k, v, k_scale, v_scale)


class IgnoresTheScaleOfV(ours.MHATokenToKVPool):
    def set_kv_buffer(self, layer, loc, k, v, k_scale=None, v_scale=None, layer_id_override=None):
        super().set_kv_buffer(layer, loc, k, v, k_scale, k_scale, layer_id_override)


class HandsOutCopies(ours.MHATokenToKVPool):
    def get_value_buffer(self, layer_id):
        return super().get_value_buffer(layer_id).clone()


class WaitsForNoLayer(ours.MHATokenToKVPool):
    def register_layer_transfer_counter(self, layer_transfer_counter):
        self.layer_transfer_counter = Counter()
        self.layer_transfer_counter.wait_until = lambda _: None


class PutsTheRopeFirst(ours.MLATokenToKVPool):
    def set_mla_kv_buffer(self, layer, loc, cache_k_nope, cache_k_rope):
        rows = torch.cat([cache_k_rope, cache_k_nope], -1)
        super().set_kv_buffer(layer, loc, rows, None)


class MovesOneByOne(ours.MHATokenToKVPool):
    def move_kv_cache(self, tgt_loc, src_loc, **more):
        for tgt, src in zip(tgt_loc.split(1), src_loc.split(1), strict=True):
            super().move_kv_cache(tgt, src)


class CutsCopiesElsewhere(ours.MLATokenToKVPool):
    def get_cpu_copy(self, token_indices):
        self.offload_chunk_page_num = 1024
        return super().get_cpu_copy(token_indices)


class LeavesTheScaleBehind(ours.MLATokenToKVPool):
    def move_kv_cache(self, tgt_loc, src_loc, **more):
        kept = self.planes[1].clone()
        super().move_kv_cache(tgt_loc, src_loc, **more)
        self.planes[1].copy_(kept)


class LeavesTheRopeUndivided(ours.MLATokenToKVPool):
    def set_kv_buffer(self, layer, loc, cache_k, cache_v, k_scale=None, v_scale=None):
        super().set_kv_buffer(layer, loc, cache_k, cache_v)
        self.planes[2][layer.layer_id, loc.long()] = cache_k[..., LATENT:].to(self.model_dtype)


class TellsTheLayersOneByOne(ours.MLATokenToKVPool):
    def get_contiguous_buf_infos(self):
        infos = super().get_contiguous_buf_infos()
        return tuple([of[i % 3 * LAYERS + i // 3] for i in range(len(of))] for of in infos)


MUTANTS = {
    IgnoresTheNamedLayer: "mha-bfloat16",
    IgnoresTheScaleOfV: "mha-e5m2",
    HandsOutCopies: "mha-bfloat16",
    WaitsForNoLayer: "mha-bfloat16",
    PutsTheRopeFirst: "mla-e4m3fn",
    MovesOneByOne: "mha-bfloat16",
    CutsCopiesElsewhere: "quantised-bfloat16",
    LeavesTheScaleBehind: "quantised-bfloat16",
    LeavesTheRopeUndivided: "quantised-bfloat16",
    TellsTheLayersOneByOne: "quantised-bfloat16",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_pool_is_caught(mutant):
    pools = machine(require_tokenspeed(), MUTANTS[mutant], mutant)
    with pytest.raises(AssertionError):
        drive(pools, max_examples=60, derandomize=True, database=None, report_multiple_bugs=False)


class ScalesAnew(KvjaxPeer):
    def move(self, dst, src, disjoint):
        super().move(dst, src, disjoint)
        latents, scales, ropes = self.gather(dst)
        super().scatter(dst, [latents, np.ones_like(scales), ropes])


def test_a_wrong_peer_is_caught():
    pools = machine(require_tokenspeed(), "quantised-bfloat16", kvjax_peer=ScalesAnew)
    with pytest.raises(AssertionError):
        drive(pools, max_examples=60, derandomize=True, database=None, report_multiple_bugs=False)


DIFFERENT = {  # on purpose
    "SWAKVPool": "cannot be made",
    "copy_all_layer_kv_cache_tiled": "B-M-8: a kernel; here a function of the buffers",
    **dict.fromkeys(
        [
            "set_mla_kv_buffer_kernel",
            "set_mla_kv_buffer_per_loc_kernel",
            "get_mla_kv_buffer_kernel",
            "get_mla_kv_buffer_per_loc_kernel",
        ],
        "B-K-1, B-K-2: engines call the functions that launch them",
    ),
    "MHATokenToKVPool.data_ptrs": "B-M-5: addresses of each pool's own memory",
    "MHATokenToKVPool.k_data_ptrs": "as data_ptrs",
    "MHATokenToKVPool.v_data_ptrs": "as data_ptrs",
    "MHATokenToKVPool.memory_saver_adapter": "A-MOD-2: a class of each, with the same region()",
    "MLATokenToKVPool.data_ptrs": "B-M-5: addresses of each pool's own memory",
    "MLATokenToKVPool.memory_saver_adapter": "A-MOD-2: a class of each, with the same region()",
}
MADE = [("BaseTokenToKVPool", (20, E4M3, "cpu", 8, 64, 4, 3)), *CASES.values()]


@pytest.mark.parametrize("name, args", MADE, ids=["base", *CASES])
def test_all_of_a_class(name, args):
    theirs, mine = getattr(require_tokenspeed(), name), getattr(ours, name)
    found = {f"{name}.{what}" for what in differences(theirs, mine, args)}
    assert found == {key for key in DIFFERENT if key.startswith(f"{name}.")}


def test_all_of_the_modules():
    theirs = vars(require_tokenspeed())
    names = {name for name in theirs if not name.startswith("_")}
    assert {"MLATokenToKVPool", "set_mla_kv_buffer_triton", "move_kv_cache_native"} < names
    functions = {name for name in names if type(theirs[name]) is type(drive)}
    assert all(may_be_called_alike(getattr(ours, name), theirs[name]) for name in functions)
    others = {name for name in names - functions if not isinstance(getattr(ours, name, None), type)}
    assert others == {name for name in DIFFERENT if "." not in name}


class Lacking(ours.MLATokenToKVPool):
    page_size_bytes = property(lambda self: 0, lambda *_: None)

    def set_kv_buffer(self, layer, loc, cache_k, cache_v, k_scale=None):
        super().set_kv_buffer(layer, loc, cache_k, cache_v, k_scale)


def test_what_is_lacking_is_found():
    name, args = CASES["quantised-bfloat16"]
    found = {*differences(getattr(require_tokenspeed(), name), Lacking, args)}
    assert found >= {"page_size_bytes", "set_kv_buffer"}
