"""Tests of engine/optimization/schedule.py: phases, learning rates and save timers, by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from isobatch.core.errors import UserError
from isobatch.core.flags import Interval
from isobatch.core.recipe import Recipe
from isobatch.engine.hooks import checkpoint
from isobatch.engine.hooks.checkpoint import Checkpoint
from isobatch.engine.optimization.schedule import CLOSING_STEPS, PhaseSchedule, learning_rate, phase_schedules
from isobatch.models.base import Phase

TWO = [Phase(name="freeze", epochs=1.0), Phase(name="tune", epochs=0.5, lr=1e-5)]


ONE = PhaseSchedule("train", steps=25, steps_per_epoch=10, lr=1.0, eval_every=10)


def recipe(**values: Any) -> Recipe:
    return Recipe(task="t", **values)


def rates(total: int, peak: float = 1.0, per_epoch: int = 10, **values: Any) -> list[float]:
    made = recipe(**values)
    return [learning_rate(made, peak, step, total, per_epoch) for step in range(total)]


def test_small_data_gets_the_least_steps() -> None:
    small = phase_schedules(recipe(epochs=(2.0,), least_steps=100), [Phase(name="train")], 17)
    assert [p.steps for p in small] == [100]  # two passes are 34
    halves = [Phase(name="prune", share=0.5), Phase(name="recover", share=0.5)]
    (own,) = phase_schedules(recipe(epochs=(2.0,), least_steps=100), [Phase(name="train")], 17, 150)
    assert own.steps == 150
    both = phase_schedules(recipe(epochs=(4.0,), least_steps=100), halves, 17)
    assert [p.steps for p in both] == [50, 50]
    large = phase_schedules(recipe(epochs=(2.0,), least_steps=100), [Phase(name="train")], 60)
    assert [p.steps for p in large] == [120]


def test_cosine_by_hand() -> None:
    expected = [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]  # (1 + cos(pi step / 4)) / 2
    assert rates(4, schedule="cosine") == pytest.approx(expected)


def test_warmup_rises_to_the_peak_and_then_the_schedule_begins() -> None:
    found = rates(6, schedule="linear", warmup=Interval(2, "steps"))
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])  # 1/2, 2/2, then 1 - (step - 2) / 4


@pytest.mark.parametrize("per_epoch", [1, 10, 1000])
def test_warmup_as_a_share_of_the_phase_does_not_depend_on_the_data(per_epoch: int) -> None:
    found = rates(20, per_epoch=per_epoch, schedule="constant", warmup=Interval(20, "percent"))
    assert found[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])  # 20 % of 20 steps; the first is not at 0


def lengths(made: Recipe, per_epoch: int = 10) -> dict[str, int]:
    return {s.name: s.steps for s in phase_schedules(made, TWO, per_epoch)}


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ({}, {"freeze": 10, "tune": 5}),  # the task's own: 1.0 and 0.5 epochs of 10
        ({"epochs": (2.0,)}, {"freeze": 20, "tune": 20}),
        ({"epochs": (2.0, 3.0)}, {"freeze": 20, "tune": 30}),
        ({"epochs": (0.25, 0.01)}, {"freeze": 3, "tune": 1}),  # 2.5 and 0.1 rounded up
        ({"epochs": (0.3, 0.7)}, {"freeze": 3, "tune": 7}),
        ({"steps": (7,)}, {"freeze": 7, "tune": 7}),
        ({"steps": (7, 8)}, {"freeze": 7, "tune": 8}),
        ({"phase": "tune"}, {"tune": 5}),
        ({"phase": "tune", "steps": (7, 8)}, {"tune": 8}),
    ],
)
def test_how_long_each_phase_is(values: dict[str, Any], steps: dict[str, int]) -> None:
    assert lengths(recipe(**values)) == steps


def test_a_phase_has_its_own_rate_and_shares_the_intervals() -> None:
    freeze, tune = phase_schedules(recipe(lr=0.5), TWO, 10)
    assert (freeze.lr, tune.lr) == (0.5, 1e-5)
    assert (freeze.eval_every, tune.eval_every) == (10, 10)  # once an epoch
    (one, _) = phase_schedules(recipe(eval_every=Interval(0.25, "epochs")), TWO, 10)
    assert one.eval_every == 2  # round(2.5) is 2
    shares = phase_schedules(recipe(eval_every=Interval(20, "percent")), TWO, 10)
    assert [s.eval_every for s in shares] == [2, 1]  # of 10 and of 5 steps


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"phase": "warm"}, "--phase warm: this task's phases are freeze, tune"),
        ({"epochs": (1.0, 2.0, 3.0)}, "--epochs 1.0,2.0,3.0: give one number, or one for each of 2 phases"),
        ({"steps": (1, 2, 3)}, "--steps 1,2,3: give one number, or one for each of 2 phases"),
    ],
)
def test_what_a_task_has_no_phases_for(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        phase_schedules(recipe(**values), TWO, 10)


def saves(every: Interval, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """The hook that saves so often, in a phase that began at 1,000 s."""
    monkeypatch.setattr(checkpoint, "now", lambda: 1000.0)
    world = SimpleNamespace(rank=0, device=None)
    facts: Any = SimpleNamespace(save_every=every, keep=1, schedule=ONE, world=world, leads=lambda _: False)
    words: Any = (facts, facts, ["train"], facts, facts, facts, print, None, [], facts)
    return Checkpoint(*words)


def test_saves_by_steps_are_the_same_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    last = ONE.steps - CLOSING_STEPS
    for every, due in (
        (Interval(3, "steps"), [3, 6, 9, 12, 15, 18, 21, last, 24]),
        (Interval(0.5, "epochs"), [5, 10, 15, 20, last, 25]),
        (Interval(40, "percent"), [10, 20, last]),
    ):
        hook = saves(every, monkeypatch)
        assert [step for step in range(1, 26) if hook.due(step)] == due
        monkeypatch.setattr(checkpoint, "now", lambda: 1e9)
        assert hook.vote(1)["save"] == 0


def test_saves_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = saves(Interval(10, "minutes"), monkeypatch)
    assert not hook.due(10)
    for clock, votes in ((1000 + 599, 0), (1000 + 600, 1)):  # 10 minutes are 600 s
        monkeypatch.setattr(checkpoint, "now", lambda clock=clock: clock)
        assert hook.vote(1)["save"] == votes
