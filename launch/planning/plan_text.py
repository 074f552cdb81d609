"""A plan with its reasons as text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from isobatch.core.measures import format_bytes, format_duration, format_fields
from isobatch.engine.planning.explanations import fixed_loader_settings
from isobatch.launch.planning.comparison import format_cost, short_duration
from isobatch.launch.planning.prices import MEANING

if TYPE_CHECKING:
    from isobatch.launch.planning.estimate import Estimate
    from isobatch.launch.planning.run_time import Failures


INTERNAL = ("correction", "predicted_step_seconds", "micro_batch_cost")
"""Fields of the plan that are for programs, or stand in a sentence below."""
WITHIN = 0.02
"""Of a figure of the plan: other settings that differ by less are not listed. `--json` lists all."""


def format_plan(
    found: Estimate,
    deadline: float | None,
    frontier: list[dict[str, Any]],
    alternatives: list[dict[str, Any]],
    reading: list[dict[str, Any]],
    failing: Failures | None = None,
) -> str:
    """The answer of `plan`."""
    recipe, facts, chosen = found.target.recipe, found.target.facts, found.plan
    assert chosen is not None
    lines = [
        f"recipe {recipe.hash()}: {recipe.task}, global batch {recipe.batch_size},"
        f" {facts.samples['train']:,} samples of up to {facts.longest} tokens",
        "",
    ]
    shown: dict[str, tuple[Any, str]] = {}
    for name, value in chosen.to_dict().items():
        if name in chosen.reasons and name not in INTERNAL:
            shown[name] = (value, chosen.reasons[name])
        if name == "pin_memory":  # the last of the loader's fields
            shown |= fixed_loader_settings(chosen)
    width = max(map(len, shown), default=0)
    lines += [f"  {name:<{width}}  {_format_value(name, v)!s:<12}  {why}" for name, (v, why) in shown.items()]
    lines += [
        "",
        f"predicted: {chosen.predicted_step_seconds:.3g} s a step,"
        f" {format_bytes(chosen.predicted_peak_memory_bytes)} per process"
        + (
            ""
            if chosen.calibrated
            else " (uncalibrated: no measurement on this kind of device stands behind it)"
        ),
        *_whole_run(found, deadline),
        *([failing.sentence()] if failing else []),
        "",
        *_format_alternatives(alternatives),
        *_format_streaming(found),
        *_format_reading(found, reading),
        "other global batches would be other recipes (--scale-batch K --lr-rule sqrt|linear|none):",
    ]
    for row in frontier:
        lines.append(
            f"  {row['batch_size']:>7}  {row['processes']} processes  {row['step_seconds']:.3g} s a step"
            f"  {format_duration(row['epoch_hours'] * 3600)} an epoch"
            f"  {row['updates_per_epoch']:,} updates an epoch"
        )
    return "\n".join(lines)


def _whole_run(found: Estimate, deadline: float | None) -> list[str]:
    """Lines on the time of the whole run, its cost and its deadline."""
    seconds = found.seconds or 0.0
    text = f"the whole run: {found.steps:,} steps, {short_duration(seconds)}"
    if found.time is not None:
        parts = {name: part for name, part in found.time.to_dict().items() if part >= 0.01 * seconds}
        text += f" ({', '.join(f'{name} {short_duration(part)}' for name, part in parts.items())})"
    if found.energy is not None:
        text += f", at most {found.energy:.3g} kWh"
    if found.cost is not None and found.price is not None:
        text += f", {format_cost(found.cost)} at {found.price:.2f} an hour"
    if deadline is not None:
        text += f"; {'within' if found.meets(deadline) else 'NOT within'} {format_duration(deadline)}"
    return [text, *([f"prices: {MEANING}"] if found.price is not None else [])]


def _format_alternatives(rows: list[dict[str, Any]]) -> list[str]:
    """Lines on other settings that use another amount of memory; none where none does."""
    rows = _that_differ(rows, "peak_memory_bytes")
    if len(rows) < 2:
        return []
    width = max(len(row["flags"]) for row in rows)
    lines = [
        f"  {row['flags']:<{width}}  {format_bytes(row['peak_memory_bytes']):>8}  {row['remark']}".rstrip()
        for row in rows
    ]
    title = (
        "the same micro-batch in other ways would take (other recipes, but for --activation-checkpointing):"
    )
    return [title, *lines, ""]


def _that_differ(rows: list[dict[str, Any]], field: str) -> list[dict[str, Any]]:
    """The first row, which is the plan itself, and those that differ from it in `field`."""
    planned = rows[0][field]
    return [row for row in rows if row is rows[0] or abs(row[field] - planned) > WITHIN * planned]


def _format_streaming(found: Estimate) -> list[str]:
    """A line on what the store has to give; none where the data is on this machine."""
    facts, recipe, plan = found.target.facts, found.target.recipe, found.plan
    if not facts.is_streamed or plan is None:
        return []
    size = facts.extra["stored_bytes"]
    seconds = math.ceil(facts.samples["train"] / recipe.batch_size) * plan.predicted_step_seconds
    return [
        f"an epoch reads up to {format_bytes(size)} from the store on each node:"
        f" {format_bytes(size / max(seconds, 1e-9))} a second",
        "",
    ]


def _format_reading(found: Estimate, rows: list[dict[str, Any]]) -> list[str]:
    """Lines on what the loader's settings change; none where reading was not measured."""
    if found.rate is None:
        return []
    rows = _that_differ(rows, "step_seconds")
    rate = 1 / max(1e-9, found.rate.sample_seconds)
    measured = f"samples are read at {rate:,.0f} a second in one thread (measured now)"
    if len(rows) < 2:
        return [measured, ""]
    width = max(len(row["flags"]) for row in rows)
    lines = [f"{measured}; a step would take:"]
    lines += [
        f"  {row['flags']:<{width}}  {row['step_seconds']:>8.3g} s"
        f"  {format_bytes(row['ready_bytes']):>8} ready  {row['remark']}".rstrip()
        for row in rows
    ]
    return [*lines, ""]


def _format_value(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return "on" if value else "off"
    if name.endswith("_bytes") and value is not None:
        return format_bytes(value)
    if isinstance(value, dict):
        return format_fields(value)
    return f"{value:.3g}" if isinstance(value, float) else value
