"""Sizes of decoder models, and the presets to train from scratch.

Of GPT-2 and Llama-like models all follows from the config, in no time; any other is built on torch's meta
device and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from isobatch.core.package import table_beside
from isobatch.models import hub
from isobatch.models.base import ModelSize
from isobatch.models.head_chunks import CHUNK_BYTES
from isobatch.models.lora import block_matrices, expert_tensors, expert_weights

MIN_CONTEXT = 64


class Preset(dict[str, int]):
    """Numbers of a GPT-2's config.json, to train it from scratch."""

    def config(self, vocabulary: int, max_length: int) -> dict[str, Any]:
        """All of config.json; without a context of its own it reads what the recipe's --max-length says."""
        context = max(max_length, MIN_CONTEXT)
        return {"model_type": "gpt2", "vocab_size": vocabulary, "n_positions": context, **self}


PRESETS = {name: Preset(sizes) for name, sizes in table_beside(__file__, "situations")["presets"].items()}

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
LINEAR_HEAD_TYPES = ("gpt2", *LLAMA_LIKE, "opt", "bloom", "gpt_neox")
"""Model types whose logits are one linear layer of the last hidden states, and nothing else."""
PACKABLE_TYPES = ("gpt2", *LLAMA_LIKE, "opt", "gpt_neox")
"""Model types whose attention is causal over the whole row and can be split into samples by position ids."""
GPT2_DEFAULTS = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
"""What a config.json of GPT-2 may leave out."""
CONTEXT_KEYS = ("n_positions", "max_position_embeddings", "n_ctx", "max_sequence_length")


def context_length(config: Mapping[str, Any]) -> int | None:
    """The longest input of a model in tokens, or None if its config sets no limit."""
    return next((int(config[name]) for name in CONTEXT_KEYS if config.get(name)), None)


class Matrix(NamedTuple):
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
    expert_tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Name -> (experts, m, n) of these tensors."""


def size_from_config(config: Mapping[str, Any]) -> ModelSize | None:
    """The exact size of a GPT-2 or Llama-like model; None for another architecture."""
    shape = shape_from_config(config)
    return None if shape is None else shape.size


def shape_from_config(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape of a GPT-2 or Llama-like model by its config.json; None for another architecture.

    GPT-2's norms have biases, and learnt positions stand beside its embeddings. Llama's MLP is gated, heads
    may share keys and values, and its norms have no biases.
    """
    kind, c = str(config.get("model_type")), {**GPT2_DEFAULTS, **config}
    size: dict[str, Any]
    if kind == "gpt2":
        hidden, layers, heads, prefix = c["n_embd"], c["n_layer"], c["n_head"], "transformer.h"
        wide = c.get("n_inner") or 4 * hidden
        block = [
            ("attn.c_attn", hidden, 3 * hidden, True),
            ("attn.c_proj", hidden, hidden, True),
            ("mlp.c_fc", hidden, wide, True),
            ("mlp.c_proj", wide, hidden, True),
        ]
        norms = norm_biases = (2 * layers + 1) * hidden
        positions, tied, size = c["n_positions"] * hidden, c.get("tie_word_embeddings", True), {"packs": True}
    elif kind in LLAMA_LIKE:
        hidden, layers, heads = c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"]
        wide, prefix = c["intermediate_size"], "model.layers"
        head_dim = c.get("head_dim") or hidden // heads
        query, key = heads * head_dim, (c.get("num_key_value_heads") or heads) * head_dim
        attention, mlp = (kind != "qwen2" and bool(c.get(name)) for name in ("attention_bias", "mlp_bias"))
        projections = (("q_proj", query), ("k_proj", key), ("v_proj", key))
        block = [
            *(
                (f"self_attn.{name}", hidden, width, attention or kind == "qwen2")
                for name, width in projections
            ),
            ("self_attn.o_proj", query, hidden, attention),
            *((f"mlp.{name}", hidden, wide, mlp) for name in ("gate_proj", "up_proj")),
            ("mlp.down_proj", wide, hidden, mlp),
        ]
        norms = (2 * layers + 1) * hidden + (2 * head_dim * layers if kind == "qwen3" else 0)
        norm_biases, positions, tied = 0, 0, c.get("tie_word_embeddings", False)
        # Packed attention has no sliding window.
        window = c.get("sliding_window") and c.get("use_sliding_window", True)
        size = {"gated": True, "query_width": query, "key_width": key, "packs": not window}
    else:
        return None
    matrices = [Matrix(f"{prefix}.{n}.{name}", *rest) for n in range(layers) for name, *rest in block]
    table = c["vocab_size"] * hidden
    tables = positions + (1 if tied else 2) * table
    biases = norm_biases + sum(m.outputs for m in matrices if m.bias)
    parameters = tables + norms + biases + sum(m.inputs * m.outputs for m in matrices)
    size |= {"heads": heads, "vocabulary": c["vocab_size"], "intermediate": wide}
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


def shape_of(config: Mapping[str, Any], open_config: Callable[[], Any], remote_code: bool) -> ModelShape:
    """The shape of any decoder, by its config.json or else by building it as transformers opens that."""
    return shape_from_config(config) or shape_by_building(open_config(), remote_code)


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
    wide = [getattr(config, name, None) for name in ("intermediate_size", "ffn_hidden_size", "ffn_dim")]
    shared = 1 if getattr(config, "multi_query", False) else heads
    size = whole_size(
        sum(p.numel() for p in parameters.values()),
        config.model_type in LINEAR_HEAD_TYPES,
        packs=config.model_type in PACKABLE_TYPES,
        layers=config.num_hidden_layers,
        hidden=hidden,
        heads=heads,
        intermediate=next(filter(None, wide), 4 * hidden),
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
        expert_tensors={name: tuple(p.shape) for name, p in expert_tensors(model).items()},
    )


def _matrix(name: str, module: Any) -> Matrix:
    """A Linear's weight is (outputs, inputs), that of transformers' Conv1D (inputs, outputs)."""
    shape = tuple(module.weight.shape)
    inputs, outputs = shape if type(module).__name__.endswith("Conv1D") else shape[::-1]
    return Matrix(name, inputs, outputs, getattr(module, "bias", None) is not None)
