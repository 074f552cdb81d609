"""Tests of engine/optimization/early_stopping.py: patience and the best checkpoint, on rounded values."""

from __future__ import annotations

import math

from isobatch.engine.optimization.early_stopping import EarlyStopping


def verdicts(judge: EarlyStopping, *values: float) -> list[bool]:
    return [judge.update(value, step) for step, value in enumerate(values, 1)]


def test_the_smallest_loss_is_the_best() -> None:
    judge = EarlyStopping("min", patience=2)
    assert verdicts(judge, 3.0, 2.0, 2.5, 1.9) == [True, True, False, True]
    assert (judge.best, judge.best_step, judge.waited, judge.should_stop) == (1.9, 4, 0, False)


def test_patience_counts_evaluations_without_improvement() -> None:
    judge = EarlyStopping("min", patience=2)
    verdicts(judge, 1.0, 1.1)
    assert not judge.should_stop
    judge.update(1.2, 3)
    assert judge.should_stop
    assert judge.best_step == 1


def test_an_improvement_must_be_more_than_min_delta() -> None:
    judge = EarlyStopping("min", patience=1, min_delta=0.5)
    assert verdicts(judge, 2.0, 1.5, 1.4) == [True, False, True]  # 2.0 - 1.5 is not more than 0.5


def test_differences_of_rounding_decide_nothing() -> None:
    one, other = EarlyStopping("min"), EarlyStopping("min")
    assert verdicts(one, 1.0, 1.0 - 4e-7) == [True, False]  # equal to six digits
    assert verdicts(other, 1.0 + 4e-7, 1.0) == [True, False]
    assert one == other


def test_what_is_not_finite_is_no_improvement() -> None:
    judge = EarlyStopping("min", patience=3)
    assert verdicts(judge, math.nan, math.inf, -math.inf) == [False, False, False]
    assert (judge.best, judge.should_stop) == (None, True)
