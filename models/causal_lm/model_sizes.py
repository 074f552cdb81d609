"""Sizes of decoder models, and the presets to train from scratch.

Of GPT-2 and Llama-like models all follows from the config, in no time; any other is built on torch's meta
device and counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.models import hub
from isobatch.models.base import ModelSize
from isobatch.models.head_chunks import CHUNK_BYTES
from isobatch.models.lora import block_matrices, expert_weights

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


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix of a transformer block."""

    name: str
    inputs: int
    outputs: int
    bias: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder's size when all of it trains, and what of it an adapter touches or --load-bits rounds."""

    size: ModelSize
    model_type: str
    matrices: list[Matrix]
    """Those of the blocks."""
    tables: int
    """Weights in the embeddings and the head."""
    biases: int
    """Weights of all biases."""
    embeddings: int
    """Weights of the input embeddings."""
    head: int
    """Weights of the head that are not those of the embeddings."""
    experts: int = 0
    """Weights of a mixture's experts: all experts of a layer are one tensor, and no matrix."""


def size_from_config(config: Mapping[str, Any]) -> ModelSize | None:
    """The exact size of a GPT-2 or Llama-like model; None for another architecture."""
    shape = shape_from_config(config)
    return None if shape is None else shape.size


def shape_from_config(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape of a GPT-2 or Llama-like model by its config.json; None for another architecture."""
    if config.get("model_type") == "gpt2":
        return _gpt2_shape(config)
    return _llama_shape(config) if config.get("model_type") in LLAMA_LIKE else None


def _gpt2_shape(config: Mapping[str, Any]) -> ModelShape:
    """Its norms have biases, and learnt positions stand beside the embeddings."""
    hidden, layers = config.get("n_embd", 768), config.get("n_layer", 12)
    intermediate = config.get("n_inner") or 4 * hidden
    block = [
        Matrix("attn.c_attn", hidden, 3 * hidden, True),
        Matrix("attn.c_proj", hidden, hidden, True),
        Matrix("mlp.c_fc", hidden, intermediate, True),
        Matrix("mlp.c_proj", intermediate, hidden, True),
    ]
    norms = (2 * layers + 1) * hidden
    positions = config.get("n_positions", 1024) * hidden
    size = {"heads": config.get("n_head", 12), "vocabulary": config.get("vocab_size", 50257), "packs": True}
    tied = config.get("tie_word_embeddings", True)
    of_norms = {"norms": norms, "norm_biases": norms, "positions": positions}
    return _shape(
        "gpt2", "transformer.h", layers, block, hidden, tied, **of_norms, intermediate=intermediate, **size
    )


def _llama_shape(config: Mapping[str, Any]) -> ModelShape:
    """Its MLP is gated, heads may share keys and values, and its norms have no biases."""
    kind, hidden, layers = config["model_type"], config["hidden_size"], config["num_hidden_layers"]
    intermediate, heads = config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    query, key = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    qwen2 = kind == "qwen2"
    attention = bool(config.get("attention_bias")) and not qwen2
    mlp = bool(config.get("mlp_bias")) and not qwen2
    block = [
        Matrix("self_attn.q_proj", hidden, query, qwen2 or attention),
        Matrix("self_attn.k_proj", hidden, key, qwen2 or attention),
        Matrix("self_attn.v_proj", hidden, key, qwen2 or attention),
        Matrix("self_attn.o_proj", query, hidden, attention),
        Matrix("mlp.gate_proj", hidden, intermediate, mlp),
        Matrix("mlp.up_proj", hidden, intermediate, mlp),
        Matrix("mlp.down_proj", intermediate, hidden, mlp),
    ]
    norms = (2 * layers + 1) * hidden + (2 * head_dim * layers if kind == "qwen3" else 0)
    # Packed attention has no sliding window.
    window = config.get("sliding_window") and config.get("use_sliding_window", True)
    widths = {"gated": True, "query_width": query, "key_width": key, "packs": not window}
    size = {"heads": heads, "vocabulary": config["vocab_size"], "intermediate": intermediate, **widths}
    tied = config.get("tie_word_embeddings", False)
    return _shape(kind, "model.layers", layers, block, hidden, tied, norms=norms, **size)


def _shape(
    kind: str,
    prefix: str,
    layers: int,
    block: list[Matrix],
    hidden: int,
    tied: bool,
    *,
    norms: int,
    norm_biases: int = 0,
    positions: int = 0,
    **size: Any,
) -> ModelShape:
    """Equal blocks, embeddings, `positions` of them learnt, and a head; `size`: fields of ModelSize."""
    matrices = [
        Matrix(f"{prefix}.{layer}.{m.name}", m.inputs, m.outputs, m.bias)
        for layer in range(layers)
        for m in block
    ]
    table = size["vocabulary"] * hidden
    tables = positions + (1 if tied else 2) * table
    biases = norm_biases + sum(m.outputs for m in matrices if m.bias)
    parameters = tables + norms + biases + sum(m.inputs * m.outputs for m in matrices)
    return ModelShape(
        size=whole_size(parameters, layers=layers, hidden=hidden, **size),
        model_type=kind,
        matrices=matrices,
        tables=tables,
        biases=biases,
        embeddings=table,
        head=0 if tied else table,
    )


def whole_size(parameters: int, linear_head: bool = True, **size: Any) -> ModelSize:
    """The size of a fully trained decoder. `linear_head`: its loss can be computed in chunks."""
    chunk = CHUNK_BYTES if linear_head else 0
    return ModelSize(parameters=parameters, trainable=parameters, head_bytes=chunk, **size)


def shape_by_building(config: Any, remote_code: bool = False) -> ModelShape:
    """The shape of any decoder that transformers opens, counted on a model without storage, once."""
    key = config.to_json_string(), remote_code
    if key not in _BUILT:
        _BUILT[key] = _build_shape(config, remote_code)
    return _BUILT[key]


_BUILT: dict[tuple[str, bool], ModelShape] = {}
"""Config as JSON and whether its code runs -> the shape."""


def _build_shape(config: Any, remote_code: bool) -> ModelShape:
    import torch
    from transformers import AutoModelForCausalLM

    kind, config = config.model_type, config.get_text_config()
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, **hub.remote_code_kwargs(remote_code))
    parameters = dict(model.named_parameters())
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers = [head, *(m for m in model.modules() if "Embedding" in type(m).__name__)]
    tables = {id(m.weight): m.weight for m in layers if getattr(m, "weight", None) is not None}
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    shared = 1 if getattr(config, "multi_query", False) else heads
    size = whole_size(
        sum(p.numel() for p in parameters.values()),
        config.model_type in LINEAR_HEAD_TYPES,
        packs=config.model_type in PACKABLE_TYPES,
        layers=config.num_hidden_layers,
        hidden=hidden,
        heads=heads,
        intermediate=_first(config, "intermediate_size", "ffn_hidden_size", "ffn_dim") or 4 * hidden,
        vocabulary=config.vocab_size,
        gated=any("gate" in name for name in parameters),
        query_width=heads * head_dim,
        key_width=(getattr(config, "num_key_value_heads", None) or shared) * head_dim,
    )
    return ModelShape(
        size=size,
        model_type=kind,
        matrices=[_matrix(name, module) for name, module in block_matrices(model).items()],
        tables=sum(p.numel() for p in tables.values()),
        biases=sum(p.numel() for name, p in parameters.items() if "bias" in name),
        embeddings=embeddings.weight.numel(),
        head=0 if head.weight is embeddings.weight else sum(p.numel() for p in head.parameters()),
        experts=expert_weights(model),
    )


def _matrix(name: str, module: Any) -> Matrix:
    """A Linear's weight is (outputs, inputs), that of transformers' Conv1D (inputs, outputs)."""
    shape = tuple(module.weight.shape)
    inputs, outputs = shape if type(module).__name__.endswith("Conv1D") else shape[::-1]
    return Matrix(name, inputs, outputs, getattr(module, "bias", None) is not None)


def _first(config: Any, *names: str) -> int | None:
    """The first of these fields that a config has."""
    return next((int(value) for name in names if (value := getattr(config, name, None))), None)
