"""The planner: (recipe, facts, model size, hardware, options) -> plan, a pure function.

parallel_layout.py sizes the micro-batch; choices.py makes the choices that need no number of processes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import TrainingError, UserError
from isobatch.core.plan import Plan, PlanOptions
from isobatch.core.strategies import traits_of
from isobatch.engine.machine.history import MachineRecord
from isobatch.engine.planning import choices as choose
from isobatch.engine.planning.calibration import MEASURED
from isobatch.engine.planning.corrections import correct_bytes, history_key
from isobatch.engine.planning.cost_model import (
    PlanningCase,
    expected_padding,
    fixed_tokens,
    micro_batch_seconds,
    steps_per_epoch,
)
from isobatch.engine.planning.explanations import (
    does_not_fit,
    why_checkpointing,
    why_processes,
    why_samples,
    why_strategy,
    why_tokens,
)
from isobatch.engine.planning.parallel_layout import (
    LARGEST_EXCESS,
    ParallelLayout,
    candidate_process_counts,
    device_memory,
    fastest_layout,
    find_layout,
    saves_enough,
    why_not_fit,
    zero_savings,
)
from isobatch.models.head_chunks import chunk_bytes

if TYPE_CHECKING:
    from isobatch.core.facts import Facts
    from isobatch.core.recipe import Recipe
    from isobatch.engine.machine.ceilings import Ceilings
    from isobatch.engine.machine.hardware import Hardware
    from isobatch.engine.machine.history import Correction
    from isobatch.engine.planning.memory_model import ExecutionChoices
    from isobatch.models.base import ModelSize

SCALES = (1, 2, 4, 8)
"""Factors of the batch size in `batch_size_frontier`."""


def make_plan(
    recipe: Recipe,
    facts: Facts,
    model_size: ModelSize,
    hardware: Hardware,
    asked: PlanOptions,
    *,
    world: int | None = None,
    foreign_noise: bool = False,
    measured: MachineRecord | None = None,
) -> Plan:
    """How to run this recipe on this hardware, with a reason for every field.

    `world`: the number of processes, where a launcher started them already. `foreign_noise`: the model draws
    noise from torch's generators. `measured`: what was measured on this hardware, if anything. Raises
    UserError where the recipe or an option cannot be met.
    """
    case, fields = _case(recipe, facts, model_size, hardware, asked, world)
    case = dataclasses.replace(case, measured=measured or MachineRecord())
    _check_processes(case, asked, world)
    eager = _layouts(case, asked, world)
    with_compile, _ = _with_compile(case, True)
    compiled = choose.choose_compile(
        with_compile, asked, fastest_layout(eager).seconds, _compiled_seconds(with_compile, asked, world)
    )
    case, padding = _with_compile(case, compiled[0] != "off")
    layouts = _layouts(case, asked, world) if case.compile else eager
    chosen = fastest_layout(layouts)
    graphs = compiled[0] == "reduce-overhead"
    if graphs and chosen.choices.traits.shards:
        raise UserError(
            f"--compile reduce-overhead: under {chosen.choices.strategy} gradients leave the memory of CUDA"
            " graphs; use --compile on, or --strategy ddp"
        )
    fields |= {"compile": compiled, "pad_multiple": padding}
    fields |= _layout_fields(case, asked, chosen, layouts, world)
    fields |= _runtime_fields(case, asked, chosen, graphs)
    fields["invariance"] = choose.choose_invariance(
        recipe, case.precision, compiled[0] != "off", foreign_noise, model_size.rounds
    )
    fields |= _prediction_fields(case, chosen)
    values: dict[str, Any] = {name: value for name, (value, _) in fields.items()}
    return Plan(**values, reasons={name: reason for name, (_, reason) in fields.items()})


def _compiled_seconds(case: PlanningCase, asked: PlanOptions, world: int | None) -> float | None:
    """Seconds of a step of the compiled model; None where the strategy that is fastest then has none."""
    fastest = fastest_layout(_layouts(case, asked, world))
    return fastest.seconds if fastest.choices.traits.compiles else None


PlanFields = dict[str, tuple[Any, str]]
"""Field of the plan -> (value, reason)."""


def _case(
    recipe: Recipe,
    facts: Facts,
    model_size: ModelSize,
    hardware: Hardware,
    asked: PlanOptions,
    world: int | None,
) -> tuple[PlanningCase, PlanFields]:
    device = choose.choose_device(hardware, asked)
    if device[0] == "cuda" and world and world > hardware.devices:
        # A launcher started processes on more machines than this one can see.
        hardware = dataclasses.replace(hardware, nodes=-(-world // len(hardware.gpus)))
    precision = choose.choose_precision(hardware, device[0], asked)
    attention = choose.choose_attention(hardware, device[0], precision[0], asked)
    case = PlanningCase(
        recipe=recipe,
        facts=facts,
        model_size=_with_head_chunks(model_size, hardware, device[0]),
        hardware=hardware,
        device=device[0],
        precision=precision[0],
        attention=attention[0],
        world_nodes=hardware.nodes if world and hardware.source == "detected" else None,
    )
    return _with_compile(case, False)[0], {"device": device, "precision": precision, "attention": attention}


def _with_head_chunks(size: ModelSize, hardware: Hardware, device: str) -> ModelSize:
    """The size with the chunks that its head, if it works in chunks, makes on this device."""
    if device != "cuda" or not size.head_bytes:
        return size
    return dataclasses.replace(size, head_bytes=chunk_bytes(hardware.gpu.memory_bytes))


def _with_compile(case: PlanningCase, compiled: bool) -> tuple[PlanningCase, tuple[int, str]]:
    padding = choose.choose_padding(case, compiled)
    return dataclasses.replace(case, compile=compiled, pad_multiple=padding[0]), padding


def _check_processes(case: PlanningCase, asked: PlanOptions, world: int | None) -> None:
    processes = world or asked.processes
    if world and asked.processes not in (None, world):
        raise UserError(
            f"--processes {asked.processes}: the launcher formed a world of {world}; leave the flag out"
        )
    if processes and case.device != "cpu" and processes > case.hardware.devices:
        have = case.hardware.devices
        there = "is 1 GPU" if have == 1 else f"are {have} GPUs"
        raise UserError(
            f"--processes {processes}: there {there}, and every process needs its own; give {have} or fewer"
        )
    if asked.strategy == "auto":
        return
    traits = traits_of(asked.strategy)
    if processes and traits.most_processes is not None and processes > traits.most_processes:
        raise UserError(f"--strategy single: is one process, not {processes}; use ddp, or --processes 1")
    alone = processes == 1 or (processes is None and (case.device != "cuda" or case.hardware.devices == 1))
    if alone and traits.shards and traits.least_processes > 1:
        raise UserError(
            f"--strategy {asked.strategy}: one process has nobody to share with; use single, zero3-offload"
        )
    if why := why_not_fit(case, asked.strategy):
        raise UserError(f"--strategy {asked.strategy}: {why}")
    if case.device not in traits.devices:
        library = traits.library
        raise UserError(f"--strategy {asked.strategy}: {library} does not run on Apple GPUs; use single")


def _layouts(case: PlanningCase, asked: PlanOptions, world: int | None) -> list[ParallelLayout]:
    counts = candidate_process_counts(case, asked, world)
    layouts = [layout for count in counts if (layout := find_layout(case, asked, count))]
    if not layouts:
        raise UserError(does_not_fit(case, asked, counts[-1]))
    useful = [layout for layout in layouts if saves_enough(case, layout.choices)]
    if not useful:
        raise UserError(_saves_too_little(case, layouts[-1].choices))
    return useful


def _saves_too_little(case: PlanningCase, choices: ExecutionChoices) -> str:
    unsharded, saved = zero_savings(case, choices)
    return (
        f"--strategy {choices.strategy}: saves {max(0.0, saved) / 1e6:.1f} MB of the"
        f" {unsharded / 1e6:.1f} MB of weights, gradients and moments on each of {choices.processes}"
        f" processes, as {case.model_size.trainable:,} of {case.model_size.parameters:,} parameters are"
        f" trained with {case.recipe.optimizer}: use ddp, which is faster, or zero3"
    )


def _layout_fields(
    case: PlanningCase,
    asked: PlanOptions,
    chosen: ParallelLayout,
    layouts: list[ParallelLayout],
    world: int | None,
) -> PlanFields:
    processes = chosen.choices.processes
    nodes = case.nodes(processes)
    return {
        "processes": (processes, why_processes(case, asked, chosen, layouts, world)),
        "nodes": (
            nodes,
            f"{case.local(processes)} processes a node" if nodes > 1 else "everything runs on one node",
        ),
        "strategy": (
            chosen.choices.strategy,
            "; ".join(filter(None, (why_strategy(case, asked, chosen), case.model_size.remark))),
        ),
        "activation_checkpointing": (
            chosen.choices.activation_checkpointing,
            why_checkpointing(case, asked, chosen),
        ),
        "micro_batch_samples": (chosen.samples, why_samples(case, asked)),
        "micro_batch_tokens": (chosen.tokens, why_tokens(case, asked, chosen)),
        "micro_batch_cost": (
            round(fixed_tokens(case, chosen.choices), 1),
            f"{micro_batch_seconds(case, chosen.choices) * 1e3:.1f} ms to launch a micro-batch,"
            f" {'exchange weights' if chosen.choices.traits.shards_weights else 'add its gradients'}",
        ),
    }


def _runtime_fields(
    case: PlanningCase, asked: PlanOptions, chosen: ParallelLayout, graphs: bool
) -> PlanFields:
    padding = expected_padding(case, chosen.choices, chosen.samples, chosen.tokens)
    return {
        "workers": choose.choose_workers(asked),
        "prefetch": choose.choose_prefetch(asked),
        "pin_memory": choose.choose_pin_memory(case.hardware, case.device, asked),
        "threads": choose.choose_threads(case, chosen.choices.processes),
        "reduction": choose.choose_reduction(case, chosen.choices, graphs),
        "pack": choose.choose_pack(case, asked, padding),
        **({"stream_cache_bytes": choose.choose_stream_cache(asked)} if case.facts.is_streamed else {}),
    }


def _prediction_fields(case: PlanningCase, chosen: ParallelLayout) -> PlanFields:
    correction = chosen.correction
    measured, basis = _basis(case, correction)
    stages = {stage: math.ceil(correct_bytes(case, b, correction)) for stage, b in chosen.stages.items()}
    key, kind, size = history_key(case, chosen.choices)
    kept = {
        "memory": correction.memory,
        "seconds": correction.seconds,
        "disturbed": case.ceilings.disturbed,
        "key": key,
        "kind": kind,
        "size": size,
    }
    worst = max(stages, key=lambda stage: stages[stage])
    return {
        "predicted_peak_memory_bytes": (stages[worst], f"the peak of the stage {worst}; {basis}"),
        "memory_bound_bytes": (
            math.ceil(correct_bytes(case, chosen.most, correction)),
            f"micro-batches of {chosen.tokens} tokens, the most that the budget allows, and"
            f" {LARGEST_EXCESS - 1:.0%} for what no model foresees",
        ),
        "device_memory_bytes": (
            device_memory(case, chosen.choices.processes),
            "a process's share of the RAM" if case.device == "cpu" else "the GPU's memory",
        ),
        "predicted_memory_by_stage": (stages, "the peak of each stage by itself"),
        "predicted_step_seconds": (
            chosen.seconds * correction.seconds,
            f"arithmetic, launches, exchange and update; {basis}",
        ),
        "calibrated": (measured, basis),
        "correction": (kept, basis),
    }


def _basis(case: PlanningCase, correction: Correction) -> tuple[bool, str]:
    """(whether measurements on this kind of device stand behind the predictions, in words)."""
    card = case.hardware.gpu.card if case.device != "cpu" else None
    if correction.basis:
        return True, correction.basis
    if case.device == "cpu":
        return True, _basis_of_rates(case.measured.ceilings)
    if card in MEASURED:
        return True, f"constants were measured on {card}"
    return False, "uncalibrated: fitted to published figures, no measurement of ours stands behind it"


def _basis_of_rates(measured: Ceilings | None) -> str:
    if measured is None:
        return "by a typical processor's rates"
    if not measured.disturbed:
        return "by this processor's measured rates"
    return (
        f"by this processor's rates, too low: other programs held {measured.waited:.0%} of it while they were"
        " measured"
    )


def with_smaller_budget(plan: Plan, recipe: Recipe, facts: Facts) -> Plan:
    """The plan after an out-of-memory error: half the budget or, at one sample, activation checkpointing.

    Raises TrainingError where both are used already.
    """
    longest = -(-facts.longest // plan.pad_multiple) * plan.pad_multiple
    samples = max(1, min(plan.micro_batch_samples, recipe.batch_size) // 2)
    tokens = max(longest, min(plan.micro_batch_tokens, recipe.batch_size * longest) // 2)
    if (samples, tokens) != (plan.micro_batch_samples, plan.micro_batch_tokens):
        why = (
            f"halved: memory ran out at {plan.micro_batch_samples} samples, {plan.micro_batch_tokens} tokens"
        )
        reasons = {**plan.reasons, "micro_batch_samples": why, "micro_batch_tokens": why}
        return dataclasses.replace(
            plan, micro_batch_samples=samples, micro_batch_tokens=tokens, reasons=reasons
        )
    if not plan.activation_checkpointing:
        why = f"memory ran out with one sample of {longest} tokens"
        reasons = {**plan.reasons, "activation_checkpointing": why}
        return dataclasses.replace(plan, activation_checkpointing=True, reasons=reasons)
    raise TrainingError(
        f"out of memory with one sample of {longest} tokens and activation checkpointing: lower --max-length,"
        " take a smaller model or more memory; --strategy zero3-offload holds the least on the device"
    )


def batch_size_frontier(
    recipe: Recipe,
    facts: Facts,
    model_size: ModelSize,
    hardware: Hardware,
    asked: PlanOptions,
    measured: MachineRecord | None = None,
) -> list[dict[str, Any]]:
    """Cost of larger global batches: processes, step seconds, hours and updates per epoch.

    A larger batch is another recipe (--scale-batch), so the planner only lists it.
    """
    return [
        _frontier_row(recipe.scaled(scale, "none"), facts, model_size, hardware, asked, measured)
        for scale in SCALES
    ]


def _frontier_row(
    recipe: Recipe,
    facts: Facts,
    model_size: ModelSize,
    hardware: Hardware,
    asked: PlanOptions,
    measured: MachineRecord | None,
) -> dict[str, Any]:
    plan = make_plan(recipe, facts, model_size, hardware, asked, measured=measured)
    updates = steps_per_epoch(recipe, facts)
    return {
        "batch_size": recipe.batch_size,
        "processes": plan.processes,
        "step_seconds": plan.predicted_step_seconds,
        "epoch_hours": updates * plan.predicted_step_seconds / 3600,
        "updates_per_epoch": updates,
    }
