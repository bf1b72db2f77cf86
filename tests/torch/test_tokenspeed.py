"""TokenSpeed's interface: what its engine reads and calls, row by row of the contract."""

import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

import kvjax
from kvjax import GeometryError, UnsupportedError
from kvtorch import tokenspeed
from kvtorch.tokenspeed import BaseTokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from tests import oracles
from tests.strategies import random_rows
from tests.torch.pools import DEVICES, Counter, Layer, slots
from tests.torch.tensors import to_numpy, to_torch
from tests.torch.tokenspeed_pools import FP8, KINDS, PER_TOKEN_HEAD, mha, plain, quantized

by_device = pytest.mark.parametrize("device", DEVICES)
by_kind = pytest.mark.parametrize("kind", KINDS)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def fill(pool, seed=0):
    """Any bits in every row but those of the padding page; returns them."""
    rows = [(spec.row_shape, spec.storage_dtype) for spec in pool.geometry.planes]
    planes = random_rows(seed, rows, pool.layer_num, pool.geometry.num_rows)
    planes = [plane.copy() for plane in planes]
    for tensor, plane in zip(pool.planes, planes, strict=True):
        plane[:, : pool.page_size] = 0
        tensor.copy_(to_torch(plane))
        plane[:] = to_numpy(tensor)
    return planes


def assert_holds(pool, planes):
    for tensor, plane in zip(pool.planes, planes, strict=True):
        oracles.assert_same_bits(to_numpy(tensor), plane)


def parts(*values, device="cpu", dtype=FP32):
    """A latent and a rope of one token or, of lists of lists, of several."""
    return [
        torch.tensor(np.atleast_2d(part)[:, None], dtype=dtype, device=device) for part in values
    ]


# The signatures of TokenSpeed's first release.
SIGNATURES = {
    BaseTokenToKVPool: {
        "__init__": "size dtype device max_batch_size max_context_len page_size rank",
        "cell_size": "",
        "register_layer_transfer_counter": "layer_transfer_counter",
        "set_token_slot_refs": "token_slot_refs",
        "get_key_buffer": "layer_id",
        "get_value_buffer": "layer_id",
        "get_kv_buffer": "layer_id",
        "set_kv_buffer": "layer loc cache_k cache_v",
        "get_cpu_copy": "page_indices",
        "load_cpu_copy": "kv_cache_cpu page_indices",
        "get_contiguous_buf_infos": "",
        "get_layerwise_buf_info_offsets": "start_idx=0",
    },
    MHATokenToKVPool: {
        "__init__": "size dtype head_num head_dim layer_num device enable_memory_saver "
        "max_batch_size max_context_len page_size rank enable_kv_cache_copy=False "
        "enable_alt_stream=True",
        "move_kv_cache": "tgt_loc src_loc",
        "get_kv_size_bytes": "",
        "get_cpu_copy": "indices",
        "load_cpu_copy": "kv_cache_cpu indices",
        "get_flat_data": "indices",
        "transfer": "indices flat_data",
        "set_kv_buffer": "layer loc cache_k cache_v k_scale=None v_scale=None "
        "layer_id_override=None",
    },
    MLATokenToKVPool: {
        "__init__": "size model_dtype dtype quant_method kv_lora_rank qk_rope_head_dim layer_num "
        "device enable_memory_saver max_batch_size max_context_len page_size rank "
        "enable_kv_cache_copy=False enable_alt_stream=True",
        "move_kv_cache": "tgt_loc src_loc",
        "get_kv_size_bytes": "",
        "get_contiguous_buf_infos": "",
        "get_layerwise_buf_info_offsets": "start_idx=0",
        "set_kv_buffer": "layer loc cache_k cache_v k_scale=None v_scale=None",
        "set_mla_kv_buffer": "layer loc cache_k_nope cache_k_rope",
        "get_mla_kv_buffer": "layer loc dst_dtype=None",
        "get_cpu_copy": "token_indices",
        "load_cpu_copy": "kv_cache_cpu token_indices",
    },
}
FUNCTIONS = {
    "set_mla_kv_buffer_triton": "kv_buffer loc cache_k_nope cache_k_rope enable_pdl=False",
    "get_mla_kv_buffer_triton": "kv_buffer loc cache_k_nope cache_k_rope enable_pdl=False",
    "move_kv_cache_native": "k_buffer v_buffer tgt_loc src_loc",
}


