"""A user's own hook in a run: what it holds goes on with the run, and its mistakes are said in a line."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file, save_file

import isobatch
from isobatch.core.errors import UserError
from isobatch.examples.average import Average
from isobatch.tests.integration.helpers import RAGGED, ROOT, launch, rows, succeed, summary, warm_python
from isobatch.tests.integration.test_bad_input import complaint

if TYPE_CHECKING:
    from pathlib import Path

AVERAGE = f"{ROOT}/examples/average.py:Average"
HOOKS = f"{ROOT}/tests/tasks/hooks.py"
LINE = f"{ROOT}/tests/tasks/failing.py:Line"
WORDS = ["auto", "--task", RAGGED, "--quiet", "--steps", "20", "--eval-every", "10"]


@pytest.mark.parametrize(
    "strategy", ["zero3", *(pytest.param(s, marks=pytest.mark.slow) for s in ("ddp", "fsdp2"))]
)
def test_an_average_of_the_weights_goes_on_elsewhere(strategy: str, tmp_path: Path) -> None:
    succeed(*WORDS, "--hook", AVERAGE, "--name", "one", "--processes", "1", cwd=tmp_path)
    succeed(*WORDS, "--name", "without", "--processes", "1", cwd=tmp_path)
    both = f"{AVERAGE},{HOOKS}:StopsOnce"
    assert launch(*WORDS, "--hook", both, "--name", "two", "--processes", "1", cwd=tmp_path).returncode == 75
    two = tmp_path / "runs" / "two"
    assert json.loads((two / "run.json").read_text())["hook"] == both.split(",")
    succeed("resume", "runs/two", "--processes", "2", "--strategy", strategy, cwd=tmp_path)

    one, without = tmp_path / "runs" / "one", tmp_path / "runs" / "without"
    final = (one / "final" / "model.safetensors").read_bytes()
    assert final == (without / "final" / "model.safetensors").read_bytes()
    averages = [load_file(run / "final" / "average" / "model.safetensors") for run in (one, two)]
    own = load_file(two / "final" / "model.safetensors")
    for name, average in averages[0].items():
        assert float((average - averages[1][name]).abs().max()) < 1e-5
    assert any(not own[name].equal(averages[1][name]) for name in own)
    metrics = [summary(run)["metrics"] for run in (one, two, without)]
    assert metrics[0]["average_loss"] == pytest.approx(metrics[1]["average_loss"], rel=1e-5)
    assert metrics[0]["average_loss"] != metrics[0]["loss"] == metrics[2]["loss"]
    beside = [row["average_loss"] for row in rows(two) if "split" in row]
    assert len(beside) == 2
    verified = succeed("verify", "runs/two", cwd=tmp_path)
    assert "what hooks made of the weights for final/average" in verified.stdout
    changed = load_file(two / "final" / "average" / "model.safetensors")
    save_file({k: v + 0.1 for k, v in changed.items()}, two / "final" / "average" / "model.safetensors")
    said = launch("verify", "runs/two", cwd=tmp_path).stdout
    assert "since the run wrote it: final/average/model.safetensors" in said


def test_a_hook_that_raises_ends_the_run_and_names_itself(tmp_path: Path) -> None:
    words = ["auto", "--task", LINE, "--quiet", "--name", "run", "--save-every", "5"]
    said = launch(*words, "--hook", f"{HOOKS}:Raises", cwd=tmp_path)
    assert said.returncode == 3
    line = "hook raises failed in step 19 of train: hooks.py, line 13, in on_figures: ValueError: as it was"
    assert line in said.stderr
    run = tmp_path / "runs" / "run"
    assert summary(run)["status"] == "failed"
    assert line in summary(run)["reason"]
    assert "train-10" in {path.name for path in (run / "checkpoints").iterdir()}
    succeed("resume", "runs/run", "--hook", f"{HOOKS}:Looks", cwd=tmp_path)
    assert all(row["gradients_seen"] == 2 for row in rows(run) if row.get("step", 0) > 15 and "lr" in row)


def test_from_python_an_object_is_a_hook_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", warm_python())
    recipe = isobatch.Recipe(task=LINE)
    hook = Average()
    run = isobatch.train(recipe, hooks=[hook], out=str(tmp_path), quiet=True, processes=1)
    assert set(hook.average) == {"weight", "bias"}
    assert "average_loss" in run.metrics
    with pytest.raises(UserError, match="--hook average: is no file; several processes, or a resume, need"):
        isobatch.train(recipe, hooks=[hook], out=str(tmp_path), quiet=True, processes=2, again=True)
    run = isobatch.train(recipe, hooks=[Average], out=str(tmp_path), quiet=True, processes=2, again=True)
    assert "average_loss" in run.metrics


def test_a_run_that_a_hook_taught_goes_on_with_it_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import isobatch\nclass Mine(isobatch.Hook):\n    changes_learning = True\n"
    )
    words = ["auto", "--task", LINE, "--quiet", "--name", "run", "--hook"]
    both = f"./mine.py:Mine,{HOOKS}:StopsOnce"
    assert launch(*words, both, cwd=tmp_path).returncode == 75
    done = launch("resume", "runs/run", "--hook", f"{HOOKS}:StopsOnce", cwd=tmp_path)
    assert "trained with these hooks that change what is learnt, as they were: mine" in complaint(done)
    succeed("resume", "runs/run", cwd=tmp_path)
    verified = launch("verify", "runs/run", cwd=tmp_path)
    assert verified.returncode == 3
    assert "a hook changes what is learnt, and no step is redone with it" in verified.stdout
