"""Tests of launch/clusters/slurm: when a job stops and when it requeues itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.clusters.slurm import client
from isobatch.launch.clusters.slurm.job_request import JobRequest, plan_for_nodes
from isobatch.launch.clusters.slurm.options import SlurmOptions

if TYPE_CHECKING:
    from isobatch.tests.conftest import Cli


LINE = f"{Path(__file__).parents[1]}/tasks/failing.py:Line"


@pytest.mark.parametrize("state", ["idle", "allocated", "mixed", "draining", "completing"])
def test_nodes_that_can_be_used(state: str) -> None:
    assert client.is_usable(state)


@pytest.mark.parametrize("state", ["down", "down*", "idle*", "drained", "failing", "fail"])
def test_nodes_that_cannot(state: str) -> None:
    assert not client.is_usable(state)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--time", "5"], "--gpus-per-node, or --cpu"),
        (["--cpu"], "--time"),
        (["--cpu", "--time", "soon"], "--time soon"),
        (["--cpu", "--gpus-per-node", "2", "--time", "5"], "--cpu"),
        (["--cpu", "--time", "5", "--lead", "301"], "--lead 301"),
        (["--cpu", "--time", "5", "--nodes", "2", "--processes", "3"], "--processes 3"),
        (["--cpu", "--time", "5", "--after", "now"], "--after now"),
        (["--cpu", "--time", "5", "--setup", "/no/such"], "--setup /no/such"),
        (["--cpu", "--time", "5", "--sbatch", "--ntasks=3"], "--sbatch --ntasks=3"),
        (
            ["--cpu", "--time", "5", "--nodes", "2", "--strategy", "single"],
            "--strategy single: is one process",
        ),
        (["--cpu", "--time", "5", "--strategy", "zero2"], "--strategy zero2: one process has nobody"),
        (["--cpu", "--time", "5", "--job-name", "a\nb"], "--job-name"),
        (["--cpu", "--time", "5", "--array", "9-1"], "--array 9-1"),
        (["--cpu", "--time", "5", "--seed", "1", "--array", "0-1"], "--seed"),
        (["--cpu", "--time", "5", "--partiton", "x"], "(did you mean --partition?)"),
        (["--cpu", "--time", "5", "--srun", "--nodes=3"], "--srun --nodes=3"),
        (["--cpu", "--time", "5", "--sbatch", "--exclusive : -N2"], "a heterogeneous job"),
        (["--cpu", "--time", "5", "--mpi", "a b"], "--mpi a b"),
        (["--cpu", "--time", "5", "--mail", "me"], "--mail me: is not one address"),
        (["--cpu", "--time", "5", "--signal", "TERM"], "--signal TERM: is not one of USR1, USR2, HUP"),
        (["--cpu", "--time", "5", "--max-legs", "0"], "--max-legs 0"),
        (["--cpu", "--time", "5", "--container", "./no.sif"], "--container ./no.sif: there is no such file"),
        (["--cpu", "--time", "5", "--container-python", "python"], "says nothing without --container"),
        (["--cpu", "--time", "5", "--parallel", "2"], "--parallel 2: limits the runs of an array"),
        (["--cpu", "--time", "5", "--lr", "1e-3,x"], "--lr x: is not a number"),
        (["--cpu", "--time", "5", "--seed", "1-2", "--array", "0-1"], "--seed"),
        (["--cpu", "--time", "5", "--workers", "1,2"], "--workers 1,2: is not an integer"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_made(
    words: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from isobatch.launch.cli import BEFORE_TORCH, main

    monkeypatch.chdir(tmp_path)
    settings = {"ISOBATCH_STARTED": "0", "TRANSFORMERS_VERBOSITY": "error", **BEFORE_TORCH}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert main(["slurm", "--task", LINE, *words]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_script_is_printed_and_its_run_is_ready(cli: Cli, tmp_path: Path) -> None:
    words = ["slurm", "--task", LINE, "--cpu", "--nodes", "2", "--time", "00:03:00", "--name", "r"]
    done = cli(*words, env={"PATH": "/usr/bin/nowhere"})
    assert done.code == 0, done.err
    run = RunFolder.open(tmp_path / "runs" / "r")
    assert done.out == (run.folder / "slurm" / "job.sh").read_text()
    assert plan_for_nodes(run, 2, JobRequest.read(run)).processes == 2
    assert plan_for_nodes(run, 1, JobRequest.read(run)).processes == 1
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


def test_every_flag_says_what_it_is_for() -> None:
    from isobatch.core.flags import flags_of

    assert all(flag.help for flag in flags_of(SlurmOptions, "slurm").values())
