"""Whether a run ended too early: its training loss still fell, or it had very few steps. Arithmetic only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from isobatch.core.recipe import DEMO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.core.recipe import Recipe
    from isobatch.engine.optimization.schedule import PhaseSchedule

FEW_STEPS = 100
"""Fewer optimizer steps than this seldom finish a fine-tuning (Mosbach et al. 2021, for small data)."""
LEAST_LOSSES = 6
"""From fewer no slope can be told."""
SURE = 3.0
"""Standard errors that a slope lies below zero."""
WORTHWHILE = 0.01
"""Fall over the last third, as a share of the loss, or gain of the monitored metric, below which more steps
are not worth their time."""


def still_falling(losses: Sequence[float]) -> bool:
    """Whether the loss falls clearly over the last half, and goes on falling in the last third.

    The half has steps enough to tell a slope from noise in a short run (the t-test of least squares). The
    third says whether the fall has ended, and whether it is worth more steps: over very many of them, a
    slope is certain long before it is.
    """
    half, third = (losses[len(losses) - len(losses) // part :] for part in (2, 3))
    if len(third) < LEAST_LOSSES:
        return False
    slope, error = _fitted_slope(half)
    fall = -_fitted_slope(third)[0] * (len(third) - 1)
    return -slope > SURE * error and fall > WORTHWHILE * abs(sum(third) / len(third))


def _fitted_slope(losses: Sequence[float]) -> tuple[float, float]:
    """The slope per step of the line that fits best, and its standard error."""
    count = len(losses)
    middle, mean = (count - 1) / 2, sum(losses) / count
    spread = sum((step - middle) ** 2 for step in range(count))
    slope = sum((step - middle) * loss for step, loss in enumerate(losses)) / spread
    off_line = sum((loss - mean - slope * (step - middle)) ** 2 for step, loss in enumerate(losses))
    return slope, math.sqrt(off_line / (count - 2) / spread)


def ending_remark(
    recipe: Recipe,
    schedules: Sequence[PhaseSchedule],
    losses: Sequence[float],
    held_out: Sequence[float],
    folder: str,
) -> str:
    """A line for a run that ended too early, with the way out; else nothing.

    `losses`: of the last phase's steps; `held_out`: its evaluations by the monitored metric, negated where
    more is better. Where the last of those is not the best, or hardly better than those before the last
    third, more training is no way out, whatever the training loss does.
    """
    if recipe.data == DEMO or (held_out and held_out[-1] > min(held_out)):
        return ""
    steps = sum(schedule.steps for schedule in schedules)
    falling = still_falling(losses) and not _is_flat(held_out)
    if not falling and (recipe.steps is not None or steps >= FEW_STEPS):
        return ""
    few = "1 step is very few" if steps == 1 else f"{steps:,} steps are very few"
    found = "the training loss was still falling at the end" if falling else few
    go_on = f" (or go on from here: isobatch auto --from {folder})" if len(schedules) == 1 else ""
    return f"{found}: {_twice_as_long(recipe, schedules)} may learn more{go_on}"


def _is_flat(held_out: Sequence[float]) -> bool:
    if len(held_out) < 2:
        return False
    before = min(held_out[: max(1, len(held_out) * 2 // 3)])
    return before - held_out[-1] <= WORTHWHILE * abs(before)


def _twice_as_long(recipe: Recipe, schedules: Sequence[PhaseSchedule]) -> str:
    if recipe.steps is not None:
        return "--steps " + ",".join(str(2 * steps) for steps in recipe.steps)
    if recipe.epochs is not None and not recipe.least_steps:
        return "--epochs " + ",".join(f"{2 * epochs:g}" for epochs in recipe.epochs)
    epochs = sum(schedule.steps / schedule.steps_per_epoch for schedule in schedules)
    return f"--epochs {math.ceil(2 * epochs)}"
