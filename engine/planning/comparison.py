"""`plan --compare`: one recipe on several machines, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isobatch.core.errors import UserError
from isobatch.core.measures import aligned, format_bytes, format_duration
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
    heads = ["machine", "fits", "GPUs used", "a step", "whole run", "memory"]
    heads += ["an hour", "cost"] if found.prices else []
    heads += [] if found.deadline is None else [f"within {format_duration(found.deadline)}"]
    rows = [heads, *(_cells(e, found) for e in found.estimates)]
    reasons = [f"{e.target.name}: {e.why_not}" for e in found.estimates if not e.plan]
    return "\n".join([*(f"  {line}" for line in aligned(rows)), "", *reasons, *_conclusions(found)])


def _cells(e: Estimate, found: Comparison) -> list[str]:
    cells = [e.target.name, "no", "", "", "", ""]
    if e.plan is not None and e.seconds is not None:
        device = e.target.hardware.devices if e.target.hardware.gpus else 0
        cells[1:] = [
            "yes",
            f"{e.plan.processes} of {device}" if device else "none",
            f"{e.plan.predicted_step_seconds:.3g} s",
            short_duration(e.seconds) + ("" if e.plan.calibrated else " ~"),
            f"{format_bytes(e.plan.predicted_peak_memory_bytes)} of {format_bytes(e.memory)}",
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
    """A cost with at least two figures."""
    return f"{cost:.2f}" if cost >= 0.1 else f"{cost:.2g}"


def short_duration(seconds: float) -> str:
    """A duration, below a minute with a tenth of a second."""
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)
