"""Where one step parts in two runs: the first module whose output differs, and the samples that carry it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from isobatch.engine.forensics.module_record import FORWARD
from isobatch.engine.runs.step_rows import FIGURES, differences

if TYPE_CHECKING:
    from collections.abc import Mapping

    from isobatch.engine.forensics.module_record import ModuleOutput
    from isobatch.engine.forensics.observed_step import ObservedStep

FLOOR = 2e-6
"""Relative difference of an output by the order of fp32 sums alone, from equal weights and inputs."""
SPREAD = 100.0
"""Times the relative difference of the weights that an output may differ by."""
REPRODUCED = (1e-5, 1e-3)
"""Differences of (loss, norm) within which a step is the logged one, on the kind of machine that trained."""
MOST_SAMPLES = 10


@dataclass(frozen=True, slots=True)
class PartingModule:
    """The first module whose output, or whose gradient, differs beyond rounding."""

    module: str
    direction: str
    difference: float
    """Relative to the output's norm; infinite where one is not finite, or shapes differ."""
    samples: list[int] = field(default_factory=list)
    """Numbers of the samples that carry it, the largest difference first; empty where rows are no samples."""
    share: float = 1.0
    """Of the batch's samples that differ beyond rounding."""


@dataclass(frozen=True, slots=True)
class StepDifference:
    """How two runs computed a step."""

    weights: float
    """Difference of all weights before the step, relative to their norm; infinite where names differ."""
    parameter: str
    """The parameter that differs most; empty where all weights are the same."""
    module: PartingModule | None
    """None where nothing differs beyond rounding."""


def compare_steps(one: ObservedStep, other: ObservedStep) -> StepDifference:
    """Compare two observations of the same step over the same samples."""
    weights, parameter = _weights(one.weights, other.weights)
    allowed = max(FLOOR, SPREAD * weights)
    others = {(output.module, output.direction): output for output in other.outputs}
    for output in one.outputs:  # forward before backward
        if (twin := others.get((output.module, output.direction))) is not None:
            relative = _relative(output, twin)
            if not relative.max(initial=0.0) <= allowed:
                return StepDifference(weights, parameter, _parting(output, relative, one.samples, allowed))
    names = [{o.module for o in seen.outputs if o.direction == FORWARD} for seen in (one, other)]
    missing = [PartingModule(name, FORWARD, np.inf) for name in sorted(names[0] ^ names[1])]
    return StepDifference(weights, parameter, missing[0] if missing else None)


def not_reproduced(seen: ObservedStep) -> dict[str, tuple[float, float]]:
    """Figure -> (logged, redone), where a redone step is not what the run logged; empty of a step that it
    did not log.
    """
    if seen.logged is None:
        return {}
    apart = differences(seen.figures, seen.logged.figures)
    found = zip(FIGURES, seen.logged.figures, seen.figures, apart, REPRODUCED, strict=True)
    return {name: (logged, redone) for name, logged, redone, far, allowed in found if not far <= allowed}


def _weights(
    one: Mapping[str, tuple[float, float]], other: Mapping[str, tuple[float, float]]
) -> tuple[float, str]:
    """The relative difference of all weights, and the parameter that differs most."""
    if other_names := one.keys() ^ other.keys():
        return np.inf, min(other_names)
    apart = {name: max(abs(a - b) for a, b in zip(one[name], other[name], strict=True)) for name in one}
    most = max(apart, key=lambda name: apart[name], default="")
    if not most or apart[most] == 0:
        return 0.0, ""
    norm = float(np.linalg.norm([found[0] for found in one.values()]))
    return float(np.linalg.norm(list(apart.values()))) / max(norm, 1e-30), most


def _relative(one: ModuleOutput, other: ModuleOutput) -> np.ndarray:
    """Of each sample: the difference of norms or of products with signs, relative to the norm."""
    if len(one.norms) != len(other.norms):
        return np.array([np.inf])
    with np.errstate(invalid="ignore", divide="ignore"):
        difference = np.maximum(np.abs(one.norms - other.norms), np.abs(one.products - other.products))
        scale = np.maximum(np.maximum(one.norms, other.norms), 1e-30)
        relative = np.where(difference == 0, 0.0, difference / scale)
    both = ~np.isfinite(one.norms) & ~np.isfinite(other.norms)
    return np.where(both, 0.0, np.where(np.isnan(relative), np.inf, relative))


def _parting(
    output: ModuleOutput, relative: np.ndarray, samples: np.ndarray, allowed: float
) -> PartingModule:
    beyond = np.flatnonzero(~(relative <= allowed))
    by_sample = len(relative) == len(samples)
    order = beyond[np.argsort(-relative[beyond], kind="stable")][:MOST_SAMPLES]
    named = samples[order].tolist() if by_sample else []
    return PartingModule(
        output.module, output.direction, float(relative.max()), named, len(beyond) / len(relative)
    )
