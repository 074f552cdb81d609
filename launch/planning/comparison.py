"""`plan --compare`: one recipe on several machines, or its modes on one, side by side."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.core.measures import format_bytes, format_duration
from isobatch.launch.planning.estimate import Estimate, estimate, with_what_would_fit
from isobatch.launch.planning.prices import MEANING, machine_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.launch.planning.estimate import Target
    from isobatch.launch.planning.prices import Prices
    from isobatch.models.base import ModelSize


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Estimates beside each other, in the order in which they were asked for."""

    estimates: list[Estimate]
    deadline: float | None
    """Seconds in which the run should end."""
    priced: bool
    one_price: bool = False
    """Whether one price stands for several kinds of card, so that costs say nothing of which is cheaper."""

    @property
    def fastest(self) -> Estimate:
        return min((e for e in self.estimates if e.fits), key=lambda e: e.seconds or 0.0)

    @property
    def cheapest(self) -> Estimate | None:
        """The cheapest of those that end in time; None without a price of each, or where none does."""
        known = [e for e in self.estimates if e.meets(self.deadline) and e.cost is not None]
        return None if self.one_price else min(known, key=lambda e: (e.cost, e.seconds), default=None)

    def ranked(self) -> Comparison:
        """The same, the fastest first; of equal times the one in the least memory."""

        def place(e: Estimate) -> tuple[float, float]:
            return e.seconds or math.inf, e.plan.predicted_peak_memory_bytes if e.plan else math.inf

        return dataclasses.replace(self, estimates=sorted(self.estimates, key=place))

    def to_dict(self) -> dict[str, Any]:
        """The object of --json."""
        return {
            "deadline_seconds": self.deadline,
            "rows": [e.to_dict(self.deadline) for e in self.estimates],
            "fastest": self.fastest.target.name,
            "cheapest": self.cheapest.target.name if self.cheapest else None,
            "price_meaning": MEANING if self.priced else None,
        }


def compare(
    flag: str, targets: Sequence[Target], prices: Prices | None, deadline: float | None
) -> Comparison:
    """Estimate each target. Raises UserError where the recipe fits none; `flag` is what named them."""
    sizes: dict[str, ModelSize | None] = {}
    found = []
    for target in targets:
        key = target.recipe.hash()
        found.append(estimate(target, prices, sizes.get(key)))
        sizes[key] = found[-1].model_size
    if not any(e.fits for e in found):
        raise UserError(_fits_nowhere(flag, found))
    of_gpu = prices is not None and prices.per_gpu is not None
    one_price = of_gpu and len({machine_key(e.target.hardware)[2] for e in found}) > 1
    return Comparison(estimates=found, deadline=deadline, priced=bool(prices), one_price=one_price)


def _fits_nowhere(flag: str, estimates: list[Estimate]) -> str:
    """The error where none fits: what is missing on the machine with the most memory, and what would fit."""
    largest = max(estimates, key=lambda e: e.memory * e.target.hardware.devices)
    return f"{flag}: the recipe fits none of them; {largest.target.name}: {with_what_would_fit(largest)}"


def format_comparison(found: Comparison, column: str) -> str:
    """The table and what follows from it; `column` heads the names."""
    rows = [[column, "fits", "GPUs used", "a step", "whole run", "memory"]]
    rows += [_cells(e) for e in found.estimates]
    if found.priced:
        for row, values in zip(rows, [["an hour", "cost"], *map(_price_cells, found.estimates)], strict=True):
            row += values
    if found.deadline is not None:
        answers = ["yes" if e.meets(found.deadline) else "no" for e in found.estimates]
        heads = [f"within {format_duration(found.deadline)}", *answers]
        rows = [[*row, answer] for row, answer in zip(rows, heads, strict=True)]
    reasons = [f"{e.target.name}: {e.why_not}" for e in found.estimates if not e.fits]
    return "\n".join([*_aligned(rows), "", *reasons, *_conclusions(found)])


def _cells(e: Estimate) -> list[str]:
    if e.plan is None or e.seconds is None:
        return [e.target.name, "no", "", "", "", ""]
    device = e.target.hardware.devices if e.target.hardware.gpus else 0
    return [
        e.target.name,
        "yes",
        f"{e.plan.processes} of {device}" if device else "none",
        f"{e.plan.predicted_step_seconds:.3g} s",
        short_duration(e.seconds) + ("" if e.plan.calibrated else " ~"),
        f"{format_bytes(e.plan.predicted_peak_memory_bytes)} of {format_bytes(e.memory)}",
    ]


def _price_cells(e: Estimate) -> list[str]:
    if e.price is None:
        return ["no price", ""]
    return [f"{e.price:.2f}", "" if e.cost is None else format_cost(e.cost)]


def format_cost(cost: float) -> str:
    """A cost with at least two figures."""
    return f"{cost:.2f}" if cost >= 0.1 else f"{cost:.2g}"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _conclusions(found: Comparison) -> list[str]:
    lines = []
    within = f" within {format_duration(found.deadline)}" if found.deadline is not None else ""
    in_time = [e for e in found.estimates if e.meets(found.deadline)]
    if not in_time:
        fastest = found.fastest
        lines.append(f"none ends{within}: the fastest, {fastest.target.name}, takes {_time(fastest)}")
    elif (cheapest := found.cheapest) is not None and cheapest.cost is not None:
        cost = format_cost(cheapest.cost)
        lines.append(f"cheapest{within}: {cheapest.target.name}, {cost} for {_time(cheapest)}")
    else:
        lines.append(f"fastest{within}: {found.fastest.target.name}, {_time(found.fastest)}")
    if found.one_price:
        lines.append(
            "which is cheapest, one price for several kinds of card does not say: give a file, --price"
            f" prices.yaml, with a line for each, such as {found.estimates[0].target.name}: 2.10"
        )
    if found.priced:
        lines.append(f"prices: {MEANING}")
    if any(e.plan and not e.plan.calibrated for e in found.estimates):
        lines.append("~ uncalibrated: no measurement on this kind of device stands behind it")
    return lines


def _time(e: Estimate) -> str:
    return short_duration(e.seconds or 0.0)


def short_duration(seconds: float) -> str:
    """A duration, below a minute with a tenth of a second."""
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)
