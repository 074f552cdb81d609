"""Tests of launch/control: the table of runs, runs side by side, and runs that are removed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.engine.registry import workload
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.launch.control.one_run import remove
from isobatch.launch.control.runs import compare, runs
from isobatch.tests.unit.helpers import plan

if TYPE_CHECKING:
    from pathlib import Path

Say = pytest.CaptureFixture[str]


def made(folder: Path, accuracy: float | None, data: str = "f", **changes: Any) -> RunFolder:
    """A classifier's run; finished where it has an accuracy."""
    recipe, _ = workload("classifier").complete({"steps": [10], **changes})
    facts = Facts(fingerprint=data, folder="", samples={"train": 100}, lengths=(8, 16))
    run = RunFolder.create(folder, recipe, facts, RunOptions())
    run.write_plan(plan(processes=1 if accuracy else 2))
    if accuracy is not None:
        metrics = {"loss": 0.5, "accuracy": accuracy, "accuracy_ci95": [0.1, 0.9]}
        done = {"status": "done", "steps": 10, "split": "valid", "monitor": "accuracy"}
        done |= {"metrics": metrics}
        atomic_files.write_json(run.folder / "summary.json", done)
    return run


def test_the_table_says_the_tasks_own_metric(
    tmp_path: Path, capsys: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "a", 0.8, lr=1e-3)
    made(tmp_path / "b", 0.9, lr=2e-3, seed=3)
    made(tmp_path / "c", None, lr=2e-3, seed=3, data="other")
    assert runs(["."]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["run", "made", "task", "state"]
    assert "accuracy 0.8" in lines[0]
    assert "done" in lines[1]
    assert "unfinished" in lines[2]
    assert runs(["--json", str(tmp_path)]) == 0  # a switch takes no folder
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 3


def test_runs_stand_side_by_side_with_what_differs_first(tmp_path: Path, capsys: Say) -> None:
    one, two = made(tmp_path / "a", 0.8, lr=1e-3), made(tmp_path / "b", 0.9, data="g", lr=2e-3)
    assert compare([str(one.folder), str(two.folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "recipe"
    assert lines[2].split() == ["lr", "0.001", "0.002"]
    assert any(line.split() == ["accuracy", "0.8", "0.9"] for line in lines)
    assert "metrics, valid" in lines
    assert "ci95" not in "".join(lines)
    assert lines[-1] == "another protocol: metrics are not comparable"
    assert compare(["--json", str(one.folder), str(one.folder)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["recipe"], found["data"], found["plan"]) == ({}, {}, {})


@pytest.mark.parametrize(
    ("data", "held_out", "split", "said"),
    [
        ("f", "h", "test", ""),
        ("g", "h", "test", "the same test: metrics are comparable"),
        ("g", "i", "test", "another protocol: metrics are not comparable"),
        ("g", "h", "valid", "another protocol: metrics are not comparable"),
    ],
)
def test_runs_are_comparable_where_the_test_is_the_same(
    data: str, held_out: str, split: str, said: str, tmp_path: Path, capsys: Say
) -> None:
    """However training cuts the data; the model's own figures stand above those of baselines."""
    for name, *made_of in (("a", "f", "h", "test"), ("b", data, held_out, split)):
        recipe, _ = workload("recommender").complete({"dim": 8 if name == "a" else 16})
        facts = Facts(fingerprint=made_of[0], folder="", samples={"train": 9}, lengths=(1,))
        facts.extra["held_out"] = made_of[1]
        run = RunFolder.create(tmp_path / name, recipe, facts, RunOptions())
        figures = {"full_ease_ndcg@10": 0.2, "full_ndcg@10": 0.1, "ease_coverage@10": 0.3, "coverage@10": 0.4}
        summary = {"status": "done", "task": "recommender", "split": made_of[2], "metrics": figures}
        atomic_files.write_json(run.folder / "summary.json", {**summary, "remark": "EASE ranks better"})
    assert compare([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split("  ")[1] for line in lines if "@10" in line]
    assert names == ["full ndcg@10", "coverage@10", "full ease ndcg@10", "ease coverage@10"]
    told = ["a: EASE ranks better", "b: EASE ranks better", *[said] * bool(said)]
    assert lines[-len(told) :] == told


def test_a_run_is_removed_only_where_that_is_agreed(tmp_path: Path, capsys: Say) -> None:
    run, other = made(tmp_path / "a", 0.8), made(tmp_path / "b", 0.8)
    with pytest.raises(UserError, match="say --yes") as refused:
        remove([str(run.folder), str(other.folder)])
    assert all(f"{one.folder} (" in str(refused.value) for one in (run, other))
    assert run.folder.is_dir()
    assert other.folder.is_dir()
    assert remove(["--yes", str(run.folder)]) == 0
    assert not run.folder.exists()
    assert "removed" in capsys.readouterr().out


def test_a_sweep_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "sweep-lrs").mkdir(parents=True)
    (tmp_path / "runs" / "sweep-lrs" / "sweep.json").write_text("{}")
    for name in ("lrs", "sweep-lrz"):
        with pytest.raises(UserError, match="did you mean runs/sweep-lrs"):
            RunFolder.open(name)


def test_what_is_no_run_or_in_use_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(UserError):
        remove([str(tmp_path / "photos"), "--yes"])
    run = made(tmp_path / "a", None)
    (tmp_path / "link").symlink_to(run.folder)
    with pytest.raises(UserError, match="is a link"):
        remove([str(tmp_path / "link"), "--yes"])
    monkeypatch.setattr(RunFolder, "is_training", lambda _: True)
    with pytest.raises(UserError, match="is running: `runs cancel"):
        remove([str(run.folder), "--yes"])
    assert run.folder.is_dir()
    assert (tmp_path / "photos").is_dir()


@pytest.mark.parametrize(("command", "words"), [(compare, []), (remove, [])])
def test_without_runs_they_say_how(command: Any, words: list[str]) -> None:
    with pytest.raises(UserError, match=r"give .* as in: runs \w+ runs/"):
        command(words)
