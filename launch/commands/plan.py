"""`plan` and `prepare`: what would happen, and what must happen first. Neither trains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isobatch.core.facts import Facts
from isobatch.core.measures import format_bytes, format_duration
from isobatch.core.number_ranges import Positive
from isobatch.core.plan import Plan
from isobatch.engine.loading.prepare import assumed_facts
from isobatch.engine.loading.prepare import prepare as prepare_data
from isobatch.engine.planning import hardware
from isobatch.engine.planning.alternatives import memory_alternatives
from isobatch.engine.planning.detect import detect
from isobatch.engine.planning.planner import batch_size_frontier, make_plan
from isobatch.launch.local.arguments import Request, parse_request


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanningOptions:
    """Flags of `plan` beside the recipe's and the plan's."""

    hardware: str | None = None
    """Plan for this machine, not the one here: rtx4080-laptop, 8xh100, 4x8xa100-80gb, cpu:2x24gb ..."""
    assume_length: Positive | None = None
    """Plan for samples of this many tokens, where the data is not at hand."""
    json: bool = False
    """One JSON object on standard output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonOption:
    """Flags of `prepare` beside the recipe's."""

    json: bool = False
    """One JSON object on standard output."""


def plan(words: Sequence[str]) -> int:
    """Usage: plan --task TASK [--hardware 8xh100] [--assume-length 128] [--json] [flags]"""
    asked = parse_request(words, "plan", PlanningOptions)
    length = asked.extra.get("assume_length")
    task, data = asked.workload.make(asked.recipe)
    facts = assumed_facts(length) if length else prepare_data(data)
    wanted = asked.extra.get("hardware")
    machine = hardware.parse_hardware(wanted) if wanted else detect()
    shape = task.model_size(facts)
    made = make_plan(asked.recipe, facts, shape, machine, asked.plan)
    others = batch_size_frontier(asked.recipe, facts, shape, machine, asked.plan)
    cheaper = memory_alternatives(
        lambda recipe: asked.workload.make(recipe)[0], asked.recipe, facts, shape, made
    )
    answer = {
        "recipe": {**asked.recipe.to_dict(), "hash": asked.recipe.hash()},
        "global_batch": asked.recipe.batch_size,
        "plan": made.to_dict(),
        "reasons": made.reasons,
        "invariance": made.invariance,
        "frontier": others,
        "savings": cheaper,
    }
    print(
        json.dumps(answer, ensure_ascii=False)
        if asked.extra.get("json")
        else _sheet(asked, facts, made, others, cheaper)
    )
    return 0


def _sheet(
    asked: Request, facts: Facts, made: Plan, others: list[dict[str, Any]], cheaper: list[dict[str, Any]]
) -> str:
    lines = [
        f"recipe {asked.recipe.hash()}: {asked.recipe.task}, global batch {asked.recipe.batch_size},"
        f" {facts.samples['train']:,} samples of up to {facts.longest} tokens",
        "",
    ]
    shown = {k: v for k, v in made.to_dict().items() if k in made.reasons}
    width = max(map(len, shown), default=0)
    lines += [
        f"  {name:<{width}}  {_value(value)!s:<12}  {made.reasons[name]}" for name, value in shown.items()
    ]
    lines += [
        "",
        f"predicted: {made.predicted_step_seconds:.3g} s a step,"
        f" {format_bytes(made.predicted_peak_memory_bytes)} per process"
        + (
            ""
            if made.calibrated
            else " (uncalibrated: no measurement on this kind of device stands behind it)"
        ),
        "",
        "the same micro-batch in other ways would take (all but the first flag are other recipes):",
        *_ways(cheaper),
        "",
        "other global batches would be other recipes (--scale-batch K --lr-rule sqrt|linear|none):",
    ]
    for row in others:
        lines.append(
            f"  {row['batch_size']:>7}  {row['processes']} processes  {row['step_seconds']:.3g} s a step"
            f"  {format_duration(row['epoch_hours'] * 3600)} an epoch"
            f"  {row['updates_per_epoch']:,} updates an epoch"
        )
    return "\n".join(lines)


def _ways(rows: list[dict[str, Any]]) -> list[str]:
    width = max(len(row["flags"]) for row in rows)
    return [
        f"  {row['flags']:<{width}}  {format_bytes(row['peak_memory_bytes']):>8}  {row['remark']}".rstrip()
        for row in rows
    ]


def _value(value: Any) -> Any:
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


def prepare(words: Sequence[str]) -> int:
    """Usage: prepare --task TASK [--data PATH] [flags]. Run it where the internet is; runs then need none."""
    asked = parse_request(words, "prepare", JsonOption)
    task, data = asked.workload.make(asked.recipe)
    facts = prepare_data(data)
    task.fetch()
    if asked.extra.get("json"):
        print(json.dumps(facts.to_dict(), ensure_ascii=False))
        return 0
    counts = ", ".join(f"{n:,} {split}" for split, n in facts.samples.items())
    print(
        f"{counts} samples of up to {facts.longest} tokens (mean {facts.mean_length:.0f}),"
        f" {facts.fingerprint}"
    )
    for line in (*facts.extra.get("notes", []), f"in {facts.folder}"):
        print(line)
    return 0
