"""Memory model: bytes and FLOPs of training, from the model's size alone.

Constants marked "measured" come from GPT-2 modules of transformers 5.23 on torch 2.13 and a CPU: their
saved tensors were counted, and resident memory read. What concerns CUDA is uncalibrated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from isobatch.core.optimizers import OPTIMIZERS
from isobatch.core.plan import Precision, StrategyName
from isobatch.core.strategies import StrategyTraits, traits_of

if TYPE_CHECKING:
    from isobatch.core.recipe import Recipe
    from isobatch.models.base import ModelSize

CONTEXT_BYTES = {"cuda": 1.2e9, "mps": 0.8e9, "cpu": 0.45e9}
"""CUDA context, cuBLAS and NCCL buffers (uncalibrated); on a CPU, the process itself (measured: 0.38 GB)."""
FRAGMENTATION = {"cuda": 1.1, "mps": 1.2, "cpu": 1.3}
"""Allocator overhead on activations (CPU measured 1.25 to 1.3; the others uncalibrated)."""
ASSUMED_LAYERS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionChoices:
    """The fields of a plan that decide memory and arithmetic."""

    device: Literal["cpu", "cuda", "mps"] = "cpu"
    processes: int = 1
    strategy: StrategyName = "single"
    precision: Precision = "fp32"
    attention: Literal["sdpa", "eager", "flash"] = "sdpa"
    activation_checkpointing: bool = False

    @property
    def traits(self) -> StrategyTraits:
        return traits_of(self.strategy)

    @property
    def half(self) -> bool:
        return self.precision != "fp32"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFootprint:
    """Bytes per process on the device that trains."""

    weights: float
    gradients: float
    moments: float
    activations: float
    logits: float
    tables: float
    """Gradients of embedding and head before they are added to the accumulated ones."""
    workspace: float
    update: float
    """Temporaries of the optimizer step, after activations are freed."""

    @property
    def resident(self) -> float:
        """What is allocated during the whole step."""
        return self.weights + self.gradients + self.moments + self.workspace

    @property
    def state(self) -> float:
        """What is kept per parameter from step to step."""
        return self.weights + self.gradients + self.moments

    @property
    def peak(self) -> int:
        """The larger of the peaks of forward/backward and of the optimizer step, which do not overlap."""
        return math.ceil(self.resident + max(self.activations + self.logits + self.tables, self.update))


def memory_footprint(
    recipe: Recipe, size: ModelSize, choices: ExecutionChoices, tokens: float, length: int
) -> MemoryFootprint:
    """Bytes per process for micro-batches of `tokens` padded tokens in samples of `length` tokens."""
    shards = _shard_counts(choices)
    slack = FRAGMENTATION[choices.device]
    return MemoryFootprint(
        weights=_weight_bytes(size, choices) / shards["weights"],
        gradients=size.trainable * _gradient_bytes(choices) / shards["gradients"],
        moments=size.trainable * _state_bytes(recipe, choices) / shards["moments"],
        activations=slack
        * (tokens * activation_bytes_per_token(size, choices, length) + _gathered_bytes(size, choices)),
        logits=slack * logits_bytes(size, choices, tokens),
        tables=table_bytes(size),
        workspace=CONTEXT_BYTES[choices.device],
        update=4.0 * size.trainable / shards["moments"],
    )


def _weight_bytes(size: ModelSize, choices: ExecutionChoices) -> float:
    """fp32 weights and, in half precision, autocast's 16-bit copies; quantised ones add fp32 on a CPU."""
    if not size.weight_bytes:
        return size.parameters * (6.0 if choices.half else 4.0)
    rounded = size.weight_bytes < 4.0 * size.parameters
    return size.weight_bytes + (4.0 * size.parameters if rounded and choices.device == "cpu" else 0.0)


def _shard_counts(choices: ExecutionChoices) -> dict[str, float]:
    """Number of shards of each part (Rajbhandari et al. 2020, "ZeRO"); infinite where it is offloaded.

    ZeRO-2 keeps full gradients as well: they are reduced once a step, so full local sums are needed.
    """
    ranks, traits = float(choices.processes), choices.traits
    weights = math.inf if traits.offloads else ranks if traits.shards_weights else 1.0
    moments = ranks if traits.shards_moments and not traits.offloads else weights
    return {"weights": weights, "gradients": weights, "moments": moments}


def _gradient_bytes(choices: ExecutionChoices) -> float:
    """Per trained parameter: fp32, and as much again for the buckets or flat buffer that are reduced."""
    return 4.0 if choices.processes == 1 else 8.0


def _state_bytes(recipe: Recipe, choices: ExecutionChoices) -> float:
    """Per trained parameter: the optimizer's moments, and the strategy's own copies."""
    return OPTIMIZERS[recipe.optimizer].state_bytes + choices.traits.copy_bytes