def assert_called_as(function, wanted):
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    written = " ".join(
        p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in positional
    )
    assert written == wanted, function


def test_signatures_are_upstreams():
    for cls, methods in SIGNATURES.items():
        for name, wanted in methods.items():
            assert_called_as(getattr(cls, name), wanted)
    for name, wanted in FUNCTIONS.items():
        assert_called_as(getattr(tokenspeed, name), wanted)


def test_b_b_1_b_b_3_the_base_has_attributes_and_setters():
    base = BaseTokenToKVPool(12, torch.float8_e5m2, "cpu", 8, 64, 4, 3)
    expected = {
        "size": 12,
        "dtype": torch.float8_e5m2,
        "store_dtype": torch.uint8,
        "device": "cpu",
        "page_size": 4,
        "rank": 3,
        "max_batch_size": 8,
        "max_context_len": 64,
        "offload_chunk_page_num": 1024,
        "token_slot_refs": None,
        "layer_transfer_counter": None,
    }
    assert vars(base) == expected
    assert BaseTokenToKVPool(12, BF16, "cpu", 8, 64, 4, 3).store_dtype == BF16
    base.set_token_slot_refs(refs := torch.zeros(3))
    base.register_layer_transfer_counter(counter := Counter())
    assert base.token_slot_refs is refs and base.layer_transfer_counter is counter


def test_b_b_2_b_b_4_the_base_implements_nothing_else():
    base = BaseTokenToKVPool(12, BF16, "cpu", 8, 64, 4, 3)
    for name, parameters in SIGNATURES[BaseTokenToKVPool].items():
        if name != "__init__" and "set_token" not in name and "register" not in name:
            with pytest.raises(NotImplementedError):
                getattr(base, name)(*parameters.split())


@by_kind
def test_b_m_1_attributes(kind):
    pool = KINDS[kind](rope=4) if kind != "mha" else mha()
    assert isinstance(pool, BaseTokenToKVPool)
    assert (pool.size, pool.page_size, pool.layer_num, pool.rank) == (12, 4, 2, 0)
    assert pool.device_module is torch.cpu and pool.alt_stream is None
    assert pool.offload_chunk_page_num == 1024 and pool.token_slot_refs is None
    assert (pool.data_ptrs.dtype, pool.data_strides.dtype) == (torch.uint64, torch.int64)
    if kind == "mha":
        assert (pool.head_num, pool.head_dim, pool.store_dtype) == (2, 4, BF16)
        assert torch.equal(torch.cat([pool.k_data_ptrs, pool.v_data_ptrs]), pool.data_ptrs)
        assert pool.k_data_ptrs.tolist() == [buffer.data_ptr() for buffer in pool.k_buffer]
    else:
        assert (pool.kv_lora_rank, pool.qk_rope_head_dim, pool.kv_cache_dim) == (4, 4, 8)
        assert pool.model_dtype == BF16 and pool.quant_method in (None, PER_TOKEN_HEAD)
        assert pool.store_dtype == (torch.uint8 if "quant" in kind else BF16)


@pytest.mark.gpu
@by_kind
def test_b_m_1_a_stream_for_who_asks_for_it(kind):
    assert isinstance(KINDS[kind](device="cuda").alt_stream, torch.cuda.Stream)
    assert KINDS[kind](device="cuda", enable_alt_stream=False).alt_stream is None


@by_device
def test_b_m_2_b_m_3_b_m_5_buffers(device):
    pool = plain(dtype=FP8, device=device, quant_method="none")
    assert type(pool.kv_buffer) is list
    for layer, buffer in enumerate(pool.kv_buffer):
        assert (buffer.shape, buffer.dtype) == ((16, 1, 7), torch.uint8) and not buffer.any()
        assert buffer.data_ptr() == pool.planes[0][layer].data_ptr()
    assert pool.data_ptrs.tolist() == [buffer.data_ptr() for buffer in pool.kv_buffer]
    assert pool.data_strides.tolist() == [7, 7]

    pool = quantized(device=device)
    assert type(pool.kv_buffer) is list and {type(x) for x in pool.kv_buffer} == {tuple}
    for buffers in pool.kv_buffer:
        assert [b.shape for b in buffers] == [(16, 1, 4), (16, 1, 1), (16, 1, 3)]
        assert [b.dtype for b in buffers] == [torch.uint8, FP32, BF16]
        assert not any(b.any() for b in buffers)
    by_layer = [b.data_ptr() for buffers in pool.kv_buffer for b in buffers]
    by_component = [pool.kv_buffer[layer][i].data_ptr() for i in range(3) for layer in range(2)]
    assert pool.data_ptrs.tolist() == by_layer != by_component
    assert pool.data_strides.tolist() == [4, 4, 6] * 2
    assert pool.get_contiguous_buf_infos()[0] == by_component


