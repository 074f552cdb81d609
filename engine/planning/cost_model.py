"""Cost model: seconds of a step for arithmetic, kernel launches, gradient exchange and optimizer update.

CPU rates were measured on two cores of an AMD EPYC; GPU efficiencies are uncalibrated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from isobatch.core.facts import Facts
from isobatch.core.plan import Precision
from isobatch.core.recipe import Recipe
from isobatch.engine.loading.microbatching import MicroBatchBudget, make_micro_batches, padding_fraction
from isobatch.engine.planning.hardware import Hardware
from isobatch.engine.planning.memory_model import ExecutionChoices, flops_per_token, layers_and_width
from isobatch.models.base import ModelSize

EFFICIENCY = {"fp32": 0.6, "bf16": 0.45, "fp16": 0.45}
"""Share of the dense peak that training reaches (uncalibrated)."""
CORE_FLOPS = 40e9
"""fp32 FLOP/s of a CPU core in training (measured: 21 to 77, growing with the width of the model)."""
CPU_BF16_SPEEDUP = 2.0
"""Measured with AVX512_BF16: 1.8 to 2.5 times fp32; without it bf16 is 5 times slower than fp32."""
CPU_MEMORY_BANDWIDTH = 10e9
"""Bytes/s."""
RECURRENT_STEP_SECONDS = {"cpu": 4e-4, "cuda": 5e-5, "mps": 5e-5}
"""Forward and backward pass of one token of a recurrent layer, however many rows there are (CPU measured: 0.3
to 0.8 ms; GPUs uncalibrated)."""
GLOO_BANDWIDTH, GLOO_LATENCY, NCCL_LATENCY = 1e9, 2e-4, 2e-5
"""Bytes/s, seconds, seconds."""
BUCKET_BYTES = 25e6
"""Gradients are reduced in buckets of this size (DDP's default)."""
MOBILE_SUSTAINED = 0.8
"""Share of its peak rate that a mobile GPU sustains when warm (uncalibrated)."""
COMPILE_SPEEDUP = 1.3
MOST_SAMPLES = 512
"""Samples of a rank that a prediction divides into micro-batches; for more, the time is scaled up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanningCase:
    """What a plan is for, with the choices that do not depend on the number of processes."""

    recipe: Recipe
    facts: Facts
    model_size: ModelSize
    hardware: Hardware
    device: Literal["cpu", "cuda", "mps"]
    precision: Precision
    attention: Literal["sdpa", "eager", "flash"]
    pad_multiple: int = 1
    compile: bool = False
    world_nodes: int | None = None
    """Number of nodes where the processes were started already; else None."""

    @property
    def longest(self) -> int:
        """Padded length of the longest sample, in tokens."""
        return self.padded(self.facts.longest)

    def padded(self, length: int) -> int:
        """A length rounded up to the pad multiple."""
        return max(1, math.ceil(length / self.pad_multiple)) * self.pad_multiple

    def nodes(self, processes: int) -> int:
        """Nodes that this many processes use: one process per GPU; on CPUs they are spread over all nodes."""
        if self.world_nodes:
            return min(self.world_nodes, processes)
        if self.device == "cpu":
            return min(self.hardware.nodes, processes)
        return math.ceil(processes / max(1, len(self.hardware.gpus)))

    def local(self, processes: int) -> int:
        """Processes on the node that has the most."""
        return math.ceil(processes / self.nodes(processes))


def flop_rate(case: PlanningCase, processes: int) -> float:
    """Predicted FLOP/s of one process. Unequal GPUs count as the one with the least memory."""
    if case.device == "cpu":
        native = CPU_BF16_SPEEDUP if case.hardware.cpu_bf16 else 0.2
        return (
            CORE_FLOPS
            * case.hardware.cpus
            / case.local(processes)
            * (1.0 if case.precision == "fp32" else native)
        )
    gpu = case.hardware.gpu
    rate = (gpu.peak_flops.get(case.precision) or gpu.peak_flops["fp32"] or 1e12) * EFFICIENCY[case.precision]
    return rate * (MOBILE_SUSTAINED if gpu.mobile else 1.0) * (COMPILE_SPEEDUP if case.compile else 1.0)


def memory_bandwidth(case: PlanningCase) -> float:
    """Bytes/s of the training device's memory."""
    return CPU_MEMORY_BANDWIDTH if case.device == "cpu" else case.hardware.gpu.memory_bandwidth


def micro_batch_seconds(case: PlanningCase) -> float:
    """Seconds of a micro-batch apart from its tokens: kernel launches, and one addition to every gradient.

    Launching a layer's eager kernels takes about a millisecond, forward and backward (BERT: 10 to 20 ms); a
    recurrent layer is launched for every token of the longest row.
    """
    fixed = 12.0 * case.model_size.trainable / memory_bandwidth(case)
    steps = case.model_size.recurrent_layers * case.facts.mean_length
    fixed += steps * RECURRENT_STEP_SECONDS[case.device]
    if case.device == "cpu":
        return 1e-3 + fixed
    launch = 3e-3 + 1e-3 * layers_and_width(case.model_size)[0]
    return launch * (0.4 if case.compile else 1.0) + fixed


def token_seconds(case: PlanningCase, choices: ExecutionChoices) -> float:
    """Seconds of the forward and backward pass of one padded token."""
    flops = flops_per_token(case.model_size, case.facts.mean_length, choices.activation_checkpointing)
    return max(flops, 1.0) / flop_rate(case, choices.processes)


def fixed_tokens(case: PlanningCase, choices: ExecutionChoices) -> float:
    """The fixed cost of a micro-batch, as a number of tokens that take the same time."""
    return micro_batch_seconds(case) / token_seconds(case, choices)


def typical_batch_lengths(facts: Facts, samples: int) -> list[int]:
    """Lengths of a typical batch: evenly spaced quantiles of the data's lengths, longest first."""
    last = len(facts.lengths) - 1
    return [facts.lengths[round((rank + 0.5) / samples * last)] for rank in reversed(range(samples))]


def compute_seconds(
    case: PlanningCase, choices: ExecutionChoices, samples: int, tokens: int
) -> tuple[float, float]:
    """Seconds of (all micro-batches, one micro-batch) of the rank with the most samples.

    A typical batch is divided into micro-batches by the same function as in training.
    """
    share = math.ceil(case.recipe.batch_size / choices.processes)
    drawn = min(share, MOST_SAMPLES)
    per_token, budget = token_seconds(case, choices), _budget(case, choices, samples, tokens)
    times = [
        m.cost * per_token
        for m in make_micro_batches(np.array(typical_batch_lengths(case.facts, drawn)), 1, budget)[0]
    ]
    return sum(times) * share / drawn, sum(times) / len(times)


def expected_padding(case: PlanningCase, choices: ExecutionChoices, samples: int, tokens: int) -> float:
    """Share of padding in the micro-batches of a typical batch on one process."""
    lengths = np.array(typical_batch_lengths(case.facts, min(case.recipe.batch_size, MOST_SAMPLES)))
    return padding_fraction(lengths, make_micro_batches(lengths, 1, _budget(case, choices, samples, tokens)))


def _budget(case: PlanningCase, choices: ExecutionChoices, samples: int, tokens: int) -> MicroBatchBudget:
    return MicroBatchBudget(samples, tokens, fixed_tokens(case, choices), 0.0, case.pad_multiple)


def all_reduce_seconds(size: float, processes: int, case: PlanningCase) -> float:
    """Seconds to all-reduce `size` bytes: a ring in each node, then one between nodes.

    Latency counts per 25 MB bucket and tree level. Alpha-beta model: Thakur, Rabenseifner, Gropp 2005,
    "Optimization of Collective Communication Operations".
    """
    if processes == 1:
        return 0.0
    nodes, local = case.nodes(processes), case.local(processes)
    latency, link = (
        (GLOO_LATENCY, GLOO_BANDWIDTH)
        if case.device == "cpu"
        else (NCCL_LATENCY, case.hardware.gpu.link_bandwidth)
    )
    inside = 2 * (local - 1) / local * size / link
    between = 2 * (nodes - 1) / nodes * size / case.hardware.node_bandwidth
    return inside + between + 2 * math.log2(processes) * latency * math.ceil(size / BUCKET_BYTES)


def exchange_seconds(case: PlanningCase, choices: ExecutionChoices, one_micro_batch: float) -> float:
    """Seconds that the gradient exchange adds: all of it, or what the last backward pass does not overlap."""
    # Besides the reduction of gradients, sharded weights are gathered twice, which costs one all-reduce.
    size = 4.0 * case.model_size.trainable + (
        4.0 * case.model_size.parameters if choices.traits.shards_weights else 0.0
    )
    total = all_reduce_seconds(size, choices.processes, case)
    if case.device == "cpu" or not choices.traits.overlaps_reduction:
        return total
    return max(0.05 * total, total - 0.6 * one_micro_batch)


def update_seconds(case: PlanningCase, choices: ExecutionChoices) -> float:
    """Seconds of the optimizer's update: 28 bytes of weights and moments per parameter, read and written.

    Offloaded state is updated by the host.
    """
    sharded = choices.processes if choices.traits.shards else 1
    rate = (
        CPU_MEMORY_BANDWIDTH / case.local(choices.processes)
        if choices.traits.offloads
        else memory_bandwidth(case)
    )
    return 28.0 * case.model_size.trainable / sharded / rate


def step_seconds(case: PlanningCase, choices: ExecutionChoices, samples: int, tokens: int) -> float:
    """Predicted seconds of one optimizer step of the whole global batch."""
    compute, one = compute_seconds(case, choices, samples, tokens)
    return compute + exchange_seconds(case, choices, one) + update_seconds(case, choices)


def steps_per_epoch(recipe: Recipe, facts: Facts) -> int:
    """Optimizer steps of one pass over the training samples."""
    samples = max(1, round(facts.samples.get("train", 1) * recipe.train_fraction))
    return math.ceil(samples / recipe.batch_size)


def run_steps(recipe: Recipe, facts: Facts) -> float:
    """Optimizer steps of the run; one epoch where the recipe leaves it to the task."""
    if recipe.steps is not None:
        return float(sum(recipe.steps))
    return sum(recipe.epochs or (1.0,)) * steps_per_epoch(recipe, facts)
