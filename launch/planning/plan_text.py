"""A plan with its reasons as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isobatch.core.measures import format_bytes, format_duration, format_fields
from isobatch.engine.planning.choices import fixed_loader_settings
from isobatch.launch.planning.comparison import format_cost, short_duration
from isobatch.launch.planning.targets import PRICES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from isobatch.launch.planning.estimate import Estimate

INTERNAL = ("predicted_step_seconds", "micro_batch_cost")
"""Fields of the plan that are for programs, or stand in a sentence below."""
WITHIN = 0.02
"""Of a figure of the plan: other settings that differ by less are not listed. `--json` lists all."""
TITLE = "the same micro-batch in other ways would take (other recipes, but for --activation-checkpointing):"
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
    lines = [
        f"recipe {recipe.hash()}: {recipe.task}, global batch {recipe.batch_size},"
        f" {facts.samples['train']:,} samples of up to {facts.longest} tokens",
        "",
        *(f"  {name:<{width}}  {_format_value(name, v)!s:<12}  {why}" for name, (v, why) in shown.items()),
        "",
        f"predicted: {chosen.predicted_step_seconds:.3g} s a step, {memory} per process"
        + ("" if chosen.calibrated else basis),
        *_whole_run(found, deadline),
        "",
        *format_alternatives(answer["savings"]),
    ]
    if found.rate is not None:
        rate = 1 / max(1e-9, found.rate.sample_seconds)
        lines += [f"samples are read at {rate:,.0f} a second in one thread (measured now)", ""]
    return "\n".join(lines)


def _whole_run(found: Estimate, deadline: float | None) -> list[str]:
    """Lines on the time of the whole run, its cost and its deadline."""
    assert found.time is not None
    seconds = found.time.total
    parts = (f"{n} {short_duration(p)}" for n, p in found.time.parts.items() if p >= 0.01 * seconds)
    text = f"the whole run: {found.time.steps:,} steps, {short_duration(seconds)} ({', '.join(parts)})"
    if found.cost is not None and found.price is not None:
        text += f", {format_cost(found.cost)} at {found.price:.2f} an hour"
    if deadline is not None:
        text += f"; {'within' if found.meets(deadline) else 'NOT within'} {format_duration(deadline)}"
    return [text, *([f"prices: {PRICES}"] if found.price is not None else [])]


def format_alternatives(rows: Rows) -> list[str]:
    """Lines on the first row, which is the plan itself, and those that take another peak of memory."""
    planned = rows[0]["peak_memory_bytes"]
    others = [row for row in rows if abs(row["peak_memory_bytes"] - planned) > WITHIN * planned]
    width = max(len(row["flags"]) for row in rows)
    lines = [
        f"  {row['flags']:<{width}}  {format_bytes(row['peak_memory_bytes']):>8}  {row['remark']}".rstrip()
        for row in (rows[0], *others)
    ]
    return [TITLE, *lines, ""] if others else []


def _format_value(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return "on" if value else "off"
    if name.endswith("_bytes") and value is not None:
        return format_bytes(value)
    if isinstance(value, dict):
        return format_fields(value)
    return f"{value:.3g}" if isinstance(value, float) else value
