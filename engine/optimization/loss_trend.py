"""Whether a run ended too early: its training loss still fell, or it had very few steps. Arithmetic only."""

from __future__ import annotations

import math
from statistics import fmean, variance
from typing import TYPE_CHECKING

from isobatch.core.recipe import DEMO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.core.recipe import Recipe
    from isobatch.engine.optimization.schedule import PhaseSchedule

FEW_STEPS = 100
"""Fewer optimizer steps than this seldom finish a fine-tuning (Mosbach et al. 2021, for small data)."""
LEAST_LOSSES = 6
"""From fewer no fall can be told."""
SURE = 3.0
"""Standard errors that the last losses lie below those before them."""
WORTHWHILE = 0.01
"""Fall as a share of the loss, or gain of the monitored metric, below which more steps are not worth it."""


def still_falling(losses: Sequence[float]) -> bool:
    """Whether the mean of the last sixth lies clearly below that of the sixth before it (Welch's t-test)."""
    count = len(losses) // 6
    if count < LEAST_LOSSES:
        return False
    before, last = losses[-2 * count : -count], losses[-count:]
    error = math.sqrt((variance(before) + variance(last)) / count)
    return fmean(before) - fmean(last) > max(SURE * error, WORTHWHILE / 2 * abs(fmean(last)))


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
    found = "the training loss was still falling at the end" if falling else f"{steps} steps are very few"
    if recipe.steps is not None:
        longer = "--steps " + ",".join(str(2 * steps) for steps in recipe.steps)
    else:
        epochs = sum(schedule.steps / schedule.steps_per_epoch for schedule in schedules)
        longer = f"--epochs {math.ceil(2 * epochs)}"
    go_on = f" (or go on from here: isobatch auto --from {folder})" if len(schedules) == 1 else ""
    return f"{found}: {longer} may learn more{go_on}"


def _is_flat(held_out: Sequence[float]) -> bool:
    if len(held_out) < 2:
        return False
    before = min(held_out[: max(1, len(held_out) * 2 // 3)])
    return before - held_out[-1] <= WORTHWHILE * abs(before)