def test_b_m_4_bytes_of_a_page():
    assert mha(dtype=FP8).page_size_bytes == 2 * 4 * 2 * 2 * 4
    assert plain().page_size_bytes == 4 * 2 * 7 * 2
    assert plain(dtype=FP8).page_size_bytes == 4 * 2 * 7
    assert quantized().page_size_bytes == 4 * 2 * (4 + 3 * 2 + 4)
    assert quantized(model=FP32).page_size_bytes == 4 * 2 * (4 + 3 * 4 + 4)


@by_kind
def test_b_m_6_the_warm_up_moves_a_row_of_the_padding_page(kind, monkeypatch):
    moves = []
    monkeypatch.setattr(
        "kvtorch.pools.tokenspeed.base.move_rows",
        lambda planes, dst, src, **_: moves.append((len(planes), dst.tolist(), src.tolist())),
    )
    KINDS[kind]()
    assert not moves
    pool = KINDS[kind](enable_kv_cache_copy=True)
    assert moves == [(len(pool.planes), [0], [0])]


MOVES = [
    ([], []),
    ([5], [5]),
    ([6, 7, 8], [5, 6, 7]),
    ([5, 6, 7], [6, 7, 8]),
    ([5, 6], [6, 5]),
    ([4, 5, 6, 7, 8], [9, 4, 5, 8, 6]),
    ([4, 6, 8, 10, 12, 14, 5], [5, 4, 6, 8, 15, 9, 10]),
    ([-1, 5, 16, 3], [5, 16, 6, 7]),
]


@by_kind
@by_device
@pytest.mark.parametrize("with_kernel", [False, True])
def test_b_m_7_b_m_8_mv1_s5_fp5_moves_of_any_number_at_once(kind, device, with_kernel):
    pool = KINDS[kind](device=device, enable_kv_cache_copy=with_kernel)
    for i, (dst, src) in enumerate(MOVES):
        planes = fill(pool, seed=i)
        dtype = [torch.int32, torch.int64][i % 2]
        pool.move_kv_cache(*(slots(*x, dtype=dtype, device=device) for x in (dst, src)))
        assert_holds(pool, [oracles.move_rows(plane, dst, src, 4) for plane in planes])
    pool.move_kv_cache(torch.tensor([], device=device), torch.tensor([], device=device))
    loc = slots(6, 12, 7, 13, device=device)[::2]
    planes = fill(pool)
    pool.move_kv_cache(loc, loc + 2)
    assert_holds(pool, [oracles.move_rows(plane, [6, 7], [8, 9], 4) for plane in planes])
    with pytest.raises(ValueError, match="tgt_loc has 1 entries, src_loc 2"):
        pool.move_kv_cache(slots(5, device=device), slots(5, 6, device=device))


@by_device
def test_b_m_8_b_m_9_mv1_functions_that_move_know_no_padding_page(device):
    pool = mha(device=device)
    for dst, src in [*MOVES[:-1], ([0, 1, 2], [1, 2, 0])]:
        planes = fill(pool)
        expected = [oracles.move_rows(plane, dst, src, 0) for plane in planes]
        tensors = [slots(*x, device=device) for x in (dst, src)]
        tokenspeed.move_kv_cache_native(
            pool.k_buffer, pool.v_buffer, *(x.view(1, -1) for x in tensors)
        )
        assert_holds(pool, expected)
        fill(pool)
        tokenspeed.copy_all_layer_kv_cache_tiled(pool.k_buffer + pool.v_buffer, *tensors)
        assert_holds(pool, expected)


