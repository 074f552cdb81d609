"""How long each phase is and what falls due at which step: arithmetic on the recipe, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isobatch.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.core.flags import Interval
    from isobatch.core.recipe import Recipe
    from isobatch.models.base import Phase


@dataclass(frozen=True, slots=True)
class PhaseSchedule:
    """A phase with its numbers."""

    name: str
    steps: int
    steps_per_epoch: int
    lr: float
    eval_every: int
    judged: bool = True
    """Whether --patience counts here."""


def phase_schedules(recipe: Recipe, phases: Sequence[Phase], steps_per_epoch: int) -> list[PhaseSchedule]:
    """The phases to train, in order, with lengths from the recipe or else from the task."""
    names = [p.name for p in phases]
    if recipe.phase is not None and recipe.phase not in names:
        raise UserError(f"--phase {recipe.phase}: this task's phases are {', '.join(names)}")
    every = recipe.eval_every.steps(steps_per_epoch) if recipe.eval_every else steps_per_epoch
    return [
        PhaseSchedule(
            p.name,
            _steps(recipe, place, p, len(phases), steps_per_epoch),
            steps_per_epoch,
            p.lr or recipe.lr,
            every,
            p.early_stopping,
        )
        for place, p in enumerate(phases)
        if recipe.phase in (None, p.name)
    ]


def _steps(recipe: Recipe, place: int, phase: Phase, count: int, steps_per_epoch: int) -> int:
    if recipe.steps is not None:
        return max(1, round(_nth(recipe.steps, place, phase, count, "--steps")))
    epochs = phase.epochs if recipe.epochs is None else _nth(recipe.epochs, place, phase, count, "--epochs")
    return max(1, math.ceil(round(epochs * steps_per_epoch, 6)))


def _nth(values: Sequence[float], place: int, phase: Phase, count: int, flag: str) -> float:
    if len(values) not in (1, count):
        raise UserError(
            f"{flag} {','.join(map(str, values))}: give one number, or one for each of {count} phases"
        )
    return values[0] * phase.share if len(values) == 1 < count else values[place]


class SaveTimer:
    """When a save falls due: every so many steps, or so many minutes of this process's clock."""

    def __init__(self, interval: Interval, steps_per_epoch: int, clock: float) -> None:
        self.minutes = interval.value if interval.unit == "minutes" else None
        self.steps = None if self.minutes is not None else interval.steps(steps_per_epoch)
        self.last = clock

    def due_at(self, step: int) -> bool:
        """By the count of steps: the same on every rank."""
        return self.steps is not None and step % self.steps == 0

    def due_by(self, clock: float) -> bool:
        """By the clock: rank 0 decides and tells the others."""
        return self.minutes is not None and clock - self.last >= self.minutes * 60

    def reset(self, clock: float) -> None:
        self.last = clock
