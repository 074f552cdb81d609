"""Where two runs part: in their logs, and in a step that both have redone.

Two runs of one recipe differ by rounding: by the order of float sums, which every step multiplies a little.
So a difference is no rounding where it jumps: above JUMP times the largest before it, and above a floor, by
which a step from equal weights can differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from isobatch.engine.train.figures import FIGURES, LossAndNorm, StepRow, differences

if TYPE_CHECKING:
    from isobatch.engine.forensics.observed_step import ObservedStep

Kind = Literal["equal", "samples", "rate", "jump", "drift", "apart"]
"""equal: within rounding throughout. samples, rate, jump: at a step. drift: beyond the tolerance without a
jump. apart: no step in common."""
JUMP = 30.0
EXACT_FLOOR: LossAndNorm = (4e-6, 8e-5)
"""What rounding of fp32 sums in a step from equal weights stays below. On the demo two cuts differ by 2e-7
and 2e-7, and fp32 and bf16 by 8e-6 and 6e-5."""
RATE = 1e-9
"""Relative difference of two equal learning rates, which are computed in fp64."""
FLOOR = 2e-6
"""Relative difference of an output by the order of fp32 sums alone, from equal weights and inputs."""
SPREAD = 100.0
"""Times the relative difference of the weights that an output may differ by."""
REPRODUCED = (1e-5, 1e-3)
"""Differences of (loss, norm) within which a step is the logged one, on the kind of machine that trained."""
MOST_SAMPLES = 10


@dataclass(frozen=True, slots=True)
class LogDifference:
    """How two logs differ over the steps that both have."""

    kind: Kind
    common_steps: int
    """Steps that both logged."""
    largest: Mapping[str, float] = field(default_factory=dict)
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
    one: Iterable[StepRow], other: Iterable[StepRow], floor: LossAndNorm, allowed: LossAndNorm
) -> LogDifference:
    """Compare two logs. `floor`: what one step can differ by; `allowed`: what may have grown from that over a
    run. A drift is only said of logs that part nowhere else.
    """
    rows = {row.place: row for row in other}
    pairs = [(row, rows[row.place]) for row in one if row.place in rows]
    largest = dict.fromkeys(FIGURES, 0.0)
    drift, before = None, None
    for a, b in pairs:
        apart = dict(zip(FIGURES, differences(a.figures, b.figures), strict=True))
        limits = {n: max(low, JUMP * largest[n]) for n, low in zip(FIGURES, floor, strict=True)}
        jump = next((n for n in FIGURES if apart[n] > limits[n]), None)
        beyond = next((n for n, most in zip(FIGURES, allowed, strict=True) if apart[n] > most), None)
        found: tuple[Kind, str] | None = None
        if a.chain != b.chain:
            found = "samples", FIGURES[0]
        elif not math.isclose(a.lr, b.lr, rel_tol=RATE):
            found = "rate", "lr"
        elif jump:
            found = "jump", jump
        elif beyond and drift is None:
            found = "drift", beyond
        if found:
            kind, figure = found
            previous = before.step if before is not None and before.phase == a.phase else 0
            values = getattr(a, figure), getattr(b, figure)
            parted = LogDifference(kind, len(pairs), largest, a.phase, a.step, previous, figure, values)
            if kind != "drift":
                return parted
            drift = parted
        largest, before = {n: max(largest[n], apart[n]) for n in FIGURES}, a
    return drift or LogDifference("equal" if pairs else "apart", len(pairs), largest)


@dataclass(frozen=True, slots=True)
class StepDifference:
    """How two runs computed a step."""

    weights: float
    """Difference of all weights before the step, relative to their norm; infinite where names differ."""
    parameter: str
    """The parameter that differs most; empty where all weights are the same."""
    module: dict[str, Any] | None
    """The first `module` whose output, or whose gradient (`direction`), differs beyond rounding, as JSON: its
    `difference` relative to the output's norm (infinite where one is not finite, or shapes differ), the
    `share` of the samples that differ, and the `samples` that do most; None where nothing differs."""


def compare_steps(one: ObservedStep, other: ObservedStep) -> StepDifference:
    """Compare two observations of the same step over the same samples."""
    weights, parameter = _weights(one.weights, other.weights)
    allowed = max(FLOOR, SPREAD * weights)
    for key in {**one.outputs, **other.outputs}:  # (module, direction), forward before backward
        pair = one.outputs.get(key), other.outputs.get(key)
        if key[1] == "backward" and any(output is None for output in pair):
            continue
        relative = _relative(*pair)
        beyond = np.flatnonzero(~(relative <= allowed))
        if len(beyond):
            order = beyond[np.argsort(-relative[beyond], kind="stable")][:MOST_SAMPLES]
            module = {
                **dict(zip(("module", "direction"), key, strict=True)),
                "difference": float(relative.max()),
                "samples": one.samples[order].tolist() if len(relative) == len(one.samples) else [],
                "share": len(beyond) / len(relative),
            }
            return StepDifference(weights, parameter, module)
    return StepDifference(weights, parameter, None)


def not_reproduced(seen: ObservedStep) -> dict[str, tuple[float, float]]:
    """Figure -> (logged, redone), where a redone step is not what the run logged; empty of a step that it
    did not log.
    """
    if seen.logged is None:
        return {}
    apart = differences(seen.figures, seen.logged.figures)
    found = zip(FIGURES, seen.logged.figures, seen.figures, apart, REPRODUCED, strict=True)
    return {name: (logged, redone) for name, logged, redone, far, allowed in found if not far <= allowed}


def _weights(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> tuple[float, str]:
    """The relative difference of all weights, and the parameter that differs most."""
    if other_names := one.keys() ^ other.keys():
        return np.inf, min(other_names)
    apart = {name: float(np.abs(one[name] - other[name]).max()) for name in one}
    most = max(apart, key=lambda name: apart[name], default="")
    if not most or apart[most] == 0:
        return 0.0, ""
    norm = float(np.linalg.norm([found[0] for found in one.values()]))
    return float(np.linalg.norm(list(apart.values()))) / max(norm, 1e-30), most


def _relative(one: np.ndarray | None, other: np.ndarray | None) -> np.ndarray:
    """Of each sample: the difference of norms or of products with signs, relative to the norm."""
    if one is None or other is None or one.shape != other.shape:
        return np.array([np.inf])
    with np.errstate(invalid="ignore", divide="ignore"):
        difference = np.abs(one - other).max(axis=0)
        scale = np.maximum(np.maximum(one[0], other[0]), 1e-30)
        relative = np.where(difference == 0, 0.0, difference / scale)
    both = ~np.isfinite(one[0]) & ~np.isfinite(other[0])
    return np.where(both, 0.0, np.where(np.isnan(relative), np.inf, relative))
