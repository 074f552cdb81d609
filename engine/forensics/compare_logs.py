"""Where the logs of two runs part: their samples, their learning rates, or what a step computed.

Two runs of one recipe differ by rounding: by the order of float sums, which every step multiplies a little.
So a difference is no rounding where it jumps: above JUMP times the largest before it, and above a floor, by
which a step from equal weights can differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from isobatch.engine.forensics.logged_steps import FIGURES, LoggedSteps, common_steps

Kind = Literal["equal", "samples", "rate", "jump", "drift", "apart"]
"""equal: within rounding throughout. samples, rate, jump: at a step. drift: beyond the tolerance without a
jump. apart: no step in common."""
JUMP = 30.0
EXACT_FLOOR = (4e-6, 8e-5)
"""What rounding of fp32 sums in a step from equal weights stays below: (loss, relative above one; norm). On
the demo two cuts differ by 2e-7 and 2e-7, and fp32 and bf16 by 8e-6 and 6e-5."""
RATE = 1e-9
"""Relative difference of two equal learning rates, which are computed in fp64."""


@dataclass(frozen=True, slots=True)
class LogDifference:
    """How two logs differ over the steps that both have."""

    kind: Kind
    common: int
    """Steps that both logged."""
    largest: Mapping[str, float]
    """Figure -> the largest difference before the runs part: loss, and grad_norm."""
    phase: str = ""
    step: int = 0
    """Where they part; for `samples` the first logged step after it."""
    previous: int = 0
    """The last common logged step of this phase before it; 0 where there is none."""
    figure: str = ""
    """The one that parts: loss, lr or grad_norm."""
    values: tuple[float, float] = (0.0, 0.0)
    """What each run logged of it."""


def compare_logs(
    one: LoggedSteps, other: LoggedSteps, floor: Mapping[str, float], allowed: Mapping[str, float]
) -> LogDifference:
    """Compare two logs, by `loss` and `grad_norm`. `floor`: what one step can differ by; `allowed`: what may
    have grown from that over a run.
    """
    first, second = common_steps(one, other)
    if not len(first):
        return LogDifference("apart", 0, {})
    differences = _differences(one.figures[first], other.figures[second])
    jumped = {name: _first_jump(values, floor[name]) for name, values in differences.items()}
    rates = one.figures[first, 1], other.figures[second, 1]
    places: dict[Kind, int | None] = {
        "samples": _first(one.chain[first] != other.chain[second]),
        "rate": _first(~np.isclose(*rates, rtol=RATE, atol=0)),
        "jump": min((place for place in jumped.values() if place is not None), default=None),
        "drift": _first(np.logical_or(*(values > allowed[name] for name, values in differences.items()))),
    }
    if any(places[kind] is not None for kind in ("samples", "rate", "jump")):
        places["drift"] = None
    found = [(place, kind) for kind, place in places.items() if place is not None]
    place, kind = min(found, key=lambda one: one[0]) if found else (len(first), "equal")
    largest = {name: _largest(values[:place]) for name, values in differences.items()}
    if kind == "equal":
        return LogDifference("equal", len(first), largest)
    phase, step = one.at(first[place])
    before = one.at(first[place - 1]) if place else ("", 0)
    figure = "lr" if kind == "rate" else _parting_figure(differences, jumped, allowed, place)
    column = FIGURES.index(figure)
    values = float(one.figures[first[place], column]), float(other.figures[second[place], column])
    previous = before[1] if before[0] == phase else 0
    return LogDifference(kind, len(first), largest, phase, step, previous, figure, values)


def _differences(one: np.ndarray, other: np.ndarray) -> dict[str, np.ndarray]:
    """Of the loss, relative above one; relative of the norm. Infinite where only one is finite."""
    with np.errstate(invalid="ignore", divide="ignore"):
        loss = np.abs(one[:, 0] - other[:, 0]) / np.maximum(1.0, np.abs(other[:, 0]))
        norm = np.abs(one[:, 2] - other[:, 2]) / np.maximum(1e-12, np.abs(other[:, 2]))
    found = {"loss": loss, "grad_norm": norm}
    for column, name in ((0, "loss"), (2, "grad_norm")):
        finite = np.isfinite(one[:, column]), np.isfinite(other[:, column])
        found[name][finite[0] != finite[1]] = np.inf
        found[name][~finite[0] & ~finite[1]] = 0.0
    return found


def _first_jump(differences: np.ndarray, floor: float) -> int | None:
    """The first difference above the floor and above JUMP times all before it."""
    before = np.concatenate([[0.0], np.maximum.accumulate(differences)[:-1]])
    return _first(differences > np.maximum(floor, JUMP * before))


def _first(found: np.ndarray) -> int | None:
    places = np.flatnonzero(found)
    return int(places[0]) if len(places) else None


def _largest(differences: np.ndarray) -> float:
    return float(differences.max(initial=0.0))


def _parting_figure(
    differences: Mapping[str, np.ndarray],
    jumped: Mapping[str, int | None],
    allowed: Mapping[str, float],
    place: int,
) -> str:
    """The figure that jumps there, or else the one that is beyond what is allowed."""
    named = [name for name, jump in jumped.items() if jump == place]
    named += [name for name, values in differences.items() if values[place] > allowed[name]]
    return named[0] if named else "loss"
