"""What an adapter adds to a model, in numbers of weights: arithmetic over the shapes of its matrices.

Those of GPT-2 and Llama-like models follow from the config; of others they are read from a model without
storage. peft, which takes seconds to import, is asked only for a model type that is not in USUAL_TARGETS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.models.causal_lm.model_sizes import LLAMA_LIKE, model_without_storage, size_from_config
from isobatch.models.lora import block_matrices, check_targets, expert_weights, usual_targets

if TYPE_CHECKING:
    from torch import nn

USUAL_TARGETS = {
    "gpt2": ("c_attn",),
    **dict.fromkeys((*LLAMA_LIKE, "opt", "gemma", "gemma2"), ("q_proj", "v_proj")),
    **dict.fromkeys(("bloom", "gpt_neox", "falcon"), ("query_key_value",)),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
}
"""Model type -> the matrices that peft adapts where --lora-targets is auto."""


@dataclass(frozen=True, slots=True)
class AdapterCounts:
    """What an adapter adds to a model and trains, in numbers of weights."""

    trainable: int
    targets: Mapping[str, int]
    """Last part of a module's name -> how many modules of this name have an adapter."""
    frozen_matrices: int
    """Weights in the matrices that --load-bits rounds."""
    frozen_tables: int
    """Weights in the embeddings and the head."""
    added: int
    """Weights that the model has more with the adapter."""
    inputs: int
    """Widths of what the adapted matrices read, added up over the model."""
    trained_tables: int = 0
    """Weights in the embeddings and the head that train whole; `trainable` holds them too."""
    experts: int = 0
    """Weights of a mixture's experts, which no adapter reaches."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix of a transformer block."""

    name: str
    inputs: int
    outputs: int
    bias: bool


@dataclass(frozen=True, slots=True)
class WeightShapes:
    """The weights of a model that an adapter touches or --load-bits rounds."""

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

    def trained_tables(self, also_train: Collection[str]) -> int:
        """Weights of the tables that train whole."""
        if also_train and not self.head:  # tied
            return self.embeddings
        return self.embeddings * ("embeddings" in also_train) + self.head * ("head" in also_train)


def adapter_counts(shapes: WeightShapes, options: Any) -> AdapterCounts:
    """What an adapter adds and trains. Raises UserError where --lora-targets names no matrix.

    An adapter of rank r on a matrix (m, n) has r (m + n) weights, DoRA's n more.
    """
    adapted = _adapted(shapes, options.lora_targets)
    magnitudes = sum(m.outputs for m in adapted) if options.adapter == "dora" else 0
    added = sum(options.lora_r * (m.inputs + m.outputs) for m in adapted) + magnitudes
    of_adapted = sum(m.outputs for m in adapted if m.bias)
    tables = shapes.trained_tables(options.also_train or ())
    biases = {"none": 0, "lora_only": of_adapted, "all": shapes.biases}[options.lora_bias]
    return AdapterCounts(
        trainable=added + biases + tables,
        targets=Counter(m.name.rpartition(".")[2] for m in adapted),
        frozen_matrices=sum(m.inputs * m.outputs for m in shapes.matrices),
        frozen_tables=shapes.tables - tables,
        added=added,
        inputs=sum(m.inputs for m in adapted),
        trained_tables=tables,
        experts=shapes.experts,
    )


def _adapted(shapes: WeightShapes, wanted: str) -> list[Matrix]:
    """The matrices that --lora-targets names. Raises UserError."""
    check_targets([m.name for m in shapes.matrices], wanted)
    if wanted == "auto":
        names = USUAL_TARGETS.get(shapes.model_type) or usual_targets(shapes.model_type)
    else:
        names = None if wanted == "all-linear" else [name.strip() for name in wanted.split(",")]
    if names is None:
        return shapes.matrices
    return [m for m in shapes.matrices if any(f".{m.name}".endswith(f".{name}") for name in names)]


