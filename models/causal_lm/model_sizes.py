"""Sizes of decoder models from their config's numbers alone, and the presets trained from scratch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isobatch.models.base import ModelSize

SMALLEST_CONTEXT = 64


@dataclass(frozen=True, slots=True)
class Preset:
    """A GPT-2 to train from scratch. `context` 0 takes the recipe's --max-length."""

    layers: int
    hidden: int
    heads: int
    context: int = 0

    def config(self, vocabulary: int, max_length: int) -> dict[str, Any]:
        """The numbers of a GPT-2 config.json."""
        return {
            "model_type": "gpt2",
            "vocab_size": vocabulary,
            "n_positions": self.context or max(max_length, SMALLEST_CONTEXT),
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
PLAIN_HEADS = ("gpt2", *LLAMA_LIKE, "opt", "bloom", "gpt_neox")
"""Model types whose logits are a linear layer of the last states and nothing else."""
PACKED = ("gpt2", *LLAMA_LIKE, "opt", "gpt_neox")
"""Model types whose attention is causal over the whole sample, and told apart by positions alone."""
CHUNK_BYTES = 64 << 20
"""Of fp32 logits that a plain head's loss makes at a time; see models/causal_lm/chunked_cross_entropy.py."""
CONTEXT_NAMES = ("n_positions", "max_position_embeddings", "n_ctx", "max_sequence_length")


def context(config: Mapping[str, Any]) -> int | None:
    """Longest input of a model, or None where its config sets no limit."""
    return next((int(config[name]) for name in CONTEXT_NAMES if config.get(name)), None)


def shape_of(config: Mapping[str, Any]) -> ModelSize | None:
    """The size of a GPT-2 or Llama-like model, every parameter counted; None for another architecture."""
    kind = config.get("model_type")
    if kind == "gpt2":
        return _gpt2(config)
    return _llama(config) if kind in LLAMA_LIKE else None


def _gpt2(config: Mapping[str, Any]) -> ModelSize:
    """Per layer: attention 4h^2 + 4h, MLP 2hi + i + h, two norms 4h; then tables, last norm, head."""
    hidden, layers = config.get("n_embd", 768), config.get("n_layer", 12)
    vocabulary, positions = config.get("vocab_size", 50257), config.get("n_positions", 1024)
    inner = config.get("n_inner") or 4 * hidden
    layer = 4 * hidden**2 + 2 * hidden * inner + 9 * hidden + inner
    count = (vocabulary + positions) * hidden + layers * layer + 2 * hidden
    if not config.get("tie_word_embeddings", True):
        count += vocabulary * hidden
    return shape(count, layers, hidden, config.get("n_head", 12), inner, vocabulary)


def _llama(config: Mapping[str, Any]) -> ModelSize:
    """Per layer: q, k, v, o, a gated MLP of three matrices and two norms; a head unless it is tied."""
    hidden, layers, inner = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    heads, vocabulary = config["num_attention_heads"], config["vocab_size"]
    width = config.get("head_dim") or hidden // heads
    queries, keys = heads * width, (config.get("num_key_value_heads") or heads) * width
    layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * inner + 2 * hidden
    layer += _llama_biases(config, queries, keys, hidden, inner)
    if config["model_type"] == "qwen3":
        layer += 2 * width  # norms of queries and keys
    tables = 1 if config.get("tie_word_embeddings", False) else 2
    count = tables * vocabulary * hidden + layers * layer + hidden
    # A window hides what is far behind, which packed attention does not know.
    window = config.get("sliding_window") and config.get("use_sliding_window", True)
    return shape(count, layers, hidden, heads, inner, vocabulary, packs=not window)


def _llama_biases(config: Mapping[str, Any], queries: int, keys: int, hidden: int, inner: int) -> int:
    if config["model_type"] == "qwen2":
        return queries + 2 * keys
    count = queries + 2 * keys + hidden if config.get("attention_bias") else 0
    return count + (2 * inner + hidden if config.get("mlp_bias") else 0)


def shape(
    count: int,
    layers: int,
    hidden: int,
    heads: int,
    inner: int,
    vocabulary: int,
    plain_head: bool = True,
    packs: bool = True,
) -> ModelSize:
    return ModelSize(
        head_bytes=CHUNK_BYTES if plain_head else 0,
        packs=packs,
        parameters=count,
        trainable=count,
        layers=layers,
        hidden=hidden,
        heads=heads,
        intermediate=inner,
        vocabulary=vocabulary,
    )
