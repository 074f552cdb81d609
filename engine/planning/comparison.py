"""Plans as text: one in six lines with the table of its reasons, and one recipe on several machines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isobatch.core.errors import UserError
from isobatch.core.measures import format_duration, gigabytes, wrapped
from isobatch.core.terminal import columns, fitted, table
from isobatch.engine.planning.choices import fixed_loader_settings
from isobatch.engine.planning.estimate import Estimate, Target, estimate

PRICES = "a price is for an hour of one GPU (of the machine, where it has none); idle ones are paid too"
"""What a price means, as users read it beside a cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Estimates beside each other, in the order in which they were asked for; at least one fits."""

    estimates: list[Estimate]
    deadline: float | None
    """Seconds in which the run should end."""
    prices: Mapping[str, float]
    """See `parse_prices`."""

    @property
    def fastest(self) -> Estimate:
        return min((e for e in self.estimates if e.plan), key=lambda e: e.seconds or 0.0)

    @property
    def one_price(self) -> bool:
        """Whether one price stands for several kinds of card: costs then do not say which is cheaper."""
        cards = {e.target.hardware.gpu.card if e.target.hardware.gpus else None for e in self.estimates}
        return "" in self.prices and len(cards) > 1

    @property
    def cheapest(self) -> Estimate | None:
        """The cheapest of those that end in time; None without a price of each, or where none does."""
        known = [e for e in self.estimates if e.meets(self.deadline) and e.cost is not None]
        return None if self.one_price else min(known, key=lambda e: (e.cost, e.seconds), default=None)

    def to_dict(self) -> dict[str, Any]:
        """The object of --json."""
        return {
            "deadline_seconds": self.deadline,
            "rows": [e.to_dict(self.deadline) for e in self.estimates],
            "fastest": self.fastest.target.name,
            "cheapest": self.cheapest.target.name if self.cheapest else None,
            "price_meaning": PRICES if self.prices else None,
        }


def compare(
    flag: str, targets: Sequence[Target], prices: Mapping[str, float], deadline: float | None
) -> Comparison:
    """Estimate each target, all of one recipe. Raises UserError where it fits none; `flag` named them."""
    found: list[Estimate] = []
    for target in targets:
        found.append(estimate(target, prices, found[0].size if found else None))
    if not any(e.plan for e in found):
        largest = max(found, key=lambda e: e.memory * e.target.hardware.devices)
        why = f"{largest.target.name}: {largest.why_not}"
        raise UserError(f"{flag}: the recipe fits none of them; {why}")
    return Comparison(estimates=found, deadline=deadline, prices=prices)


def format_comparison(found: Comparison) -> str:
    """The table and what follows from it."""
    heads = ["machine", "fits", "GPUs used", "a step", "whole run", "memory, GB"]
    heads += ["an hour", "cost"] if found.prices else []
    heads += [] if found.deadline is None else [f"within {format_duration(found.deadline)}"]
    rows = [heads, *(_cells(e, found) for e in found.estimates)]
    reasons = [f"{e.target.name}: {e.why_not}" for e in found.estimates if not e.plan]
    return "\n".join(
        [table(rows, columns()), "", wrapped("\n".join([*reasons, *_conclusions(found)]), columns())]
    )


def _cells(e: Estimate, found: Comparison) -> list[str]:
    cells = [e.target.name, "no", "", "", "", ""]
    if e.plan is not None and e.seconds is not None:
        device = e.target.hardware.devices if e.target.hardware.gpus else 0
        cells[1:] = [
            "yes",
            f"{e.plan.processes} of {device}" if device else "none",
            f"{e.plan.predicted_step_seconds:.3g} s",
            short_duration(e.seconds) + ("" if e.plan.calibrated else " ~"),
            f"{gigabytes(e.plan.predicted_peak_memory_bytes)[:-3]} of {gigabytes(e.memory)[:-3]}",
        ]
    if found.prices:
        price = "no price" if e.price is None else f"{e.price:.2f}"
        cells += [price, "" if e.cost is None else format_cost(e.cost)]
    if found.deadline is not None:
        cells.append("yes" if e.meets(found.deadline) else "no")
    return cells


def _conclusions(found: Comparison) -> list[str]:
    within = f" within {format_duration(found.deadline)}" if found.deadline is not None else ""
    cheapest, fastest = found.cheapest, found.fastest
    name, time = fastest.target.name, short_duration(fastest.seconds or 0.0)
    lines = [f"fastest{within}: {name}, {time}"]
    if not fastest.meets(found.deadline):
        lines = [f"none ends{within}: the fastest, {name}, takes {time}"]
    elif cheapest is not None and cheapest.cost is not None:
        cost = f"{format_cost(cheapest.cost)} for {short_duration(cheapest.seconds or 0.0)}"
        lines = [f"cheapest{within}: {cheapest.target.name}, {cost}"]
    if found.one_price:
        lines.append("one price of several cards does not say which is cheapest: --price h100=2.10,t4=0.35")
    if found.prices:
        lines.append(f"prices: {PRICES}")
    if any(e.plan and not e.plan.calibrated for e in found.estimates):
        lines.append("~ uncalibrated: no measurement on this kind of device stands behind it")
    return lines


def format_cost(cost: float) -> str:
    """A cost with at least two figures, from 1,000 on without a fraction."""
    return f"{cost:,.0f}" if cost >= 1000 else f"{cost:.2f}" if cost >= 0.1 else f"{cost:.2g}"


def short_duration(seconds: float) -> str:
    """A duration, below a minute with a tenth of a second, from 100 hours on in days."""
    if seconds >= 360_000:
        return f"{seconds / 86400:,.0f} days"
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)


BUSY = 1.2
"""Stretched by so much, a run is slower than predictions miss."""
INTERNAL = ("predicted_step_seconds", "micro_batch_cost")
"""Fields of the plan that are for programs, or stand in a sentence below."""
EXACTNESS = {
    "exact": "same curve on any machine and cut, but for the order of float sums",
    "rounding": "{} rounded to levels: another cut moves few values by one level",
    "precision": "close, not exact: in {} another cut rounds differently",
    "noise": "alike, not exact: another cut draws other random numbers",
}
"""Invariance -> what it means for who trains elsewhere; with the number format."""


def six_lines(found: Estimate, deadline: float | None = None) -> str:
    """Memory, devices, time, cost, how the batch is cut, and how exact that is: 80 characters at most."""
    plan, recipe, (used, there) = found.plan, found.target.recipe, found.used
    assert plan is not None
    memory, kept = plan.device_memory_bytes, plan.device_memory_bytes - plan.usable_memory_bytes
    sizes = (plan.predicted_peak_memory_bytes, memory, plan.least_memory_bytes, kept)
    shown = (f"{n / 1e9:.2f}"[:5].rstrip(".") for n in sizes)
    unit = "CPU cores" if plan.device == "cpu" else "GPU" if there == 1 else "GPUs"
    idle = f"{there - used} idle" if there > used else "none idle"
    if plan.nodes > 1 and plan.device == "cuda":
        idle += f"; {found.target.hardware.network}"
    elif there > used:
        idle += ": more would gain too little"
    busy = f"; busy now: {found.stretch:.1f} times as long" if found.stretch >= BUSY else ""
    seconds = (found.seconds or 0, *found.interval)
    time = "{} ({} to {})".format(*map(short_duration, seconds))
    if deadline is not None:
        time += f", {'within' if found.meets(deadline) else 'NOT within'} {short_duration(deadline)}"
    time += " if the machine is idle" if found.is_measured else ", uncalibrated"
    cost = "not known: plan --price 2.10/h says it; plan --why all reasons"
    if (price := found.price) is not None:
        costs = (format_cost(price * one / 3600) for one in seconds)
        cost = "{} ({} to {}) at {:.2f} an hour".format(*costs, price)
        cost += "; idle too" if there > used else ""
    longest = math.ceil(found.target.facts.longest / plan.pad_multiple) * plan.pad_multiple
    share = math.ceil(recipe.batch_size / plan.processes)
    most = min(plan.micro_batch_samples, max(1, plan.micro_batch_tokens // longest), share)
    count = math.ceil(share / most)
    mesh = " {} x {}".format(*plan.mesh) if plan.copies > 1 else ""
    cut = f"micro-batch {math.ceil(share / count)} x {count} accumulated"
    lines = [
        "memory     fits: {} of {} GB; micro-batch 1 needs {}; {} kept free".format(*shown),
        f"devices    {used} of {there} {unit} used, {idle}{busy}",
        f"time       {time}",
        f"cost       {cost}",
        f"batch      {plan.strategy}{mesh}: {cut}, {recipe.batch_size} a step, {found.steps:,} steps",
        "exactness  " + EXACTNESS[plan.invariance].format(plan.precision),
    ]
    return fitted("\n".join(lines))


def reasons(found: Estimate) -> str:
    """Every field of the plan with its reason, and the parts of the whole run's time."""
    recipe, facts, plan, seconds = found.target.recipe, found.target.facts, found.plan, found.seconds
    assert plan is not None
    assert seconds is not None
    shown: dict[str, tuple[Any, str]] = {}
    for name, value in plan.to_dict().items():
        if name in plan.reasons and name not in INTERNAL:
            shown[name] = (value, plan.reasons[name])
        if name == "pin_memory":  # the last of the loader's fields
            shown |= fixed_loader_settings(plan)
    parts = (f"{n} {short_duration(p)}" for n, p in found.parts.items() if p >= 0.01 * seconds)
    lines = [
        f"recipe {recipe.hash()}: {recipe.task}, global batch {recipe.batch_size},"
        f" {facts.samples['train']:,} samples of up to {facts.longest} tokens",
        "",
        table([(name, _cell(name, v), why) for name, (v, why) in shown.items()], columns()),
        "",
        f"a step: {plan.predicted_step_seconds:.3g} s; the whole run: {', '.join(parts)}",
        *([f"prices: {PRICES}"] if found.price is not None else []),
    ]
    return wrapped("\n".join(lines), columns())


def _cell(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if name.endswith("_bytes") and value is not None:
        return gigabytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{stage} {peak / 1e9:.2f}" for stage, peak in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)