def _gathered_bytes(size: ModelSize, choices: ExecutionChoices) -> float:
    """Sharded weights are gathered by layer: two layers are on the device at a time."""
    if not choices.traits.shards_weights:
        return 0.0
    return 2 * 4.0 * max(size.parameters / max(size.layers, 1), size.vocabulary * size.hidden)


def activation_bytes_per_token(size: ModelSize, choices: ExecutionChoices, length: int) -> float:
    """Bytes kept for the backward pass per padded token.

    Korthikanti et al. 2022, "Reducing Activation Recomputation", counts s*b*h*(34 + 5*a*s/h) bytes a layer in
    16 bits: 8 h-wide and 2 i-wide tensors. Unfused modules keep 5.5 i-wide ones (measured on GPT-2: 120 h
    bytes a layer in fp32 at i = 4h, 64 h under autocast, whose residual stream stays fp32). With
    checkpointing, each layer keeps only its fp32 input, and one layer at a time is recomputed.
    """
    layers, hidden = layers_and_width(size)
    per_layer = _layer_bytes(size, hidden, choices, length)
    if choices.activation_checkpointing:
        return layers * 4.0 * hidden + 2 * per_layer
    return (layers + 1) * per_layer  # one more: gradients of the layer in its backward pass


def _layer_bytes(size: ModelSize, hidden: float, choices: ExecutionChoices, length: int) -> float:
    intermediate = size.intermediate or 4 * hidden
    elements = 8 * hidden + 5.5 * intermediate
    linear = 2 * elements + 4 * hidden if choices.half else 4 * elements
    # Scores after softmax, a mask, the dropped-out scores: 4 + 1 + 4 bytes (autocast keeps softmax fp32).
    return linear + (9.0 * size.heads * length if choices.attention == "eager" else 0.0)


def layers_and_width(size: ModelSize) -> tuple[float, float]:
    """(layers, hidden width); where the size has none, those of a 12-layer transformer of as many parameters.

    A crude estimate: parameters = 12 * layers * hidden^2 gives hidden = sqrt(parameters / 144). Embedding
    tables make it too large, which is safe for memory.
    """
    if size.layers:
        return size.layers, size.hidden
    return ASSUMED_LAYERS, size.hidden or math.sqrt(size.parameters / (12 * ASSUMED_LAYERS))


def logits_bytes(size: ModelSize, choices: ExecutionChoices, tokens: float) -> float:
    """Tensors as wide as the vocabulary: fp32 logits, log-softmax, gradient; with autocast two 16-bit copies.

    Where the head computes in chunks, at most those of one chunk. With sharded weights it does not: the
    head's weight is gathered only while the head runs.
    """
    unchunked = tokens * size.vocabulary * (16.0 if choices.half else 12.0)
    chunked = size.head_bytes > 0 and not choices.traits.shards_weights
    return min(unchunked, size.head_bytes * (4.0 if choices.half else 3.0)) if chunked else unchunked


def table_bytes(size: ModelSize) -> float:
    """Each backward pass makes full fp32 gradients of embedding and head before they are accumulated.

    Measured: GPT-2 124M trained on a CPU takes 3.87 to 3.93 GB; predicted: 3.50 without this, 3.81 with it.
    """
    trained = 2 * size.trainable > size.parameters
    return 2 * 4.0 * size.vocabulary * size.hidden if trained else 0.0


def matmul_parameters(size: ModelSize) -> float:
    """Parameters that multiply every token: attention 4 h^2 and MLP 2 h i a layer, and the output projection.

    Embedding tables are looked up, not multiplied. Where the number of layers is unknown: all parameters, at
    most those of a 12-layer stack.
    """
    if size.layers:
        intermediate = size.intermediate or 4 * size.hidden
        stack = size.layers * (4.0 * size.hidden**2 + 2.0 * size.hidden * intermediate)
        return stack + size.vocabulary * size.hidden
    return min(float(size.parameters), 12.0 * ASSUMED_LAYERS * size.hidden**2 or math.inf)


def flops_per_token(size: ModelSize, length: float, activation_checkpointing: bool = False) -> float:
    """FLOPs per token, both passes: 6 per matmul parameter, 12 * layers * hidden * length for attention.

    Chowdhery et al. 2022, "PaLM", appendix B. Frozen weights need no weight gradient (2 of the 6);
    activation checkpointing runs the forward pass twice (8 in place of 6).
    """
    layers, hidden = layers_and_width(size)
    trained = size.trainable / max(size.parameters, 1)
    passes = 4 + 2 * trained + (2 if activation_checkpointing else 0)
    attention = 12.0 * layers * hidden * length if size.layers else 0.0
    return passes * matmul_parameters(size) + attention * (passes / 6)
