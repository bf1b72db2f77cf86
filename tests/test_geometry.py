"""Sizes against numbers worked out by hand, and every refusal with what it has to name."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.errors import GeometryError
from kvjax.geometry import (
    DTYPE_BYTES,
    LayerRange,
    MHAGeometry,
    MLAGeometry,
    PlaneSpec,
    dtype_name,
    fit,
)

MHA = MHAGeometry(
    num_slots=48,
    page_size=16,
    layers=LayerRange(8, 12),
    num_kv_heads=2,
    head_dim=64,
    dtype="float16",
)
MLA = MLAGeometry(
    num_slots=48, page_size=1, layers=3, latent_dim=512, rope_dim=64, dtype="bfloat16"
)
GIB = 2**30


def test_slots_pages_and_rows():
    assert (MHA.num_pages, MHA.num_rows, MHA.first_slot) == (3, 64, 16)
    assert (MLA.num_pages, MLA.num_rows, MLA.first_slot) == (48, 49, 1)


def test_planes_and_bytes():
    assert MHA.planes == (PlaneSpec("k", (2, 64), "float16"), PlaneSpec("v", (2, 64), "float16"))
    assert MHA.bytes_per_token_per_layer == 2 * (2 * 64 * 2)
    assert MHA.bytes_per_token == 4 * 512
    assert MHA.bytes_per_page == 16 * 2048
    assert MHA.bytes == 64 * 2048
    assert MLA.planes == (PlaneSpec("rows", (1, 576), "bfloat16"),)
    assert MLA.bytes_per_token_per_layer == 1152


@pytest.mark.parametrize(
    "geometry, bytes_per_token",
    [  # what these models are known to take
        (MHAGeometry(16, 16, 32, num_kv_heads=8, head_dim=128, dtype="bfloat16"), 131_072),
        (MLAGeometry(64, 64, 61, latent_dim=512, rope_dim=64, dtype="bfloat16"), 70_272),
    ],
    ids=["Llama-3-8B", "DeepSeek-V3"],
)
def test_bytes_of_real_models(geometry, bytes_per_token):
    assert geometry.bytes_per_token == bytes_per_token


def test_v_is_like_k_unless_given():
    assert (MHA.v_head_dim, MHA.v_dtype) == (64, "float16")
    mixed = dataclasses.replace(MHA, v_head_dim=32, v_dtype="float8_e5m2")
    assert mixed.planes[0] == MHA.planes[0]
    assert mixed.planes[1] == PlaneSpec("v", (2, 32), "float8_e5m2")
    assert mixed.bytes_per_token_per_layer == 2 * 64 * 2 + 2 * 32 * 1


def test_mla_may_have_no_rope():
    assert dataclasses.replace(MLA, rope_dim=0).planes == (PlaneSpec("rows", (1, 512), "bfloat16"),)


QUANTIZED = dataclasses.replace(MLA, quantization="per_token_head")


def test_a_quantized_row_is_three():
    assert QUANTIZED.planes == (
        PlaneSpec("latent", (1, 512), "float8_e4m3fn"),
        PlaneSpec("scale", (1, 1), "float32"),
        PlaneSpec("rope", (1, 64), "bfloat16"),
    )
    assert QUANTIZED.bytes_per_token_per_layer == 512 + 4 + 64 * 2
    assert dataclasses.replace(QUANTIZED, dtype="float32").planes[2].dtype == "float32"
    assert QUANTIZED == MLAGeometry(48, 1, 3, 512, 64, "bfloat16", "per_token_head") != MLA


QUANTIZED_KV = dataclasses.replace(MHA, v_head_dim=32, quantization="int8_per_token_head")


@pytest.mark.parametrize(
    "quantization, stored",
    [("int8_per_token_head", "int8"), ("fp8_per_token_head", "float8_e4m3fn")],
)
def test_quantized_k_and_v_are_two_each(quantization, stored):
    geometry = dataclasses.replace(QUANTIZED_KV, quantization=quantization)
    assert geometry.planes == (
        PlaneSpec("k", (2, 64), stored),
        PlaneSpec("k_scale", (2, 1), "float32"),
        PlaneSpec("v", (2, 32), stored),
        PlaneSpec("v_scale", (2, 1), "float32"),
    )
    assert geometry.bytes_per_token_per_layer == 2 * (64 + 4 + 32 + 4)
    assert {plane.storage_dtype for plane in geometry.planes} == {
        "float32",
        "int8" if stored == "int8" else "uint8",
    }


def test_equal_geometries_hash_alike():
    """They are static fields of pytrees, so jit compares them."""
    same = dataclasses.replace(MLA, layers=LayerRange(0, 3), dtype=jnp.bfloat16)
    assert same == MLA and hash(same) == hash(MLA)
    assert same != dataclasses.replace(MLA, num_slots=49)


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_a_dtype_is_known_however_it_is_spelled(name):
    class TorchDtype:
        def __repr__(self):
            return f"torch.{name}"

    spellings = [name, jnp.dtype(name), getattr(jnp, name), jnp.zeros(1, name).dtype, TorchDtype()]
    assert {dtype_name(spelling) for spelling in spellings} == {name}
    assert DTYPE_BYTES[name] == jnp.dtype(name).itemsize


@pytest.mark.parametrize("dtype", ["int8", "float64", np.int32, float, None, "", "fp8"])
def test_a_dtype_that_no_pool_stores_is_refused(dtype):
    with pytest.raises(GeometryError, match=r"allowed: .*'bfloat16'"):
        dtype_name(dtype)


@pytest.mark.parametrize(
    "base, change, message",
    [
        (MHA, {"num_slots": 47}, r"num_slots=47 is not a multiple of page_size=16; .* 32"),
        (MHA, {"num_slots": 0}, "num_slots=0"),
        (MHA, {"num_slots": -16}, "num_slots=-16"),
        (MHA, {"num_slots": 48.0}, "num_slots=48.0"),
        (MHA, {"num_slots": True, "page_size": 1}, "num_slots=True"),
        (MHA, {"num_slots": 2**31}, "num_slots=2147483648 does not fit int32"),
        (MHA, {"num_slots": 2**31 - 16}, "does not fit int32"),  # the padding page is too much
        (MHA, {"page_size": 0}, "page_size=0"),
        (MHA, {"layers": 0}, "layers=0"),
        (MHA, {"layers": False}, "layers=False"),
        (MHA, {"layers": None}, "layers=None"),
        (MHA, {"layers": (0, 4)}, r"layers=\(0, 4\)"),
        (MHA, {"num_kv_heads": 0}, "num_kv_heads=0"),
        (MHA, {"head_dim": -1}, "head_dim=-1"),
        (MHA, {"v_head_dim": 0}, "v_head_dim=0"),
        (MHA, {"dtype": "int4"}, "int4"),
        (MHA, {"v_dtype": "int4"}, "int4"),
        (MLA, {"latent_dim": 0}, "latent_dim=0"),
        (MLA, {"rope_dim": -1}, "rope_dim=-1"),
        (MLA, {"rope_dim": None}, "rope_dim=None"),
        (MLA, {"quantization": "int4"}, "quantization='int4' .* allowed: 'per_token_head'"),
        (MLA, {"quantization": ""}, "quantization=''"),
        (MLA, {"quantization": "int8_per_token_head"}, "is not for latent rows"),
        (MHA, {"quantization": "per_token_head"}, r"not for K and V; allowed: \['fp8_per.*'int8_"),
        (MHA, {"quantization": ""}, "quantization=''"),
        (QUANTIZED_KV, {"dtype": "float8_e5m2", "v_dtype": None}, "dtype='float8_e5m2' is the mod"),
        (QUANTIZED_KV, {"v_dtype": "bfloat16"}, "v_dtype='bfloat16' differs from dtype='float16'"),
        (QUANTIZED, {"dtype": "float16"}, "dtype='float16' .* range of float16"),
        (QUANTIZED, {"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn' .* the model's"),
        (QUANTIZED, {"dtype": "float8_e5m2"}, "dtype='float8_e5m2'"),
        (QUANTIZED, {"rope_dim": 0}, "rope_dim=0 leaves"),
        (QUANTIZED, {"rope_dim": -1}, "rope_dim=-1"),
        (QUANTIZED, {"latent_dim": 0}, "latent_dim=0"),
    ],
    ids=repr,
)
def test_impossible_sizes_are_refused_by_name(base, change, message):
    with pytest.raises(GeometryError, match=message):
        dataclasses.replace(base, **change)


def test_layer_range_translates_and_refuses():
    layers = LayerRange(8, 12)
    assert [layers.local(layer_id) for layer_id in range(8, 12)] == [0, 1, 2, 3]
    assert (len(layers), str(layers)) == (4, "8..11")
    for layer_id in (0, 7, 12, -1, np.int32(12)):
        with pytest.raises(GeometryError, match=r"layer_id=.* holds layers 8\.\.11"):
            layers.local(layer_id)


def test_layer_range_leaves_traced_layers_alone():
    assert LayerRange(8, 12).local(jnp.int32(20)) == 12


@pytest.mark.parametrize("start, stop", [(0, 0), (3, 2), (-1, 2), (0.0, 2), (0, True), (None, 1)])
def test_impossible_layer_ranges_are_refused(start, stop):
    with pytest.raises(GeometryError, match="layers"):
        LayerRange(start, stop)


def test_a_host_pool_has_no_padding_page():
    host = dataclasses.replace(MHA, padding_page=False)
    assert (host.num_pages, host.num_rows, host.first_slot) == (3, 48, 0)
    assert host.bytes == 48 * 2048


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_fp8_is_stored_as_its_bits(name):
    plane = PlaneSpec("k", (2, 64), name)
    assert plane.storage_dtype == ("uint8" if "float8" in name else name)
    assert plane.row_bytes == 2 * 64 * jnp.dtype(plane.storage_dtype).itemsize


@pytest.mark.parametrize("padding_page", [True, False], ids=["device", "host"])
@pytest.mark.parametrize(
    "geometry", [MHA, MLA, QUANTIZED, QUANTIZED_KV], ids=["mha", "mla", "quantized", "quantized-kv"]
)
@given(budget_bytes=st.integers(0, GIB // 8))
def test_fit_is_the_largest_that_fits(geometry, padding_page, budget_bytes):
    geometry = dataclasses.replace(geometry, padding_page=padding_page)
    smallest_bytes = dataclasses.replace(geometry, num_slots=geometry.page_size).bytes
    if budget_bytes < smallest_bytes:
        with pytest.raises(GeometryError, match=f"{budget_bytes=} .* takes {smallest_bytes}"):
            fit(geometry, budget_bytes)
        return
    fitted = fit(geometry, budget_bytes)
    assert fitted.bytes <= budget_bytes < fitted.bytes + geometry.bytes_per_page
    assert fitted == dataclasses.replace(geometry, num_slots=fitted.num_slots)


@pytest.mark.parametrize("budget_bytes", [0, 65_535, 65_536, 98_303, 98_304])
def test_fit_at_the_edge_of_a_page(budget_bytes):
    """A page of MHA takes 32 768 bytes, and the padding page is one of them."""
    pages = budget_bytes // 32_768 - 1
    if pages < 1:
        with pytest.raises(GeometryError, match="smallest pool takes 65536"):
            fit(MHA, budget_bytes)
    else:
        assert fit(MHA, budget_bytes).num_pages == pages
