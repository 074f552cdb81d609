"""What verify proves: what was checked, what is wrong and what is left open, in words and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from isobatch.engine.verification.log_audit import LogRecord
from isobatch.engine.verification.windows import Redone
from isobatch.models import model_card

MOST_FAR = 0.02
"""Share of the weights that may differ by much of what Adam allows. Measured under other cuts: 0."""
LEAST = 1e-4
"""The tightest tolerance of held-out metrics: a share of the metric, however small that is."""
FLIPPED_ROWS = 2
"""Rows of a split that rounding may count differently in a share such as accuracy, where it chooses between
two values that are nearly equal."""
NO_STEPS = "data and records, which have no steps"
ROUNDED = "rounding may explain it: only the run's own cut, on a processor like its own, gives the same"


Metrics = Mapping[str, Mapping[str, Any]]
"""Split -> its metrics."""


def within(difference: float) -> str:
    """How two figures that should be the same are so."""
    return f"equal within {difference:.0e}" if difference else "equal bit for bit"


def stretches(steps: Iterable[int]) -> str:
    """Numbers of steps as ranges: `1-6 and 140`."""
    ends = [(a, b) for a, b in pairwise([-1, *sorted(steps), 0]) if b != a + 1]
    found = [f"{first}-{last}" if first < last else f"{first}" for (_, first), (last, _) in pairwise(ends)]
    return " and ".join(found)


@dataclass(slots=True)
class Proof:
    """What verify found. `verified` is true where nothing is wrong and nothing of the level is left open."""

    level: str
    log: LogRecord | None = None
    """What the log says; None where records are wrong."""
    problems: list[str] = field(default_factory=list)
    """What is not as the recipe says, a sentence each."""
    unproven: list[str] = field(default_factory=list)
    """What could not be checked though the level asks for it, a sentence each."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Each redone step that is in the log."""
    redone: set[tuple[str, int]] = field(default_factory=set)
    """(phase, step) of the redone steps, logged or not."""
    allowed: float = 0.0
    """The largest tolerance that a loss was held against."""
    covered: list[str] = field(default_factory=list)
    """What was checked, a phrase each."""
    trusted: list[str] = field(default_factory=list)
    """What the proof rests on and nothing was compared with, a phrase each; part of the verdict."""

    @property
    def verified(self) -> bool:
        return not self.problems and not self.unproven

    @property
    def largest(self) -> float:
        """The largest difference of a loss."""
        return max((step["loss_difference"] for step in self.steps), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        named = ("level", "verified", "problems", "unproven", "trusted")
        return {
            **{name: getattr(self, name) for name in named},
            "steps": list({(step["phase"], step["step"]): step for step in self.steps}.values()),
            "coverage": self.coverage(),
            "steps_redone": len(self.redone),
            "steps_total": self.log.steps if self.log else 0,
            "largest_loss_difference": self.largest,
        }

    def coverage(self) -> str:
        """What was checked, in a sentence's part."""
        total, redone = self.log.steps if self.log else 0, len(self.redone)
        left_out = sum(map(len, self.log.left_out.values())) if self.log else 0
        phases = dict.fromkeys(phase for phase, _ in sorted(self.redone) if redone < total - left_out)
        parts = [f"{name} {stretches(n for one, n in self.redone if one == name)}" for name in phases]
        where = f" ({', '.join(parts)})" if parts else ""
        said = [
            f"{redone} of {total - left_out} steps redone{where} {within(self.largest)}" if redone else "",
            f"{left_out} left out as decided" if left_out else "",
            f"samples of all {total} checked" if total else "",
            "" if redone else "no step redone" if total or not self.log else NO_STEPS,
            *self.covered,
        ]
        return ", ".join(filter(None, said))

    def add(
        self,
        redone: Redone,
        tolerance: Callable[[int], tuple[float, float]],
        claimed: Callable[[int], tuple[float, float]],
        exact: bool = False,
    ) -> None:
        """Judge redone steps. `tolerance`: steps since a common state -> what (loss, norm) may differ by.

        `claimed`: what rounding may explain beyond that, as the run says: it is not proven; `exact`: whether
        the logged and the redone plan both are.
        """
        self.steps += redone.steps
        for phase, first, last in redone.covered:
            left_out = self.log.left_out.get(phase, ()) if self.log else ()
            self.redone |= {(phase, step) for step in range(first, last + 1) if step not in left_out}
        for r in redone.steps:
            where = f"phase {r['phase']}, step {r['step']}"
            allowed, most = tolerance(r["after"]), claimed(r["after"])
            self.allowed = max(self.allowed, allowed[0])
            norms = f"gradient norm {r['norm']:.4g} redone, {r['logged_norm']:.4g} logged"
            figures = [
                (0, r["loss_difference"], f"loss {r['loss']:.6f} redone, {r['logged_loss']:.6f} logged"),
                (1, r["norm_difference"], norms),
                *((0, apart, f"{name} is not what it is redone") for name, apart in r["parts"].items()),
            ]
            for number, apart, said in figures:
                if not apart <= allowed[number]:
                    is_rounded = apart <= most[number]
                    to, why = (self.unproven, f": {ROUNDED}") if is_rounded else (self.problems, "")
                    to.append(f"{where}: {said}{why}")
        for name, found in redone.weights.items():
            of = f"of {found['elements']:,} elements"
            if found["beyond"]:
                self.problems.append(
                    f"the weights of {name} are not those that the steps before it give: {found['beyond']:,}"
                    f" {of} differ by more than rounding explains, by up to {found['largest']:.2g}"
                )
            elif exact and found["far"] > MOST_FAR * found["elements"]:
                self.problems.append(
                    f"the weights of {name} differ in {found['far']:,} {of} by more than few steps' rounding"
                    " comes to"
                )
        if self.log is not None:  # a receipt has no decisions of its task
            self.problems += wrong_changes(self.log.changes, redone)

    def add_export(self, redone: Redone) -> None:
        """Judge final/ beside what the last weights export here."""
        wrong, excused = redone.export["differing"], redone.export["configurations"]
        if not redone.export["same_versions"]:  # which the run says of itself
            wrong = [name for name in wrong if name not in excused]
            why = "the run names other versions of the libraries than are here"
            self.unproven += [f"final/{name} is not what is written here: {why}" for name in excused]
        self.problems += [f"final/{name} is not the export of the last weights" for name in wrong]
        if hooks := ", ".join(f"final/{name}" for name in redone.export["hooks"]):
            self.trusted.append(f"what hooks made of the weights for {hooks}")
        if not redone.export["card"]:
            self.problems.append(f"final/{model_card.FILE} is not the card of these figures and this data")

    def add_metrics(self, log: LogRecord, redone: Redone, samples: Mapping[str, int], allowed: float) -> None:
        """Judge held-out metrics that were measured again. `samples`: split -> how many it has."""
        best = log.phases[-1].judge.best
        self.problems += wrong_metrics(log.splits, redone.metrics, samples, allowed)
        for split, metrics in redone.metrics.items():
            if more := sorted(log.fields.get(split, set()) - metrics.keys() - {"phase", "step", "split"}):
                self.problems.append(f"{', '.join(more)} of {split} is nothing that this task measures")
        judged = redone.judged
        if judged is not None and best is not None and not abs(judged - best) <= max(allowed, 2e-6):
            self.problems.append(f"the best evaluation is {best} logged, and {judged:.6g} measured again")
        found = [(split, name, v) for split, metrics in redone.metrics.items() for name, v in metrics.items()]
        pairs = [(v, log.splits.get(split, {}).get(name)) for split, name, v in found]
        numbers = [(new, old) for new, old in pairs if isinstance(old, float | int)]
        moved = max((abs(new - old) / max(1.0, abs(old)) for new, old in numbers), default=0.0)
        if found:
            apart = f"{moved:.1e} apart at most, where {max(allowed, LEAST):.0e} is allowed"
            how = "exactly" if all(new == old for new, old in pairs) else apart
            self.covered.append(f"held-out metrics recomputed {how}")


def wrong_changes(logged: Iterable[Mapping[str, Any]], redone: Redone) -> list[str]:
    """Compare what the task changed in redone steps with decisions.jsonl; figures may differ by rounding."""
    written = {(r["phase"], r["step"]): dict(r) for r in logged}
    found = [((r["phase"], r["step"]), r) for r in redone.changes]  # windows overlap: some are there twice
    wrong = [place for place, change in found if not _alike(written.get(place), change, _same_figure)]
    covered = {(phase, step) for phase, first, last in redone.covered for step in range(first, last + 1)}
    wrong += sorted((written.keys() & covered) - {place for place, _ in found})
    return [
        f"decisions.jsonl: phase {phase}, step {step}: redone, the task decides otherwise"
        for phase, step in wrong[:1]
    ]


def _alike(one: Any, other: Any, close: Callable[[float, float], bool]) -> bool:
    """Equal but for numbers, which are `close`."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[k], other[k], close) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(_alike(a, b, close) for a, b in zip(one, other, strict=True))
    if all(isinstance(x, int | float) and not isinstance(x, bool) for x in (one, other)):
        return close(one, other)
    return bool(one == other)


def _same_figure(logged: float, redone: float) -> bool:
    is_count = isinstance(logged, int)
    return logged == redone if is_count else math.isclose(logged, redone, rel_tol=1e-2, abs_tol=1e-6)


def wrong_metrics(
    logged: Metrics, measured: Metrics, samples: Mapping[str, int], allowed: float
) -> list[str]:
    """Compare held-out metrics with the logged ones. A share of rows may differ by FLIPPED_ROWS rows.

    Where a confusion matrix shows that rows were counted elsewhere, figures of the smallest class may differ
    by two such rows of its own.
    """
    problems = []
    for split, metrics in measured.items():
        before = logged.get(split, {})
        flipped = 0 < _rows_moved(before.get("confusion"), metrics.get("confusion")) <= FLIPPED_ROWS
        for name, value in metrics.items():
            rows: float = samples[split]
            if flipped and "accuracy" not in name:
                rows = min(filter(None, map(sum, metrics["confusion"]))) / 2
            close = partial(_same_metric, name, allowed, rows)
            is_excused = flipped and name == "confusion"
            if not is_excused and not _alike(before.get(name), value, close):
                problems.append(f"{name} of {split} is {value} recomputed, and {before.get(name)} logged")
    return problems


def _rows_moved(one: Any, other: Any) -> float:
    """Samples that two confusion matrices count at different places; infinite where these are none."""
    try:
        pairs = [zip(a, b, strict=True) for a, b in zip(one or (), other or (), strict=True)]
        return sum(abs(x - y) for pair in pairs for x, y in pair) / 2
    except (TypeError, ValueError):  # a received run's log may hold anything
        return math.inf


def _same_metric(name: str, allowed: float, rows: float, logged: float, measured: float) -> bool:
    least = allowed if allowed > LEAST else LEAST / 100
    if math.isclose(logged, measured, rel_tol=allowed, abs_tol=least):
        return True
    is_share = "loss" not in name and isinstance(measured, float) and -1 <= measured <= 1
    return is_share and abs(logged - measured) <= FLIPPED_ROWS / rows
