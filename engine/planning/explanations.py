"""Reasons and error messages for the decisions about processes, strategy, memory and micro-batches."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from isobatch.core.flags import flags_of
from isobatch.core.measures import format_bytes
from isobatch.core.plan import PRECISION_WORDS, Plan, PlanOptions
from isobatch.engine.planning.parallel_layout import (
    ParallelLayout,
    device_memory,
    find_layout,
    least_memory,
    memory_limit,
    offloaded_bytes,
)

if TYPE_CHECKING:
    from isobatch.core.facts import Facts
    from isobatch.engine.planning.cost_model import PlanningCase


def length_flag(facts: Facts) -> str:
    """The flag that says how long samples are."""
    return "--assume-length" if facts.extra.get("assumed") else "--max-length"


def does_not_fit(case: PlanningCase, asked: PlanOptions, processes: int) -> str:
    """The error message where the longest sample does not fit on this many processes."""
    need, limit = least_memory(case, asked, processes), memory_limit(case, asked, processes)
    if need <= limit:
        return (
            f"--strategy zero3-offload: it takes {format_bytes(offloaded_bytes(case, processes))} of RAM a"
            f" node, and there are {format_bytes(case.hardware.ram_bytes)}; take a smaller model or more"
            " memory"
        )
    flag = length_flag(case.facts)
    value = "" if case.facts.extra.get("assumed") else f" {case.recipe.max_length}"
    return (
        f"{flag}{value}: one sample of {case.longest} tokens needs "
        f"{format_bytes(need)} on {case.device} with every measure allowed, and {format_bytes(limit)} may be "
        f"used; lower {flag}, take a smaller model or more memory"
    )


def why_processes(
    case: PlanningCase,
    asked: PlanOptions,
    chosen: ParallelLayout,
    layouts: list[ParallelLayout],
    world: int | None,
) -> str:
    """The reason for the number of processes. `layouts`: all that were compared; `world`: see `make_plan`."""
    count, batch = chosen.choices.processes, case.recipe.batch_size
    if world or asked.processes:
        source = "the launcher formed this world" if world else asked.why("processes")
        idle = (
            f"; {count - batch} of them idle, as a batch of {batch} has fewer samples"
            if count > batch
            else ""
        )
        return source + idle + _slower_than_one(case, chosen)
    if case.device == "cpu":
        return "one process with all cores: its threads share one copy of the model; --processes N splits it"
    if case.hardware.devices == 1:
        return "there is one GPU"
    have = case.hardware.devices
    used = f"I use all {have} GPUs" if count == have else f"I use {count} of {have} GPUs"
    if asked.strategy == "single":
        return f"{used}: --strategy single is one process"
    if len(layouts) == 1:
        return f"{used}: other numbers of processes do not fit, or a batch of {batch} leaves them idle"
    other = layouts[-1] if chosen is not layouts[-1] else layouts[0]
    rival, time = _milliseconds(other.seconds), _milliseconds(chosen.seconds)
    end = "; so little gain is not worth them" if other.seconds < chosen.seconds else ""
    return f"{used}: this batch of {batch} takes {rival} on {other.choices.processes}, {time} on {count}{end}"


def _slower_than_one(case: PlanningCase, chosen: ParallelLayout) -> str:
    alone = find_layout(case, PlanOptions(), 1) if chosen.choices.processes > 1 else None
    if alone is None or alone.seconds >= chosen.seconds:
        return ""
    time = _milliseconds(chosen.seconds)
    return f"; one process would be faster: {_milliseconds(alone.seconds)} a step against {time}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def why_strategy(case: PlanningCase, asked: PlanOptions, chosen: ParallelLayout) -> str:
    strategy, processes = chosen.choices.strategy, chosen.choices.processes
    if strategy == "single":
        wish = "; --strategy ddp takes effect with --processes 2 or more" if asked.strategy == "ddp" else ""
        return f"one process needs no wrapper{wish}"
    if asked.strategy == strategy:
        return asked.why("strategy")
    if strategy == "ddp":
        return f"the whole model fits on each of {processes} processes"
    plain = find_layout(
        case, dataclasses.replace(asked, strategy="single" if processes == 1 else "ddp"), processes
    )
    if plain is not None:
        return f"faster: {_milliseconds(chosen.seconds)} a step, {_milliseconds(plain.seconds)} undivided"
    memory = format_bytes(device_memory(case, processes))
    then = "they stay in host memory" if chosen.choices.traits.offloads else "they are partitioned"
    return f"weights, gradients and moments do not fit whole into {memory}, so {then}"


def why_checkpointing(case: PlanningCase, asked: PlanOptions, chosen: ParallelLayout) -> str:
    if asked.activation_checkpointing != "auto":
        return asked.why("activation_checkpointing")
    if not chosen.choices.activation_checkpointing:
        return "activations fit, so nothing need be computed twice"
    kept = dataclasses.replace(asked, strategy=chosen.choices.strategy, activation_checkpointing="off")
    without = find_layout(case, kept, chosen.choices.processes)
    if without is None:
        return "the longest sample fits only if activations are computed again in the backward pass"
    rival, time = _milliseconds(without.seconds), _milliseconds(chosen.seconds)
    return f"it allows fewer, larger micro-batches: {time} a step, {rival} without"


def why_samples(case: PlanningCase, asked: PlanOptions) -> str:
    batch = case.recipe.batch_size
    if asked.micro_batch is None:
        return f"up to all {batch} of the global batch at once, as far as micro_batch_tokens allows"
    if asked.micro_batch > batch:
        return f"--micro-batch {asked.micro_batch} is more than the global batch of {batch}, so it is {batch}"
    return asked.why("micro_batch")


def why_tokens(case: PlanningCase, asked: PlanOptions, chosen: ParallelLayout) -> str:
    limit = format_bytes(memory_limit(case, asked, chosen.choices.processes))
    memory = format_bytes(device_memory(case, chosen.choices.processes))
    return {
        "memory": f"fills the {limit} that may be used of {memory}",
        "batch": f"holds a process's share of the global batch, which fits into {limit}",
        "asked": f"--micro-batch times the longest sample of {case.longest} tokens",
        "cache": "larger micro-batches are slower on a CPU: their tensors are mapped anew each time",
        "index": "larger tensors would pass 2^31 elements, which some kernels cannot index",
    }[chosen.bound]


def fixed_loader_settings(plan: Plan) -> dict[str, tuple[bool, str]]:
    """Loader settings that follow from the plan and are no choice: name -> (whether it is so, why)."""
    if plan.workers:
        persistent = f"the {plan.workers} loader processes live as long as a phase, through all its epochs"
    else:
        persistent = "no loader processes: one thread loads as long as a phase lasts, through all its epochs"
    if plan.pack:
        return {
            "persistent_workers": (True, persistent),
            "dynamic_padding": (False, "samples are packed end to end, so batches are not padded"),
        }
    multiple = f", up to a multiple of {plan.pad_multiple}" if plan.pad_multiple > 1 else ""
    padded = f"samples are padded to the longest of their micro-batch{multiple}, and cut so that it is little"
    return {"persistent_workers": (True, persistent), "dynamic_padding": (True, padded)}


PLANNED_AS = {"micro_batch": "micro_batch_samples"}
"""Options whose field in the plan has another name."""


def unmet_wishes(asked: PlanOptions, plan: Plan) -> list[str]:
    """A line for each option that the plan does not follow, with the plan's reason."""
    lines = []
    for name, flag in flags_of(PlanOptions, "plan").items():
        wish, field = getattr(asked, name), PLANNED_AS.get(name, name)
        if wish == flag.default or field not in plan.reasons:
            continue
        value = getattr(plan, field)
        wanted = wish == "on" if isinstance(value, bool) else PRECISION_WORDS.get(wish, wish)
        if wanted != value:
            preset = asked.preset_options.get(name)
            who = f"the preset {preset}, " if preset else ""
            lines.append(f"{who}{flag.spelling} {wish}: {plan.reasons[field]}")
    if asked.stream_cache is not None and not plan.stream_cache_bytes:
        lines.append(f"--stream-cache {asked.stream_cache}: the data is on this machine, and nothing is kept")
    return lines
