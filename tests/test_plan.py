import json
import subprocess
import sys

import pytest

from kvjax import plan, presets
from kvjax.__main__ import main
from kvjax.errors import GeometryError, UnsupportedError

GIB = 1024**3


def planned(model, **changes):
    arguments = {"page_size": 64, "tp_size": 1, "pp_size": 1, "memory_bytes": 80 * GIB}
    return plan.make_plan(presets.load(model), "bfloat16", **(arguments | changes))


@pytest.mark.parametrize(
    "model, bytes_per_token",
    [
        ("llama-3.1-8b", 128 * 1024),
        ("llama-3.1-70b", 320 * 1024),
        ("deepseek-v3", 61 * 576 * 2),
        ("qwen2.5-7b", 28 * 2 * 4 * 128 * 2),
        ("gemma-7b", 28 * 2 * 16 * 256 * 2),
    ],
)
def test_bytes_per_token_of_known_models(model, bytes_per_token):
    (stage,) = planned(model).stages
    assert stage.bytes_per_token == bytes_per_token


def test_quantized_rows_are_smaller_and_have_a_scale():
    (stage,) = planned("deepseek-v3", quantization="per_token_head").stages
    assert stage.bytes_per_token == 61 * (512 + 4 + 64 * 2)
    assert stage.num_slots == 80 * GIB // (61 * 644 * 64) * 64 - 64


def test_the_padding_page_is_part_of_the_budget():
    (stage,) = planned("llama-3.1-8b").stages
    assert stage.num_slots == 80 * GIB // (128 * 1024) - 64
    assert stage.bytes == 80 * GIB


def test_every_preset_can_be_planned():
    for name in presets.PRESETS:
        assert planned(name).stages[0].num_slots > 0


@pytest.mark.parametrize("tp_size, heads", [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_more_ranks_than_heads_replicate_them(tp_size, heads):  # RT2
    (stage,) = planned("llama-3.1-8b", tp_size=tp_size).stages
    assert stage.bytes_per_token == 128 * 1024 * heads // 8


@pytest.mark.parametrize("tp_size", [3, 12])
def test_heads_that_do_not_divide_are_rejected(tp_size):  # RT2
    with pytest.raises(
        GeometryError, match=f"num_kv_heads=8 cannot be split over tp_size={tp_size}"
    ):
        planned("llama-3.1-8b", tp_size=tp_size)


def test_every_rank_stores_the_whole_latent():
    assert planned("deepseek-v3", tp_size=8).stages == planned("deepseek-v3").stages


def test_uneven_stages_hold_as_many_tokens_as_the_largest():
    result = planned("deepseek-v3", pp_size=4)
    assert [len(stage.layers) for stage in result.stages] == [15, 15, 15, 16]
    assert [stage.layers.start for stage in result.stages] == [0, 15, 30, 45]
    assert result.largest_stage == 3
    assert {stage.num_slots for stage in result.stages} == {
        80 * GIB // (16 * 576 * 2 * 64) * 64 - 64
    }


def test_more_stages_than_layers_are_rejected():
    with pytest.raises(GeometryError, match="layers=61 cannot be split over pp_size=62"):
        planned("deepseek-v3", pp_size=62)


@pytest.mark.parametrize(
    "text, amount",
    [("80GiB", 80 * GIB), ("80GB", 80 * 10**9), ("1.5 KiB", 1536), ("7B", 7), ("2TiB", 2048 * GIB)],
)
def test_units_are_strict(text, amount):
    assert plan.parse_bytes(text) == amount


@pytest.mark.parametrize("text", ["80", "80G", "80gib", "GiB", "-1GiB", "0GiB", "1e3B", "0.1B", ""])
def test_amounts_without_a_clear_unit_are_rejected(text):
    with pytest.raises(ValueError, match=f"^{text!r}"):
        plan.parse_bytes(text)


@pytest.mark.parametrize("text", ["8388608TiB", "9" * 400 + "GiB", "9" * 5000 + "B"])
def test_amounts_that_no_machine_has_are_rejected(text):
    with pytest.raises(ValueError, match=r"^'\d+.*' is 8 EiB of memory or more$"):
        plan.parse_bytes(text)


def config(tmp_path, **fields):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return presets.load(str(path))


LAYERS_AND_HEADS = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}


def test_a_config_without_head_dim_splits_the_hidden_size(tmp_path):
    model = config(tmp_path, **LAYERS_AND_HEADS, num_key_value_heads=2, head_dim=None)
    assert model == presets.MHAModel(str(tmp_path / "config.json"), 4, 2, 64)


def test_a_config_without_grouping_has_as_many_kv_heads_as_heads(tmp_path):
    assert config(tmp_path, **LAYERS_AND_HEADS).num_kv_heads == 8


FALCON_7B = {
    "model_type": "falcon",
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "hidden_size": 4544,
    "multi_query": True,
    "new_decoder_architecture": False,
}
FALCON_40B = {
    "model_type": "falcon",
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "hidden_size": 8192,
    "num_kv_heads": 8,
    "multi_query": True,
    "new_decoder_architecture": True,
}


@pytest.mark.parametrize(
    "fields, kv_heads",
    [
        (FALCON_7B, 1),
        (FALCON_7B | {"num_kv_heads": 71}, 1),  # as in Falcon-7B-Instruct
        ({key: FALCON_7B[key] for key in FALCON_7B if key != "multi_query"}, 1),
        (FALCON_7B | {"multi_query": False}, 71),  # as in Falcon-RW
        (FALCON_40B, 8),
    ],
)
def test_falcon_has_a_say_of_its_own_in_kv_heads(tmp_path, fields, kv_heads):
    model = config(tmp_path, **fields)
    assert model.geometry(64, 64, "bfloat16").bytes_per_token == (
        fields["num_hidden_layers"] * 2 * kv_heads * 64 * 2
    )


def test_a_config_with_a_latent_is_mla_whatever_its_heads(tmp_path):
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}
    model = config(tmp_path, **LAYERS_AND_HEADS, **latent, num_key_value_heads=8)
    assert model == presets.MLAModel(str(tmp_path / "config.json"), 4, 512, 64)


