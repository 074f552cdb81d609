"""Sizes of decoder models, computed from their config alone; and the presets to train from scratch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.models import hub
from isobatch.models.base import ModelSize
from isobatch.models.head_chunks import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

MIN_CONTEXT = 64


@dataclass(frozen=True, slots=True)
class Preset:
    """A GPT-2 to train from scratch; `context` 0 takes the recipe's --max-length."""

    layers: int
    hidden: int
    heads: int
    context: int = 0

    def config(self, vocabulary: int, max_length: int) -> dict[str, Any]:
        """The numbers of a GPT-2 config.json."""
        return {
            "model_type": "gpt2",
            "vocab_size": vocabulary,
            "n_positions": self.context or max(max_length, MIN_CONTEXT),
            "n_embd": self.hidden,
            "n_layer": self.layers,
            "n_head": self.heads,
        }


PRESETS = {
    "tiny": Preset(layers=2, hidden=128, heads=4),
    "small": Preset(layers=4, hidden=128, heads=4),
    "gpt2-124m": Preset(layers=12, hidden=768, heads=12, context=1024),
}

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
LINEAR_HEAD_TYPES = ("gpt2", *LLAMA_LIKE, "opt", "bloom", "gpt_neox")
"""Model types whose logits are one linear layer of the last hidden states, and nothing else."""
PACKABLE_TYPES = ("gpt2", *LLAMA_LIKE, "opt", "gpt_neox")
"""Model types whose attention is causal over the whole row and can be split into samples by position ids."""
CONTEXT_KEYS = ("n_positions", "max_position_embeddings", "n_ctx", "max_sequence_length")


def context_length(config: Mapping[str, Any]) -> int | None:
    """The longest input of a model in tokens, or None if its config sets no limit."""
    return next((int(config[name]) for name in CONTEXT_KEYS if config.get(name)), None)


def size_from_config(config: Mapping[str, Any]) -> ModelSize | None:
    """The exact size of a GPT-2 or Llama-like model; None for another architecture."""
    model_type = config.get("model_type")
    if model_type == "gpt2":
        return _gpt2_size(config)
    return _llama_size(config) if model_type in LLAMA_LIKE else None


def _gpt2_size(config: Mapping[str, Any]) -> ModelSize:
    """Per layer: attention 4h^2 + 4h, MLP 2hi + i + h, two norms 4h; beside: embeddings, last norm, head."""
    hidden, layers = config.get("n_embd", 768), config.get("n_layer", 12)
    vocabulary, context = config.get("vocab_size", 50257), config.get("n_positions", 1024)
    intermediate = config.get("n_inner") or 4 * hidden
    layer_parameters = 4 * hidden**2 + 2 * hidden * intermediate + 9 * hidden + intermediate
    parameters = (vocabulary + context) * hidden + layers * layer_parameters + 2 * hidden
    if not config.get("tie_word_embeddings", True):
        parameters += vocabulary * hidden
    return make_model_size(parameters, layers, hidden, config.get("n_head", 12), intermediate, vocabulary)


def _llama_size(config: Mapping[str, Any]) -> ModelSize:
    """Per layer: q, k, v, o, a gated MLP of three matrices, 2 norms; beside: embeddings, last norm, head."""
    hidden, layers, intermediate = (
        config["hidden_size"],
        config["num_hidden_layers"],
        config["intermediate_size"],
    )
    heads, vocabulary = config["num_attention_heads"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // heads
    query_width, key_width = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    layer_parameters = (
        2 * hidden * query_width + 2 * hidden * key_width + 3 * hidden * intermediate + 2 * hidden
    )
    layer_parameters += _llama_biases(config, query_width, key_width, hidden, intermediate)
    if config["model_type"] == "qwen3":
        layer_parameters += 2 * head_dim  # norms of queries and keys
    tables = 1 if config.get("tie_word_embeddings", False) else 2
    parameters = tables * vocabulary * hidden + layers * layer_parameters + hidden
    # Packed attention has no sliding window.
    window = config.get("sliding_window") and config.get("use_sliding_window", True)
    size = make_model_size(parameters, layers, hidden, heads, intermediate, vocabulary, packs=not window)
    return dataclasses.replace(size, gated=True, query_width=query_width, key_width=key_width)


def _llama_biases(
    config: Mapping[str, Any], query_width: int, key_width: int, hidden: int, intermediate: int
) -> int:
    if config["model_type"] == "qwen2":
        return query_width + 2 * key_width
    parameters = query_width + 2 * key_width + hidden if config.get("attention_bias") else 0
    return parameters + (2 * intermediate + hidden if config.get("mlp_bias") else 0)


def size_by_building(config: Any, remote_code: bool = False) -> ModelSize:
    """The size of any decoder that transformers opens, counted on a model without storage."""
    model, config = model_without_storage(config, remote_code), config.get_text_config()
    hidden, heads, kind = config.hidden_size, config.num_attention_heads, config.model_type
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    shared = 1 if getattr(config, "multi_query", False) else heads
    size = make_model_size(
        sum(p.numel() for p in model.parameters()),
        config.num_hidden_layers,
        hidden,
        heads,
        _first(config, "intermediate_size", "ffn_hidden_size", "ffn_dim") or 4 * hidden,
        config.vocab_size,
        kind in LINEAR_HEAD_TYPES,
        kind in PACKABLE_TYPES,
    )
    return dataclasses.replace(
        size,
        gated=any("gate" in name for name, _ in model.named_parameters()),
        query_width=heads * head_dim,
        key_width=(getattr(config, "num_key_value_heads", None) or shared) * head_dim,
    )


def model_without_storage(config: Any, remote_code: bool = False) -> Any:
    """A model on the device meta, for counting: built once for a config, and not to be changed."""
    import torch
    from transformers import AutoModelForCausalLM

    config = config.get_text_config()
    key = config.to_json_string()
    if key not in _BUILT:
        with torch.device("meta"):
            _BUILT[key] = AutoModelForCausalLM.from_config(config, **hub.remote_code_kwargs(remote_code))
    return _BUILT[key]


_BUILT: dict[str, Any] = {}
"""Text config as JSON -> its model without storage."""


def _first(config: Any, *names: str) -> int | None:
    """The first of these fields that a config has."""
    return next((int(value) for name in names if (value := getattr(config, name, None))), None)


def make_model_size(
    parameters: int,
    layers: int,
    hidden: int,
    heads: int,
    intermediate: int,
    vocabulary: int,
    linear_head: bool = True,
    packs: bool = True,
) -> ModelSize:
    """A ModelSize of a fully trained decoder. `linear_head`: its loss can be computed in chunks."""
    return ModelSize(
        head_bytes=CHUNK_BYTES if linear_head else 0,
        packs=packs,
        parameters=parameters,
        trainable=parameters,
        layers=layers,
        hidden=hidden,
        heads=heads,
        intermediate=intermediate,
        vocabulary=vocabulary,
    )
