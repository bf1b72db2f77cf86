"""What one token's KV rows look like in a given model. Standard library only."""

import dataclasses
import json
import pathlib
import reprlib
from collections.abc import Mapping
from typing import Any

from kvjax.errors import GeometryError, UnsupportedError
from kvjax.geometry import LayerRange, MHAGeometry, MLAGeometry


@dataclasses.dataclass(frozen=True)
class MHAModel:
    """Multi-head, grouped-query or multi-query attention: a K and a V row per head."""

    name: str
    layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        v = "" if self.v_head_dim is None else f" (V: {self.v_head_dim})"
        return f"{self.layers} layers, {self.num_kv_heads} KV heads of {self.head_dim}{v}"

    def on_rank(self, tp_size: int) -> "MHAModel":
        """The part of every layer that one tensor-parallel rank stores.

        With more ranks than heads, ``tp_size // num_kv_heads`` ranks store the same head.

        Raises:
          GeometryError: heads and ranks do not divide one another.
        """
        if self.num_kv_heads % tp_size and tp_size % self.num_kv_heads:
            raise GeometryError(
                f"{self.name}: num_kv_heads={self.num_kv_heads} cannot be split over "
                f"{tp_size=}; one must divide the other"
            )
        return dataclasses.replace(self, num_kv_heads=max(1, self.num_kv_heads // tp_size))

    def geometry(
        self, num_slots: int, page_size: int, dtype: str, layers: LayerRange | None = None
    ) -> MHAGeometry:
        """The pool that holds ``layers`` of this model, all of them by default."""
        return MHAGeometry(
            num_slots=num_slots,
            page_size=page_size,
            layers=LayerRange(0, self.layers) if layers is None else layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            v_head_dim=self.v_head_dim,
        )


@dataclasses.dataclass(frozen=True)
class MLAModel:
    """Multi-head latent attention: one latent and one rope row, whatever the number of heads."""

    name: str
    layers: int
    latent_dim: int
    rope_dim: int
    notes: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        return f"{self.layers} layers, MLA latent {self.latent_dim} + rope {self.rope_dim}"

    def on_rank(self, tp_size: int) -> "MLAModel":
        """Every tensor-parallel rank stores the whole latent, which no head owns."""
        del tp_size
        return self

    def geometry(
        self, num_slots: int, page_size: int, dtype: str, layers: LayerRange | None = None
    ) -> MLAGeometry:
        """The pool that holds ``layers`` of this model, all of them by default."""
        return MLAGeometry(
            num_slots=num_slots,
            page_size=page_size,
            layers=LayerRange(0, self.layers) if layers is None else layers,
            latent_dim=self.latent_dim,
            rope_dim=self.rope_dim,
            dtype=dtype,
        )


Model = MHAModel | MLAModel


@dataclasses.dataclass(frozen=True)
class Preset:
    """The keys of a published ``config.json`` that decide what a KV row is."""

    source: str
    config: Mapping[str, Any]


def _mha(source: str, layers: int, kv_heads: int, head_dim: int, **more: Any) -> Preset:
    return Preset(
        source,
        {
            "num_hidden_layers": layers,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            **more,
        },
    )


def _mla(source: str, layers: int, latent_dim: int, rope_dim: int) -> Preset:
    return Preset(
        source,
        {
            "num_hidden_layers": layers,
            "kv_lora_rank": latent_dim,
            "qk_rope_head_dim": rope_dim,
        },
    )


# Source: config.json of the Hugging Face repository that each entry names.
PRESETS = {
    "llama-2-7b": _mha("meta-llama/Llama-2-7b-hf", 32, 32, 128),
    "llama-3.1-8b": _mha("meta-llama/Llama-3.1-8B", 32, 8, 128),
    "llama-3.1-70b": _mha("meta-llama/Llama-3.1-70B", 80, 8, 128),
    "llama-3.1-405b": _mha("meta-llama/Llama-3.1-405B", 126, 8, 128),
    "llama-3.2-1b": _mha("meta-llama/Llama-3.2-1B", 16, 8, 64),
    "mistral-7b": _mha("mistralai/Mistral-7B-v0.3", 32, 8, 128),
    "mixtral-8x7b": _mha("mistralai/Mixtral-8x7B-v0.1", 32, 8, 128),
    "qwen2.5-0.5b": _mha("Qwen/Qwen2.5-0.5B", 24, 2, 64),
    "qwen2.5-7b": _mha("Qwen/Qwen2.5-7B", 28, 4, 128),
    "qwen2.5-72b": _mha("Qwen/Qwen2.5-72B", 80, 8, 128),
    "qwen3-0.6b": _mha("Qwen/Qwen3-0.6B", 28, 8, 128),
    "qwen3-8b": _mha("Qwen/Qwen3-8B", 36, 8, 128),
    "qwen3-32b": _mha("Qwen/Qwen3-32B", 64, 8, 128),
    "qwen3-30b-a3b": _mha("Qwen/Qwen3-30B-A3B", 48, 4, 128),
    "qwen3-235b-a22b": _mha("Qwen/Qwen3-235B-A22B", 94, 4, 128),
    "gemma-7b": _mha("google/gemma-7b", 28, 16, 256),
    "gemma-3-27b": _mha("google/gemma-3-27b-it", 62, 16, 128, sliding_window=1024),
    "phi-4": _mha("microsoft/phi-4", 40, 10, 128),
    "gpt-oss-120b": _mha("openai/gpt-oss-120b", 36, 8, 64, sliding_window=128),
    "deepseek-v2-lite": _mla("deepseek-ai/DeepSeek-V2-Lite", 27, 512, 64),
    "deepseek-v3": _mla("deepseek-ai/DeepSeek-V3", 61, 512, 64),
    "deepseek-r1": _mla("deepseek-ai/DeepSeek-R1", 61, 512, 64),
    "kimi-k2": _mla("moonshotai/Kimi-K2-Instruct", 61, 512, 64),
}


# The layer types that keep one KV row a token, which a window only allows to be dropped.
_PLANNED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}

# Keys that give some layers other KV rows than the rest, or none, and a model that has them.
_PER_LAYER_KEYS = (
    "attn_layer_indices",  # Bamba
    "attn_layer_period",  # Jamba
    "block_configs",  # Nemotron-NAS
    "block_types",  # RecurrentGemma
    "cross_attention_layers",  # Llama 3.2 Vision
    "full_attention_interval",  # Qwen3-Next
    "full_attn_idxs",  # LFM2
    "hybrid_override_pattern",  # Nemotron-H
    "layers_block_type",  # Zamba2
    "linear_attn_config",  # Kimi Linear
    "num_key_value_heads_per_layer",  # DeciLM
)

_MAX_SIZE = 2**31 - 1  # as for slots


def load(name_or_path: str) -> Model:
    """The model of a preset's name, or of the path of a Hugging Face ``config.json``.

    Raises:
      ValueError: neither a preset nor a file, or a file that is not such a JSON object.
      GeometryError: the configuration lacks a size, or has one that makes no sense.
      UnsupportedError: the layers do not all keep KV rows of one shape.
    """
    if name_or_path in PRESETS:
        return from_config(name_or_path, PRESETS[name_or_path].config)
    path = pathlib.Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{name_or_path!r} is neither a file nor a preset; presets: {', '.join(PRESETS)}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object")
    return from_config(str(path), config)


def from_config(name: str, config: Mapping[str, Any]) -> Model:
    """The model that the keys of a Hugging Face configuration describe.

    Raises:
      GeometryError: a size is missing, not a positive integer, or does not divide.
      UnsupportedError: the layers do not all keep KV rows of one shape.
    """
    text_config = config.get("text_config")  # multimodal models nest the language model
    if text_config is not None:
        if not isinstance(text_config, dict):
            raise GeometryError(f"{name}: {text_config=} must be an object")
        config = text_config
    layers = _size(name, config, "num_hidden_layers")
    notes = _notes(name, layers, config)
    if config.get("kv_lora_rank") is not None:
        latent_dim = _size(name, config, "kv_lora_rank")
        rope_dim = _size(name, config, "qk_rope_head_dim")
        return MLAModel(name, layers, latent_dim, rope_dim, notes)
    kv_heads = _kv_heads(name, config)
    # transformers' own default: hidden_size split over the heads.
    if config.get("head_dim") is None:
        hidden_size = _size(name, config, "hidden_size")
        heads = _size(name, config, "num_attention_heads")
        if hidden_size % heads:
            raise GeometryError(f"{name}: {hidden_size=} is not a multiple of {heads} heads")
        head_dim = hidden_size // heads
    else:
        head_dim = _size(name, config, "head_dim")
    v_head_dim = None if config.get("v_head_dim") is None else _size(name, config, "v_head_dim")
    return MHAModel(name, layers, kv_heads, head_dim, v_head_dim, notes)


def _kv_heads(name: str, config: Mapping[str, Any]) -> int:
    """The KV heads of a layer; by default there is no grouping.

    Source: transformers ``FalconAttention`` for ``multi_query``, which overrules ``num_kv_heads``
    unless the decoder architecture is the new one, and which a Falcon may leave out.
    """
    if config.get("num_key_value_heads") is not None:
        return _size(name, config, "num_key_value_heads")
    multi_query = config.get("multi_query", config.get("model_type") == "falcon")
    if multi_query and not config.get("new_decoder_architecture"):
        return 1
    if config.get("num_kv_heads") is not None:
        return _size(name, config, "num_kv_heads")
    return _size(name, config, "num_attention_heads")


def _size(name: str, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_SIZE:
        raise GeometryError(
            f"{name}: {key}={reprlib.repr(value)} must be an integer of at least 1, at most "
            f"{_MAX_SIZE}"
        )
    return value


def _notes(name: str, layers: int, config: Mapping[str, Any]) -> tuple[str, ...]:
    """What the plan leaves out or counts in full, in words.

    Raises:
      GeometryError: ``layer_types`` is not a list of names.
      UnsupportedError: the layers do not all keep KV rows of one shape.
    """
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
        raise GeometryError(f"{name}: layer_types must be a list of names")
    if others := set(layer_types) - _PLANNED_LAYER_TYPES:
        raise UnsupportedError(
            f"{name}: layer_types has {', '.join(sorted(others))}; only layers of "
            f"{', '.join(sorted(_PLANNED_LAYER_TYPES))} can be planned"
        )
    keys = [key for key in _PER_LAYER_KEYS if config.get(key)]
    # MiniMax: 1 is softmax attention and 0 linear attention; MiniMax-M2 has no layer of the latter.
    if config.get("attn_type_list") not in (None, [1] * layers):
        keys.append("attn_type_list")
    if keys:
        raise UnsupportedError(
            f"{name}: {', '.join(keys)}: not all layers keep the same KV rows; only models whose "
            f"layers do can be planned"
        )
    notes = []
    window = config.get("sliding_window")
    # Qwen2 configurations carry a window and say separately that it is off.
    if window is not None and config.get("use_sliding_window", True):
        notes.append(f"layers with a sliding window of {window} tokens are counted in full")
    if "chunked_attention" in layer_types or config.get("attention_chunk_size") is not None:
        notes.append("layers with chunked attention are counted in full")
    if shared := config.get("num_kv_shared_layers"):
        notes.append(
            f"the last {shared} layers share earlier layers' rows, but are counted in full"
        )
    if config.get("index_head_dim") is not None:
        notes.append("the sparse-attention indexer's own keys are not counted")
    return tuple(notes)
