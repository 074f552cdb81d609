"""Lengths of phases, learning rates, and when evaluations and saves are due: arithmetic, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.core.recipe import Recipe
from isobatch.models.base import Phase, Task

CLOSING_STEPS = 3
"""Steps before the end, and before the best checkpoint, at which one is kept: `verify` redoes these steps."""


EVALUATIONS = 50
"""Most of a phase, where the recipe does not say how often: small data has epochs of a step."""


@dataclass(frozen=True, slots=True)
class PhaseSchedule:
    """A phase with its length and learning rate."""

    name: str
    steps: int
    """Optimizer steps of the phase."""
    steps_per_epoch: int
    lr: float
    """Peak learning rate."""
    eval_every: int
    """Steps between evaluations."""
    early_stopping: bool = True
    """Whether --patience applies to this phase."""
    left_out: frozenset[int] = frozenset()
    """Steps, from 1, that the run leaves out."""

    def evaluates_after(self, step: int, patience: int) -> bool:
        """Whether a step has an evaluation. The last one has it for early stopping alone, with `patience`:
        the end of the run evaluates anyway.
        """
        return patience > 0 if step == self.steps else step % self.eval_every == 0


def phase_schedules(
    recipe: Recipe, phases: Sequence[Phase], steps_per_epoch: int, fewest: int | None = None
) -> list[PhaseSchedule]:
    """The phases to train, in order; lengths are the recipe's or else the task's. `fewest`: the task's own
    least steps on its data, by default the recipe's.

    Raises UserError where --phase is unknown or --steps or --epochs do not match the number of phases.
    """
    names = [p.name for p in phases]
    if recipe.phase is not None and recipe.phase not in names:
        raise UserError(f"--phase {recipe.phase}: this task's phases are {', '.join(names)}")
    lengths = [_steps(recipe, index, p, len(phases), steps_per_epoch) for index, p in enumerate(phases)]
    chosen = [n for p, n in zip(phases, lengths, strict=True) if recipe.phase in (None, p.name)]
    least = recipe.least_steps if fewest is None else fewest
    planned = sum(chosen)
    stretch = max(1.0, least / planned) if recipe.steps is None and planned else 1.0
    lengths = [math.ceil(round(steps * stretch, 6)) for steps in lengths]
    return [
        PhaseSchedule(
            p.name,
            steps,
            steps_per_epoch,
            p.lr or recipe.lr,
            recipe.eval_every.steps(steps_per_epoch, steps)
            if recipe.eval_every
            else steps_per_epoch * max(1, math.ceil(steps / steps_per_epoch / EVALUATIONS)),
            p.early_stopping,
        )
        for p, steps in zip(phases, lengths, strict=True)
        if recipe.phase in (None, p.name)
    ]


def schedules_of(task: Task, facts: Facts, steps_per_epoch: int) -> list[PhaseSchedule]:
    """The phases that a task trains on this data."""
    return phase_schedules(task.recipe, task.phases(), steps_per_epoch, task.fewest_steps(facts))


def _steps(recipe: Recipe, index: int, phase: Phase, count: int, steps_per_epoch: int) -> int:
    if not phase.epochs:
        return 0  # nothing is learnt by steps
    if recipe.steps is not None:
        steps = _nth(recipe.steps, index, phase, count, "--steps")
        return max(1, round(steps)) if steps else 0
    epochs = phase.epochs if recipe.epochs is None else _nth(recipe.epochs, index, phase, count, "--epochs")
    return max(1, math.ceil(round(epochs * steps_per_epoch, 6)))


def _nth(values: Sequence[float], index: int, phase: Phase, count: int, flag: str) -> float:
    """The value of phase `index` of `count`; one value for several phases is divided by their shares."""
    if len(values) not in (1, count):
        typed = f"{flag} {','.join(map(str, values))}"
        raise UserError(f"{typed}: give one number, or one for each of {count} phases")
    return values[0] * phase.share if len(values) == 1 < count else values[index]


def learning_rate(recipe: Recipe, peak: float, step: int, total: int, steps_per_epoch: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total`: linear warm-up, then the recipe's schedule.

    Of W warm-up steps the first is at peak / W, not at 0, and the last at `peak`; the schedule begins there.
    linear decays towards 0 and cosine towards the recipe's floor, which the step after the last one would
    have; constant stays at `peak`, and wsd until its last part.
    """
    warmup = recipe.warmup.steps(steps_per_epoch, total) if recipe.warmup.value else 0
    if step < warmup:
        return peak * (step + 1) / warmup
    if recipe.schedule == "constant":
        return peak
    if recipe.schedule == "wsd":
        last = decay_steps(recipe, total, steps_per_epoch)
        share = max(0.0, step - (total - last)) / last
        return peak * (1 - (math.sqrt(share) if recipe.decay_shape == "sqrt" else share))
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    if recipe.schedule == "linear":
        return peak * (1 - progress)
    floor = recipe.lr_floor
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def decay_steps(recipe: Recipe, total: int, steps_per_epoch: int) -> int:
    """Steps of wsd's last part in a phase of `total` steps; at least one. Its first is still at the peak."""
    return min(total, max(1, recipe.decay.steps(steps_per_epoch, total)))