def test_v_may_have_another_dimension(tmp_path):
    model = config(tmp_path, **LAYERS_AND_HEADS, head_dim=192, v_head_dim=128)
    assert model.geometry(64, 64, "bfloat16").bytes_per_token == 4 * 8 * (192 + 128) * 2


def test_a_language_model_may_be_nested(tmp_path):
    model = config(tmp_path, text_config=LAYERS_AND_HEADS, vision_config={"num_hidden_layers": 9})
    assert model.layers == 4
    assert presets.load(str(tmp_path)) == model  # the folder will do


def test_what_the_plan_leaves_out_is_said(tmp_path):
    assert config(tmp_path, **LAYERS_AND_HEADS).notes == ()
    assert "128 tokens" in config(tmp_path, **LAYERS_AND_HEADS, sliding_window=128).notes[0]
    off = {"sliding_window": 128, "use_sliding_window": False}
    assert config(tmp_path, **LAYERS_AND_HEADS, **off).notes == ()
    assert "indexer" in config(tmp_path, **LAYERS_AND_HEADS, index_head_dim=128).notes[0]


@pytest.mark.parametrize(
    "fields",
    [{"layer_types": ["chunked_attention"] * 3 + ["full_attention"]}, {"attention_chunk_size": 8}],
)
def test_chunked_attention_is_counted_in_full(tmp_path, fields):  # Llama 4
    model = config(tmp_path, **LAYERS_AND_HEADS, **fields)
    assert model.notes == ("layers with chunked attention are counted in full",)
    assert model.geometry(64, 64, "bfloat16").bytes_per_token == 4 * 2 * 8 * 64 * 2


def test_shared_layers_are_counted_in_full(tmp_path):  # Gemma 3n
    model = config(tmp_path, **LAYERS_AND_HEADS, num_kv_shared_layers=2)
    (note,) = model.notes
    assert "the last 2 layers share" in note
    assert model.geometry(64, 64, "bfloat16").bytes_per_token == 4 * 2 * 8 * 64 * 2
    assert config(tmp_path, **LAYERS_AND_HEADS, num_kv_shared_layers=0).notes == ()


@pytest.mark.parametrize("other", ["linear_attention", "mamba"])
def test_layers_without_kv_rows_are_rejected(tmp_path, other):
    kinds = ["full_attention", other] * 2
    with pytest.raises(UnsupportedError, match=f"layer_types has {other}; only layers of chunked"):
        config(tmp_path, **LAYERS_AND_HEADS, layer_types=kinds)


@pytest.mark.parametrize(
    "key, value",
    [
        ("attn_layer_indices", [1]),
        ("attn_layer_period", 8),
        ("attn_type_list", [0, 0, 0, 1]),
        ("block_configs", [{"attention": {"n_heads_in_group": 8}}]),
        ("block_types", ["recurrent", "recurrent", "attention"]),
        ("cross_attention_layers", [3]),
        ("full_attention_interval", 4),
        ("full_attn_idxs", [2]),
        ("hybrid_override_pattern", "M-M*"),
        ("layers_block_type", ["mamba", "hybrid"] * 2),
        ("linear_attn_config", {"full_attn_layers": [4]}),
        ("num_key_value_heads_per_layer", [4, 4, 2, 1]),
    ],
)
def test_layers_with_rows_of_their_own_are_rejected(tmp_path, key, value):
    with pytest.raises(UnsupportedError, match=f"{key}: not all layers keep the same KV rows"):
        config(tmp_path, **LAYERS_AND_HEADS, **{key: value})
    assert config(tmp_path, **LAYERS_AND_HEADS, **{key: None}).layers == 4