def shapes_from_config(config: Mapping[str, Any]) -> WeightShapes | None:
    """The shapes of a GPT-2 or Llama-like model by its config.json; None for another architecture."""
    size = size_from_config(config)
    if size is None:
        return None
    gpt2 = config["model_type"] == "gpt2"
    block = _gpt2_block(config) if gpt2 else _llama_block(config)
    prefix = "transformer.h" if gpt2 else "model.layers"
    matrices = [
        Matrix(f"{prefix}.{layer}.{m.name}", m.inputs, m.outputs, m.bias)
        for layer in range(size.layers)
        for m in block
    ]
    norms = (2 * size.layers + 1) * size.hidden if gpt2 else 0
    positions = config.get("n_positions", 1024) if gpt2 else 0
    tables = 1 if config.get("tie_word_embeddings", gpt2) else 2
    table = size.vocabulary * size.hidden
    return WeightShapes(
        config["model_type"],
        matrices,
        tables * table + positions * size.hidden,
        sum(m.outputs for m in matrices if m.bias) + norms,
        table,
        (tables - 1) * table,
    )


def _gpt2_block(config: Mapping[str, Any]) -> list[Matrix]:
    hidden = config.get("n_embd", 768)
    intermediate = config.get("n_inner") or 4 * hidden
    return [
        Matrix("attn.c_attn", hidden, 3 * hidden, True),
        Matrix("attn.c_proj", hidden, hidden, True),
        Matrix("mlp.c_fc", hidden, intermediate, True),
        Matrix("mlp.c_proj", intermediate, hidden, True),
    ]


def _llama_block(config: Mapping[str, Any]) -> list[Matrix]:
    hidden, intermediate, heads = (
        config["hidden_size"],
        config["intermediate_size"],
        config["num_attention_heads"],
    )
    head_dim = config.get("head_dim") or hidden // heads
    query, key = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    qwen2 = config["model_type"] == "qwen2"
    attention, mlp = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    return [
        Matrix("self_attn.q_proj", hidden, query, qwen2 or attention),
        Matrix("self_attn.k_proj", hidden, key, qwen2 or attention),
        Matrix("self_attn.v_proj", hidden, key, qwen2 or attention),
        Matrix("self_attn.o_proj", query, hidden, attention and not qwen2),
        Matrix("mlp.gate_proj", hidden, intermediate, mlp and not qwen2),
        Matrix("mlp.up_proj", hidden, intermediate, mlp and not qwen2),
        Matrix("mlp.down_proj", intermediate, hidden, mlp and not qwen2),
    ]


def shapes_by_building(config: Any, remote_code: bool = False) -> WeightShapes:
    """The shapes of any decoder that transformers opens, read from a model without storage."""
    model: Any = model_without_storage(config, remote_code)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    return WeightShapes(
        config.model_type,
        [_matrix(name, module) for name, module in block_matrices(model).items()],
        sum(p.numel() for p in _tables(model)),
        sum(p.numel() for name, p in model.named_parameters() if "bias" in name),
        embeddings.weight.numel(),
        0 if head.weight is embeddings.weight else sum(p.numel() for p in head.parameters()),
        expert_weights(model),
    )


def _matrix(name: str, module: Any) -> Matrix:
    """A Linear's weight is (outputs, inputs), that of transformers' Conv1D (inputs, outputs)."""
    shape = tuple(module.weight.shape)
    inputs, outputs = shape if type(module).__name__.endswith("Conv1D") else shape[::-1]
    return Matrix(name, inputs, outputs, getattr(module, "bias", None) is not None)


def _tables(model: Any) -> list[nn.Parameter]:
    """The weights of embeddings and the head, a tied one once."""
    layers = [m for m in model.modules() if "Embedding" in type(m).__name__] + [model.get_output_embeddings()]
    weights = {id(m.weight): m.weight for m in layers if getattr(m, "weight", None) is not None}
    return list(weights.values())
