"""Tests of engine/optimization/early_stopping.py: patience and the best checkpoint, on rounded values."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.engine.hooks import evaluate as evaluations
from isobatch.engine.optimization.early_stopping import EarlyStopping

if TYPE_CHECKING:
    from collections.abc import Sequence


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


@pytest.mark.parametrize(
    ("values", "fraction", "of_all", "of_part", "said"),
    [
        ([0.97], 1.0, 0.96, None, "step 1 of 2 (accuracy 0.9700, at the end 0.9600)"),
        ([0.97], 1.0, 0.97, None, ""),
        ([0.97], 0.5, 0.96, 0.975, ""),  # on the same half the end is better
        ([0.97], 0.5, 0.98, 0.95, "(accuracy 0.9700, at the end 0.9500, both on 50 % of the rows)"),
        ([], 1.0, 0.96, None, ""),
    ],
)
def test_the_best_and_the_last_evaluation_are_compared_on_the_same_rows(
    values: Sequence[float],
    fraction: float,
    of_all: float,
    of_part: float | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = SimpleNamespace(task=None, facts=None, splits={"valid": range(10_000)})
    state.progress, state.schedule = SimpleNamespace(step=2), SimpleNamespace(early_stopping=True)
    state.recipe = SimpleNamespace(eval_fraction=fraction)
    hook: Any = evaluations.Evaluate.__new__(evaluations.Evaluate)
    hook.training, hook.judge = state, EarlyStopping("max")
    verdicts(hook.judge, *values)

    def evaluate_part(_: Any, split: str, share: float, beside: Any) -> dict[str, Any]:
        assert (split, share, beside) == ("valid", fraction, {})
        return {"accuracy": of_part}

    monkeypatch.setattr(evaluations, "monitor_of", lambda *_: ("accuracy", "max"))
    monkeypatch.setattr(evaluations, "evaluate", evaluate_part)
    found = hook.better_before({"accuracy": of_all}, {})
    assert found.endswith(said)
    assert bool(found) == bool(said)
