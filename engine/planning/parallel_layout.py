"""Parallel layout: how many processes, which strategy, and how much fits into one micro-batch; and why."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from isobatch.core.flags import spelling
from isobatch.core.measures import gigabytes
from isobatch.core.optimizers import OPTIMIZERS, OWN
from isobatch.core.plan import PlanOptions, Recompute, StrategyName, size_of
from isobatch.core.strategies import STRATEGIES, traits_of
from isobatch.engine.planning.cost_model import PlanningCase, largest_micro_batch, step_seconds
from isobatch.engine.planning.memory_model import ExecutionChoices, MemoryFootprint, memory_footprint

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
USABLE = 0.8
"""Of a device's memory, where --memory-limit does not say how much."""
HOST_SHARE = 0.8
"""Of a node's RAM that weights and offloaded state may take."""
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
    """Per optimizer step."""
    stages: dict[str, int]
    """Stage -> predicted peak bytes per process with a typical batch."""
    most: int
    """The most of the worst stage, with micro-batches as large as the budget allows."""
    bound: str
    """What limits the token budget: a key of the reasons in `why_tokens`."""


def device_memory(case: PlanningCase, processes: int) -> int:
    """Bytes of memory of one process: its GPU's, or its share of the RAM on CPUs."""
    if case.device == "cpu":
        return case.hardware.ram_bytes // case.local(processes)
    return case.hardware.gpu.memory_bytes


def memory_limit(case: PlanningCase, processes: int) -> float:
    """Bytes a process may use: a share of its memory, or --memory-limit (a size is the machine's)."""
    memory, text = device_memory(case, processes), case.asked.memory_limit
    if text is None:
        return USABLE * memory
    sharing = case.local(processes) if case.device == "cpu" and "%" not in text else 1
    return min(float(memory), size_of(text, memory) / sharing)


def choices_to_try(case: PlanningCase, processes: int) -> list[ExecutionChoices]:
    """What to compare, the simplest first: strategies without and with activation checkpointing."""
    plain: StrategyName = "single" if processes == 1 else "ddp"
    strategies: list[StrategyName] = [plain]
    asked = case.asked
    if asked.strategy != "auto" and traits_of(asked.strategy).least_processes <= processes:
        strategies = [asked.strategy]
    elif asked.strategy == "auto" and case.device == "cuda":
        tried = [name for name, t in STRATEGIES.items() if t.tried and t.least_processes <= processes]
        strategies += [name for name in tried if not why_not_fit(case, name)]
    wish = asked.activation_checkpointing
    checkpointing: tuple[Recompute, ...] = ("off", "selective", "on") if wish == "auto" else (wish,)
    device, precision, attention = case.device, case.precision, case.attention
    return [
        ExecutionChoices(device, processes, strategy, precision, attention, recompute, copies)
        for strategy in strategies
        for copies in _copies_to_try(case, processes, strategy)
        for recompute in checkpointing
    ]


def _copies_to_try(case: PlanningCase, processes: int, strategy: str) -> list[int]:
    """Numbers of copies of what a strategy shards, the most first: one a node, or one over several nodes."""
    if not traits_of(strategy).keeps_copies:
        return [1]
    if case.asked.copies:
        return [case.asked.copies]
    nodes, least = case.nodes(processes), 2 if case.asked.strategy == "auto" else 1  # one alone is fsdp2
    return [n for n in range(nodes, least - 1, -1) if nodes % n == processes % n == 0]


def why_not_fit(case: PlanningCase, strategy: StrategyName) -> str:
    """Why this recipe cannot be trained by a strategy; empty where it can."""
    traits = traits_of(strategy)
    name = "ZeRO" if traits.library == "DeepSpeed" else strategy
    if traits.shards and (why := case.model_size.why_unshardable):
        return f"{case.recipe.task}: {why}, so each process holds all of it: use ddp"
    if traits.shards_weights and (why := case.model_size.why_whole_weights):
        return f"{why}, which needs all weights there: use ddp or zero2, or leave it out"
    if case.precision == "fp16" and not traits.takes_fp16:
        return f"fp16's loss scale is not kept under {name}: use --precision fp32 or bf16"
    if traits.flat_shards and not OPTIMIZERS[case.recipe.optimizer].elementwise:
        if case.recipe.optimizer == OWN:
            return f"the task's own optimizer may need whole matrices, and {name}'s shards are flat: use ddp"
        return (
            f"--optimizer {case.recipe.optimizer} looks at whole matrices, and {name}'s shards are flat: it"
            " would learn something else; use adamw or sgd"
        )
    return ""


