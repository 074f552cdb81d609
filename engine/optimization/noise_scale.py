"""The gradient noise scale: up to which global batch a larger one saves steps.

From the gradients of two random halves of a global batch (McCandlish, Kaplan, Amodei et al. 2018, "An
Empirical Model of Large-Batch Training", appendix A.1). Halves are drawn by sample, or by cohort:
micro-batches are sorted by length, so that their gradients are no random sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SQUARED, VARIANCE, COST = "gradient_squared", "gradient_variance", "noise_scale_seconds"
"""Fields of a measured step's row: estimates of |G|^2 and of tr(Sigma), and seconds that they took."""
FIELDS = (SQUARED, VARIANCE, COST)
LEAST_MEASUREMENTS = 5
"""With fewer no noise scale is said: one measurement may be off by its own size."""
RESAMPLES = 1000
_HALF_SEED = 0x4A1F


def first_half(seed: int, step: int, count: int, cohort: int = 1) -> np.ndarray:
    """Whether each of `count` places of global batch `step` is in the first half, (count,) bool.

    The same on every machine, rank and cut. Whole cohorts stay together; all places where there is one.
    """
    cohorts = -(-count // cohort)
    drawn = np.random.default_rng((_HALF_SEED, seed, step)).permutation(cohorts) < -(-cohorts // 2)
    return np.repeat(drawn, cohort)[:count]


def estimates(whole: float, half: float, product: float, share: float, batch: int) -> tuple[float, float]:
    """(|G|^2, tr(Sigma)): unbiased estimates of the true gradient's square and of a sample's variance.

    `whole`: |g|^2 of the batch of `batch` samples; `half`: |a|^2 of the first half, whose `share` of the
    samples is scaled up to a mean of its own; `product`: <g, a>. The other half is b = (g - s a) / (1 - s),
    and E|x|^2 of a mean of n samples is |G|^2 + tr(Sigma) / n, for a and for b (weighted alike) and for g.
    """
    other = (whole - 2 * share * product + share**2 * half) / (1 - share) ** 2
    small = (1 / (batch * share) + 1 / (batch * (1 - share))) / 2
    variance = ((half + other) / 2 - whole) / (small - 1 / batch)
    return whole - variance / batch, variance


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """What a run measured: tr(Sigma) / |G|^2, in samples of the global batch."""

    value: float
    """At this global batch a step makes half the progress of a step without noise; infinite where the mean
    gradient is lost in noise."""
    low: float
    high: float
    """Between these lie 90 % of bootstrap resamples of the measurements."""
    measurements: int
    seconds: float
    """What measuring took, in all."""


def noise_scale(rows: Iterable[Mapping[str, Any]]) -> NoiseScale | None:
    """The noise scale over the measured steps of a run; None where they are too few.

    Both estimates are averaged before they are divided, as their ratio is biased (the paper's appendix A.1).
    The first third of the measurements is left out: gradients are large while a model finds its bearings, and
    the scale is then far below what most of a run has.
    """
    found = [row for row in rows if _measured(row)]
    if len(found) < LEAST_MEASUREMENTS:
        return None
    pairs = np.array([(row[SQUARED], row[VARIANCE]) for row in found[len(found) // 3 :]])
    drawn = np.random.default_rng(0).integers(0, len(pairs), (RESAMPLES, len(pairs)))
    ratios = [_ratio(*means) for means in pairs[drawn].mean(axis=1)]
    low, high = (float(np.quantile(ratios, q, method="nearest")) for q in (0.05, 0.95))
    seconds = sum(row.get(COST, 0.0) for row in found)
    return NoiseScale(_ratio(*pairs.mean(axis=0)), low, high, len(found), seconds)


def _measured(row: Mapping[str, Any]) -> bool:
    values = [row.get(name) for name in (SQUARED, VARIANCE)]
    return all(isinstance(v, float | int) and math.isfinite(v) for v in values)


def _ratio(squared: float, variance: float) -> float:
    return max(0.0, variance) / squared if squared > 0 else math.inf
