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


def test_layers_without_kv_rows_are_rejected(tmp_path):
    kinds = ["full_attention", "linear_attention"] * 2
    with pytest.raises(UnsupportedError, match="linear_attention"):
        config(tmp_path, **LAYERS_AND_HEADS, layer_types=kinds)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({}, "num_hidden_layers=None"),
        ({"num_hidden_layers": 4}, "num_attention_heads=None"),
        (LAYERS_AND_HEADS | {"num_hidden_layers": "4"}, "num_hidden_layers='4'"),
        (LAYERS_AND_HEADS | {"num_key_value_heads": 0}, "num_key_value_heads=0"),
        (LAYERS_AND_HEADS | {"hidden_size": 510}, "hidden_size=510 is not a multiple of 8 heads"),
        ({"num_hidden_layers": 4, "kv_lora_rank": 512}, "qk_rope_head_dim=None"),
    ],
)
def test_a_config_that_makes_no_sense_is_rejected(tmp_path, fields, message):
    with pytest.raises(GeometryError, match=message):
        config(tmp_path, **fields)


@pytest.mark.parametrize("content", ["{", "[1]"])
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


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["gpt-5"], "neither a file nor a preset; presets: llama-2-7b"),
        (["llama-3.1-8b", "--tp", "3"], "cannot be split over tp_size=3"),
        (["llama-3.1-8b", "--tp", "0"], "--tp 0 must be at least 1"),
        (["llama-3.1-8b", "--memory", "80G"], "'80G' is not an amount of memory"),
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
