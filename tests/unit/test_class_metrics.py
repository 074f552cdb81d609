"""Tests of models/encoder/class_metrics.py against the formulas of scikit-learn's user guide, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from isobatch.models.encoder.class_metrics import (
    CALIBRATION_BINS,
    calibration_error,
    class_figures,
    class_metrics,
    matthews_correlation,
)

LABELS = np.array([0, 0, 0, 0, 0, 1, 1, 1, 2, 2])
ANSWERS = np.array([0, 0, 0, 1, 2, 1, 1, 0, 2, 0])
CONFUSION = np.array([[3, 1, 1], [1, 2, 0], [1, 0, 1]])


def test_macro_figures_are_means_over_classes() -> None:
    found = class_metrics(CONFUSION, "abc")
    precision, recall = [3 / 5, 2 / 3, 1 / 2], [3 / 5, 2 / 3, 1 / 2]
    f1 = [2 * p * r / (p + r) for p, r in zip(precision, recall, strict=True)]
    assert found["precision_macro"] == pytest.approx(sum(precision) / 3)
    assert found["recall_macro"] == pytest.approx(sum(recall) / 3)
    assert found["f1_macro"] == pytest.approx(sum(f1) / 3)
    assert (found["confusion"], found["classes"]) == (CONFUSION.tolist(), ["a", "b", "c"])
    assert "f1" not in found, "that is for two classes"


def test_two_classes_have_the_f1_of_the_second_and_matthews_own_formula() -> None:
    tn, fp, fn, tp = 50, 10, 5, 35
    found = class_metrics(np.array([[tn, fp], [fn, tp]]), ("no", "yes"))
    assert found["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
    below = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert found["mcc"] == pytest.approx((tp * tn - fp * fn) / below)
    assert found["recall_macro"] == pytest.approx((tp / (tp + fn) + tn / (tn + fp)) / 2)


def test_matthews_of_many_classes_is_the_correlation_of_their_indicators() -> None:
    """Gorodkin 2004, equation 8: covariances of the one-hot labels and answers, summed over classes."""
    one, other = (np.eye(3)[values] - np.eye(3)[values].mean(0) for values in (LABELS, ANSWERS))
    expected = (one * other).sum() / math.sqrt((one**2).sum() * (other**2).sum())
    assert matthews_correlation(CONFUSION) == pytest.approx(expected)


def test_what_is_undefined_is_0_and_what_never_occurs_has_no_part() -> None:
    never_answered = np.array([[8, 0, 0], [2, 0, 0], [0, 0, 0]])
    found = class_metrics(never_answered, "abc")
    assert class_figures(never_answered).shares[0].tolist() == [0.8, 0, 0]
    assert found["f1_macro"] == pytest.approx((2 * 8 / (8 + 10) + 0) / 2), "the third class occurs nowhere"
    assert found["mcc"] == 0


def test_calibration_is_by_bins() -> None:
    confidence, right = np.array([0.99, 0.97, 0.52, 0.51]), np.array([True, False, True, True])
    gaps = abs((0.99 + 0.97) / 2 - 0.5) * 0.5 + abs((0.52 + 0.51) / 2 - 1.0) * 0.5  # two bins of two each
    assert CALIBRATION_BINS == 15
    assert calibration_error(confidence, right) == pytest.approx(gaps)
    assert calibration_error(np.array([1.0, 1.0]), np.array([True, True])) == 0
