"""Parallel layout: how many processes, which strategy, and how much fits into one micro-batch."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from isobatch.core.errors import UserError
from isobatch.core.optimizers import OPTIMIZERS
from isobatch.core.plan import MEMORY_LIMIT, UNITS, PlanOptions, StrategyName
from isobatch.core.strategies import STRATEGIES, traits_of
from isobatch.engine.machine.history import Correction
from isobatch.engine.planning.corrections import correct_bytes, correction_for, uncorrected_limit
from isobatch.engine.planning.cost_model import PlanningCase, largest_micro_batch, step_seconds
from isobatch.engine.planning.memory_model import ExecutionChoices, memory_footprint

CPU_TENSOR_BYTES = 24 * 2**20
"""Blocks of 32 MiB are mapped and page-faulted anew each time (glibc's DEFAULT_MMAP_THRESHOLD_MAX).

Measured: 3,600 tokens/s at 1,024 tokens and a vocabulary of 8,000, 1,900 at 8,192 tokens."""
CPU_TOKENS = (512, 8192)
"""Least and largest token budget on a CPU."""
MANY = 1e12
"""More tokens than any micro-batch has."""
INDEX_LIMIT = 2**31
"""Elements of one tensor: the most that kernels with 32-bit indices can address."""
LEAST_SAVING = 0.02
"""Least share of weights, gradients and moments that sharding must save: with less it is only slower."""
OVER_A_RUN = 1.25
"""The largest micro-batch of a run over that of a typical batch (measured)."""
LARGEST_EXCESS = 1.15
"""Measured peaks over predicted ones, at most (measured on CPUs: `python -m benchmarks predictions`)."""
AS_GOOD = 1.1
"""Layouts that take at most this times the fastest's time count as equal: predictions are no finer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """A number of processes with a strategy and checkpointing under which training fits."""

    choices: ExecutionChoices
    tokens: int
    """Padded tokens of the largest micro-batch."""
    samples: int
    seconds: float
    """Per optimizer step, before the correction."""
    stages: dict[str, int]
    """Stage -> predicted peak bytes per process with a typical batch, before the correction."""
    most: int
    """The most of the worst stage, with micro-batches as large as the budget allows."""
    correction: Correction
    """What this machine's history makes of the predictions."""
    bound: str
    """What limits the token budget: a key of the reasons in `explanations.why_tokens`."""


def device_memory(case: PlanningCase, processes: int) -> int:
    """Bytes of memory of one process: its GPU's, or its share of the RAM on CPUs."""
    if case.device == "cpu":
        return case.hardware.ram_bytes // case.local(processes)
    return case.hardware.gpu.memory_bytes


def memory_limit(case: PlanningCase, asked: PlanOptions, processes: int) -> float:
    """Bytes a process may use: 80 % of its memory, or --memory-limit. Raises UserError."""
    memory, text = device_memory(case, processes), asked.memory_limit
    if text is None:
        return 0.8 * memory
    match = re.fullmatch(MEMORY_LIMIT, text.strip().lower())
    if match is None or float(match[1]) == 0 or (match[2] == "%" and float(match[1]) > 100):
        raise UserError(f"--memory-limit {text}: is not a size such as 10GB or a share such as 80%")
    if match[2] == "%":
        return memory * float(match[1]) / 100
    sharing = case.local(processes) if case.device == "cpu" else 1
    return min(float(memory), float(match[1]) * UNITS[match[2]] / sharing)


def strategies_to_try(
    case: PlanningCase, asked: PlanOptions, processes: int
) -> list[tuple[StrategyName, bool]]:
    """Pairs of (strategy, activation checkpointing) to compare, the simplest first."""
    plain: StrategyName = "single" if processes == 1 else "ddp"
    strategies: list[StrategyName] = [plain]
    if asked.strategy != "auto" and traits_of(asked.strategy).least_processes <= processes:
        strategies = [asked.strategy]
    elif asked.strategy == "auto" and case.device == "cuda":
        strategies += [
            name
            for name, traits in STRATEGIES.items()
            if traits.tried and traits.least_processes <= processes and not why_not_fit(case, name)
        ]
    checkpointing = {"auto": [False, True], "on": [True], "off": [False]}[asked.activation_checkpointing]
    return [(strategy, recompute) for strategy in strategies for recompute in checkpointing]


def why_not_fit(case: PlanningCase, strategy: StrategyName) -> str:
    """Why this recipe cannot be trained by a strategy; empty where it can."""
    traits = traits_of(strategy)
    name = "ZeRO" if traits.library == "DeepSpeed" else strategy
    if traits.shards and (why := case.model_size.why_unshardable):
        return f"{case.recipe.task}: {why}, so each process holds all of it: use ddp"
    if case.precision == "fp16" and not traits.takes_fp16:
        return f"fp16's loss scale is not kept under {name}: use --precision fp32 or bf16"
    if traits.flat_shards and not OPTIMIZERS[case.recipe.optimizer].elementwise:
        return (
            f"--optimizer {case.recipe.optimizer} looks at whole matrices, and {name}'s shards are flat: it"
            " would learn something else; use adamw or sgd"
        )
    return ""


def zero_savings(case: PlanningCase, choices: ExecutionChoices) -> tuple[float, float]:
    """Bytes of weights, gradients and moments per process in DDP, and those that this strategy saves."""
    ddp = dataclasses.replace(choices, strategy="ddp")
    unsharded = memory_footprint(case.recipe, case.model_size, ddp, 0, case.longest).state
    sharded = memory_footprint(case.recipe, case.model_size, choices, 0, case.longest).state
    return unsharded, unsharded - sharded


def saves_enough(case: PlanningCase, choices: ExecutionChoices) -> bool:
    """ZeRO's copies of the trained parameters may take more memory than sharding their moments saves."""
    unsharded, saved = zero_savings(case, choices)
    only_moments = choices.traits.shards and not choices.traits.shards_weights
    return not only_moments or saved >= LEAST_SAVING * unsharded


def find_layout(case: PlanningCase, asked: PlanOptions, processes: int) -> ParallelLayout | None:
    """The fastest layout that fits the longest sample; None where none does.

    The simplest is taken of those that are as good.
    """
    found = []
    for strategy, recompute in strategies_to_try(case, asked, processes):
        choices = make_choices(case, processes, strategy, recompute)
        tokens, bound = token_budget(case, asked, choices)
        useful = asked.strategy != "auto" or saves_enough(case, choices)
        if useful and tokens >= case.longest and host_memory_suffices(case, choices):
            found.append(_layout(case, asked, choices, tokens, bound))
    return fastest_layout(found) if found else None


def _layout(
    case: PlanningCase, asked: PlanOptions, choices: ExecutionChoices, tokens: int, bound: str
) -> ParallelLayout:
    samples = min(case.recipe.batch_size, asked.micro_batch or case.recipe.batch_size)
    typical = min(tokens, round(OVER_A_RUN * largest_micro_batch(case, choices, samples, tokens)))
    return ParallelLayout(
        choices=choices,
        tokens=tokens,
        samples=samples,
        seconds=step_seconds(case, choices, samples, tokens),
        stages=memory_footprint(
            case.recipe, case.model_size, choices, typical, case.longest, evaluated=tokens
        ).stages,
        most=_most_bytes(case, choices, tokens),
        correction=correction_for(case, choices),
        bound=bound,
    )


def _most_bytes(case: PlanningCase, choices: ExecutionChoices, tokens: int) -> int:
    footprint = memory_footprint(case.recipe, case.model_size, choices, tokens, case.longest)
    return math.ceil(LARGEST_EXCESS * footprint.peak)


def make_choices(
    case: PlanningCase, processes: int, strategy: StrategyName, recompute: bool
) -> ExecutionChoices:
    """The case's choices with a strategy; `recompute` is activation checkpointing."""
    return ExecutionChoices(
        device=case.device,
        processes=processes,
        strategy=strategy,
        precision=case.precision,
        attention=case.attention,
        activation_checkpointing=recompute,
    )


def token_budget(case: PlanningCase, asked: PlanOptions, choices: ExecutionChoices) -> tuple[int, str]:
    """(largest padded tokens of a micro-batch, what limits them).

    A budget below the length of the longest sample means that it does not fit.
    """
    limit = memory_limit(case, asked, choices.processes)
    limit = uncorrected_limit(case, limit, correction_for(case, choices))
    empty = memory_footprint(case.recipe, case.model_size, choices, 0, case.longest)
    per_token = memory_footprint(case.recipe, case.model_size, choices, 1, case.longest)
    full = memory_footprint(case.recipe, case.model_size, choices, MANY, case.longest)
    free = limit - empty.resident - empty.activations - empty.tables
    token_bytes = per_token.activations - empty.activations
    # Logits grow with the tokens, up to one chunk of them where the head computes in chunks.
    most = max(free / max(token_bytes + per_token.logits, 1.0), (free - full.logits) / max(token_bytes, 1.0))
    memory = -1.0 if empty.peak > limit else most
    bounds = [(math.floor(memory), "memory"), *_other_bounds(case, asked, choices.processes)]
    return min(bounds)


def _other_bounds(case: PlanningCase, asked: PlanOptions, processes: int) -> list[tuple[int, str]]:
    widest = max(case.model_size.vocabulary, case.model_size.intermediate, 4 * case.model_size.hidden, 1)
    bounds = [(max(case.longest, INDEX_LIMIT // widest), "index")]
    bounds.append((case.longest * math.ceil(case.recipe.batch_size / processes), "batch"))
    if asked.micro_batch:
        bounds.append((case.longest * asked.micro_batch, "asked"))
    elif case.device == "cpu":
        low, high = CPU_TOKENS
        cached = min(high, max(low, CPU_TENSOR_BYTES // (4 * widest)))
        bounds.append((max(case.longest, cached), "cache"))
    return bounds


def host_memory_suffices(case: PlanningCase, choices: ExecutionChoices) -> bool:
    """Whether what is offloaded to a node fits into 80 % of its RAM."""
    return (
        not choices.traits.offloads
        or offloaded_bytes(case, choices.processes) <= 0.8 * case.hardware.ram_bytes
    )


def offloaded_bytes(case: PlanningCase, processes: int) -> float:
    """Bytes of offloaded fp32 weights, gradients and moments on one node."""
    per_trained = 4.0 + OPTIMIZERS[case.recipe.optimizer].state_bytes
    return (4.0 * case.model_size.parameters + per_trained * case.model_size.trainable) / case.nodes(
        processes
    )


def candidate_process_counts(case: PlanningCase, asked: PlanOptions, world: int | None) -> list[int]:
    """Numbers of processes to compare: powers of two within a node and of nodes, and all of both."""
    fixed = world or asked.processes
    if fixed:
        return [fixed]
    traits = None if asked.strategy == "auto" else traits_of(asked.strategy)
    if case.device != "cuda" or (traits and traits.most_processes == 1):
        return [1]
    node = len(case.hardware.gpus)
    inside = {2**power for power in range(node.bit_length()) if 2**power <= node} | {node}
    across = {
        2**power for power in range(1, case.hardware.nodes.bit_length()) if 2**power <= case.hardware.nodes
    }
    counts = sorted(inside | {node * nodes for nodes in across | {case.hardware.nodes}})
    shared = [count for count in counts if count > 1] if traits and traits.least_processes > 1 else counts
    return [count for count in shared if count <= case.recipe.batch_size] or shared[:1] or [1]


def fastest_layout(layouts: list[ParallelLayout]) -> ParallelLayout:
    """The first layout, the simplest or that of the fewest processes, that is as good as the fastest."""
    fastest = min(layout.seconds for layout in layouts)
    return next(layout for layout in layouts if layout.seconds <= AS_GOOD * fastest)


def least_memory(case: PlanningCase, asked: PlanOptions, processes: int) -> int:
    """Peak bytes per process of a micro-batch of one longest sample under the setting that needs least."""
    settings = [
        make_choices(case, processes, *measure) for measure in strategies_to_try(case, asked, processes)
    ]
    return min(_least_peak(case, choices) for choices in settings)


def _least_peak(case: PlanningCase, choices: ExecutionChoices) -> int:
    """Corrected peak bytes of a micro-batch of one longest sample."""
    footprint = memory_footprint(case.recipe, case.model_size, choices, case.longest, case.longest)
    return math.ceil(correct_bytes(case, footprint.peak, correction_for(case, choices)))
