"""Noise that a model draws from torch's generators is noticed in whatever phase it is drawn."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import isobatch
from isobatch.core.atomic_files import rows_in
from isobatch.tests.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("task", "invariance"), [("Quiet", "exact"), ("NoisyFirst", "noise"), ("NoisyLater", "noise")]
)
def test_plan_seal_and_summary_say_the_same(task: str, invariance: str, tmp_path: Path) -> None:
    recipe = isobatch.Recipe(task=f"{ROOT}/tests/tasks/noisy.py:{task}")
    run = isobatch.train(recipe, out=tmp_path, micro_batch=8, quiet=True)
    seal = next(row for row in rows_in(run.folder / "metrics.jsonl") if "final" in row)
    planned = json.loads((run.folder / "plan.json").read_text())["invariance"]
    assert (seal["invariance"], planned, run.summary["invariance"]) == (invariance,) * 3
    assert isobatch.verify(run)
