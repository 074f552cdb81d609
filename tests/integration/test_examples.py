"""The examples run as they stand, and what they say of one entry or three places is so."""

from __future__ import annotations

import csv
import json
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isobatch
from isobatch.core.optimizers import OPTIMIZERS
from isobatch.core.strategies import STRATEGIES
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint, list_checkpoints
from isobatch.engine.checkpointing.portable_state import saved_moments
from isobatch.tests.integration.helpers import ROOT, launch, rows, succeed, summary
from isobatch.tests.integration.test_bad_input import complaint
from isobatch.tests.paths import REGISTER

EXAMPLES = ROOT / "examples"
FAILING = f"{ROOT}/tests/tasks/failing.py"
MINE = ["auto", "--task", "./mine.py:Mine", "--quiet"]


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """A copy: runs are written beside the files."""
    return Path(shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=_runs))


@pytest.fixture
def own_task(examples: Path) -> Path:
    """The user's folder."""
    return examples / "own_task"


def _runs(_: str, names: list[str]) -> set[str]:
    return {"runs", "__pycache__"} & {*names}


def test_the_own_task_trains_and_logs_its_figures(own_task: Path) -> None:
    succeed(*MINE, "--name", "one", cwd=own_task)
    run = own_task / "runs" / "one"
    metrics = summary(run)["metrics"]
    assert metrics["accuracy"] > 0.8
    assert metrics["median_margin"] > 1
    steps = [r for r in rows(run) if "lr" in r]
    assert all(round(r["train_accuracy"] * 32, 6).is_integer() for r in steps)  # of a global batch of 32
    succeed("verify", "runs/one", cwd=own_task)
    check_predictions(own_task)


def check_predictions(own_task: Path) -> None:
    """Of held-out samples, and of rows that the task's own data reads."""
    held_out = succeed("predict", "runs/one", "--split", "valid", "--json", cwd=own_task)
    found = [json.loads(line) for line in held_out.stdout.splitlines()]
    assert [row["sample"] for row in found] == list(range(80))
    (own_task / "new.csv").write_text("x,y\n0.0,1.0\n1.0,-0.4\n")
    for words in (["--file", "new.csv"], ["--data", "new.csv"], ["new.csv"]):
        done = launch("predict", "runs/one", *words, "--out", "new.jsonl", cwd=own_task)
        assert done.stdout == "2 rows -> new.jsonl\n", done.stderr
    rows_ = [json.loads(line) for line in (own_task / "new.jsonl").read_text().splitlines()]
    assert [(row["x"], row["y"]) for row in rows_] == [("0.0", "1.0"), ("1.0", "-0.4")]  # as they came
    assert [row["class"] for row in rows_] == [0, 1]  # the upper half circle, and the lower one
    assert rows_[0]["probability"] < 0.5 < rows_[1]["probability"]
    assert "--file" in complaint(launch("predict", "runs/one", cwd=own_task))
    (own_task / "none.csv").write_text("x,y\n")
    assert "none.csv" in complaint(launch("predict", "runs/one", "--file", "none.csv", cwd=own_task))


