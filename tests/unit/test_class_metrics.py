"""Tests of models/encoder/class_metrics.py against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest

from isobatch.models.encoder.class_metrics import (
    CALIBRATION_BINS,
    calibration_error,
    class_figures,
    class_metrics,
)


@pytest.mark.parametrize("count", [2, 3])
def test_figures_of_classes_are_those_of_scikit_learn(count: int) -> None:
    sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is in the extra baselines")
    draw = np.random.default_rng(0)
    labels = draw.integers(count, size=60)
    answers = np.where(draw.uniform(size=60) < 0.6, labels, draw.integers(count, size=60))
    confusion = sklearn.confusion_matrix(labels, answers)
    found = class_metrics(confusion, "abc"[:count])
    means = sklearn.precision_recall_fscore_support(labels, answers, average="macro")
    for name, value in zip(("precision", "recall", "f1"), means, strict=False):
        assert found[f"{name}_macro"] == pytest.approx(value)
    assert found["mcc"] == pytest.approx(sklearn.matthews_corrcoef(labels, answers))
    assert (found["confusion"], found["classes"]) == (confusion.tolist(), [*"abc"[:count]])
    assert found.get("f1") == (pytest.approx(sklearn.f1_score(labels, answers)) if count == 2 else None)


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