def saves_enough(case: PlanningCase, choices: ExecutionChoices) -> bool:
    """Whether a strategy saves memory: ZeRO's copies of the trained parameters may take more than sharding
    their moments saves.
    """
    if not choices.traits.shards or choices.traits.shards_weights:
        return True
    unsharded = _footprint(case, dataclasses.replace(choices, strategy="ddp"), 0).state
    return unsharded - _footprint(case, choices, 0).state >= LEAST_SAVING * unsharded


def find_layout(case: PlanningCase, processes: int) -> ParallelLayout | None:
    """The fastest layout that fits the longest sample; None where none does.

    The simplest is taken of those that are as good.
    """
    found = []
    most = case.recipe.batch_size
    samples = min(most, case.asked.micro_batch or most)
    for choices in choices_to_try(case, processes):
        tokens, bound = token_budget(case, choices)
        useful = case.asked.strategy != "auto" or saves_enough(case, choices)
        fits_host = host_bytes(case, choices) <= HOST_SHARE * case.hardware.ram_bytes
        if not useful or tokens < case.longest or not fits_host:
            continue
        typical = min(tokens, round(OVER_A_RUN * largest_micro_batch(case, choices, samples, tokens)))
        found.append(
            ParallelLayout(
                choices=choices,
                tokens=tokens,
                samples=samples,
                seconds=step_seconds(case, choices, samples, tokens),
                stages=_footprint(case, choices, typical, evaluated=tokens).stages,
                most=math.ceil(LARGEST_EXCESS * _footprint(case, choices, tokens).peak),
                bound=bound,
            )
        )
    return fastest_layout(found) if found else None


def _footprint(
    case: PlanningCase, choices: ExecutionChoices, tokens: float, evaluated: float | None = None
) -> MemoryFootprint:
    return memory_footprint(case.recipe, case.model_size, choices, tokens, case.longest, evaluated)


