"""Memory model: bytes of training, from the model's size alone.

Constants marked "measured" come from GPT-2 and Llama modules of transformers 5.23 on torch 2.13 and a CPU:
their saved tensors were counted, and resident memory read. What concerns CUDA is uncalibrated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from isobatch.core.optimizers import OPTIMIZERS
from isobatch.core.plan import Precision, Recompute, StrategyName
from isobatch.core.recipe import Recipe
from isobatch.core.strategies import StrategyTraits, mesh_of, traits_of
from isobatch.models import flops
from isobatch.models.base import ModelSize

CONTEXT_BYTES = {"cuda": 1.2e9, "mps": 0.8e9, "cpu": 0.46e9}
"""CUDA context, cuBLAS and NCCL buffers (uncalibrated); on a CPU the process (measured: 0.35 to 0.49)."""
TRANSFORMERS_BYTES = 0.1e9
"""Of a process on a CPU: transformers' models and what they import (measured)."""
FRAGMENTATION = {"cuda": 1.1, "mps": 1.2, "cpu": 1.15}
"""Allocator overhead on activations (CPU measured: 1.0 to 1.5; the others uncalibrated)."""
EXPORT_COPIES = 1.0
"""Copies of the weights that are alive while a model is written (measured)."""
HELD_BACK = 0.7
"""On a CPU (measured: 0.5 to 1)."""
ZERO_BUCKET_BYTES = 4 * 50e6 * 2
"""Of the buckets in configs/deepspeed: one is filled while the other is reduced."""


@dataclass(frozen=True, slots=True)
class ExecutionChoices:
    """The fields of a plan that decide memory and arithmetic."""

    device: Literal["cpu", "cuda", "mps"] = "cpu"
    processes: int = 1
    strategy: StrategyName = "single"
    precision: Precision = "fp32"
    attention: Literal["sdpa", "eager", "flash"] = "sdpa"
    activation_checkpointing: Recompute = "off"
    copies: int = 1

    @property
    def mesh(self) -> tuple[int, int]:
        """(copies of what is sharded, processes that share each)."""
        return mesh_of(self.strategy, self.processes, self.copies)

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
    teacher: float
    """Weights of another model, before this one is built."""
    gradients: float
    moments: float
    activations: float
    logits: float
    tables: float
    """Gradients of embedding and head before they are added to the accumulated ones."""
    workspace: float
    caches: float
    """The model's own, which do not grow with the micro-batch."""
    host_copy: float
    """On a CPU: what a checkpoint is written from, kept from the first save on."""
    update: float
    """Temporaries of the optimizer step, after activations are freed."""
    rehearsal: float
    """Of a phase that rounds: its first steps are computed under another cut before it begins."""
    evaluation: float
    """Activations and logits of a forward pass without a backward pass."""
    exported: float
    """What a run's end holds beside: copies of the weights, or what it fits."""
    held_back: float
    """Share of a step's freed memory that stays with the process."""

    @property
    def resident(self) -> float:
        """What is allocated during a whole step, after a save."""
        return self.state + self.workspace + self.caches + self.host_copy

    @property
    def state(self) -> float:
        """What is kept per parameter from step to step."""
        return self.weights + self.gradients + self.moments

    @property
    def step(self) -> float:
        """The larger of the peaks of forward/backward and of the optimizer step, which do not overlap."""
        return self.resident + max(self.activations + self.logits + self.tables, self.update)

    @property
    def stages(self) -> dict[str, int]:
        """Stage of a run -> its peak.

        On a CPU what a step has freed stays with the process, where it serves what comes after.
        """
        kept = self.held_back * (self.step - self.resident)
        loaded = self.workspace + max(self.weights, self.teacher)
        peaks = {
            "load": self.step + self.rehearsal if self.rehearsal else loaded,
            "train": self.step,
            "save": self.resident + kept,
            "evaluate": self.resident + kept + self.evaluation,
            "export": self.resident + max(kept, self.exported),
        }
        return {stage: math.ceil(peak) for stage, peak in peaks.items()}

    @property
    def peak(self) -> int:
        """The largest peak of all stages."""
        return max(self.stages.values())


