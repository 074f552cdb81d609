"""Tests of the chain `compress`: its plan, how it goes on, and a classifier that learnt nothing."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isobatch.core.errors import STOPPED, UserError
from isobatch.engine.registry import workload
from isobatch.engine.runs.run_folder import Verdict
from isobatch.launch.commands.auto import auto
from isobatch.launch.commands.compress import compress, refuse_chance
from isobatch.launch.commands.plan import plan
from isobatch.models.compression.pruning import FREE_FAST_SPARSITY, Pruning


def run_of(metrics: dict[str, Any], granularity: str = "both", valid: int = 872) -> Any:
    summary = {"split": "valid", "parameters": 22_565_376, "metrics": metrics}
    facts = SimpleNamespace(
        extra={"majority": {"train": 0.6, "valid": 0.509174}}, samples={"train": 9000, "valid": valid}
    )
    recipe = SimpleNamespace(options={"granularity": granularity})
    return SimpleNamespace(summary=lambda: summary, facts=facts, recipe=recipe, folder=Path("runs/a"))


@pytest.mark.parametrize(
    ("accuracy", "warns"), [(0.885, False), (444 / 872, True), (445 / 872, False), (0.4, True)]
)
def test_a_classifier_no_better_than_its_largest_class_is_named(accuracy: float, warns: bool) -> None:
    said = f"{accuracy:.1%}, is not above that of always answering the largest class, 50.9%"
    with pytest.raises(UserError, match=said) if warns else contextlib.nullcontext():
        refuse_chance(run_of({"accuracy": accuracy}))
    refuse_chance(run_of({"accuracy": accuracy}, valid=29))


def test_fast_mode_trains_long_enough_on_small_data_unless_a_length_is_given() -> None:
    recipe, notes = workload("classifier").complete({"mode": "fast"})
    assert recipe.least_steps == 100
    assert "least_steps 100" in notes[-1]
    for length in ({"epochs": 1}, {"steps": 9}):
        recipe, notes = workload("classifier").complete({"mode": "fast", **length})
        assert recipe.least_steps == 0
        assert "least_steps" not in notes[-1]


@pytest.mark.parametrize(("every", "ramp", "steps"), [(40, 17, 40), ("20%", 17, 3), ("20%", 630, 126)])
def test_the_interval_of_pruning_may_follow_the_ramp(every: Any, ramp: int, steps: int) -> None:
    recipe, _ = workload("pruning").complete({"prune_every": every})
    task, _ = workload("pruning").make(recipe)
    assert isinstance(task, Pruning)
    assert task.steps_between(ramp) == steps


def test_a_stopped_stage_leads_back_to_compress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typed again, it goes on with the stopped stage: each is found by its recipe, as `auto` finds a run."""
    stopped = (None, Verdict(STOPPED, ""))
    monkeypatch.setattr("isobatch.launch.commands.compress.find_or_train", lambda _: stopped)
    assert compress(["--task", "compress", "--steps", "6"]) == STOPPED
    assert "the same command again" in capsys.readouterr().err


def test_fast_mode_removes_what_was_measured_to_cost_nothing() -> None:
    """benchmarks/LOG.md, accuracy: a fifth of the heads; more was not measured in fast mode."""
    recipe, notes = workload("pruning").complete({"mode": "fast"})
    assert recipe.options["sparsity"] == FREE_FAST_SPARSITY == 0.2
    assert "sparsity 0.2" in notes[-1]


def test_the_plan_of_a_chain_is_that_of_its_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(["--task", "compress", "--hardware", "cpu:2x24gb", "--steps", "3,4,5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    stages = found["stages"]
    # Pruning and qat have the model of the stage before: of their own training phase a step is left.
    assert [stage["run"]["steps"] for stage in stages.values()] == [3, 5, 6]
    assert found["run_seconds"] == sum(stage["run"]["run_seconds"] for stage in stages.values())
    assert {name: stage["recipe"]["steps"] for name, stage in stages.items()} == {
        "classifier": [3],
        "pruning": [4],
        "qat": [5],
    }
    assert auto(["--task", "compress", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.startswith("stage ")] == [
        "stage 1 of 3, classifier:",
        "stage 2 of 3, pruning:",
        "stage 3 of 3, qat:",
    ]
    with pytest.raises(UserError, match="--compare: no stage of compress has such a flag"):
        plan(["--task", "compress", "--compare", "h100,t4"])
