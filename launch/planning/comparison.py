"""`plan --compare`: one recipe on several machines, or its modes on one, side by side."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.flags import nearest_hint
from isobatch.core.measures import format_bytes, format_duration
from isobatch.launch.local.arguments import parse_request
from isobatch.launch.planning.estimate import Estimate, estimate, with_what_would_fit
from isobatch.launch.planning.targets import (
    HERE,
    PRICES,
    PlanCommandOptions,
    parse_machine,
    parse_prices,
    print_notes,
    target_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from isobatch.engine.machine.hardware import Hardware
    from isobatch.launch.local.arguments import Request
    from isobatch.launch.planning.targets import Target
    from isobatch.models.base import ModelSize

MODES = ("full", "fast")


def compare_targets(words: Sequence[str], request: Request, options: PlanCommandOptions) -> int:
    """Print the machines or modes of --compare side by side. Raises UserError where none of them fits."""
    parse_machine(options.hardware or HERE, "--hardware")
    flag, deadline, prices = f"--compare {options.compare}", options.seconds(), parse_prices(options.price)
    print_notes(request)
    names = [name.strip() for name in str(options.compare).split(",")]
    if "" in names or len(set(names)) < len(names):
        raise UserError(f"{flag}: give names of machines, each once, as in rtx4080-laptop,8xh100,here")
    if not set(names) & set(MODES):
        tables = {"machine": _machines(request, options, names)}
    elif set(names) <= set(MODES):
        tables = _modes(words, request, options, names)
    else:
        others = {name: nearest_hint(name, MODES) for name in names if name not in MODES}
        hints = (f"{name} is no mode{hint}" for name, hint in others.items() if hint)
        both = f"compare machines or modes ({', '.join(MODES)}), not both at once"
        raise UserError(f"{flag}: {next(hints, both)}")
    results = {column: compare(flag, targets, prices, deadline) for column, targets in tables.items()}
    if "scheme" in results:
        results["scheme"] = results["scheme"].ranked()
    if options.json:
        answer = {f"{column}s": found.to_dict() for column, found in results.items()}
        print(atomic_files.json_text(answer, ensure_ascii=False))
    else:
        print("\n\n".join(format_comparison(found, column) for column, found in results.items()))
    return 0


def _machines(request: Request, options: PlanCommandOptions, names: Sequence[str]) -> list[Target]:
    if options.hardware:
        raise UserError(f"--hardware {options.hardware}: --compare names the machines; leave one of them out")
    machines = {name: parse_machine(name, "--compare") for name in names}
    first = target_of(request, options, machines[names[0]])
    return [replace(first, name=name, hardware=machine) for name, machine in machines.items()]


def _modes(
    words: Sequence[str], request: Request, options: PlanCommandOptions, modes: Sequence[str]
) -> dict[str, list[Target]]:
    """The recipe in each mode, and in the first of them the task's own schemes."""
    machine = parse_machine(options.hardware or HERE, "--hardware")
    variants = {mode: parse_request([*words, "--mode", mode], "plan", PlanCommandOptions) for mode in modes}
    for found in variants.values():
        print_notes(found, but=request.notes)
    targets = [target_of(found, options, machine, mode) for mode, found in variants.items()]
    return {"mode": targets} | _schemes([*words, "--mode", modes[0]], request, options, machine)


def _schemes(
    words: Sequence[str], request: Request, options: PlanCommandOptions, machine: Hardware
) -> dict[str, list[Target]]:
    """The task's own schemes of training, if it has any and the user chose none."""
    found = []
    for name, values in request.workload.task.schemes.items():
        flags = [word for field, value in values.items() for word in (f"--{field.replace('_', '-')}", value)]
        try:
            scheme = parse_request([*words, *flags], "plan", PlanCommandOptions)
        except UserError:  # the user chose a scheme
            return {}
        found.append(target_of(scheme, options, machine, name))
    return {"scheme": found} if found else {}


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
            "price_meaning": PRICES if self.priced else None,
        }


def compare(
    flag: str, targets: Sequence[Target], prices: Mapping[str, float], deadline: float | None
) -> Comparison:
    """Estimate each target. Raises UserError where the recipe fits none; `flag` is what named them."""
    sizes: dict[str, ModelSize | None] = {}
    found = []
    for target in targets:
        key = target.recipe.hash()
        found.append(estimate(target, prices, sizes.get(key)))
        sizes[key] = found[-1].model_size
    if not any(e.fits for e in found):
        largest = max(found, key=lambda e: e.memory * e.target.hardware.devices)
        why = f"{largest.target.name}: {with_what_would_fit(largest)}"
        raise UserError(f"{flag}: the recipe fits none of them; {why}")
    cards = {e.target.hardware.gpu.card if e.target.hardware.gpus else None for e in found}
    one_price = "" in prices and len(cards) > 1
    return Comparison(estimates=found, deadline=deadline, priced=bool(prices), one_price=one_price)


def format_comparison(found: Comparison, column: str) -> str:
    """The table and what follows from it; `column` heads the names."""
    heads = [column, "fits", "GPUs used", "a step", "whole run", "memory"]
    heads += ["an hour", "cost"] if found.priced else []
    heads += [] if found.deadline is None else [f"within {format_duration(found.deadline)}"]
    rows = [heads, *(_cells(e, found) for e in found.estimates)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    aligned = (("  ".join(map(str.ljust, row, widths))).rstrip() for row in rows)
    reasons = [f"{e.target.name}: {e.why_not}" for e in found.estimates if not e.fits]
    return "\n".join([*(f"  {line}" for line in aligned), "", *reasons, *_conclusions(found)])


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
    if found.priced:
        price = "no price" if e.price is None else f"{e.price:.2f}"
        cells += [price, "" if e.cost is None else format_cost(e.cost)]
    if found.deadline is not None:
        cells.append("yes" if e.meets(found.deadline) else "no")
    return cells


def format_cost(cost: float) -> str:
    """A cost with at least two figures."""
    return f"{cost:.2f}" if cost >= 0.1 else f"{cost:.2g}"


def short_duration(seconds: float) -> str:
    """A duration, below a minute with a tenth of a second."""
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)


def _conclusions(found: Comparison) -> list[str]:
    within = f" within {format_duration(found.deadline)}" if found.deadline is not None else ""
    cheapest, fastest = found.cheapest, found.fastest
    name, time = fastest.target.name, short_duration(fastest.seconds or 0.0)
    if not any(e.meets(found.deadline) for e in found.estimates):
        lines = [f"none ends{within}: the fastest, {name}, takes {time}"]
    elif cheapest is not None and cheapest.cost is not None:
        cost = f"{format_cost(cheapest.cost)} for {short_duration(cheapest.seconds or 0.0)}"
        lines = [f"cheapest{within}: {cheapest.target.name}, {cost}"]
    else:
        lines = [f"fastest{within}: {name}, {time}"]
    if found.one_price:
        lines.append("one price of several cards does not say which is cheapest: --price h100=2.10,t4=0.35")
    if found.priced:
        lines.append(f"prices: {PRICES}")
    if any(e.plan and not e.plan.calibrated for e in found.estimates):
        lines.append("~ uncalibrated: no measurement on this kind of device stands behind it")
    return lines