def test_b_m_10_bytes_of_all_rows():
    assert mha().get_kv_size_bytes() == (2 * 16 * 8 * 2,) * 2
    for pool, row_bytes in ((plain(), 14), (plain(dtype=FP8), 7), (quantized(), 4 + 4 + 6)):
        size = pool.get_kv_size_bytes()
        assert type(size) is int and size == 2 * 16 * row_bytes


def test_b_m_11_b_m_12_x3_buffers_of_fp8_as_they_are_stored():
    pool = mha(dtype=FP8)
    addresses, lengths, item_lengths = pool.get_contiguous_buf_infos()
    assert addresses == [buffer.data_ptr() for buffer in pool.k_buffer + pool.v_buffer]
    assert (lengths, item_lengths) == ([128] * 4, [32] * 4)
    assert pool.get_layerwise_buf_info_offsets() == [[0, 2], [1, 3]]
    copy = pool.get_cpu_copy(slots(5))
    assert sum(part.nbytes for layer in copy for chunk in layer for part in chunk) == 32
    pool = plain(dtype=FP8, layers=3)
    assert pool.get_contiguous_buf_infos()[1:] == ([112] * 3, [28] * 3)
    assert pool.get_layerwise_buf_info_offsets(5) == [[5], [6], [7]]


def test_fp5_b_m_11_b_m_12_b_m_18_b_m_19_scales_travel_with_their_rows():
    pool = quantized()
    assert pool.get_contiguous_buf_infos()[1:] == ([64] * 4 + [96] * 2, [16] * 4 + [24] * 2)
    assert pool.get_layerwise_buf_info_offsets() == [[0, 2, 4], [1, 3, 5]]
    assert pool.get_layerwise_buf_info_offsets(start_idx=7) == [[7, 9, 11], [8, 10, 12]]
    row = parts([1, -2, 4, 0.5], [1, -3, 0])
    for layer in range(2):  # the report's slot 1 is one of the padding page here
        pool.set_mla_kv_buffer(Layer(layer), slots(5), *row)
    pool.move_kv_cache(slots(7), slots(5))
    copy = pool.get_cpu_copy(slots(5))
    assert [[[part.shape for part in chunk] for chunk in layer] for layer in copy] == [
        [[(1, 1, 4), (1, 1, 1), (1, 1, 3)]]
    ] * 2
    assert sum(part.nbytes for layer in copy for chunk in layer for part in chunk) == 28
    for where in (7, 9):
        for layer in range(2):
            found = pool.get_mla_kv_buffer(Layer(layer), slots(where))
            for part, expected in zip(found, row, strict=True):
                assert torch.equal(part, expected.to(BF16))
        pool.clear()
        pool.load_cpu_copy(copy, slots(9))


def test_b_m_13_b_m_14_what_readers_get():
    pool = plain(dtype=FP8)
    fill(pool)
    k, v = pool.get_kv_buffer(1)
    assert (k.dtype, k.shape, v.dtype, v.shape) == (FP8, (16, 1, 7), FP8, (16, 1, 4))
    assert k.data_ptr() == v.data_ptr() == pool.kv_buffer[1].data_ptr()
    pool = quantized()
    k, v = pool.get_kv_buffer(1)
    assert type(k) is tuple and type(v) is tuple
    assert [x.data_ptr() for x in k] == [x.data_ptr() for x in pool.kv_buffer[1]]
    assert [x.dtype for x in k] == [torch.uint8, FP32, BF16]
    assert [x.data_ptr() for x in v] == [x.data_ptr() for x in k[:2]]


@by_kind
def test_b_m_13_b_m_17_reads_wait_for_the_layer(kind):
    pool = KINDS[kind]()
    pool.register_layer_transfer_counter(counter := Counter())
    pool.get_key_buffer(1), pool.get_value_buffer(0), pool.get_kv_buffer(1)
    assert counter.waits == [1, 0, 1, 1]
    pool.get_contiguous_buf_infos(), pool.get_cpu_copy(slots(4)), pool.get_kv_size_bytes()
    assert counter.waits == [1, 0, 1, 1]
    if kind != "mha":
        pool.get_mla_kv_buffer(Layer(1), slots(4))
        assert counter.waits == [1, 0, 1, 1, 1]


