"""`plan` and `prepare`: show the plan, and prepare the data. Neither trains."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.measures import format_bytes, format_duration
from isobatch.core.number_ranges import Positive
from isobatch.engine.loading.prepare import assumed_facts
from isobatch.engine.loading.prepare import prepare as prepare_data
from isobatch.engine.machine import hardware
from isobatch.engine.machine.detect import detect
from isobatch.engine.planning.alternatives import memory_alternatives
from isobatch.engine.planning.explanations import fixed_loader_settings
from isobatch.engine.planning.planner import batch_size_frontier, make_plan
from isobatch.launch.local.arguments import Request, parse_request
from isobatch.launch.local.run_setup import print_unless_quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from isobatch.core.facts import Facts
    from isobatch.core.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCommandOptions:
    """Flags of `plan` beside the recipe's and the plan's."""

    hardware: str | None = None
    """Plan for this machine, not the one here: rtx4080-laptop, 8xh100, 4x8xa100-80gb, cpu:2x24gb ..."""
    assume_length: Positive | None = None
    """Plan for samples of this many tokens, where the data is not at hand."""
    json: bool = False
    """One JSON object on standard output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """Flags of `prepare` beside the recipe's."""

    json: bool = False
    """One JSON object on standard output."""


def plan(words: Sequence[str]) -> int:
    """Usage: plan --task TASK [--hardware 8xh100] [--assume-length 128] [--json] [flags]"""
    request = parse_request(words, "plan", PlanCommandOptions)
    _print_notes(request)
    length = request.extra.get("assume_length")
    task, data = request.workload.make(request.recipe)
    facts = assumed_facts(length, request.recipe.tokenizer) if length else prepare_data(data, _say(request))
    hardware_name = request.extra.get("hardware")
    machine = hardware.parse_hardware(hardware_name) if hardware_name else detect()
    model_size = task.model_size(facts)
    chosen = make_plan(request.recipe, facts, model_size, machine, request.plan)
    frontier = batch_size_frontier(request.recipe, facts, model_size, machine, request.plan)
    alternatives = memory_alternatives(
        lambda recipe: request.workload.make(recipe)[0], request.recipe, facts, model_size, chosen
    )
    result = {
        "recipe": {**request.recipe.to_dict(), "hash": request.recipe.hash()},
        "global_batch": request.recipe.batch_size,
        "plan": chosen.to_dict(),
        "reasons": chosen.reasons,
        "invariance": chosen.invariance,
        "frontier": frontier,
        "savings": alternatives,
        "loader": {
            name: {"value": value, "reason": reason}
            for name, (value, reason) in fixed_loader_settings(chosen).items()
        },
    }
    print(
        atomic_files.json_text(result, ensure_ascii=False)
        if request.extra.get("json")
        else _format_plan(request, facts, chosen, frontier, alternatives)
    )
    return 0


def _print_notes(request: Request) -> None:
    for note in request.notes:
        print_unless_quiet(note, request.run.quiet)


def _format_plan(
    request: Request,
    facts: Facts,
    chosen: Plan,
    frontier: list[dict[str, Any]],
    alternatives: list[dict[str, Any]],
) -> str:
    lines = [
        f"recipe {request.recipe.hash()}: {request.recipe.task}, global batch {request.recipe.batch_size},"
        f" {facts.samples['train']:,} samples of up to {facts.longest} tokens",
        "",
    ]
    shown: dict[str, tuple[Any, str]] = {}
    for name, value in chosen.to_dict().items():
        if name in chosen.reasons:
            shown[name] = (value, chosen.reasons[name])
        if name == "pin_memory":  # the last of the loader's fields
            shown |= fixed_loader_settings(chosen)
    width = max(map(len, shown), default=0)
    lines += [f"  {name:<{width}}  {_format_value(v)!s:<12}  {why}" for name, (v, why) in shown.items()]
    lines += [
        "",
        f"predicted: {chosen.predicted_step_seconds:.3g} s a step,"
        f" {format_bytes(chosen.predicted_peak_memory_bytes)} per process"
        + (
            ""
            if chosen.calibrated
            else " (uncalibrated: no measurement on this kind of device stands behind it)"
        ),
        "",
        "the same micro-batch in other ways would take (all but the first flag are other recipes):",
        *_format_alternatives(alternatives),
        "",
        "other global batches would be other recipes (--scale-batch K --lr-rule sqrt|linear|none):",
    ]
    for row in frontier:
        lines.append(
            f"  {row['batch_size']:>7}  {row['processes']} processes  {row['step_seconds']:.3g} s a step"
            f"  {format_duration(row['epoch_hours'] * 3600)} an epoch"
            f"  {row['updates_per_epoch']:,} updates an epoch"
        )
    return "\n".join(lines)


def _format_alternatives(rows: list[dict[str, Any]]) -> list[str]:
    width = max(len(row["flags"]) for row in rows)
    return [
        f"  {row['flags']:<{width}}  {format_bytes(row['peak_memory_bytes']):>8}  {row['remark']}".rstrip()
        for row in rows
    ]


def _format_value(value: Any) -> Any:
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


def _say(request: Request) -> Callable[[str], None]:
    return partial(print_unless_quiet, quiet=request.run.quiet)


def prepare(words: Sequence[str]) -> int:
    """Usage: prepare --task TASK [--data PATH] [flags]. Run it where the internet is; runs then need none."""
    request = parse_request(words, "prepare", PrepareOptions)
    _print_notes(request)
    task, data = request.workload.make(request.recipe)
    facts = prepare_data(data, _say(request))
    task.fetch()
    if request.extra.get("json"):
        print(atomic_files.json_text(facts.to_dict(), ensure_ascii=False))
        return 0
    counts = ", ".join(f"{n:,} {split}" for split, n in facts.samples.items())
    print(
        f"{counts} samples of up to {facts.longest} tokens (mean {facts.mean_length:.0f}),"
        f" {facts.fingerprint}"
    )
    for line in (*facts.extra.get("notes", []), f"in {facts.folder}"):
        print(line)
    return 0
