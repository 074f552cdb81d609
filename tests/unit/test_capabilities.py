"""The contract stays short, and what a task can do beside it is whole or not there."""

from __future__ import annotations

import inspect

import pytest

from isobatch.engine.registry import TASKS, workload
from isobatch.engine.task_files import part_of_protocol
from isobatch.models.base import Task
from isobatch.models.capabilities import all_protocols

MOST_METHODS = 12
PROTOCOLS = all_protocols()


def test_the_contract_has_at_most_twelve_methods() -> None:
    methods = [n for n, _ in inspect.getmembers(Task, callable) if not n.startswith("_")]
    methods = [n for n in methods if not isinstance(getattr(Task, n), type)]
    assert len(methods) <= MOST_METHODS, methods


def test_the_contract_has_no_capability() -> None:
    assert [names for names in PROTOCOLS.values() if any(hasattr(Task, name) for name in names)] == []


@pytest.mark.parametrize("name", TASKS)
def test_each_task_has_all_of_a_protocol_or_none(name: str) -> None:
    task = workload(name).task
    assert part_of_protocol(task) == ""
    for protocol, names in PROTOCOLS.items():
        for member in names:
            here, asked = getattr(task, member, None), getattr(protocol, member, None)
            if here is None or not inspect.isfunction(asked):
                continue
            has, wanted = (list(inspect.signature(one).parameters) for one in (here, asked))
            assert has == wanted, member


def test_each_protocol_is_some_tasks() -> None:
    """One that nobody has is no seam but a wish."""
    tasks = [workload(name).task for name in TASKS]
    idle = {one for one, names in PROTOCOLS.items() if not any(hasattr(t, n) for t in tasks for n in names)}
    assert {one.__name__ for one in idle} == {
        "PredictsBatches",
        "MakesOptimizer",
        "TakesTurns",
    }  # for tasks of users
