"""Figures of a classifier that follow from counts: confusion matrix, F1, Matthews correlation, calibration.

A share of nothing (the precision of a class that is never answered) is 0, as scikit-learn's is.
Letters: C classes, n samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Z_95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution: two-sided 95 %."""
CALIBRATION_BINS = 15
"""As in Guo et al. 2017."""
DRAWS = 1000
"""Of a bootstrap."""
LARGEST_CONFUSION = 100
"""Most classes whose confusion matrix is among the metrics: it is logged at every evaluation."""


class ClassFigures(NamedTuple):
    """Figures of each class."""

    shares: np.ndarray
    """(3, C): precision, recall and F1."""
    macro: list[float]
    """Their means over the classes that are any sample's label or answer."""


def confusion_matrix(labels: np.ndarray, answers: np.ndarray, classes: int) -> np.ndarray:
    """(C, C) int64: how many samples with the label of the row were answered with the class of the column."""
    places = labels.astype(np.int64) * classes + answers.astype(np.int64)
    return np.bincount(places, minlength=classes * classes).reshape(classes, classes)


def class_figures(confusion: np.ndarray) -> ClassFigures:
    """Precision, recall and F1 of each class, from a confusion matrix (C, C)."""
    right, labelled, answered = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    parts, wholes = np.stack([right, right, 2 * right]), np.stack([answered, labelled, labelled + answered])
    shares = np.divide(parts, wholes, out=np.zeros(parts.shape), where=wholes > 0)
    return ClassFigures(shares, [float(share[wholes[2] > 0].mean()) for share in shares])


def matthews_correlation(confusion: np.ndarray) -> float:
    """Matthews' correlation, for C classes Gorodkin's R_K (2004); 0 where one side has a single class."""
    total, right = int(confusion.sum()), int(confusion.trace())
    labelled, answered = ([int(n) for n in confusion.sum(axis)] for axis in (1, 0))
    product = sum(a * b for a, b in zip(labelled, answered, strict=True))
    spread = [total**2 - sum(n**2 for n in counts) for counts in (labelled, answered)]
    return (right * total - product) / math.sqrt(spread[0] * spread[1]) if all(spread) else 0.0


def calibration_error(confidence: np.ndarray, is_right: np.ndarray) -> float:
    """Expected calibration error (Naeini et al. 2015): mean distance of accuracy from confidence.

    Over bins of equal width, weighted by their samples. confidence (n,): the answer's probability.
    """
    bins = np.clip(np.ceil(confidence * CALIBRATION_BINS).astype(int) - 1, 0, CALIBRATION_BINS - 1)
    gaps = np.bincount(bins, weights=confidence.astype(np.float64) - is_right)
    return float(np.abs(gaps).sum() / len(confidence))


def class_metrics(confusion: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """f1_macro, precision_macro, recall_macro, mcc; of two classes f1, that of the second.

    And `classes`, the names, with `confusion`, whose rows (labels) and columns (answers) are in their order.
    """
    shares, (precision, recall, f1) = class_figures(confusion)
    found: dict[str, Any] = {"f1": float(shares[2, 1])} if len(confusion) == 2 else {}
    found |= {"f1_macro": f1, "precision_macro": precision, "recall_macro": recall}
    found["mcc"] = matthews_correlation(confusion)
    if len(confusion) <= LARGEST_CONFUSION:
        found |= {"classes": list(names), "confusion": confusion.tolist()}
    return found


def mcnemar(one: np.ndarray, other: np.ndarray) -> float:
    """Exact two-sided p-value of McNemar's test (1947): whether two classifiers differ in accuracy.

    one, other: (n,) bool, whether each was correct on the same samples.
    """
    only_one, only_other = int((one & ~other).sum()), int((~one & other).sum())
    count, fewer = only_one + only_other, min(only_one, only_other)
    tail = sum(math.comb(count, k) for k in range(fewer + 1)) / 2**count
    return min(1.0, 2 * tail)


def paired_difference(one: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
    """(difference, low, high): accuracy of `one` less that of `other`, with its 95 % interval.

    one, other: (n,) bool, whether each was correct on the same samples. Agresti and Min 2005 (Statistics in
    Medicine 24): Wald's interval with half a sample more in each cell of the table of the two.
    """
    count = len(one) + 2
    only_one, only_other = int((one & ~other).sum()) + 0.5, int((~one & other).sum()) + 0.5
    middle = (only_one - only_other) / count
    half_width = Z_95 * math.sqrt(only_one + only_other - (only_one - only_other) ** 2 / count) / count
    return (only_one - only_other) / len(one), middle - half_width, middle + half_width


def bootstrap(evidence: np.ndarray, score: Callable[[np.ndarray], Any]) -> np.ndarray:
    """(DRAWS, ...): scores of samples drawn with replacement, the same draws for every n (Efron 1979).

    evidence (n, ...): what each sample adds; `score` gets n rows of it.
    """
    generator, count = np.random.default_rng(0), len(evidence)
    return np.array([score(evidence[generator.integers(0, count, count)]) for _ in range(DRAWS)])


def bootstrap_difference(
    one: np.ndarray, other: np.ndarray, score: Callable[[np.ndarray], float]
) -> tuple[float, float, float, float]:
    """(difference, low, high, p): score of `one` less that of `other`, its 95 % interval, two-sided p-value.

    one, other: (n, k) evidence on the same samples, which are drawn together (paired bootstrap, Efron and
    Tibshirani 1993). p is twice the share of the draws on the rarer side of 0, a tie on both.
    """
    drawn = bootstrap(np.stack([one, other], 1), lambda rows: score(rows[:, 0]) - score(rows[:, 1]))
    fewer = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    low, high = np.percentile(drawn, (2.5, 97.5)).tolist()
    return score(one) - score(other), low, high, min(1.0, 2 * (fewer + 1) / (DRAWS + 1))


def wilson_interval(num_correct: float, count: int) -> list[float]:
    """[low, high]: 95 % confidence interval of a proportion (Wilson 1927)."""
    proportion, z_squared = num_correct / count, Z_95**2
    scale = 1 + z_squared / count
    center = (proportion + z_squared / (2 * count)) / scale
    half_width = Z_95 / scale * math.sqrt(proportion * (1 - proportion) / count + z_squared / (4 * count**2))
    return [center - half_width, center + half_width]
