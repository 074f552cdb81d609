"""Seconds of a step: arithmetic, launches, an alpha-beta all-reduce and the optimizer's update.

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
GLOO_BANDWIDTH, GLOO_LATENCY, NCCL_LATENCY = 1e9, 2e-4, 2e-5
BUCKET_BYTES = 25e6
MOBILE_SUSTAINED = 0.8
"""Share of its peak that a mobile GPU holds when warm (uncalibrated)."""
COMPILE_SPEEDUP = 1.3
MOST_SAMPLES = 512
"""Of a rank, cut for a prediction; more are scaled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanningCase:
    """What is planned for, with the choices that do not depend on the number of processes."""

    recipe: Recipe
    facts: Facts
    shape: ModelSize
    hardware: Hardware
    device: Literal["cpu", "cuda", "mps"]
    precision: Precision
    attention: Literal["sdpa", "eager", "flash"]
    pad_multiple: int = 1
    compile: bool = False
    world_nodes: int | None = None
    """Nodes of a world that was formed already."""

    @property
    def longest(self) -> int:
        """The longest sample, padded, in tokens."""
        return self.padded(self.facts.longest)

    def padded(self, length: int) -> int:
        return max(1, math.ceil(length / self.pad_multiple)) * self.pad_multiple

    def nodes(self, processes: int) -> int:
        """Nodes that these processes fill, one per GPU; on CPUs they are spread."""
        if self.world_nodes:
            return min(self.world_nodes, processes)
        if self.device == "cpu":
            return min(self.hardware.nodes, processes)
        return math.ceil(processes / max(1, len(self.hardware.gpus)))

    def local(self, processes: int) -> int:
        """Processes on the fullest node."""
        return math.ceil(processes / self.nodes(processes))


def flop_rate(case: PlanningCase, processes: int) -> float:
    """FLOP/s of one process; rates of unequal GPUs are the slowest one's."""
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
    return CPU_MEMORY_BANDWIDTH if case.device == "cpu" else case.hardware.gpu.memory_bandwidth


def micro_batch_seconds(case: PlanningCase) -> float:
    """What a micro-batch costs besides its tokens: launching kernels, and adding to every gradient once more.

    Eager kernels of a layer take about a millisecond to launch, forward and backward (BERT: 10 to 20 ms).
    """
    accumulate = 12.0 * case.shape.trainable / memory_bandwidth(case)
    if case.device == "cpu":
        return 1e-3 + accumulate
    launch = 3e-3 + 1e-3 * layers_and_width(case.shape)[0]
    return launch * (0.4 if case.compile else 1.0) + accumulate


def token_seconds(case: PlanningCase, choices: ExecutionChoices) -> float:
    """Forward and backward of one padded token."""
    flops = flops_per_token(case.shape, case.facts.mean_length, choices.activation_checkpointing)
    return max(flops, 1.0) / flop_rate(case, choices.processes)


def fixed_tokens(case: PlanningCase, choices: ExecutionChoices) -> float:
    """The cost of a micro-batch besides its tokens, in tokens."""
    return micro_batch_seconds(case) / token_seconds(case, choices)


def typical_batch_lengths(facts: Facts, samples: int) -> list[int]:
    """A batch like the data: lengths at evenly spaced ranks of the distribution, longest first."""
    last = len(facts.lengths) - 1
    return [facts.lengths[round((rank + 0.5) / samples * last)] for rank in reversed(range(samples))]


def compute_seconds(
    case: PlanningCase, choices: ExecutionChoices, samples: int, tokens: int
) -> tuple[float, float]:
    """(all, one) micro-batches of the fullest rank, cut as training will cut them."""
    share = math.ceil(case.recipe.batch_size / choices.processes)
    drawn = min(share, MOST_SAMPLES)
    per_token, budget = token_seconds(case, choices), _budget(case, choices, samples, tokens)
    times = [
        m.cost * per_token
        for m in make_micro_batches(np.array(typical_batch_lengths(case.facts, drawn)), 1, budget)[0]
    ]
    return sum(times) * share / drawn, sum(times) / len(times)


def expected_padding(case: PlanningCase, choices: ExecutionChoices, samples: int, tokens: int) -> float:
    """Share of the padded tokens of a batch like the data that are no tokens, cut for one process."""
    lengths = np.array(typical_batch_lengths(case.facts, min(case.recipe.batch_size, MOST_SAMPLES)))
    return padding_fraction(lengths, make_micro_batches(lengths, 1, _budget(case, choices, samples, tokens)))


def _budget(case: PlanningCase, choices: ExecutionChoices, samples: int, tokens: int) -> MicroBatchBudget:
    return MicroBatchBudget(samples, tokens, fixed_tokens(case, choices), 0.0, case.pad_multiple)


def all_reduce_seconds(size: float, processes: int, case: PlanningCase) -> float:
    """A ring inside each node, then one between nodes; latencies per 25 MB bucket and tree level.

    Alpha-beta model: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations".
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
    """What the exchange adds: all of it after the last micro-batch, or what its backward pass cannot hide."""
    # Sharded weights are gathered twice, besides the reduction of gradients.
    size = 4.0 * case.shape.trainable + (
        4.0 * case.shape.parameters if choices.traits.shards_weights else 0.0
    )
    whole = all_reduce_seconds(size, choices.processes, case)
    if case.device == "cpu" or not choices.traits.overlaps_reduction:
        return whole
    return max(0.05 * whole, whole - 0.6 * one_micro_batch)


def update_seconds(case: PlanningCase, choices: ExecutionChoices) -> float:
    """The optimizer reads and writes weights and moments, 28 bytes a parameter; offloaded, on the host."""
    sharded = choices.processes if choices.traits.shards else 1
    rate = (
        CPU_MEMORY_BANDWIDTH / case.local(choices.processes)
        if choices.traits.offloads
        else memory_bandwidth(case)
    )
    return 28.0 * case.shape.trainable / sharded / rate


def step_seconds(case: PlanningCase, choices: ExecutionChoices, samples: int, tokens: int) -> float:
    """One optimizer step of the whole global batch."""
    compute, one = compute_seconds(case, choices, samples, tokens)
    return compute + exchange_seconds(case, choices, one) + update_seconds(case, choices)


def steps_per_epoch(recipe: Recipe, facts: Facts) -> int:
    samples = max(1, round(facts.samples.get("train", 1) * recipe.train_fraction))
    return math.ceil(samples / recipe.batch_size)


def run_steps(recipe: Recipe, facts: Facts) -> float:
    """Optimizer steps of the run; one epoch where the recipe leaves it to the task."""
    if recipe.steps is not None:
        return float(sum(recipe.steps))
    return sum(recipe.epochs or (1.0,)) * steps_per_epoch(recipe, facts)
