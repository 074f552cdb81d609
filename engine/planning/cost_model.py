"""Cost model: seconds of a step for arithmetic, kernel launches, exchange, offloading and optimizer update.

Its constants are in calibration.py.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from isobatch.core.facts import Facts
from isobatch.core.optimizers import OPTIMIZERS
from isobatch.core.plan import PlanOptions, Precision
from isobatch.core.recipe import Recipe
from isobatch.engine.loading.microbatching import BatchCut, MicroBatchBudget, cut_batch
from isobatch.engine.machine.ceilings import Ceilings
from isobatch.engine.machine.hardware import Hardware
from isobatch.engine.planning import calibration
from isobatch.engine.planning.memory_model import ExecutionChoices, held_weight_bytes, kept_bytes_per_token
from isobatch.models import flops
from isobatch.models.base import ModelSize

BUCKET_BYTES = 25e6
"""Gradients are reduced in buckets of this size (DDP's default)."""
NEAR_A_BORDER = 1.5
"""How much more a launch counts for in `largest_micro_batch`, so that it sees the few large ones of a run."""
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
    asked: PlanOptions = field(default_factory=PlanOptions)
    world: int | None = None
    """The number of processes, where a launcher started them already."""
    measured: Ceilings | None = None
    """Rates that were measured on this machine."""

    @property
    def ceilings(self) -> Ceilings:
        """Rates of the processor, all cores together: measured, or those of a typical one."""
        return self.measured or calibration.typical_ceilings(self.hardware.cpus)

    @property
    def longest(self) -> int:
        """Padded length of the longest sample, in tokens."""
        return self.padded(self.facts.longest)

    def padded(self, length: int) -> int:
        """A length rounded up to the pad multiple."""
        return max(1, math.ceil(length / self.pad_multiple)) * self.pad_multiple

    def nodes(self, processes: int) -> int:
        """Nodes that this many processes use: one process per GPU; on CPUs they are spread over all nodes."""
        if self.device == "cpu" or (self.world and self.hardware.source == "detected"):
            return min(self.hardware.nodes, processes)
        return math.ceil(processes / max(1, len(self.hardware.gpus)))

    def local(self, processes: int) -> int:
        """Processes on the node that has the most."""
        return math.ceil(processes / self.nodes(processes))

    @property
    def constants(self) -> calibration.GpuConstants:
        """What training reaches on this GPU."""
        return calibration.gpu_constants(self.hardware.gpu)


def flop_rate(case: PlanningCase, processes: int) -> float:
    """FLOP/s of one process in matrix products. Unequal GPUs count as the one with the least memory."""
    if case.device == "cpu":
        native = case.precision != "fp32" and case.hardware.cpu_bf16
        rate = case.ceilings.matmul_rate(flops.layers_and_width(case.model_size)[1], native)
        emulated = case.precision != "fp32" and not native
        reached = calibration.CPU_MATMUL_SHARE * (calibration.EMULATED_BF16 if emulated else 1.0)
        return rate / case.local(processes) * reached
    gpu = case.hardware.gpu
    peak = gpu.peak_flops.get(case.precision) or gpu.peak_flops["fp32"] or 1e12
    return peak * case.constants.matmul_share * (calibration.MOBILE_SUSTAINED if gpu.mobile else 1.0)


def memory_bandwidth(case: PlanningCase) -> float:
    """Bytes/s of the training device's memory."""
    return case.ceilings.bandwidth if case.device == "cpu" else case.hardware.gpu.memory_bandwidth


def micro_batch_seconds(case: PlanningCase, choices: ExecutionChoices) -> float:
    """Seconds of a micro-batch apart from its tokens: launches, one addition to every gradient, and the part
    of a sharded model's exchange that arithmetic cannot hide.

    A recurrent layer is launched for every token of the longest row.
    """
    fixed = 12.0 * case.model_size.trainable / memory_bandwidth(case)
    fixed += (1 - _hidden_share(case)) * gather_seconds(case, choices)
    layers, hidden = flops.layers_and_width(case.model_size)
    longest_row = (case.facts.mean_length + case.facts.longest) / 2  # the first of the rows sorted by length
    steps = case.model_size.recurrent_layers * longest_row
    if case.device == "cpu":
        calls = calibration.MODEL_CALLS + calibration.LAYER_CALLS * layers
        read = calibration.RECURRENT_PASSES * 12.0 * hidden**2 / case.ceilings.cached_bandwidth
        return fixed + calls * case.ceilings.call_seconds + steps * (case.ceilings.recurrent_seconds + read)
    fixed += steps * calibration.RECURRENT_STEP_SECONDS
    known = case.constants
    launch = known.launch_seconds + known.layer_launch_seconds * layers
    return launch * (known.compiled_launch if case.compile and choices.traits.compiles else 1.0) + fixed


def token_seconds(case: PlanningCase, choices: ExecutionChoices) -> float:
    """Seconds of the forward and backward pass of one padded token.

    On GPUs the matrix products, and all traffic through the device's memory.
    """
    length = case.facts.mean_length
    work = flops.flops_per_token(case.model_size, length, choices.activation_checkpointing == "on")
    seconds = max(work, 1.0) / flop_rate(case, choices.processes)
    passes = 1.0 if choices.activation_checkpointing == "off" else 4 / 3
    if case.device == "cpu":
        return seconds + case.local(choices.processes) * passes * _elementwise_seconds(case, choices)
    known = case.constants
    moves = known.compiled_traffic if case.compile and choices.traits.compiles else known.traffic
    moved = moved_bytes(case.model_size, choices, round(length), moves)
    return seconds + passes * moved / memory_bandwidth(case)


def moved_bytes(size: ModelSize, choices: ExecutionChoices, length: int, moves: float) -> float:
    """Bytes of a token that cross a GPU's memory, forward and backward: what products read and write, `moves`
    times what the layers keep, frozen or not, and what the head and adapters move.
    """
    layers, hidden = flops.layers_and_width(size)
    widths = hidden + flops.query_width(size) + flops.key_width(size)
    widths += (1.5 if size.gated else 1.0) * (hidden + flops.intermediate_width(size))
    operands = 3 * (2.0 if choices.half else 4.0) * 2 * widths  # a product forward, and two backward
    bare = dataclasses.replace(size, trainable=size.parameters, adapter_inputs=0, vocabulary=0)
    logit = calibration.LOGIT if size.head_bytes and choices.half else calibration.WHOLE_LOGIT
    return (
        layers * (operands + calibration.ADAPTER_INPUT * size.adapter_inputs)
        + moves * kept_bytes_per_token(bare, choices, length)
        + logit * size.vocabulary
    )


def _elementwise_seconds(case: PlanningCase, choices: ExecutionChoices) -> float:
    """Seconds of a token on a processor for all that is no matrix product, forward and backward."""
    size, length = case.model_size, round(case.facts.mean_length)
    layers, hidden = flops.layers_and_width(size)
    full = dataclasses.replace(choices, precision="fp32")
    moved = calibration.CPU_TRAFFIC * kept_bytes_per_token(size, full, length) / memory_bandwidth(case)
    if choices.half:
        moved *= calibration.HALF_CPU_TRAFFIC
    elements = layers * flops.intermediate_width(size) + calibration.SOFTMAX * size.vocabulary
    if size.rounds:
        elements += calibration.ROUNDING * layers * (4 * hidden + flops.intermediate_width(size))
    if size.keyed_dropout:
        draw = calibration.KEYED_DRAW if size.keyed_scores else calibration.KEYED_MASK
        scores = size.heads * length if size.keyed_scores else 0
        elements += draw * (layers * (2 * hidden + scores) + hidden)
    return moved + elements / case.ceilings.gelu


def fixed_tokens(case: PlanningCase, choices: ExecutionChoices) -> float:
    """`micro_batch_seconds` as a number of tokens that take as long."""
    return micro_batch_seconds(case, choices) / token_seconds(case, choices)


def _typical_cut(
    case: PlanningCase, choices: ExecutionChoices, budget: tuple[int, int], share: int, launches: float = 1.0
) -> tuple[BatchCut, np.ndarray]:
    """A typical batch of `share` samples, divided by the same function as in training, and its lengths:
    evenly spaced quantiles of the data's, longest first.

    `budget`: most samples and tokens of a micro-batch; `launches`: how much more one of them counts for.
    """
    samples, last = min(share, MOST_SAMPLES), len(case.facts.lengths) - 1
    ranks = np.arange(samples)[::-1]
    lengths = np.array(case.facts.lengths)[np.round((ranks + 0.5) / samples * last).astype(int)]
    fixed = launches * fixed_tokens(case, choices)
    return cut_batch(lengths, 1, MicroBatchBudget(*budget, fixed, case.pad_multiple)), lengths


def compute_seconds(
    case: PlanningCase, choices: ExecutionChoices, samples: int, tokens: int
) -> tuple[float, float, float]:
    """(seconds of all micro-batches, seconds of one, their number) on the rank with the most samples."""
    share, per_token = math.ceil(case.recipe.batch_size / choices.processes), token_seconds(case, choices)
    cut, lengths = _typical_cut(case, choices, (samples, tokens), share)
    times, scale = [m.cost * per_token for m in cut.of_rank(0)], share / len(lengths)
    return sum(times) * scale, sum(times) / len(times), len(times) * scale


def largest_micro_batch(case: PlanningCase, choices: ExecutionChoices, samples: int, tokens: int) -> int:
    """Padded tokens of the largest micro-batch of a typical batch, on the rank with the most samples.

    Where a typical batch is nearly cut into fewer, some batches of a run are.
    """
    share = math.ceil(case.recipe.batch_size / choices.processes)
    cut, _ = _typical_cut(case, choices, (samples, tokens), share, NEAR_A_BORDER)
    return max(m.width * len(m.positions) for m in cut.of_rank(0))


def all_gather_seconds(size: float, processes: int, nodes: int, case: PlanningCase, messages: float) -> float:
    """Seconds until every process of a group over `nodes` has all `size` bytes, or its sum of a share of
    them (reduce-scatter).

    A ring in each node, then one between nodes. Latency counts per message and tree level. Alpha-beta model:
    Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations".
    """
    if processes == 1:
        return 0.0
    local = math.ceil(processes / nodes)
    latency, link = calibration.GLOO_LATENCY, calibration.GLOO_BANDWIDTH
    if case.device != "cpu":
        latency, link = calibration.NCCL_LATENCY, case.hardware.gpu.link_bandwidth
    inside = (local - 1) / local * size / link
    between = (nodes - 1) / nodes * size / case.hardware.node_bandwidth
    return inside + between + math.log2(processes) * latency * messages


def gather_seconds(case: PlanningCase, choices: ExecutionChoices) -> float:
    """Seconds that a micro-batch's exchange of sharded weights takes by itself; 0 where they are whole.

    Weights are gathered for the forward and again for the backward pass, gradients are reduced into shards.
    What is offloaded crosses PCIe as well, each process its own share.
    """
    traits, size, (copies, ranks) = choices.traits, case.model_size, choices.mesh
    if not traits.shards_weights:
        return 0.0
    width = 2.0 if choices.half and traits.gathers_half else 4.0
    gradients, (layers, _) = 4.0 * size.trainable, flops.layers_and_width(size)
    nodes, moved = math.ceil(case.nodes(choices.processes) / copies), 2 * width * size.parameters + gradients
    seconds = all_gather_seconds(moved, ranks, nodes, case, 3 * layers)
    if traits.offloads and case.device != "cpu":
        seconds += (2 * held_weight_bytes(size, choices) + gradients) / ranks / calibration.HOST_LINK
    return seconds


def _hidden_share(case: PlanningCase) -> float:
    """Share of the exchange of sharded weights that may run beside arithmetic: none on CPUs."""
    return 0.0 if case.device == "cpu" else calibration.HIDDEN


def exchange_seconds(
    case: PlanningCase, choices: ExecutionChoices, one_micro_batch: float, count: float
) -> float:
    """Seconds that exchange adds to a step of `count` micro-batches beside what `micro_batch_seconds` has.

    Whole gradients, and those of copies, are reduced once, during the last backward pass or after it.
    """
    beside, spare, copies, nodes = 0.0, one_micro_batch, choices.processes, case.nodes(choices.processes)
    size = 4.0 * case.model_size.trainable  # a reduce-scatter and an all-gather, in buckets
    messages: float = math.ceil(size / BUCKET_BYTES)
    if choices.traits.shards_weights:
        spare = one_micro_batch - micro_batch_seconds(case, choices) - gather_seconds(case, choices)
        beside = count * _hidden_share(case) * max(0.0, -spare)
        # Each process has a part of the gradients; those of a node share its network.
        copies, shards = choices.mesh
        size /= shards if nodes == 1 else math.ceil(nodes / copies)
        nodes, messages = min(nodes, copies), flops.layers_and_width(case.model_size)[0]
    total = 2 * all_gather_seconds(size, copies, nodes, case, messages)
    if case.device == "cpu" or not choices.traits.overlaps_reduction:
        return beside + total
    return beside + max(0.05 * total, total - calibration.HIDDEN * max(0.0, spare))


def update_seconds(case: PlanningCase, choices: ExecutionChoices) -> float:
    """Seconds of the optimizer's update: 28 bytes of weights and moments per parameter, read and written.

    Offloaded state is updated by the host.
    """
    sharded = choices.mesh[1]
    if case.device == "cpu":
        slower = OPTIMIZERS[case.recipe.optimizer].cpu_update
        updated = case.model_size.trainable * case.local(choices.processes) / sharded
        return slower * updated / case.ceilings.adamw
    rate = memory_bandwidth(case)
    if choices.traits.offloads:
        host = min(calibration.HOST_CORE_BANDWIDTH * case.hardware.cpus, calibration.HOST_BANDWIDTH)
        rate = host / case.local(choices.processes)
    return 28.0 * case.model_size.trainable / sharded / rate


def step_seconds(case: PlanningCase, choices: ExecutionChoices, samples: int, tokens: int) -> float:
    """Predicted seconds of one optimizer step of the whole global batch."""
    compute, one, count = compute_seconds(case, choices, samples, tokens)
    beside = exchange_seconds(case, choices, one, count) + update_seconds(case, choices)
    # Whatever its tokens: the model's own arithmetic beside them, and the loop's calls.
    arithmetic = case.model_size.step_flops / choices.processes / flop_rate(case, choices.processes)
    calls = calibration.STEP_CALLS * case.ceilings.call_seconds if case.device == "cpu" else 0.0
    return compute + beside + (arithmetic + calls)


def steps_per_epoch(recipe: Recipe, facts: Facts) -> int:
    """Optimizer steps of one pass over the training samples."""
    samples = max(1, round(facts.samples.get("train", 1) * recipe.train_fraction))
    return math.ceil(samples / recipe.batch_size)


def run_steps(recipe: Recipe, facts: Facts) -> float:
    """Optimizer steps of the run; one epoch where the recipe leaves it to the task."""
    if recipe.steps is not None:
        return float(sum(recipe.steps))
    return max(recipe.least_steps, sum(recipe.epochs or (1.0,)) * steps_per_epoch(recipe, facts))
