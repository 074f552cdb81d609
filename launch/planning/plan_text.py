"""A plan with its reasons as text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from isobatch.core.measures import format_bytes, format_duration, format_fields
from isobatch.engine.planning.choices import fixed_loader_settings
from isobatch.launch.planning.comparison import format_cost, short_duration
from isobatch.launch.planning.machines import MEANING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from isobatch.launch.planning.estimate import Estimate

INTERNAL = ("correction", "predicted_step_seconds", "micro_batch_cost")
"""Fields of the plan that are for programs, or stand in a sentence below."""
WITHIN = 0.02
"""Of a figure of the plan: other settings that differ by less are not listed. `--json` lists all."""
Rows = list[dict[str, Any]]


def format_plan(found: Estimate, deadline: float | None, answer: Mapping[str, Any]) -> str:
    """The text of `plan`; `answer` is that of --json."""
    recipe, facts, chosen = found.target.recipe, found.target.facts, found.plan
    assert chosen is not None
    shown: dict[str, tuple[Any, str]] = {}
    for name, value in chosen.to_dict().items():
        if name in chosen.reasons and name not in INTERNAL:
            shown[name] = (value, chosen.reasons[name])
        if name == "pin_memory":  # the last of the loader's fields
            shown |= fixed_loader_settings(chosen)
    width = max(map(len, shown), default=0)
    basis = " (uncalibrated: no measurement on this kind of device stands behind it)"
    memory = format_bytes(chosen.predicted_peak_memory_bytes)
    title = (
        "the same micro-batch in other ways would take (other recipes, but for --activation-checkpointing):"
    )
    lines = [
        f"recipe {recipe.hash()}: {recipe.task}, global batch {recipe.batch_size},"
        f" {facts.samples['train']:,} samples of up to {facts.longest} tokens",
        "",
        *(f"  {name:<{width}}  {_format_value(name, v)!s:<12}  {why}" for name, (v, why) in shown.items()),
        "",
        f"predicted: {chosen.predicted_step_seconds:.3g} s a step, {memory} per process"
        + ("" if chosen.calibrated else basis),
        *_whole_run(found, deadline),
        *_failing(answer["failures"]),
        "",
        *format_alternatives(title, "peak_memory_bytes", answer["savings"], _memory_cells),
        *_format_streaming(found),
    ]
    if found.rate is not None:
        rate = 1 / max(1e-9, found.rate.sample_seconds)
        measured = f"samples are read at {rate:,.0f} a second in one thread (measured now)"
        others = format_alternatives(
            f"{measured}; a step would take:", "step_seconds", answer["reading"], _reading_cells
        )
        lines += others or [measured, ""]
    return "\n".join(lines)


def _whole_run(found: Estimate, deadline: float | None) -> list[str]:
    """Lines on the time of the whole run, its cost and its deadline."""
    assert found.time is not None
    seconds = found.time.total
    parts = (f"{n} {short_duration(p)}" for n, p in found.time.parts.items() if p >= 0.01 * seconds)
    text = f"the whole run: {found.time.steps:,} steps, {short_duration(seconds)} ({', '.join(parts)})"
    if found.energy is not None:
        text += f", at most {found.energy:.3g} kWh"
    if found.cost is not None and found.price is not None:
        text += f", {format_cost(found.cost)} at {found.price:.2f} an hour"
    if deadline is not None:
        text += f"; {'within' if found.meets(deadline) else 'NOT within'} {format_duration(deadline)}"
    return [text, *([f"prices: {MEANING}"] if found.price is not None else [])]


def _failing(found: Mapping[str, Any] | None) -> list[str]:
    """A line on what failures take of the run; none where nobody asked."""
    if found is None:
        return []
    often = f"with a failure every {format_duration(found['mtbf_seconds'])}"
    save, restart = (
        f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"
        for seconds in (found["save_seconds"], found["restart_seconds"])
    )
    if found["run_seconds"] is None:
        return [f"{often} the run hardly gets on: a save takes {save} s and to start again {restart} s"]
    return [
        f"{often}: --save-every {found['save_every']} loses"
        f" least ({save} s a save, {restart} s to start again): at least"
        f" {found['goodput']:.1%} of the time is kept, the whole run takes"
        f" {format_duration(found['run_seconds'])}"
    ]


def format_alternatives(
    title: str, field: str, rows: Rows, cells: Callable[[Mapping[str, Any]], str]
) -> list[str]:
    """Lines on the first row, which is the plan itself, and those that differ from it in `field`; none where
    none does.
    """
    planned = rows[0][field]
    rows = [row for row in rows if row is rows[0] or abs(row[field] - planned) > WITHIN * planned]
    if len(rows) < 2:
        return []
    width = max(len(row["flags"]) for row in rows)
    lines = [f"  {row['flags']:<{width}}  {cells(row)}  {row['remark']}".rstrip() for row in rows]
    return [title, *lines, ""]


def _memory_cells(row: Mapping[str, Any]) -> str:
    return f"{format_bytes(row['peak_memory_bytes']):>8}"


def _reading_cells(row: Mapping[str, Any]) -> str:
    return f"{row['step_seconds']:>8.3g} s  {format_bytes(row['ready_bytes']):>8} ready"


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


def _format_value(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return "on" if value else "off"
    if name.endswith("_bytes") and value is not None:
        return format_bytes(value)
    if isinstance(value, dict):
        return format_fields(value)
    return f"{value:.3g}" if isinstance(value, float) else value