def test_a_hybrids_keys_may_say_that_all_layers_are_alike(tmp_path):  # MiniMax-M2
    assert config(tmp_path, **LAYERS_AND_HEADS, attn_type_list=[1] * 4).layers == 4


@pytest.mark.parametrize(
    "fields, message",
    [
        ({}, "num_hidden_layers=None"),
        ({"num_hidden_layers": 4}, "num_attention_heads=None"),
        (LAYERS_AND_HEADS | {"num_hidden_layers": "4"}, "num_hidden_layers='4'"),
        (LAYERS_AND_HEADS | {"num_key_value_heads": 0}, "num_key_value_heads=0"),
        (LAYERS_AND_HEADS | {"hidden_size": 510}, "hidden_size=510 is not a multiple of 8 heads"),
        (LAYERS_AND_HEADS | {"num_hidden_layers": 10**400}, "num_hidden_layers=1000"),
        (LAYERS_AND_HEADS | {"layer_types": 3}, "layer_types must be a list of names"),
        (LAYERS_AND_HEADS | {"layer_types": "full"}, "layer_types must be a list of names"),
        (LAYERS_AND_HEADS | {"layer_types": [[]]}, "layer_types must be a list of names"),
        ({"text_config": 3}, "text_config=3 must be an object"),
        ({"num_hidden_layers": 4, "kv_lora_rank": 512}, "qk_rope_head_dim=None"),
    ],
)
def test_a_config_that_makes_no_sense_is_rejected(tmp_path, fields, message):
    with pytest.raises(GeometryError, match=message):
        config(tmp_path, **fields)


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000], ids=["open", "list", "deep"])
def test_a_file_that_is_no_config_is_rejected(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"config\.json is not"):
        presets.load(str(path))


def test_the_table_names_the_largest_stage(capsys):
    assert main(["plan", "deepseek-v3", "--pp", "4", "--tp", "2"]) == 0
    printed = capsys.readouterr().out
    assert "8 rank(s): tp 2 x pp 4" in printed
    (largest,) = (line for line in printed.splitlines() if "largest" in line)
    assert largest.split()[:2] == ["3", "45..60"]


def test_json_has_the_same_numbers(capsys):
    assert main(["plan", "llama-3.1-8b", "--memory", "40GiB", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens"] == 40 * GIB // (128 * 1024) - 64
    assert result["pages"] * result["page_size"] == result["tokens"]
    assert result["stages"][0]["bytes_per_token_per_layer"] == 4096


def test_a_quantized_plan_says_so(capsys):
    arguments = ["plan", "deepseek-v3", "--quantization", "per_token_head"]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "bfloat16, quantised per_token_head" in table and " 644 B " in table
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["dtype"], result["quantization"]) == ("bfloat16", "per_token_head")
    shapes = result["stages"][0]["row_shapes"]
    assert shapes == {"latent": [1, 512], "scale": [1, 1], "rope": [1, 64]}


def test_a_quantized_plan_of_k_and_v(capsys):
    assert main(["plan", "llama-3.1-8b", "--quantization", "int8_per_token_head", "--json"]) == 0
    shapes = json.loads(capsys.readouterr().out)["stages"][0]["row_shapes"]
    assert shapes == {"k": [8, 128], "k_scale": [8, 1], "v": [8, 128], "v_scale": [8, 1]}


QUANTIZED = ["--quantization", "per_token_head"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["llama-3.1-8b", *QUANTIZED], "quantization='per_token_head' is not for K and V"),
        (["deepseek-v3", *QUANTIZED, "--dtype", "float16"], "dtype='float16' is the model's"),
        (["gpt-5"], "neither a file nor a preset; presets: llama-2-7b"),
        (["llama-3.1-8b", "--tp", "3"], "cannot be split over tp_size=3"),
        (["llama-3.1-8b", "--tp", "0"], "--tp 0 must be at least 1"),
        (["llama-3.1-8b", "--memory", "80G"], "'80G' is not an amount of memory"),
        (["llama-3.1-8b", "--memory", "9" * 400 + "GiB"], "is 8 EiB of memory or more"),
        (["llama-3.1-8b", "--memory", "1MiB"], "holds no page"),
        (["llama-3.1-8b", "--page-size", "0"], "--page-size 0 must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_reason(capsys, arguments, message):
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvjax plan: ")
    assert message in captured.err


def test_planning_loads_no_jax():
    program = (
        "import sys; from kvjax.__main__ import main; main(['plan', 'deepseek-v3']);"
        "assert not {'jax', 'jaxlib', 'torch', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
