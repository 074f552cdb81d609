"""How long a whole run takes: the optimizer steps of its phases at the plan's predicted rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isobatch.engine.optimization.schedule import phase_schedules
from isobatch.engine.planning.cost_model import steps_per_epoch

if TYPE_CHECKING:
    from isobatch.core.facts import Facts
    from isobatch.core.plan import Plan
    from isobatch.core.recipe import Recipe
    from isobatch.models.base import Task


def training_steps(recipe: Recipe, facts: Facts, task: Task) -> int:
    """Optimizer steps of all phases that the recipe trains."""
    schedules = phase_schedules(recipe, task.phases(), steps_per_epoch(recipe, facts))
    return sum(schedule.steps for schedule in schedules)


def run_seconds(plan: Plan, recipe: Recipe, facts: Facts, task: Task) -> float:
    """Predicted seconds of training, from the first step to the last."""
    return training_steps(recipe, facts, task) * plan.predicted_step_seconds
