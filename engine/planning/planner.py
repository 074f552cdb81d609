"""The planner: (recipe, facts, model size, hardware, options) -> plan, a pure function.

parallel_layout.py sizes the micro-batch; choices.py makes the choices that need no number of processes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from isobatch.core.errors import TrainingError, UserError
from isobatch.core.facts import Facts
from isobatch.core.plan import Plan, PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.core.strategies import traits_of
from isobatch.engine.machine.ceilings import Ceilings
from isobatch.engine.machine.hardware import Hardware
from isobatch.engine.planning import choices as choose
from isobatch.engine.planning import parallel_layout as layout
from isobatch.engine.planning.calibration import MEASURED
from isobatch.engine.planning.choices import PlanFields
from isobatch.engine.planning.cost_model import PlanningCase, fixed_tokens, micro_batch_seconds
from isobatch.engine.planning.parallel_layout import ParallelLayout
from isobatch.models.base import ModelSize
from isobatch.models.head_chunks import chunk_bytes

UNCALIBRATED = "uncalibrated: fitted to published figures, no measurement of ours stands behind it"


def make_plan(
    recipe: Recipe,
    facts: Facts,
    model_size: ModelSize,
    hardware: Hardware,
    asked: PlanOptions,
    *,
    world: int | None = None,
    measured: Ceilings | None = None,
) -> Plan:
    """How to run this recipe on this hardware, with a reason for every field.

    `world`: the number of processes, where a launcher started them already. `measured`: rates of this
    hardware, if they were measured. Raises UserError where the recipe or an option cannot be met.
    """
    fields: PlanFields = {"device": choose.choose_device(hardware, asked)}
    device = fields["device"][0]
    if device == "cuda" and world and world > hardware.devices:
        # A launcher started processes on more machines than this one can see.
        hardware = dataclasses.replace(hardware, nodes=-(-world // len(hardware.gpus)))
    fields["precision"] = choose.choose_precision(hardware, device, model_size, asked)
    precision = fields["precision"][0]
    fields["attention"] = choose.choose_attention(hardware, device, precision, asked)
    if device == "cuda" and model_size.head_bytes:  # the chunks that the head makes on this device
        model_size = dataclasses.replace(model_size, head_bytes=chunk_bytes(hardware.gpu.memory_bytes))
    case = PlanningCase(
        recipe=recipe,
        facts=facts,
        model_size=model_size,
        hardware=hardware,
        device=device,
        precision=precision,
        attention=fields["attention"][0],
        asked=asked,
        world=world,
        measured=measured,
    )
    _check_processes(case)
    fields["pad_multiple"] = choose.choose_padding(case)
    eager = dataclasses.replace(case, pad_multiple=fields["pad_multiple"][0])
    compiled = dataclasses.replace(eager, compile=True)
    layouts, others = _layouts(eager), _layouts(compiled)
    fastest = layout.fastest_layout(others)
    seconds = fastest.seconds if fastest.choices.traits.compiles else None
    fields["compile"] = choose.choose_compile(compiled, layout.fastest_layout(layouts).seconds, seconds)
    compiles, graphs = fields["compile"][0] != "off", fields["compile"][0] == "reduce-overhead"
    case, layouts = (compiled, others) if compiles else (eager, layouts)
    chosen = layout.fastest_layout(layouts)
    if graphs and chosen.choices.traits.shards:
        raise UserError(
            f"--compile reduce-overhead: under {chosen.choices.strategy} gradients leave the memory of CUDA"
            " graphs; use --compile on, or --strategy ddp"
        )
    fields |= _layout_fields(case, chosen, layouts)
    fields |= choose.choose_loading(case, chosen.choices.processes)
    fields["pack"] = choose.choose_pack(case)
    fields["reduction"] = choose.choose_reduction(case, chosen.choices, graphs)
    fields["invariance"] = choose.choose_invariance(recipe, precision, compiles, False, model_size.rounds)
    fields |= _prediction_fields(case, chosen)
    values: dict[str, Any] = {name: value for name, (value, _) in fields.items()}
    return Plan(**values, reasons={name: reason for name, (_, reason) in fields.items()})


def _check_processes(case: PlanningCase) -> None:
    asked, world = case.asked, case.world
    processes = world or asked.processes
    if world and asked.processes not in (None, world):
        formed = f"the launcher formed a world of {world}"
        raise UserError(f"--processes {asked.processes}: {formed}; leave the flag out")
    if processes and case.device != "cpu" and processes > case.hardware.devices:
        have = case.hardware.devices
        there = "is 1 GPU" if have == 1 else f"are {have} GPUs"
        why = f"there {there}, and every process needs its own"
        raise UserError(f"--processes {processes}: {why}; give {have} or fewer")
    if (copies := asked.copies) and (asked.strategy == "auto" or not traits_of(asked.strategy).keeps_copies):
        raise UserError(f"--copies {copies}: hsdp alone keeps copies: add --strategy hsdp, or leave it out")
    if asked.strategy == "auto":
        return
    traits, alone = traits_of(asked.strategy), case.device != "cuda" or case.hardware.devices == 1
    count = processes or (1 if alone else None)
    least = traits.least_processes if traits.shards else 1
    if count and not least <= count <= (traits.most_processes or count):
        takes = "two or more processes" if count < least else "one process"
        other = "single or fsdp2-offload" if count == 1 else "ddp, or --processes 1"
        raise UserError(f"--strategy {asked.strategy}: takes {takes}, not {count}; use {other}")
    if why := layout.why_not_fit(case, asked.strategy):
        raise UserError(f"--strategy {asked.strategy}: {why}")
    if case.device not in traits.devices:
        library = traits.library
        raise UserError(f"--strategy {asked.strategy}: {library} does not run on Apple GPUs; use single")
    count = layout.candidate_process_counts(case)[-1]
    if copies and count % copies:
        raise UserError(f"--copies {copies}: {count} processes cannot be divided so; give a divisor of them")


def _layouts(case: PlanningCase) -> list[ParallelLayout]:
    counts = layout.candidate_process_counts(case)
    layouts = [found for count in counts if (found := layout.find_layout(case, count))]
    if not layouts:
        raise UserError(layout.does_not_fit(case, counts[-1]))
    return layouts


def _layout_fields(case: PlanningCase, chosen: ParallelLayout, layouts: list[ParallelLayout]) -> PlanFields:
    choices, processes = chosen.choices, chosen.choices.processes
    nodes, remark = case.nodes(processes), case.model_size.remark
    per_node = f"{case.local(processes)} processes a node" if nodes > 1 else "everything runs on one node"
    strategy, recompute = layout.why_strategy(case, chosen), choices.activation_checkpointing
    copies: PlanFields = {"copies": (choices.copies, layout.why_copies(case, chosen))}
    launch = f"{micro_batch_seconds(case, choices) * 1e3:.1f} ms to launch a micro-batch, and for exchange"
    return {
        "processes": (processes, layout.why_processes(case, chosen, layouts)),
        "nodes": (nodes, per_node),
        "strategy": (choices.strategy, f"{strategy}; {remark}" if remark else strategy),
        **(copies if choices.traits.keeps_copies else {}),
        "activation_checkpointing": (recompute, layout.why_checkpointing(case, chosen)),
        "micro_batch_samples": (chosen.samples, layout.why_samples(case)),
        "micro_batch_tokens": (chosen.tokens, layout.why_tokens(case, chosen)),
        "micro_batch_cost": (round(fixed_tokens(case, choices), 1), launch),
    }


def _prediction_fields(case: PlanningCase, chosen: ParallelLayout) -> PlanFields:
    card = None if case.device == "cpu" else case.hardware.gpu.card
    measured = case.device == "cpu" or card in MEASURED
    basis = f"constants were measured on {card}" if measured else UNCALIBRATED
    if case.device == "cpu":
        basis = f"by {'this' if case.measured else 'a typical'} processor's rates"
    stages = chosen.stages
    worst = max(stages, key=lambda stage: stages[stage])
    bound = (
        f"micro-batches of {chosen.tokens} tokens, the most that the budget allows, and"
        f" {layout.LARGEST_EXCESS - 1:.0%} for what no model foresees"
    )
    processes = chosen.choices.processes
    memory, usable = (find(case, processes) for find in (layout.device_memory, layout.memory_limit))
    least = layout.least_bytes(case, processes, chosen.choices)
    of = "a process's share of the RAM" if case.device == "cpu" else "the GPU's memory"
    return {
        "predicted_peak_memory_bytes": (stages[worst], f"the peak of the stage {worst}; {basis}"),
        "least_memory_bytes": (least, "the longest sample by itself, and checkpointing where it may be"),
        "usable_memory_bytes": (round(usable), f"--memory-limit, or {layout.USABLE:.0%} of it"),
        "memory_bound_bytes": (chosen.most, bound),
        "device_memory_bytes": (memory, of),
        "host_memory_bytes": (round(layout.host_bytes(case, chosen.choices)), "a node's, beside GPUs"),
        "predicted_memory_by_stage": (stages, "the peak of each stage by itself, in GB"),
        "predicted_step_seconds": (chosen.seconds, f"arithmetic, launches, exchange and update; {basis}"),
        "calibrated": (measured, basis),
    }


def with_smaller_budget(plan: Plan, recipe: Recipe, facts: Facts) -> Plan:
    """The plan after an out-of-memory error: half the budget or, at one sample, activation checkpointing.

    Raises TrainingError where both are used already.
    """
    longest = -(-facts.longest // plan.pad_multiple) * plan.pad_multiple
    samples = max(1, min(plan.micro_batch_samples, recipe.batch_size) // 2)
    tokens = max(longest, min(plan.micro_batch_tokens, recipe.batch_size * longest) // 2)
    before = plan.micro_batch_samples, plan.micro_batch_tokens
    if (samples, tokens) != before:
        why = "halved: memory ran out at {} samples, {} tokens".format(*before)
        return plan.changed(why, micro_batch_samples=samples, micro_batch_tokens=tokens)
    if plan.activation_checkpointing != "on":
        why = f"memory ran out with one sample of {longest} tokens"
        return plan.changed(why, activation_checkpointing="on")
    raise TrainingError(
        f"out of memory with one sample of {longest} tokens and activation checkpointing: lower --max-length,"
        " take a smaller model or more memory; --strategy fsdp2-offload holds the least on the device"
    )
