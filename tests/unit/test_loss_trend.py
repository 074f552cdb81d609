"""Tests of engine/optimization/loss_trend.py: which curves still fall, and what a short run says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from isobatch.core.recipe import Recipe
from isobatch.engine.optimization.loss_trend import ending_remark, still_falling
from isobatch.engine.optimization.schedule import PhaseSchedule

NOISE = np.random.default_rng(1).normal(size=3000)


def curve(steps: int, shape: Any, noise: float) -> list[float]:
    return [float(shape(step / steps) + noise * NOISE[step]) for step in range(steps)]


@pytest.mark.parametrize(
    ("losses", "falls"),
    [
        (curve(48, lambda x: 0.69 - 0.2 * x, 0.01), True),  # a fine-tuning cut short
        (curve(300, lambda x: 0.69 - 0.4 * x, 0.05), True),
        (curve(3000, lambda x: 3 + 3 * math.exp(-3 * x), 0.1), True),
        (curve(34, lambda x: 0.69 - 0.02 * x, 0.05), False),  # less than the noise
        (curve(300, lambda x: 0.7 - min(0.4, x * 0.65), 0.01), False),  # ended at two thirds
        (curve(300, lambda x: 0.3 + 0.4 * math.exp(-20 * x), 0.05), False),  # long flat
        (curve(3000, lambda x: 3 - 0.05 * x, 0.01), False),  # certain, and not worth it
        (curve(300, lambda x: 0.3 + 0.2 * x, 0.01), False),  # rising
        ([0.5] * 300, False),
        ([3.0, 2.0, 1.0], False),  # too few to tell
        ([], False),
    ],
    ids=lambda value: "" if isinstance(value, list) else str(value),
)
def test_which_curves_still_fall(losses: list[float], falls: bool) -> None:
    assert still_falling(losses) == falls


def test_pure_noise_is_seldom_taken_for_a_fall() -> None:
    draws = np.random.default_rng(2).normal(0.5, 0.1, size=(1000, 60))
    assert sum(still_falling(list(row)) for row in draws) < 10


FALLING, FLAT = curve(400, lambda x: 0.7 - 0.5 * x, 0.01), [0.5] * 400


def remark(losses: list[float], held_out: tuple[float, ...] = (), steps: int = 400, **values: Any) -> str:
    recipe = Recipe(task="t", **{"data": "reviews.csv", "epochs": (2.0,), **values})
    schedules = [PhaseSchedule("train", steps, steps // 2, 1e-3, steps // 2)]
    return ending_remark(recipe, schedules, losses, held_out, "runs/a")


@pytest.mark.parametrize(
    ("said", "way_out"),
    [
        (remark(FALLING), "still falling at the end: --epochs 4 may learn more"),
        (remark(FALLING), "(or go on from here: isobatch auto --from runs/a)"),
        (remark(FALLING, (0.6, 0.5)), "--epochs 4"),
        (remark(FALLING, epochs=None, steps=400), "--epochs 4"),
        (remark(FLAT[:34], steps=34), "34 steps are very few: --epochs 4"),
        (remark(FALLING, least_steps=400), "--epochs 4"),
    ],
)
def test_a_run_that_ended_early_says_so_with_the_way_out(said: str, way_out: str) -> None:
    assert way_out in said
    assert "\n" not in said


def test_other_runs_say_nothing() -> None:
    assert remark(FLAT) == ""
    assert remark(FALLING, (0.5, 0.6)) == "", "more training would only overfit"
    assert remark(FALLING, (-0.30, -0.444, -0.446, -0.447)) == "", "what is monitored has been flat"
    assert "--epochs 4" in remark(FALLING, (-0.30, -0.40, -0.43, -0.45))
    assert remark(FALLING, data="demo") == ""
    few = Recipe(task="t", data="reviews.csv", steps=(10,))
    assert ending_remark(few, [PhaseSchedule("train", 10, 5, 1e-3, 5)], FLAT[:10], (), "runs/a") == ""
