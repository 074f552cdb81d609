"""Recipes from a few flags, and training in one process; for all benchmarks."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

from isobatch.core.plan import PlanOptions
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.loading.prepare import prepare
from isobatch.engine.machine.detect import detect
from isobatch.engine.planning.planner import make_plan
from isobatch.engine.registry import workload
from isobatch.engine.train.build import Builder
from isobatch.engine.train.hooks import Hook, Hooks
from isobatch.engine.train.loop import run_phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from isobatch.engine.train.figures import StepFigures


def prepare_workload(name: str, values: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """(recipe, task, facts, data) of a task with these flags; its data is prepared."""
    chosen = workload(name)
    recipe, _ = chosen.complete(values)
    task, data = chosen.make(recipe)
    return recipe, task, prepare(data), data


ON_A_CPU = PlanOptions(device="cpu", precision="fp32", processes=1)


def make_builder(
    name: str, values: dict[str, Any], options: PlanOptions = ON_A_CPU, **forced: Any
) -> Builder:
    """The training of a task with these flags; `with` ends it, and none of its phases has begun.

    `forced`: fields of the plan that the planner would refuse.
    """
    recipe, task, facts, _ = prepare_workload(name, values)
    plan = make_plan(recipe, facts, task.model_size(facts), detect(), options)
    plan = dataclasses.replace(plan, **forced)
    return Builder(recipe, facts, plan, Communicator(plan))


class Seconds(Hook):
    """The seconds of each step, with the wait for its data."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_figures(self, figures: StepFigures) -> None:
        self.seconds.append(figures.output.seconds)


def train(builder: Builder) -> list[float]:
    """Train all phases; the seconds of each step."""
    hook = Seconds()
    for schedule in builder.schedules:
        with builder.phase(schedule) as state:
            run_phase(state, Hooks([hook]))
    return hook.seconds


@contextlib.contextmanager
def stopwatch(*places: tuple[Any, str]) -> Iterator[list[float]]:
    """A list of one number: the seconds spent so far in functions, each given by its owner and name."""
    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                spent[0] += time.perf_counter() - began

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name))))
        yield spent
