"""Sweeps by `auto`: a run for each value of a list, a table and sweep.json."""

from __future__ import annotations

import json
from pathlib import Path

from isobatch.tests.integration.helpers import command, warm_command

LINE = f"{Path(__file__).parents[1]}/tasks/failing.py:Line"


def test_each_list_makes_runs_and_a_table(tmp_path: Path) -> None:
    words = ["auto", "--task", LINE, "--lr", "1e-3,1e-2", "--seed", "0-1", "--steps", "5", "--name", "s"]
    first = command(warm_command(*words), tmp_path)
    assert first.returncode == 0, first.stderr
    assert "run 4 of 4: lr 0.01 seed 1" in first.stderr
    assert "deviation" in first.stdout
    assert "best" in first.stdout
    folder = tmp_path / "runs" / "sweep-s"
    rows = json.loads((folder / "sweep.json").read_text())["rows"]
    assert " --trials 4 --seed 0,1 (under another --name: " in first.stdout
    assert [row["values"] for row in rows] == [{"lr": 0.001}, {"lr": 0.01}]
    assert [Path(run).name for run in rows[0]["runs"]] == ["s-lr0.001-seed0", "s-lr0.001-seed1"]
    again = command(warm_command(*words, "--quiet", "--json"), tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["rows"] == rows, "all are done: nothing is trained again"
    less = command(warm_command(*words[:4], "1e-3,1e-4", *words[5:]), tmp_path)
    assert less.returncode == 2
    assert "not asked for here (lr 0.01): choose another --name" in less.stderr
    assert json.loads((folder / "sweep.json").read_text())["rows"] == rows


def test_a_halved_run_that_goes_on_ends_as_if_it_had_been_trained_at_once(tmp_path: Path) -> None:
    words = ["auto", "--task", LINE, "--eval-every", "5", "--quiet", "--json", "--lr"]
    halve = warm_command(*words, "1e-4,1e-3,1e-2", "--halving", "2", "--name", "s")
    first = command(halve, tmp_path)
    assert first.returncode == 0, first.stderr
    found = json.loads(first.stdout)
    assert [(row["values"]["lr"], row.get("stopped")) for row in found["rows"]] == [
        (1e-4, 10),
        (1e-3, 20),
        (1e-2, None),
    ]
    assert (found["best"]["values"], found["steps"], found["steps_saved"]) == ({"lr": 1e-2}, 120, 50)
    assert [(rung["share"], len(rung["scores"])) for rung in found["rungs"]] == [(0.25, 3), (0.5, 2)]
    whole = command(warm_command(*words, "1e-2", "--name", "whole"), tmp_path)
    assert whole.returncode == 0, whole.stderr
    one, other = (tmp_path / "runs" / name / "final" / "model.safetensors" for name in ("s-lr0.01", "whole"))
    assert one.read_bytes() == other.read_bytes()
    logs = {file: file.read_bytes() for file in (tmp_path / "runs").glob("s-*/metrics.jsonl")}
    again = command(halve, tmp_path)
    assert json.loads(again.stdout) == found, again.stderr
    assert {file: file.read_bytes() for file in logs} == logs, "nothing is trained again"
    shown = command(warm_command("report", "runs/sweep-s", "--json"), tmp_path)
    assert [run["run"] for run in json.loads(shown.stdout)["runs"]] == ["s-lr0.01"], shown.stderr
    page = (tmp_path / "runs" / "sweep-s" / "report" / "report.html").read_text()
    assert "stopped at step" in page
    assert page.count("<svg") == 2, "the sweep's, and that of the best setting's runs"
    assert (tmp_path / "runs" / "sweep-s" / "report" / "sweep-s.tex").is_file()
    drawn = command(warm_command("report", "--png", "runs/sweep-s", "--to", "figures"), tmp_path)
    assert drawn.stdout.split() == ["figures/sweep-s.png", "figures/sweep-s.svg"], drawn.stderr
    resumed = command(warm_command("resume", str(tmp_path / "runs" / "s-lr0.0001"), "--json"), tmp_path)
    assert json.loads(resumed.stdout)["status"] == "done", "its stop is forgotten"


def test_a_run_that_fails_does_not_end_the_sweep(tmp_path: Path) -> None:
    words = ["--lr", "1e30,1e-2", "--optimizer", "sgd", "--clip", "0", "--steps", "9", "--quiet", "--json"]
    done = command(warm_command("auto", "--task", LINE, *words), tmp_path)
    assert done.returncode == 3, done.stderr
    assert [row["failed"] for row in json.loads(done.stdout)["rows"]] == [0, 1], "by their rates"


def test_a_run_begins_with_the_weights_of_another(tmp_path: Path) -> None:
    def ended(*words: str) -> str:
        done = command(warm_command(*words), tmp_path)
        return f"{done.returncode}: {done.stderr.strip() or done.stdout}"

    first = ["auto", "--task", LINE, "--lr", "1e-2", "--steps", "9", "--name", "a", "--quiet"]
    assert ended(*first).startswith("0")
    assert ended("auto", "--from", "runs/a", "--steps", "3", "--name", "b", "--quiet").startswith("0")
    rows = [json.loads(line) for line in (tmp_path / "runs" / "b" / "metrics.jsonl").read_text().splitlines()]
    before = json.loads((tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()[0])
    losses = [row["loss"] for row in rows if "loss" in row and "lr" in row]
    assert losses[0] < before["loss"], "it began where the other ended"
    recipe = json.loads((tmp_path / "runs" / "b" / "recipe.json").read_text())
    assert recipe["starts_from"]["run"] == str(tmp_path / "runs" / "a")
    assert (recipe["lr"], recipe["steps"]) == (1e-2, [3])
    assert ended("verify", "runs/b", "--processes", "2").startswith("0")
    said = ended("auto", "--from", "runs/a", "--task", "recommender", "--steps", "3")
    assert "is a run of" in said
    checkpoint = (
        tmp_path / "runs" / "a" / "checkpoints" / recipe["starts_from"]["checkpoint"] / "checksums.json"
    )
    checkpoint.write_text(checkpoint.read_text() + " ")
    assert "is another checkpoint now" in ended("verify", "runs/b")
    checkpoint.unlink()
    assert "has no checkpoint" in ended("auto", "--from", "runs/a", "--steps", "3", "--name", "c")