@by_device
@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2, BF16, FP16, FP32])
@pytest.mark.parametrize("source", [BF16, FP32, FP16])
def test_b_m_15_b_m_16_s3_plain_rows_are_cast_each_part_by_itself(dtype, source, device):
    pool = plain(dtype=dtype, device=device)
    rows = torch.randn(3, 1, 7).to(source).to(device)
    pool.set_kv_buffer(Layer(1), slots(5, 6, -1, device=device), rows, None)
    pool.set_mla_kv_buffer(
        Layer(1), slots(9, 10, 3, device=device), rows[..., :4].float(), rows[..., 4:]
    )
    stored = oracles.narrow(to_numpy(rows), np.dtype(str(dtype).removeprefix("torch.")))
    for where in (5, 9):
        oracles.assert_same_bits(to_numpy(pool.get_key_buffer(1)[where : where + 2]), stored[:2])
    latent, rope = pool.get_mla_kv_buffer(Layer(1), slots(9, 10, 3, device=device))
    assert (latent.shape, rope.shape, latent.dtype, rope.dtype) == (
        (3, 1, 4),
        (3, 1, 3),
        *[dtype] * 2,
    )
    oracles.assert_same_bits(to_numpy(latent)[:2], stored[:2, :, :4])
    oracles.assert_same_bits(to_numpy(rope)[:2], stored[:2, :, 4:])
    assert not latent[2].float().any() and pool.audit() == []


@pytest.mark.parametrize("make", [plain, quantized])
@pytest.mark.parametrize("scale", [2.0, 0, torch.tensor(1.0)])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_b_m_15_scales_that_upstream_ignores_are_refused(make, scale, name):
    pool, row = make(), torch.ones(1, 1, 7)
    with pytest.raises(UnsupportedError, match=f"{name}=.*divide them before the call"):
        pool.set_kv_buffer(Layer(0), slots(5), row, None, **{name: scale})
    assert not any(plane.any() for plane in pool.planes)
    pool.set_kv_buffer(Layer(0), slots(5), row, None, 1.0, v_scale=1)
    assert pool.planes[0].any()


def upstreams_quantization(latent, rope, model_dtype):
    """TokenSpeed's eager path in NumPy: nothing saturates but the cast to fp8."""
    with np.errstate(all="ignore"):
        return _upstreams_quantization(latent, rope, model_dtype)


def _upstreams_quantization(latent, rope, model_dtype):
    latent, rope = latent.astype(np.float32), rope.astype(np.float32)
    scale = np.maximum(np.abs(latent).max(-1, keepdims=True), np.float32(1e-26)) / np.float32(448)
    return (
        oracles.narrow(latent / scale, np.dtype("float8_e4m3fn")).view(np.uint8),
        scale,
        (rope / scale).astype(model_dtype),
    )


@by_device
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("model", [BF16, FP32])
@pytest.mark.parametrize("source", [BF16, FP32, FP16])
def test_b_q_finite_rows_are_stored_as_upstream_does(joined, model, source, device):
    pool = quantized(32, model=model, lora=40, rope=24, device=device)
    planes = fill(pool)
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-3, 3, (16, 1, 1))
    rows = torch.tensor(rng.standard_normal((16, 1, 64)) * sizes).to(source).to(device)
    rows[3] = 0
    loc = rng.permutation(np.arange(4, 36))[:16]
    if joined:
        pool.set_kv_buffer(Layer(1), to_torch(loc, device), rows, rows[..., :40])
    else:
        pool.set_mla_kv_buffer(Layer(1), to_torch(loc, device), rows[..., :40], rows[..., 40:])
    values = to_numpy(rows)
    stored = upstreams_quantization(
        values[..., :40], values[..., 40:], str(model).removeprefix("torch.")
    )
    for plane, new in zip(planes, stored, strict=True):
        plane[1, loc] = new
    assert_holds(pool, planes)
    for dtype in (None, FP32, FP16, FP8):
        found = pool.get_mla_kv_buffer(Layer(1), to_torch(loc, device), dtype)
        name = str(dtype or model).removeprefix("torch.")
        for part, expected in zip(found, oracles.dequantize(*stored, name), strict=True):
            oracles.assert_same_bits(to_numpy(part), expected)


