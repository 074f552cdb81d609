"""The examples run as they stand, and what they say of one entry or three places is so."""

from __future__ import annotations

import base64
import csv
import itertools
import json
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import isobatch
from isobatch.core.optimizers import OPTIMIZERS
from isobatch.core.strategies import STRATEGIES
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint, list_checkpoints
from isobatch.engine.checkpointing.portable_state import saved_moments
from isobatch.launch.serving.command import ServeOptions, make_app
from isobatch.tests.integration.helpers import (
    ROOT,
    figure,
    launch,
    resumed_from,
    rows,
    run_code,
    succeed,
    summary,
    warm_python,
)
from isobatch.tests.integration.test_bad_input import complaint

EXAMPLES = ROOT / "examples"
FAILING = f"{ROOT}/tests/tasks/failing.py"
MINE = ["auto", "--task", "./mine.py:Mine", "--quiet"]


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """A copy: runs are written beside the files."""
    made = shutil.ignore_patterns("runs", "__pycache__")
    return Path(shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=made))


@pytest.fixture
def own_task(examples: Path) -> Path:
    """The user's folder."""
    return examples / "own_task"


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


def test_the_own_task_is_served_by_its_read_rows(own_task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own_task)
    run = isobatch.train(isobatch.Recipe(task="./mine.py:Mine"), name="one", quiet=True)
    client = TestClient(make_app("runs/one", ServeOptions()), raise_server_exceptions=False)

    def ask(*rows: Any, status: int = 200) -> Any:
        answer = client.post("/predict", json={"rows": rows})
        assert answer.status_code == status
        return answer.json()["predictions" if status == 200 else "error"]

    points = [{"x": 0.0, "y": 1.0}, {"y": -0.4, "x": 1}]
    found = ask(*points)
    assert [one["class"] for one in found] == [0, 1]
    assert ask(points[1]) == [pytest.approx(found[1])]
    assert run.predictor()(points) == found
    for wrong, said in [
        ([{"x": 1.0}], "the task's read_rows cannot read these rows: rows: has no column y"),
        ([{"x": "a", "y": 1}], "ValueError: could not convert string to float"),
        ([points[0], {"x": 1}], "rows: must all have the same fields"),
    ]:
        assert said in ask(*wrong, status=400)["message"]
    texts = client.post("/predict", json={"texts": ["a"]}).json()["error"]["message"]
    assert texts == 'texts[0]: a task of your own reads rows: give {"rows": [{...}]}'
    without = isobatch.train(isobatch.Recipe(task=f"{FAILING}:Answers", steps=1), name="without", quiet=True)
    with pytest.raises(isobatch.UserError, match=r"its Points has no method read_rows, .*: add it and train"):
        make_app(str(without.folder), ServeOptions())


