"""Sizes of decoder models, with an adapter too, and the presets to train from scratch.

Of GPT-2 and Llama-like models all follows from the config, in no time; any other is built on torch's meta
device and counted.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isobatch.models import hub, lora
from isobatch.models.base import ModelSize
from isobatch.models.head_chunks import CHUNK_BYTES

MIN_CONTEXT = 64


class Preset(dict[str, int]):
    """Numbers of a GPT-2's config.json, to train it from scratch."""

    def config(self, vocabulary: int, max_length: int) -> dict[str, Any]:
        """All of config.json; without a context of its own it reads what the recipe's --max-length says."""
        context = max(max_length, MIN_CONTEXT)
        return {"model_type": "gpt2", "vocab_size": vocabulary, "n_positions": context, **self}


PRESETS = {
    "tiny": Preset(n_layer=2, n_embd=128, n_head=4),
    "small": Preset(n_layer=4, n_embd=128, n_head=4),
    "gpt2-124m": Preset(n_layer=12, n_embd=768, n_head=12, n_positions=1024),
}

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
LINEAR_HEAD_TYPES = ("gpt2", *LLAMA_LIKE, "opt", "bloom", "gpt_neox")
"""Model types whose logits are one linear layer of the last hidden states, and nothing else."""
PACKABLE_TYPES = ("gpt2", *LLAMA_LIKE, "opt", "gpt_neox")
"""Model types whose attention is causal over the whole row and can be split into samples by position ids."""
GPT2_DEFAULTS = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
"""What a config.json of GPT-2 may leave out."""
BYTES_PER_WEIGHT = {16: 4.0, 8: 1.0 + 4 / 1024, 4: 0.5 + 4 / 64}
"""Bits -> bytes of a frozen weight: 4 bits have a float scale per 64 weights, 8 bits about one per row."""
WHY_UNSHARDABLE = "bitsandbytes' weights cannot be cut"
"""Why every process must hold all of a model with weights in 8 or 4 bits (ModelSize.why_unshardable)."""
USUAL_TARGETS = {"gpt2": ["c_attn"], **{kind: ["q_proj", "v_proj"] for kind in LLAMA_LIKE}}
"""What peft adapts where --lora-targets is auto; for other models peft, seconds to import, is asked."""
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
        matrices=[_matrix(name, module) for name, module in lora.block_matrices(model).items()],
        tables=sum(p.numel() for p in tables.values()),
        biases=sum(p.numel() for name, p in parameters.items() if "bias" in name),
        embeddings=embeddings.weight.numel(),
        head=0 if head.weight is embeddings.weight else sum(p.numel() for p in head.parameters()),
        experts=lora.expert_weights(model),
        expert_tensors={name: tuple(p.shape) for name, p in lora.expert_tensors(model).items()},
    )


def _matrix(name: str, module: Any) -> Matrix:
    """A Linear's weight is (outputs, inputs), that of transformers' Conv1D (inputs, outputs)."""
    shape = tuple(module.weight.shape)
    inputs, outputs = shape if type(module).__name__.endswith("Conv1D") else shape[::-1]
    return Matrix(name, inputs, outputs, getattr(module, "bias", None) is not None)


def adapted_model_size(shape: ModelShape, options: Any) -> ModelSize:
    """The size with an adapter; its remark says what a user should know of the choice.

    An adapter of rank r on a matrix (m, n) has r (m + n) weights, DoRA's n more; so has each expert. Raises
    UserError where --lora-targets names no matrix.
    """
    whole, adapted, rank = shape.size, _adapted_matrices(shape, options), options.lora_r
    experts = [shape.expert_tensors[n] for n in lora.adapted_experts(shape.expert_tensors, options)]
    added = sum(rank * (m.inputs + m.outputs) for m in adapted)
    added += sum(m.outputs for m in adapted) if options.adapter == "dora" else 0
    added += sum(rank * count * (m + n) for count, m, n in experts)
    of_adapted = sum(m.outputs for m in adapted if m.bias)
    biases = {"none": 0, "lora_only": of_adapted, "all": shape.biases}[options.lora_bias]
    tables = _trained_tables(shape, options.also_train or ())
    total, trainable = whole.parameters + added, added + biases + tables
    of_tables = 2.0 if options.frozen_dtype == "bf16" else 4.0
    of_matrices = of_tables if options.load_bits == 16 else BYTES_PER_WEIGHT[options.load_bits]
    frozen_bytes = 4.0 * (total - trainable) - (4.0 - of_tables) * (shape.tables - tables)
    frozen_bytes -= (4.0 - of_matrices) * sum(m.inputs * m.outputs for m in shape.matrices)
    targets = Counter(m.name.rpartition(".")[2] for m in adapted)
    on = ", ".join(f"{count} {name}" for name, count in targets.items())
    remark = (
        f"{options.adapter} of rank {rank} on {on} trains {trainable:,} of {total:,} parameters"
        f" ({trainable / total:.2%})"
    )
    if shape.experts and not options.lora_experts:
        remark += f"; the {shape.experts:,} weights of the mixture's experts stay frozen"
    return dataclasses.replace(
        whole,
        parameters=total,
        trainable=trainable,
        frozen_bytes=frozen_bytes / max(total - trainable, 1),
        adapter_inputs=sum(m.inputs for m in adapted) // max(whole.layers, 1),
        why_unshardable=whole.why_unshardable if options.load_bits == 16 else WHY_UNSHARDABLE,
        remark=remark,
    )


def _adapted_matrices(shape: ModelShape, options: Any) -> list[Matrix]:
    lora.check_targets([m.name for m in shape.matrices], options.lora_targets)
    usual = USUAL_TARGETS.get(shape.model_type) if options.lora_targets == "auto" else None
    names = usual or lora.wanted_names(options.lora_targets, shape.model_type)
    chosen = set(lora.in_layers([m.name for m in shape.matrices], options.lora_layers))
    return [m for m in shape.matrices if m.name in chosen and lora.is_target(m.name, names)]


def _trained_tables(shape: ModelShape, also_train: Sequence[str]) -> int:
    """Weights in the embeddings and the head that train whole."""
    if also_train and not shape.head:  # tied
        return shape.embeddings
    return shape.embeddings * ("embeddings" in also_train) + shape.head * ("head" in also_train)