def memory_footprint(
    recipe: Recipe,
    size: ModelSize,
    choices: ExecutionChoices,
    tokens: float,
    length: int,
    evaluated: float | None = None,
) -> MemoryFootprint:
    """Bytes per process for micro-batches of `tokens` padded tokens in samples of `length` tokens.

    `evaluated`: tokens of a batch of an evaluation, where they are others.
    """
    evaluated = tokens if evaluated is None else evaluated
    optimizer, on_cpu = OPTIMIZERS[recipe.optimizer], choices.device == "cpu"
    kept = mean_state_bytes(recipe, size)
    average = 4.0 * size.trainable if recipe.ema is not None else 0.0  # held as the weights are
    shards, slack = _shard_counts(choices), FRAGMENTATION[choices.device]
    held = held_weight_bytes(size, choices)
    activations = activation_bytes_per_token(size, choices, length)
    states = kept + choices.traits.copy_bytes
    update = optimizer.update_bytes + (4.0 if choices.traits.flat_shards else 0.0)  # gradients in flat shards
    light = on_cpu and not size.needs_transformers
    # A second model with its gradients and moments beside the run's own, and the activations of a step.
    rehearsal = size.trainable * (8.0 + 2 * states) + held + slack * tokens * activations
    one_layer = _layer_bytes(size, flops.layers_and_width(size)[1], choices, length)
    return MemoryFootprint(
        weights=(held + average) / shards["weights"] + _copied_weight_bytes(size, choices),
        teacher=size.teacher_bytes,
        gradients=size.trainable * 4.0 / shards["gradients"] + _bucket_bytes(size, choices),
        moments=size.trainable * states / shards["moments"],
        activations=slack * (tokens * activations + _gathered_bytes(size, choices)),
        logits=slack * logits_bytes(size, choices, tokens),
        tables=table_bytes(size, choices),
        workspace=CONTEXT_BYTES[choices.device] - (TRANSFORMERS_BYTES if light else 0.0),
        caches=slack * size.cached_bytes,
        # This rank's share of the trained weights and moments (`engine/checkpointing/host_buffer.py`).
        host_copy=(size.trainable * (4.0 + kept) + average) / choices.processes if on_cpu else 0.0,
        update=size.trainable * update / shards["moments"],
        rehearsal=rehearsal if size.rounds else 0.0,
        evaluation=slack * evaluated * one_layer
        + slack * logits_bytes(size, choices, evaluated) / 3
        + average / shards["weights"],  # a copy of the weights, while the average is in their place
        exported=max(EXPORT_COPIES * 4.0 * size.parameters, size.fit_bytes) if on_cpu else 0.0,
        held_back=HELD_BACK if on_cpu else 0.0,
    )


def mean_state_bytes(recipe: Recipe, size: ModelSize) -> float:
    """Bytes of optimizer state per trained parameter: fewer in the blocks' matrices under some optimizers."""
    entry = OPTIMIZERS[recipe.optimizer]
    if entry.matrix_bytes is None or not size.layers:
        return entry.state_bytes
    matrices = min(1.0, size.layers * flops.layer_parameters(size) / max(size.trainable, 1))
    return entry.state_bytes + (entry.matrix_bytes - entry.state_bytes) * matrices


def held_weight_bytes(size: ModelSize, choices: ExecutionChoices) -> float:
    """Bytes of all weights, before they are cut: shards are of one number format, so frozen ones are fp32."""
    return 4.0 * size.parameters if choices.traits.shards else size.weight_bytes


def _copied_weight_bytes(size: ModelSize, choices: ExecutionChoices) -> float:
    """16-bit copies that autocast makes of fp32 weights, and fp32 ones that a CPU makes of rounded weights.

    Those of frozen matrices are kept for the backward pass: with activation checkpointing, in one layer.
    """
    if choices.traits.shards_weights:
        return 0.0
    if size.frozen_bytes < 2.0 and choices.device == "cpu":
        return 4.0 * size.parameters
    if size.frozen_bytes < 2.5 and choices.device == "cpu":
        # A copy lives as long as its product: the largest is the head's, forward and backward.
        return 2 * 4.0 * size.vocabulary * size.hidden
    if not choices.half:
        return 0.0
    matrices = min(size.frozen, flops.layers_and_width(size)[0] * flops.layer_parameters(size))
    kept = matrices if size.frozen_bytes == 4.0 and choices.activation_checkpointing == "off" else 0
    return 2.0 * (size.trainable + kept)


def _shard_counts(choices: ExecutionChoices) -> dict[str, float]:
    """Number of shards of each part (Rajbhandari et al. 2020, "ZeRO"); infinite where it is offloaded.

    DeepSpeed's estimators count 2 + 18 / n bytes a parameter for stage 2, 18 / n for stage 3. Here they are
    4 + 2 + 4 + 12 / n, because weights are fp32 beside autocast's copies and whole local gradients are
    reduced once a step (`whole_gradients`), and 20 / n, because weights and gradients have no 16-bit form.
    """
    ranks, traits = float(choices.mesh[1]), choices.traits
    weights = math.inf if traits.offloads else ranks if traits.shards_weights else 1.0
    moments = ranks if traits.shards_moments and not traits.offloads else weights
    return {"weights": weights, "gradients": 1.0 if traits.whole_gradients else moments, "moments": moments}


def _bucket_bytes(size: ModelSize, choices: ExecutionChoices) -> float:
    """Copies of gradients that are reduced: buckets on GPUs, where DDP's are the gradients themselves; on
    CPUs a flat buffer of all.
    """
    if choices.processes == 1 or choices.traits.offloads:
        return 0.0
    whole = 4.0 * size.trainable
    if choices.device == "cpu":
        return whole / (choices.mesh[1] if choices.traits.shards_weights else 1)
    return min(whole, ZERO_BUCKET_BYTES) if choices.traits.shards else 0.0


