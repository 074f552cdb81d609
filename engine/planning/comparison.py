"""Plans as text: one in six lines with the table of its reasons, and one recipe on several machines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isobatch.core.errors import UserError
from isobatch.core.flags import value_text
from isobatch.core.measures import format_duration, gigabytes, wrapped
from isobatch.core.strategies import traits_of
from isobatch.core.terminal import columns, fitted, rendered, table
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
    said = rendered(__file__, "comparison", found=found, prices=PRICES, whole=format_duration, **WRITTEN)
    return "\n".join([table(rows, columns()), "", wrapped(said, columns())])


def _cells(e: Estimate, found: Comparison) -> list[str]:
    cells = [e.target.name, "no", "", "", "", ""]
    if e.plan is not None and e.seconds is not None:
        recomputes = e.plan.activation_checkpointing != "off"
        device = e.target.hardware.devices if e.target.hardware.gpus else 0
        cells[1:] = [
            "yes",
            f"{e.plan.processes} of {device}" if device else "none",
            f"{e.plan.predicted_step_seconds:.3g} s",
            short_duration(e.seconds) + " ~" * (not e.plan.calibrated) + " r" * recomputes,
            f"{gigabytes(e.plan.predicted_peak_memory_bytes)[:-3]} of {gigabytes(e.memory)[:-3]}",
        ]
    if found.prices:
        price = "no price" if e.price is None else f"{e.price:.2f}"
        cells += [price, "" if e.cost is None else format_cost(e.cost)]
    if found.deadline is not None:
        cells.append("yes" if e.meets(found.deadline) else "no")
    return cells


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
WRITTEN = {"short": short_duration, "cost": format_cost}
"""Functions of the templates."""


def six_lines(found: Estimate, deadline: float | None = None) -> str:
    """Memory, devices, time, cost, how the batch is cut, and how exact that is: 80 characters at most."""
    plan, recipe = found.plan, found.target.recipe
    assert plan is not None
    longest = math.ceil(found.target.facts.longest / plan.pad_multiple) * plan.pad_multiple
    share = math.ceil(recipe.batch_size / plan.processes)
    most = min(plan.micro_batch_samples, max(1, plan.micro_batch_tokens // longest), share)
    count = math.ceil(share / most)
    shown = {"plan": plan, "count": count, "busy": BUSY, "each": math.ceil(share / count)}
    shown |= {"offloads": traits_of(plan.strategy).offloads, "deadline": deadline}
    return fitted(rendered(__file__, "plan", found=found, **shown, **WRITTEN))


def reasons(found: Estimate) -> str:
    """Every field of the plan with its reason, and the parts of the whole run's time."""
    plan, seconds = found.plan, found.seconds
    assert plan is not None
    assert seconds is not None
    shown: dict[str, tuple[Any, str]] = {}
    for name, value in plan.to_dict().items():
        if name in plan.reasons and name not in INTERNAL:
            shown[name] = (value, plan.reasons[name])
        if name == "pin_memory":  # the last of the loader's fields
            shown |= fixed_loader_settings(plan)
    rows = table([(name, _cell(name, v), why) for name, (v, why) in shown.items()], columns())
    parts = [f"{n} {short_duration(p)}" for n, p in found.parts.items() if p >= 0.01 * seconds]
    said = {"rows": rows, "parts": parts, "plan": plan, "price": found.price, "prices": PRICES}
    page = rendered(__file__, "reasons", target=found.target, **said)
    return wrapped(page, columns())


def _cell(name: str, value: Any) -> str:
    if name.endswith("_bytes") and value is not None:
        return gigabytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{stage} {peak / 1e9:.2f}" for stage, peak in value.items())
    return f"{value:.3g}" if isinstance(value, float) else value_text(value)