def test_b_q_what_upstream_makes_nan_or_infinite_saturates():
    pool = quantized()
    pool.set_mla_kv_buffer(
        Layer(0), slots(5, 6), *parts([[np.inf, 1, 0, 0], [0] * 4], [[3e38] * 3] * 2)
    )
    wrong = upstreams_quantization(np.array([np.inf, 1]), np.array([1]), "float32")
    assert np.isnan(oracles.narrow(wrong[0].view("float8_e4m3fn"), "float32")[0])
    for part in pool.get_mla_kv_buffer(Layer(0), slots(5, 6), FP32):
        assert part.isfinite().all()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": FP16}, "float16"),
        ({"model": FP8}, "float8_e4m3fn"),
        ({"dtype": torch.float8_e5m2}, "float8_e5m2.*latents are stored in torch.float8_e4m3fn"),
        ({"dtype": BF16}, "bfloat16.*latents are stored in torch.float8_e4m3fn"),
        ({"rope": 0}, "rope_dim=0"),
        ({"size": 10}, "num_slots=10 is not a multiple"),
    ],
)
def test_b_q_s4_pools_that_cannot_hold_it_are_refused(changes, message):
    with pytest.raises(GeometryError, match=message):
        quantized(**changes)


def test_b_m_1_a_method_of_quantisation_that_nobody_knows_is_refused():
    with pytest.raises(GeometryError, match="quant_method='per_tensor' is unknown"):
        plain(quant_method="per_tensor")


@by_device
@pytest.mark.parametrize("model", [BF16, FP32])
def test_fp4_s4_a_latent_of_zeros(model, device):
    pool = quantized(model=model, device=device)
    latent, rope = parts([[0] * 4, [1, -2, 4, 0.5]], [[1, -3, 0]] * 2, device=device)
    where = slots(5, 6, device=device)
    pool.set_mla_kv_buffer(Layer(0), where, latent, rope)
    latents, scale, ropes = (x[5:7, 0].cpu() for x in pool.get_key_buffer(0))
    assert scale[0] > 0 and scale.isfinite().all() and scale[1] == np.float32(4) / np.float32(448)
    assert latents.tolist() == [[0] * 4, [0x6E, 0xF6, 0x7E, 0x66]]
    assert ropes.isfinite().all() and ropes[1].bfloat16().tolist() == [112, -336, 0]
    for part, expected in zip(pool.get_mla_kv_buffer(Layer(0), where), (latent, rope), strict=True):
        if model == BF16:
            assert torch.equal(part, expected.to(BF16))
        else:  # two roundings of a quotient that float32 does not have
            torch.testing.assert_close(part, expected, rtol=2**-22, atol=0)


def test_b_m_17_the_models_dtype_is_what_comes_out():
    for model in (BF16, FP32):
        found = quantized(model=model).get_mla_kv_buffer(Layer(0), slots(5, 99))
        assert [part.dtype for part in found] == [model, model]
        assert [part.shape for part in found] == [(2, 1, 4), (2, 1, 3)]
    assert plain(dtype=FP8).get_mla_kv_buffer(Layer(0), slots(5))[0].dtype == FP8


@by_kind
@by_device
@pytest.mark.parametrize("kind_of_tokens", [list, torch.tensor])
def test_b_m_18_b_m_19_copies_on_the_host_a_chunk_at_a_time(kind, device, kind_of_tokens):
    pool = KINDS[kind](2060, layers=2, device=device)
    planes, tokens = fill(pool), list(range(2063, 10, -1))
    copies = pool.get_cpu_copy(kind_of_tokens(tokens))
    assert [[len(chunk[0]) for chunk in layer] for layer in copies] == [[1024, 1024, 5]] * 2
    for layer, chunks in enumerate(copies):
        for i, plane in enumerate(planes):
            assert all(type(chunk) is list and chunk[i].is_cpu for chunk in chunks)
            copied = np.concatenate([to_numpy(chunk[i]) for chunk in chunks])
            oracles.assert_same_bits(copied, plane[layer, tokens])
    pool.load_cpu_copy(copies, kind_of_tokens(tokens[::-1]))
    for plane in planes:
        plane[:, tokens[::-1]] = plane[:, tokens].copy()
    assert_holds(pool, planes)
    with pytest.raises(GeometryError):
        pool.load_cpu_copy(copies, kind_of_tokens(tokens[:-1]))
    pool.offload_chunk_page_num = 0
    with pytest.raises(ValueError, match="offload_chunk_page_num=0"):
        pool.get_cpu_copy(kind_of_tokens(tokens))


