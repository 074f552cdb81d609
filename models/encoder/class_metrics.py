"""Figures of a classifier: confusion matrix, F1, Matthews correlation, calibration, thresholds, correlations,
entities; paired tests and intervals.

A share of nothing (the precision of a class that is never answered) is 0, as scikit-learn's is.
Letters: C classes, n samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Predictions:
    """A classifier's logits for all samples of a split, in order, beside their labels.

    Where words are labelled, a row for each of these, m in all; else m = n.
    """

    logits: np.ndarray
    """(m, C)"""
    labels: np.ndarray
    """(m,) class numbers or scores, or (m, C) of 0 and 1"""
    words: np.ndarray | None = None
    """(n,) rows of each sample, where these are words"""

    @classmethod
    def of(cls, logits: np.ndarray, labels: np.ndarray) -> Predictions:
        """Of a batch: logits (B, C) or (B, T, C), labels (B, ...), below 0 where a token has none."""
        if logits.ndim == 2:
            return cls(logits, labels)
        inside = labels >= 0
        return cls(logits[inside], labels[inside], inside.sum(1))

    @property
    def predicted_labels(self) -> np.ndarray:
        """(m,) class with the largest logit."""
        return self.logits.argmax(1)

    @property
    def is_correct(self) -> np.ndarray:
        """(m,) bool."""
        return self.predicted_labels == self.labels

    def differing(self, other: Predictions) -> np.ndarray:
        """Rows that another model answers with another class; none of scores, of which the logits say all."""
        differ: np.ndarray = self.predicted_labels != other.predicted_labels
        return np.flatnonzero(differ & (self.labels.dtype.kind == "i"))


class ClassFigures(NamedTuple):
    """Figures of each class."""

    shares: np.ndarray
    """(3, C): precision, recall and F1."""
    means: list[float]
    """Over the classes that are any sample's label or answer (macro)."""


def class_figures(confusion: np.ndarray) -> ClassFigures:
    """Precision, recall and F1 of each class, from a confusion matrix (C, C)."""
    return label_figures(np.stack([confusion.diagonal(), confusion.sum(1), confusion.sum(0)]))


def label_figures(counts: np.ndarray, absent: bool = False) -> ClassFigures:
    """Precision, recall and F1 of each label, from (3, C): how often it is right, there, and answered.

    `absent`: labels that are nowhere count in the means too, as 0.
    """
    right, labelled, answered = counts
    parts, wholes = np.stack([right, right, 2 * right]), np.stack([answered, labelled, labelled + answered])
    shares = np.divide(parts, wholes, out=np.zeros(parts.shape), where=wholes > 0)
    counted = shares if absent else shares[:, wholes[2] > 0]
    return ClassFigures(shares, [float(share.sum()) / max(1, len(share)) for share in counted])


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


def best_threshold(probabilities: np.ndarray, is_label: np.ndarray) -> float:
    """From which probability on a label is answered for the best F1, halfway to the next lower; of several
    the one nearest to 0.5, and 0.5 where all are 0. probabilities (n,), is_label (n,) bool.
    """
    order = np.argsort(-probabilities, kind="stable")
    falling, right = probabilities[order].astype(np.float64), np.cumsum(is_label[order])
    f1 = 2 * right / (np.arange(1, len(order) + 1) + right[-1])
    below = np.append(falling[1:], 0.0)
    cuts = np.where(falling > below, (falling + below) / 2, np.nan)  # the equal are answered alike
    if np.isnan(cuts).all():
        return 0.5
    best = cuts[(f1 == f1[~np.isnan(cuts)].max()) & ~np.isnan(cuts)]
    return float(best[np.abs(best - 0.5).argmin()])


def ranks(values: np.ndarray) -> np.ndarray:
    """(n,) from 1 on; the equal have their mean rank."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Pearson's, of (n,) each; Spearman's of their ranks. 0 where one side has a single value."""
    apart = [side.astype(np.float64) - side.mean(dtype=np.float64) for side in (one, other)]
    spread = math.sqrt(float((apart[0] @ apart[0]) * (apart[1] @ apart[1])))
    return float(apart[0] @ apart[1]) / spread if spread else 0.0


def softmax(logits: np.ndarray) -> np.ndarray:
    """(n, C) probabilities in fp64."""
    exponentials = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True, initial=-np.inf))
    return exponentials / exponentials.sum(1, keepdims=True)


def mcnemar(one: np.ndarray, other: np.ndarray) -> float:
    """Exact two-sided p-value of McNemar's test (1947): whether two classifiers differ in accuracy.

    one, other: (n,) bool, whether each was correct on the same samples.
    """
    only_one, only_other = int((one & ~other).sum()), int((~one & other).sum())
    count, fewer = only_one + only_other, min(only_one, only_other)
    return min(1.0, 2 * sum(math.comb(count, k) for k in range(fewer + 1)) / 2**count)


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


def wilson_interval(num_correct: float, count: int) -> list[float]:
    """[low, high]: 95 % confidence interval of a proportion (Wilson 1927)."""
    if not count:
        return [0.0, 1.0]
    proportion, z_squared = num_correct / count, Z_95**2
    scale = 1 + z_squared / count
    center = (proportion + z_squared / (2 * count)) / scale
    half_width = Z_95 / scale * math.sqrt(proportion * (1 - proportion) / count + z_squared / (4 * count**2))
    return [center - half_width, center + half_width]
