"""Bytes and FLOPs of training, from shapes alone.

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
"""CUDA context, cuBLAS and NCCL buffers (uncalibrated); on a CPU the process itself (measured: 0.38 GB)."""
FRAGMENTATION = {"cuda": 1.1, "mps": 1.2, "cpu": 1.3}
"""Allocator overhead on activations (CPU measured 1.25 to 1.3; the others uncalibrated)."""
ASSUMED_LAYERS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionChoices:
    """What of a plan decides memory and arithmetic."""

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
    """Gradients of embedding and head on their way to those that gather."""
    workspace: float
    update: float
    """Temporaries of the optimizer step, when activations are gone."""

    @property
    def resident(self) -> float:
        return self.weights + self.gradients + self.moments + self.workspace

    @property
    def state(self) -> float:
        """What training keeps of each parameter."""
        return self.weights + self.gradients + self.moments

    @property
    def peak(self) -> int:
        """Forward and backward against the optimizer step: the two never peak together."""
        return math.ceil(self.resident + max(self.activations + self.logits + self.tables, self.update))


def memory_footprint(
    recipe: Recipe, shape: ModelSize, choices: ExecutionChoices, tokens: float, length: int
) -> MemoryFootprint:
    """Bytes of training on micro-batches of `tokens` padded tokens in samples of `length`."""
    share = _shards(choices)
    slack = FRAGMENTATION[choices.device]
    return MemoryFootprint(
        weights=_weight_bytes(shape, choices) / share["weights"],
        gradients=shape.trainable * _gradient_bytes(choices) / share["gradients"],
        moments=shape.trainable * _state_bytes(recipe, choices) / share["moments"],
        activations=slack
        * (tokens * activation_bytes_per_token(shape, choices, length) + _one_layer(shape, choices)),
        logits=slack * logits_bytes(shape, choices, tokens),
        tables=table_bytes(shape),
        workspace=CONTEXT_BYTES[choices.device],
        update=4.0 * shape.trainable / share["moments"],
    )


def _weight_bytes(shape: ModelSize, choices: ExecutionChoices) -> float:
    """What autocast keeps in 16 bits lies beside the fp32 weights; rounded ones are loaded whole on a CPU."""
    if not shape.weight_bytes:
        return shape.parameters * (6.0 if choices.half else 4.0)
    rounded = shape.weight_bytes < 4.0 * shape.parameters
    return shape.weight_bytes + (4.0 * shape.parameters if rounded and choices.device == "cpu" else 0.0)


def _shards(choices: ExecutionChoices) -> dict[str, float]:
    """By how much each part is divided (Rajbhandari et al. 2020, "ZeRO"); what is offloaded is gone.

    Gradients are whole under ZeRO-2 as well: they are reduced once a step, so full local sums are kept.
    """
    ranks, traits = float(choices.processes), choices.traits
    whole = math.inf if traits.offloads else ranks if traits.shards_weights else 1.0
    moments = ranks if traits.shards_moments and not traits.offloads else whole
    return {"weights": whole, "gradients": whole, "moments": moments}


def _gradient_bytes(choices: ExecutionChoices) -> float:
    """fp32, and once more for the buckets or the flat buffer in which they cross processes."""
    return 4.0 if choices.processes == 1 else 8.0


def _state_bytes(recipe: Recipe, choices: ExecutionChoices) -> float:
    """Moments, and what the strategy keeps beside them."""
    return OPTIMIZERS[recipe.optimizer].state_bytes + choices.traits.copy_bytes


def _one_layer(shape: ModelSize, choices: ExecutionChoices) -> float:
    """Sharded weights are gathered by layers: two of them are on the device at a time."""
    if not choices.traits.shards_weights:
        return 0.0
    return 2 * 4.0 * max(shape.parameters / max(shape.layers, 1), shape.vocabulary * shape.hidden)


def activation_bytes_per_token(shape: ModelSize, choices: ExecutionChoices, length: int) -> float:
    """Bytes kept for the backward pass per padded token.

    Korthikanti et al. 2022, "Reducing Activation Recomputation", counts s*b*h*(34 + 5*a*s/h) bytes a layer in
    16 bits: 8 h-wide and 2 i-wide tensors. Unfused modules keep 5.5 i-wide ones (measured on GPT-2: 120 h
    bytes a layer in fp32 at i = 4h, 64 h under autocast, whose residual stream stays fp32). With
    checkpointing only each layer's fp32 input stays, and one layer at a time is computed anew.
    """
    layers, hidden = layers_and_width(shape)
    per_layer = _layer_bytes(shape, hidden, choices, length)
    if choices.activation_checkpointing:
        return layers * 4.0 * hidden + 2 * per_layer
    return (layers + 1) * per_layer  # one more: the gradients of the layer at work


def _layer_bytes(shape: ModelSize, hidden: float, choices: ExecutionChoices, length: int) -> float:
    intermediate = shape.intermediate or 4 * hidden
    elements = 8 * hidden + 5.5 * intermediate
    linear = 2 * elements + 4 * hidden if choices.half else 4 * elements
    # Scores after softmax, a mask, the dropped-out scores: 4 + 1 + 4 bytes (autocast keeps softmax fp32).
    return linear + (9.0 * shape.heads * length if choices.attention == "eager" else 0.0)


def layers_and_width(shape: ModelSize) -> tuple[float, float]:
    """(layers, hidden width); for a model that does not say, those of a 12-layer transformer of its size.

    A crude stand-in: parameters = 12 * layers * hidden^2 gives hidden = sqrt(parameters / 144). Embedding
    tables make it too large, which is the safe side for memory.
    """
    if shape.layers:
        return shape.layers, shape.hidden
    return ASSUMED_LAYERS, shape.hidden or math.sqrt(shape.parameters / (12 * ASSUMED_LAYERS))


def logits_bytes(shape: ModelSize, choices: ExecutionChoices, tokens: float) -> float:
    """Vocabulary-wide: fp32 logits, log-softmax and gradient; under autocast 16-bit copies of two of them.

    Where the head works in chunks, at most a chunk of them; under ZeRO-3, whose head is whole only while it
    runs, it does not.
    """
    whole = tokens * shape.vocabulary * (16.0 if choices.half else 12.0)
    chunked = shape.head_bytes > 0 and not choices.traits.shards_weights
    return min(whole, shape.head_bytes * (4.0 if choices.half else 3.0)) if chunked else whole


def table_bytes(shape: ModelSize) -> float:
    """Each backward makes both tables' gradients whole, in fp32, before they are added (measured: GPT-2 124M
    trained on a CPU takes 3.87 to 3.93 GB; 3.50 without this, 3.81 with it).
    """
    trained = 2 * shape.trainable > shape.parameters
    return 2 * 4.0 * shape.vocabulary * shape.hidden if trained else 0.0


def matmul_parameters(shape: ModelSize) -> float:
    """Parameters that multiply every token: attention 4 h^2 and MLP 2 h i a layer, and the output projection.

    Embedding tables are looked up, not multiplied. Without layers: all of them, at most a 12-layer stack's.
    """
    if shape.layers:
        intermediate = shape.intermediate or 4 * shape.hidden
        stack = shape.layers * (4.0 * shape.hidden**2 + 2.0 * shape.hidden * intermediate)
        return stack + shape.vocabulary * shape.hidden
    return min(float(shape.parameters), 12.0 * ASSUMED_LAYERS * shape.hidden**2 or math.inf)


def flops_per_token(shape: ModelSize, length: float, activation_checkpointing: bool = False) -> float:
    """Forward and backward: 6 per matmul parameter, 12 * layers * hidden * length for attention.

    Chowdhery et al. 2022, "PaLM", appendix B. Frozen weights need no weight gradient (2 of the 6);
    checkpointing runs the forward pass twice (8 in place of 6).
    """
    layers, hidden = layers_and_width(shape)
    trained = shape.trainable / max(shape.parameters, 1)
    passes = 4 + 2 * trained + (2 if activation_checkpointing else 0)
    attention = 12.0 * layers * hidden * length if shape.layers else 0.0
    return passes * matmul_parameters(shape) + attention * (passes / 6)
