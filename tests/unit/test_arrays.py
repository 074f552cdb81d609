"""Tests of launch/clusters/slurm/command.py and of `slurm` with lists: runs, names, numbers and folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core import atomic_files
from isobatch.launch.clusters.slurm import command
from isobatch.launch.local.arguments import parse_sweep

if TYPE_CHECKING:
    from isobatch.tests.conftest import Cli

LINE = f"{Path(__file__).parents[1]}/tasks/failing.py:Line"


@pytest.mark.parametrize(
    ("words", "array", "wanted"),
    [
        ("", False, {0: "r"}),
        ("--seed 3", True, {3: "r"}),
        ("--seed 2026,7", True, {0: "r-seed2026", 1: "r-seed7"}),
        ("--seed 0-1", True, {0: "r-seed0", 1: "r-seed1"}),
        ("--lr 1e-3,3e-3", True, {0: "r-lr0.001", 1: "r-lr0.003"}),
    ],
)
def test_the_runs_of_an_array(words: str, array: bool, wanted: dict[int, str]) -> None:
    points = parse_sweep(["--task", LINE, "--name", "r", *words.split()], "auto")
    assert {n: request.run.name for n, request in command.numbered(points, array).items()} == wanted


def test_the_numbers_are_written_short() -> None:
    assert command.array_text([9, 0, 1, 2, 3, 5, 6], None) == "0-3,5,6,9"
    assert command.array_text(range(1000), 8) == "0-999%8"


def test_an_array_is_seeds_and_a_limit(cli: Cli) -> None:
    words = ["slurm", "--task", LINE, "--cpu", "--time", "5", "--name", "r", "--json", "--array", "4,0-1%2"]
    made = json.loads(cli(*words, env={"PATH": "/usr/bin/nowhere"}).out)
    assert [Path(run).name for run in made["runs"]] == ["r-seed4", "r-seed0", "r-seed1"]
    assert "#SBATCH --array=0,1,4%2\n" in made["script"]


def test_a_larger_sweep_remembers_a_smaller_one(cli: Cli, tmp_path: Path) -> None:
    words = ["slurm", "--task", LINE, "--cpu", "--time", "5", "--name", "r", "--json"]

    def sweep(*more: str) -> tuple[dict[str, Any], str]:
        done = cli(*words, *more, env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"})
        assert done.code == 0, done.err
        return json.loads(done.out), done.err

    small, _ = sweep("--lr", "1e-2,3e-2")
    assert [Path(run).name for run in small["runs"]] == ["r-lr0.01", "r-lr0.03"]
    assert "#SBATCH --array=0,1\n" in small["script"]
    done, held = (Path(run) for run in small["runs"])
    atomic_files.write_json(done / "summary.json", {"status": "done"})
    atomic_files.write_json(held / "slurm" / "job.json", {"job": "7_1"})
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\necho 7_1 RUNNING 0 None\n")
    (tmp_path / "bin" / "squeue").chmod(0o755)
    large, said = sweep("--lr", "1e-2,3e-2", "--seed", "0-1", "--parallel", "1")
    assert [Path(run).name for run in large["runs"]] == ["r-lr0.01-seed1", "r-lr0.03-seed1"]
    assert "#SBATCH --array=1,3%1\n" in large["script"]
    assert f"{done} has this recipe and is done" in said
    assert f"{held} is in job 7_1 already (RUNNING): it stays there" in said
    assert sweep("--lr", "1e-2,3e-2")[0] == {"job": None, "script": None, "path": None, "runs": []}
    assert json.loads((held / "slurm" / "job.json").read_text()) == {"job": "7_1"}