def test_the_own_task_reads_the_users_file_and_has_flags(own_task: Path) -> None:
    generator = np.random.default_rng(0)
    with (own_task / "points.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["x", "y", "label"])
        writer.writerows([[*point, int(point[0] > 0)] for point in generator.normal(size=(200, 2)).tolist()])
    words = ["--data", "points.csv", "--width", "16", "--activation", "relu", "--holdout", "0.25"]
    succeed(*MINE, *words, "--name", "points", cwd=own_task)
    run = isobatch.load(own_task / "runs" / "points")
    assert run.facts.samples == {"train": 150, "valid": 50}
    assert run.metrics["accuracy"] > 0.8
    described = launch("describe", "./mine.py:Mine", cwd=own_task).stdout
    for flag in ("--width", "--activation", "--holdout", "Share of the points"):
        assert flag in described
    assert launch(*MINE, "--holdout", "2", cwd=own_task).stderr == (
        "isobatch: --holdout 2: must be above 0 and below 1\n"
    )


def test_the_notebook_runs_from_top_to_bottom(
    examples: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(examples)
    names = runpy.run_path("notebook.py")
    assert names["plan"].device == "cuda"
    assert names["run"].status == "done"
    assert names["losses"][-1] < names["losses"][0]
    assert names["verification"]
    assert capsys.readouterr().out.splitlines()[-1] == "done True"


def test_one_entry_adds_an_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from isobatch.examples.optimizer import LION

    monkeypatch.setitem(OPTIMIZERS, "lion", LION)
    monkeypatch.chdir(tmp_path)
    values = {"optimizer": "lion", "lr": 0.1, "steps": 30}
    line = isobatch.Recipe(task=f"{FAILING}:Line", **values)
    assert isobatch.plan(line, hardware="8xh100", processes=8, strategy="zero3").strategy == "zero3"
    whole = isobatch.train(line, save_every=2, keep=99, quiet=True)
    assert sum(_losses(whole)[-5:]) < 0.5 * sum(_losses(whole)[:5])

    saved = list_checkpoints(whole.folder / "checkpoints", ["train"])[-1]
    assert {kind for _, kind, _ in saved_moments(SavedCheckpoint(saved))} == {"exp_avg"}
    assert isobatch.verify(whole)


def test_an_optimizer_of_a_tasks_own_file_is_known_wherever_the_task_is(tmp_path: Path) -> None:
    """`runs` imports no task, and shows the run; `verify` and the rest do."""
    registered = "OPTIMIZERS['own-lion'] = LION"
    imports = ["isobatch.core.optimizers import OPTIMIZERS", "isobatch.examples.optimizer import LION"]
    imports.append("isobatch.tests.tasks.failing import Line")
    lines = [*(f"from {one}" for one in imports), registered, "class Mine(Line): ..."]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    asked = ("auto", "--task", "./mine.py:Mine", "--optimizer", "own-lion", "--steps", "6", "--name", "own")
    for words in (asked, ("verify", "runs/own"), ("runs", "--json")):
        done = succeed(*words, cwd=tmp_path)
    assert '"done"' in done.stdout
    (tmp_path / "mine.py").write_text("\n".join([*lines[:3], *lines[4:]]))
    done = launch(*(word.replace("own-lion", "own-lyon") for word in asked), cwd=tmp_path)
    assert (done.returncode, "own-lyon: is not one of adamw" in done.stderr) == (2, True)


def test_one_class_and_one_entry_add_a_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from isobatch.examples.strategy import PER_PARAMETER

    monkeypatch.setitem(STRATEGIES, "per-parameter", PER_PARAMETER)
    task = f"{ROOT}/tests/tasks/ragged.py:RaggedLM"
    recipe = isobatch.Recipe(task=task, steps=4)
    there = isobatch.plan(recipe, hardware="cpu:8x24gb", processes=2, strategy="per-parameter")
    assert (there.strategy, there.processes) == ("per-parameter", 2)
    known, ours = (
        isobatch.train(recipe, out=tmp_path, name=name, again=True, strategy=name, quiet=True)
        for name in ("single", "per-parameter")
    )
    assert (ours.plan.strategy, ours.plan.reasons["strategy"]) == ("per-parameter", "you asked for it")
    assert _losses(ours) == pytest.approx(_losses(known), abs=1e-6)
    assert isobatch.verify(known, strategy="per-parameter")


def _losses(run: isobatch.Run) -> list[float]:
    return [r["loss"] for r in run.history if "lr" in r]


def _commands(script: str) -> list[list[str]]:
    """The words of each `isobatch ...` of a shell script."""
    lines = script.replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("isobatch ")]


def test_the_slurm_jobs_are_printed(examples: Path) -> None:
    commands = _commands((examples / "slurm.sh").read_text())
    for words in commands:
        done = succeed(*words, cwd=examples)
        assert words[0] == "runs" or done.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=")
    assert [words[0] for words in commands] == ["slurm"] * 4 + ["runs"]
    assert (examples / "runs" / "two-nodes" / "slurm" / "job.sh").is_file()


THIRD_PLACE = (
    "import sys\n"
    "from isobatch.engine.registry import TASKS\n"
    "from isobatch.models.workloads import Workload\n"
    "TASKS['line'] = Workload('line', 'tests.tasks.failing:Line', 'fit a line')\n"
    "from isobatch.launch.cli import main\n"
    "sys.exit(main(sys.argv[1:]))\n"
)


def test_a_workload_is_a_model_file_a_data_file_and_one_entry(tmp_path: Path) -> None:
    def isobatch_with_it(*words: str) -> Any:
        script = [sys.executable, "-P", "-c", REGISTER + THIRD_PLACE, *words]
        return subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert "line          fit a line" in isobatch_with_it("tasks")
    assert "recipe of line" in isobatch_with_it("describe", "line")
    isobatch_with_it("auto", "--task", "line", "--steps", "3", "--name", "line", "--quiet")
    run = isobatch.load(tmp_path / "runs" / "line")
    assert (run.status, run.recipe.task, len(_losses(run))) == ("done", "line", 3)