def _gathered_bytes(size: ModelSize, choices: ExecutionChoices) -> float:
    """Sharded weights are gathered by layer: two layers are on the device at a time, in the type they have,
    and one in 16 bits beside.
    """
    if not choices.traits.shards_weights:
        return 0.0
    largest = max(size.parameters / max(size.layers, 1), size.vocabulary * size.hidden)
    return (2 * 4.0 + (2.0 if choices.half else 0.0)) * largest


def activation_bytes_per_token(size: ModelSize, choices: ExecutionChoices, length: int) -> float:
    """Bytes kept for the backward pass per padded token.

    With checkpointing each layer keeps only its input, if selective what products and attention give, too,
    and one layer at a time is recomputed.
    """
    layers, hidden = flops.layers_and_width(size)
    per_layer = _layer_bytes(size, hidden, choices, length)
    if choices.activation_checkpointing != "off":
        kept = (2.0 if choices.half and size.frozen_bytes <= 2.0 else 4.0) * hidden
        if choices.activation_checkpointing == "selective":
            wide = (2 if size.gated else 1) * flops.intermediate_width(size)
            results = 2 * (flops.query_width(size) + flops.key_width(size) + hidden) + wide
            kept += (2.0 if choices.half else 4.0) * results
        return layers * kept + 2 * per_layer
    # One more on a GPU: gradients of the layer in its backward pass. A CPU frees as many tensors meanwhile.
    return (layers + (choices.device != "cpu")) * per_layer


def kept_bytes_per_token(size: ModelSize, choices: ExecutionChoices, length: int) -> float:
    """Bytes a token that a forward pass writes for the backward pass, logits among them."""
    layers, hidden = flops.layers_and_width(size)
    logits = size.vocabulary * (16.0 if choices.half else 12.0)
    return layers * _layer_bytes(size, hidden, choices, length) + logits


def _layer_bytes(size: ModelSize, hidden: float, choices: ExecutionChoices, length: int) -> float:
    """Bytes that a layer keeps per token, measured; autocast's residual stream and norms stay fp32.

    Korthikanti et al. 2022, "Reducing Activation Recomputation", counts s*b*h*(34 + 5*a*s/h) bytes a layer in
    16 bits: 8 h-wide and 2 i-wide tensors; so do GPT-2 and BERT (64 h bytes a layer in fp32 at i = 4h,
    36 h under autocast). Llama's norms keep two fp32 tensors each, its MLP four i-wide ones,
    and autocast casts what q, k, v, gate and up read for each anew. A frozen layer keeps no input of a
    matrix, but adapters keep theirs and the mask of their dropout.
    """
    # Keyed dropout draws and scales in fp32, and so does what follows it.
    element = 2.0 if choices.half and not size.keyed_dropout else 4.0
    wide, heads = flops.intermediate_width(size), flops.query_width(size) + 2 * flops.key_width(size)
    if 2 * size.trainable < size.parameters and size.gated:
        kept = 8 * hidden + element * (flops.query_width(size) + heads + 3 * wide)
    elif size.gated:
        casts = 5 if choices.half else 2
        kept = 16 * hidden + element * (casts * hidden + flops.query_width(size) + heads + 4 * wide)
    else:
        tensors = 2.0 if size.hidden else 5.5  # a model that says nothing of itself may have no fused GELU
        kept = element * (8 * hidden + tensors * wide) + (4 * hidden if choices.half else 0.0)
    kept += (element + 1.0) * size.adapter_inputs
    # Scores after softmax, a mask, the dropped-out scores: 4 + 1 + 4 bytes (autocast keeps softmax fp32).
    return kept + (9.0 * size.heads * length if choices.attention == "eager" else 0.0)


def logits_bytes(size: ModelSize, choices: ExecutionChoices, tokens: float) -> float:
    """Tensors as wide as the vocabulary: fp32 logits, log-softmax, gradient; with autocast two 16-bit copies.

    Where the head computes in chunks, at most those of one chunk.
    """
    unchunked = size.logit_copies * tokens * size.vocabulary * (16.0 if choices.half else 12.0)
    if not size.head_bytes:
        return unchunked
    # On tensor cores logits come in fp32 at once, and their gradient in 16 bits.
    copies = 2.5 if choices.half and choices.device == "cuda" else 4.0 if choices.half else 3.0
    return min(unchunked, size.logit_copies * size.head_bytes * copies)


def table_bytes(size: ModelSize, choices: ExecutionChoices) -> float:
    """Each backward pass makes full fp32 gradients of embedding and head before they are accumulated.

    On a CPU activations are freed before the embedding's is made (measured: GPT-2's and Llama's shapes).
    """
    trained = 2 * size.trainable > size.parameters
    return (4.0 if choices.device == "cpu" else 8.0) * size.vocabulary * size.hidden if trained else 0.0
