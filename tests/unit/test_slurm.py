"""Tests of launch/clusters/slurm: when a job stops and when it requeues itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from isobatch.core.errors import UserError
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.clusters.slurm import client
from isobatch.launch.clusters.slurm.command import slurm
from isobatch.launch.clusters.slurm.job import plan_for_nodes
from isobatch.launch.clusters.slurm.legs import JobRequest

if TYPE_CHECKING:
    from isobatch.tests.conftest import Cli


LINE = f"{Path(__file__).parents[1]}/tasks/failing.py:Line"


def test_nodes_that_can_be_used() -> None:
    assert all(map(client.is_usable, ("idle", "allocated", "mixed", "draining", "completing")))
    assert not any(map(client.is_usable, ("down", "down*", "idle*", "drained", "failing", "fail")))


@pytest.mark.parametrize(
    "words",
    [
        "--time 5",  # needs GPUs, or --cpu
        "--cpu",  # needs --time
        "--cpu --time soon",
        "--time 5 --gpus-per-node 2 --cpu",
        "--cpu --time 5 --lead 301",
        "--cpu --time 5 --nodes 2 --processes 3",
        "--time 5 --gpus-per-node 2 --nodes 2 --processes 6",
        "--cpu --time 5 --setup /no/such",
        "--cpu --time 5 --sbatch --ntasks=3",
        "--cpu --time 5 --nodes 2 --strategy single",
        "--cpu --time 5 --strategy zero2",
        "--cpu --time 5 --array 9;1",
        "--cpu --time 5 --array 0-1 --seed 1",
        "--cpu --time 5 --array 0-1 --seed 1-2",
        "--cpu --time 5 --partiton x",
        "--cpu --time 5 --srun --nodes=3",
        "--cpu --time 5 --mpi pmix",
        "--cpu --time 5 --mail me",
        "--cpu --time 5 --max-legs 0",
        "--cpu --time 5 --container ./no.sif",
        "--cpu --time 5 --parallel 2",
        "--cpu --time 5 --lr 1e-3,x",
        "--cpu --time 5 --workers 1,2",
    ],
)
def test_what_is_wrong_is_said_before_anything_is_made(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last flag is the wrong one, or the one that misses another."""
    monkeypatch.chdir(tmp_path)
    flag = [word for word in words.split(" ") if re.match(r"--(?!ntasks|nodes=)", word)][-1]
    with pytest.raises(UserError, match=flag if len(words) > 8 else "--gpus-per-node, or --cpu|--time"):
        slurm(["--task", LINE, *words.split(" ")])
    assert not list(tmp_path.iterdir())


def test_the_script_is_printed_and_its_run_is_ready(cli: Cli, tmp_path: Path) -> None:
    words = ["slurm", "--task", LINE, "--cpu", "--nodes", "2", "--time", "00:03:00", "--name", "r"]
    done = cli(*words, env={"PATH": "/usr/bin/nowhere"})
    assert done.code == 0, done.err
    run = RunFolder.open(tmp_path / "runs" / "r")
    assert done.out == (run.folder / "slurm" / "job.sh").read_text()
    request = JobRequest.read(run.folder)
    assert [plan_for_nodes(run, nodes, request).processes for nodes in (1, 2)] == [1, 2]
    refused = cli(*words, "--submit", env={"PATH": "/usr/bin/nowhere"})
    assert refused.code == 2
    assert "there is no sbatch here" in refused.err


def test_one_submission_of_a_run_at_a_time(cli: Cli, tmp_path: Path) -> None:
    words = ["slurm", "--task", LINE, "--cpu", "--time", "00:03:00", "--name", "r"]
    assert cli(*words, env={"PATH": "/usr/bin/nowhere"}).code == 0
    with RunFolder(tmp_path / "runs" / "r").lock("submit"):
        refused = cli(*words, env={"PATH": "/usr/bin/nowhere"})
    assert refused.code == 2
    assert "is being submitted by another process" in refused.err