def draw_images(folder: Path, count: int) -> None:
    """Noise that is redder in `one`, and greener in `two`, of several sizes and kinds."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for channel, (name, ending) in enumerate({"one": "png", "two": "jpg"}.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            values = generator.integers(0, 60, (20 + number % 3, 24, 3))
            values[..., channel] += 150
            Image.fromarray(values.astype(np.uint8)).save(folder / name / f"{number}.{ending}")


def test_images_are_learnt_from_a_folder_per_class(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = examples / "images"
    monkeypatch.chdir(folder)
    draw_images(folder / "pets", 40)
    draw_images(folder / "new", 2)
    values = {"task": "./images.py:Images", "data": "pets", "size": 16, "epochs": 3}
    run = isobatch.train(isobatch.Recipe(**values), name="pets", save_every=2, keep=99, quiet=True)
    assert 5 < run.facts.samples["valid"] < 30
    assert run.metrics["accuracy"] == 1
    again = resumed_from(run.folder, 4)
    final = [one / "final" / "model.safetensors" for one in (run.folder, again)]
    assert final[0].read_bytes() == final[1].read_bytes()
    assert isobatch.verify(run, micro_batch=7)  # crops and mirrored images are the same in another cut
    succeed("predict", "runs/pets", "--file", "new", "--out", "new.csv", cwd=folder)
    with (folder / "new.csv").open(newline="") as stream:
        assert all(Path(row["file"]).parent.name == row["label"] for row in csv.DictReader(stream))
    sent = base64.b64encode((folder / "new" / "two" / "0.jpg").read_bytes()).decode()
    assert [one["label"] for one in run.predictor()([{"image": sent}])] == ["two"]
    (folder / "new" / "one" / "2.png").write_bytes(b"none")
    said = complaint(launch("predict", "runs/pets", "--file", "new", cwd=folder))
    assert said == "isobatch: new/one/2.png: is no image that can be read"


@pytest.mark.parametrize("processes", [1, 2])
def test_two_networks_learn_by_turns(processes: int, examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(examples)
    monkeypatch.setattr(sys, "executable", warm_python())
    recipe = isobatch.Recipe(task="./adversarial.py:Adversarial", steps=12)
    run = isobatch.train(recipe, name="turns", processes=processes, save_every=1, keep=99, quiet=True)
    saved = [SavedCheckpoint(one) for one in list_checkpoints(run.folder / "checkpoints", ["train"])]
    assert len(saved) == 12
    for step, (before, after) in enumerate(itertools.pairwise(saved), 1):
        moved = {
            name.split("/")[-1].split(".")[0]
            for name in before.entries
            if not torch.equal(before.read(name), after.read(name))
        }
        assert moved == {"critic" if step % 2 == 0 else "generator"}, step
    again = resumed_from(run.folder, 7)
    exact = 0 if processes == 1 else 1e-6  # it goes on with one process
    assert figure(again) == pytest.approx(figure(run.folder), rel=0, abs=exact)
    assert isobatch.verify(run, processes=3 - processes)
    assert all({"critic", "generator"} <= row.keys() for row in run.history if "lr" in row)


def test_what_turns_exclude_is_refused(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(examples)
    recipe = isobatch.Recipe(task="./adversarial.py:Adversarial")
    assert isobatch.plan(recipe, hardware="8xh100", processes=8).strategy == "ddp"
    with pytest.raises(isobatch.UserError, match="a step trains a part of the parameters, so each process"):
        isobatch.plan(recipe, hardware="8xh100", processes=8, strategy="fsdp2")
    file = examples / "adversarial.py"
    file.write_text(file.read_text().replace('else "critic."', 'else "critics."'))
    with pytest.raises(isobatch.TrainingError, match=r"turn_of\(0\): no parameter's name begins with"):
        isobatch.train(isobatch.Recipe(task="./adversarial.py:Adversarial"), quiet=True)


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


def test_the_slurm_jobs_are_printed(examples: Path) -> None:
    lines = (examples / "slurm.sh").read_text().replace("\\\n", " ").splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("isobatch ")]
    for words in commands[:-1]:
        done = succeed(*words, cwd=examples)
        assert done.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=")
    assert [words[0] for words in commands] == ["slurm"] * 4 + ["runs"]
    assert not (examples / "runs").exists()


THIRD_PLACE = (
    "import sys\n"
    "from isobatch.engine.registry import TASKS, Workload\n"
    "TASKS['line'] = Workload('tests.tasks.failing:Line', 'fit a line')\n"
    "from isobatch.launch.cli import main\n"
    "sys.exit(main(sys.argv[1:]))\n"
)


def test_a_workload_is_a_model_file_a_data_file_and_one_entry(tmp_path: Path) -> None:
    def isobatch_with_it(*words: str) -> Any:
        done = run_code(THIRD_PLACE, *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "line          fit a line" in isobatch_with_it("tasks")
    assert "recipe of line" in isobatch_with_it("describe", "line", "--all", "--json")
    isobatch_with_it("auto", "--task", "line", "--steps", "3", "--name", "line", "--quiet")
    run = isobatch.load(tmp_path / "runs" / "line")
    assert (run.status, run.recipe.task, len(_losses(run))) == ("done", "line", 3)