@by_device
@pytest.mark.parametrize("kind", [float, torch.tensor, lambda x: torch.tensor([x])])
def test_fp1_s1_the_bytes_of_the_report(kind, device):
    pool = mha(dtype=FP8, heads=1, device=device)
    k = torch.tensor([[[2.0, 4, 8, 16]]], device=device)
    v = k.clone()
    pool.set_kv_buffer(Layer(0), slots(5, device=device), k, v, kind(0.5), kind(4.0))
    assert pool.k_buffer[0][5, 0].tolist() == [0x48, 0x50, 0x58, 0x60]
    assert pool.v_buffer[0][5, 0].tolist() == [0x30, 0x38, 0x40, 0x48]
    assert k.tolist() == v.tolist() == [[[2, 4, 8, 16]]]
    stored = pool.get_key_buffer(0)[5:6].clone()
    pool.set_kv_buffer(Layer(1), slots(5, device=device), stored, stored, kind(0.5), kind(4.0))
    for buffer in (pool.k_buffer, pool.v_buffer):
        assert buffer[1][5, 0].tolist() == [0x48, 0x50, 0x58, 0x60]


@by_device
def test_s1_keys_and_values_are_divided_in_a_copy_and_the_layer_can_be_another(device):
    pool = mha(dtype=FP8, device=device)
    k = torch.tensor([[[1.0, 2, 4, 8], [1, 1, 1, 1]]], device=device)
    v = k.clone().half()
    pool.set_kv_buffer(None, slots(5, device=device), k, v, 0.5, torch.tensor(4.0), 1)
    assert torch.equal(k, v.float()) and k[0, 0, 3] == 8
    assert pool.get_key_buffer(1)[5, 0].float().tolist() == [2, 4, 8, 16]
    assert pool.get_value_buffer(1)[5, 0].float().tolist() == [0.25, 0.5, 1, 2]
    pool.set_kv_buffer(Layer(0), slots(5, device=device), k, v, layer_id_override=None)
    assert pool.get_key_buffer(0)[5, 0].float().tolist() == [1, 2, 4, 8]


@by_device
def test_flat_data_of_keys_and_values(device):
    pool = mha(device=device)
    planes = fill(pool)
    flat = pool.get_flat_data(slots(6, 5, device=device))
    oracles.assert_same_bits(to_numpy(flat), np.stack([plane[:, [6, 5]] for plane in planes]))
    pool.clear()
    pool.transfer(slots(8, 9, device=device), flat.cpu())
    oracles.assert_same_bits(to_numpy(pool.planes[1][:, 8:10]), planes[1][:, [6, 5]])


@by_device
@pytest.mark.parametrize("num_tokens", [1, 4, 511, 512, 1024])
@pytest.mark.parametrize("dtype", [BF16, FP8])
@pytest.mark.parametrize("widths", [(512, 64), (528, 128), (100, 28), (320, 96)], ids=str)
def test_b_k_1_b_k_2_b_k_3_wr1_parts_of_any_widths_and_any_number(
    num_tokens, dtype, widths, device
):
    """As upstream's own test: a sentinel where nothing is written, the launch of either kind."""
    generator = torch.Generator().manual_seed(num_tokens)
    rows = (torch.randn(num_tokens, 1, sum(widths), generator=generator) * 50).to(dtype)
    loc = torch.randperm(1200, generator=generator)[:num_tokens]
    expected = torch.full((1200, sum(widths)), 7.5).to(dtype)
    expected.view(torch.uint8)[loc] = rows[:, 0].contiguous().view(torch.uint8)
    given = [part.to(device) for part in rows.split(widths, -1)]
    for enable_pdl in (False, True):
        buffer = torch.full((1200, sum(widths)), 7.5).to(dtype).to(device)
        tokenspeed.set_mla_kv_buffer_triton(buffer, loc.to(device), *given, enable_pdl=enable_pdl)
        oracles.assert_same_bits(to_numpy(buffer), to_numpy(expected))
        for shape in ((1200, sum(widths)), (1200, 1, sum(widths))):
            outputs = [torch.empty_like(part) for part in given]
            tokenspeed.get_mla_kv_buffer_triton(
                buffer.view(shape), loc.to(device), *outputs, enable_pdl=enable_pdl
            )
            for output, part in zip(outputs, given, strict=True):
                oracles.assert_same_bits(to_numpy(output), to_numpy(part))


