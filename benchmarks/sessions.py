"""Workloads as the benchmarks run them: a recipe from a few values, and a session on one process of a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from isobatch.core.plan import PlanOptions
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.loading.prepare import prepare
from isobatch.engine.planning.detect import detect
from isobatch.engine.planning.planner import make_plan
from isobatch.engine.registry import workload
from isobatch.engine.training.session import Session


def asked(name: str, values: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """(recipe, task, facts, data) of a task's flags, prepared."""
    chosen = workload(name)
    recipe, _ = chosen.complete(values)
    task, data = chosen.make(recipe)
    return recipe, task, prepare(data), data


def session(name: str, values: dict[str, Any]) -> Session:
    """Ready for the first step of its first phase."""
    recipe, task, facts, _ = asked(name, values)
    options = PlanOptions(device="cpu", precision="fp32", processes=1)
    plan = make_plan(recipe, facts, task.model_size(facts), detect(), options)
    made = Session(recipe, facts, plan, Communicator(plan))
    made.enter(made.stretches[0])
    return made


def train(made: Session, after: Callable[[str, float], None] = lambda phase, seconds: None) -> None:
    """All phases to their ends; `after` is told the seconds of each step."""
    for stretch in made.stretches:
        if stretch is not made.stretches[0]:
            made.enter(stretch)
        began = time.perf_counter()
        for loaded in made.feed().steps(0, stretch.steps):
            made.step(loaded)
            now = time.perf_counter()
            after(stretch.name, now - began)
            began = now