def token_budget(case: PlanningCase, choices: ExecutionChoices) -> tuple[int, str]:
    """(largest padded tokens of a micro-batch, what limits them).

    A budget below the length of the longest sample means that it does not fit.
    """
    limit = memory_limit(case, choices.processes)
    empty, per_token, full = (_footprint(case, choices, tokens) for tokens in (0, 1, MANY))
    free = limit - empty.resident - empty.activations - empty.tables
    token_bytes = per_token.activations - empty.activations
    # Logits grow with the tokens, up to one chunk of them where the head computes in chunks.
    most = max(free / max(token_bytes + per_token.logits, 1.0), (free - full.logits) / max(token_bytes, 1.0))
    size, longest = case.model_size, case.longest
    widest = max(size.vocabulary, size.intermediate, 4 * size.hidden, 1)
    whole = max(size.intermediate, 4 * size.hidden, 1) if size.head_bytes else widest
    bounds = [
        (math.floor(-1.0 if empty.peak > limit else most), "memory"),
        (max(longest, INDEX_LIMIT // whole), "index"),
        (longest * math.ceil(case.recipe.batch_size / choices.processes), "batch"),
    ]
    if case.asked.micro_batch:
        bounds.append((longest * case.asked.micro_batch, "asked"))
    elif case.device == "cpu":
        low, high = CPU_TOKENS
        bounds.append((max(longest, min(high, max(low, CPU_TENSOR_BYTES // (4 * widest)))), "cache"))
    return min(bounds)


def host_bytes(case: PlanningCase, choices: ExecutionChoices) -> float:
    """Bytes of a node's RAM beside a GPU: fp32 weights, gradients and moments that are offloaded, and the
    strategy's copy; else the weights that each process builds there before they go to its GPU. Those of 8 and
    4 bits are built on it.
    """
    size, processes = case.model_size, choices.processes
    if choices.traits.offloads:
        per_trained = 4.0 + OPTIMIZERS[case.recipe.optimizer].state_bytes + choices.traits.copy_bytes
        return (4.0 * size.parameters + per_trained * size.trainable) / case.nodes(processes)
    if case.device != "cuda" or size.frozen_bytes < 2.0:
        return 0.0
    whole = choices.traits.shards_weights  # rank 0 builds it for all, in fp32
    return 4.0 * size.parameters if whole else case.local(processes) * size.weight_bytes


def candidate_process_counts(case: PlanningCase) -> list[int]:
    """Numbers of processes to compare: powers of two within a node and of nodes, and all of both."""
    if fixed := case.world or case.asked.processes:
        return [fixed]
    traits = None if case.asked.strategy == "auto" else traits_of(case.asked.strategy)
    if case.device != "cuda" or (traits and traits.most_processes == 1):
        return [1]
    node = len(case.hardware.gpus)
    counts = sorted({*_powers_to(node), *(node * nodes for nodes in _powers_to(case.hardware.nodes))})
    counts = [count for count in counts if count % (case.asked.copies or 1) == 0] or counts
    shared = [count for count in counts if count >= (traits.least_processes if traits else 1)]
    return [count for count in shared if count <= case.recipe.batch_size] or shared[:1] or [1]


def _powers_to(most: int) -> set[int]:
    """The powers of two up to `most`, and `most`."""
    return {most, *(2**k for k in range(most.bit_length()))}


def fastest_layout(layouts: list[ParallelLayout]) -> ParallelLayout:
    """The first layout, the simplest or that of the fewest processes, that is as good as the fastest."""
    fastest = min(layout.seconds for layout in layouts)
    return next(layout for layout in layouts if layout.seconds <= AS_GOOD * fastest)


def least_bytes(case: PlanningCase, processes: int, like: ExecutionChoices | None = None) -> int:
    """The least peak of the longest sample by itself, under strategy and copies of `like` or those tried that
    do not offload.
    """
    tried = choices_to_try(case, processes)
    meant = [one for one in tried if not one.traits.offloads]
    if like:
        meant = [one for one in tried if (one.strategy, one.copies) == (like.strategy, like.copies)]
    return min(_footprint(case, choices, case.longest).peak for choices in meant or tried)


def does_not_fit(case: PlanningCase, processes: int) -> str:
    """The error message where the longest sample does not fit on this many processes, and what would do."""
    limit, memory = memory_limit(case, processes), device_memory(case, processes)
    need, size = least_bytes(case, processes), case.model_size
    what, may = f"one sample of {case.longest} tokens needs", f"{gigabytes(limit)} of {gigabytes(memory)}"
    if need <= limit:
        need = round(min(host_bytes(case, one) for one in choices_to_try(case, processes)))
        may = f"{HOST_SHARE:.0%} of {gigabytes(case.hardware.ram_bytes)}"
        what = "a node's RAM has to hold"
    elif size.fit_bytes > 4.0 * size.parameters and case.device == "cpu":
        what = "what the run's end fits to the data, less of fewer items, needs"
    ways = dict[str, str]()
    for words, other in _ways(case):
        kind = re.sub(r"\d+| without .*", "", words)
        if kind not in ways and any(find_layout(other, count) for count in candidate_process_counts(other)):
            ways[kind] = words
        if kind in ways and words.startswith("without"):
            break
    ways["memory"] = f"memory of {need / USABLE / 1e9:.0f} GB"
    return f"{what} {gigabytes(need)}, and {may} may be used: {', or '.join(ways.values())} would do"


def _ways(case: PlanningCase) -> Iterator[tuple[str, PlanningCase]]:
    """What a user may type, or leave out, to need less memory of a device, the gentlest first, and the case
    with it; of one kind the first that fits counts.
    """
    replace, facts, machine, asked = dataclasses.replace, case.facts, case.hardware, case.asked
    for flag in ("strategy", "activation_checkpointing", "memory_limit", "processes"):
        if (wish := getattr(asked, flag)) not in ("auto", None):
            bare = replace(asked, **{flag: getattr(PlanOptions(), flag)})
            yield f"without {spelling(flag)} {wish}", replace(case, asked=bare)
    for kept in dict.fromkeys((asked.strategy, "auto")):
        end = "" if kept == asked.strategy else f" without --strategy {asked.strategy}"
        case = replace(case, asked=replace(asked, strategy=kept))
        for words, size in case.model_size.smaller().items():
            yield words + end, replace(case, model_size=replace(size, head_bytes=case.model_size.head_bytes))
        if case.recipe.optimizer == "adamw":
            smaller = replace(case.recipe, optimizer="adamw8bit")
            yield f"--optimizer adamw8bit{end}", replace(case, recipe=smaller)
        flag = "--assume-length" if facts.extra.get("assumed") else "--max-length"
        for most in (max(2, facts.longest >> halvings) for halvings in range(1, 7)):
            yield f"{flag} {most}{end}", replace(case, facts=replace(facts, lengths=(most,)))
        for count in (2, 4, 8, 16, 32, 64) if case.device == "cuda" and not machine.gpu.mobile else ():
            other = replace(machine, nodes=max(1, count // 8), gpus=(machine.gpu,) * min(8, count))
            if count > machine.devices:
                yield f"{count} such GPUs{end}", replace(case, hardware=other)


def why_processes(case: PlanningCase, chosen: ParallelLayout, layouts: list[ParallelLayout]) -> str:
    """The reason for the number of processes. `layouts`: all that were compared."""
    count, batch, have = chosen.choices.processes, case.recipe.batch_size, case.hardware.devices
    if case.world or case.asked.processes:
        why = "the launcher formed this world" if case.world else case.asked.why("processes")
        idle = f"; {count - batch} of them idle, as a batch of {batch} has fewer samples"
        return why + (idle if count > batch else "")
    if case.device == "cpu":
        return "one process with all cores: its threads share one copy of the model; --processes N splits it"
    if have == 1:
        return "there is one GPU"
    times = ", ".join(f"{one.seconds:.3g} s on {one.choices.processes}" for one in layouts)
    return f"I use {count} of {have} GPUs: this batch of {batch} takes {times}"


def why_strategy(case: PlanningCase, chosen: ParallelLayout) -> str:
    """The reason for the strategy."""
    strategy, processes = chosen.choices.strategy, chosen.choices.processes
    if strategy == "single":
        wish = "; --strategy ddp takes effect with --processes 2 or more"
        return "one process needs no wrapper" + (wish if case.asked.strategy == "ddp" else "")
    if case.asked.strategy == strategy:
        return case.asked.why("strategy")
    if strategy == "ddp":
        return f"the whole model fits on each of {processes} processes"
    memory = gigabytes(device_memory(case, processes))
    copies, shards = chosen.choices.mesh
    then = "stay in host memory" if chosen.choices.traits.offloads else "are partitioned"
    then += f" among {shards} processes, {copies} times" if copies > 1 else ""
    return f"weights, gradients and moments {then}: whole they do not fit into {memory}, or are slower"


def why_copies(case: PlanningCase, chosen: ParallelLayout) -> str:
    """The reason for the copies of what is sharded, with the mesh of processes."""
    copies, shards = chosen.choices.mesh
    mesh = f"a mesh of {copies} x {shards}: {shards} processes share a copy; copies meet once a step"
    return f"{case.asked.why('copies')}; {mesh}" if case.asked.copies else mesh


def why_checkpointing(case: PlanningCase, chosen: ParallelLayout) -> str:
    """The reason for or against activation checkpointing."""
    if case.asked.activation_checkpointing != "auto":
        return case.asked.why("activation_checkpointing")
    if chosen.choices.activation_checkpointing == "off":
        return "activations fit, so nothing need be computed twice"
    return "with less of it the longest sample does not fit, or smaller micro-batches make a step slower"


def why_samples(case: PlanningCase) -> str:
    """The reason for the most samples of a micro-batch."""
    batch, wish = case.recipe.batch_size, case.asked.micro_batch
    if wish is None:
        return f"up to all {batch} of the global batch at once, as far as micro_batch_tokens allows"
    return case.asked.why("micro_batch") + (f"; {wish} is more than the global batch" if wish > batch else "")


def why_tokens(case: PlanningCase, chosen: ParallelLayout) -> str:
    limit = gigabytes(memory_limit(case, chosen.choices.processes))
    memory = gigabytes(device_memory(case, chosen.choices.processes))
    return {
        "memory": f"fills the {limit} that may be used of {memory}",
        "batch": f"holds a process's share of the global batch, which fits into {limit}",
        "asked": f"--micro-batch times the longest sample of {case.longest} tokens",
        "cache": "larger micro-batches are slower on a CPU: their tensors are mapped anew each time",
        "index": "larger tensors would pass 2^31 elements, which some kernels cannot index",
    }[chosen.bound]