def test_b_k_2_each_output_has_its_own_dtype():
    buffer = torch.tensor([[1.0, 300.0, 500.0, -1.0]]).repeat(12, 1).to(BF16)
    latent, rope = torch.zeros(1, 1, 2, dtype=FP8), torch.zeros(1, 1, 2)
    tokenspeed.get_mla_kv_buffer_triton(buffer, slots(3), latent, rope)
    assert latent.float().tolist() == [[[1, 288]]] and rope.tolist() == [[[500, -1]]]


@by_kind
def test_layers_are_local_and_a_pool_that_does_not_fit_a_call_says_so(kind):
    pool = KINDS[kind]()
    planes = fill(pool)
    for layer_id in (-1, 2):
        with pytest.raises(GeometryError, match=f"layer_id={layer_id}"):
            pool.get_kv_buffer(layer_id)
    with kvjax.checks(), pytest.raises(IndexError, match=r"tgt_loc\[0\]=3"):
        pool.move_kv_cache(slots(3), slots(4))
    if kind != "mha":
        for wrong in (torch.ones(1, 1, 6), torch.ones(2, 1, 7)):
            with pytest.raises(GeometryError, match="cache_k has shape"):
                pool.set_kv_buffer(Layer(0), slots(5), wrong, None)
        with pytest.raises(GeometryError, match="cache_k_rope has shape"):
            pool.set_mla_kv_buffer(Layer(0), slots(5), torch.ones(1, 1, 4), torch.ones(1, 1, 4))
    assert_holds(pool, planes)
    shifted = KINDS[kind](start_layer=3)
    assert shifted.get_key_buffer(3) is not None
    with pytest.raises(GeometryError, match="layer_id=2"):
        shifted.get_key_buffer(2)


@by_kind
def test_audit_and_what_follows_a_loan_or_the_end_of_memory(kind):
    pool = KINDS[kind]()
    fill(pool)
    assert pool.audit() == []
    name = pool._BUFFERS[0]
    getattr(pool, name).reverse()
    assert all("is not the layers of its plane" in found for found in pool.audit())
    assert len(pool.audit()) == (3 if kind == "mla, quantised" else 1)
    getattr(pool, name).reverse()
    pool.planes[-1][1, 3, 0, -1] = 1
    (found,) = pool.audit()
    assert "padding page of layer 1 is not zero" in found
    pool._lent_to = "somebody"
    with pytest.raises(RuntimeError, match="lent"):
        pool.get_key_buffer(0)
    pool._lent_to = None
    pool._clear_buffers()
    assert not hasattr(pool, name) and not hasattr(pool, "data_ptrs")
    with pytest.raises(RuntimeError, match="no memory"):
        pool.get_key_buffer(0)
    pool._create_buffers()
    assert pool.audit() == []


@by_device
def test_quantised_writes_and_reads_in_one_graph(device):
    def step(pool, loc, latent, rope):
        pool.set_mla_kv_buffer(Layer(1), loc, latent, rope)
        latent, rope = pool.get_mla_kv_buffer(Layer(1), loc, torch.float32)
        pool.set_kv_buffer(Layer(0), loc, torch.cat([latent * 2, rope], -1), None)
        return pool.get_mla_kv_buffer(Layer(0), loc)

    torch._dynamo.reset()
    pool, other = quantized(device=device), quantized(device=device)
    inputs = (
        slots(5, 6, -1, device=device),
        *parts([[1, 2, 3, 4]] * 3, [[5, 6, 7]] * 3, device=device),
    )
    with torch.no_grad():
        found = torch.compile(step, backend="aot_eager", fullgraph=True)(pool, *inputs)
        wanted = step(other, *inputs)
    for a, b in zip([*found, *pool.planes], [*wanted, *other.planes], strict=True):
        assert torch.equal(a, b)
    assert pool.planes[0].any()
