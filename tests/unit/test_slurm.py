"""Tests of launch/slurm: when a job stops and when it requeues itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.slurm import client, time_limit
from isobatch.launch.slurm.job import should_save_now
from isobatch.launch.slurm.job_request import JobRequest, plan_for_nodes
from isobatch.launch.slurm.rendezvous import StepNode, join, local_address, wait_for_answers
from isobatch.launch.slurm.requeue import why_not_requeue
from isobatch.launch.slurm.submission import sbatch_script
from isobatch.launch.slurm.submission.options import SlurmOptions

if TYPE_CHECKING:
    from isobatch.tests.conftest import Cli


LINE = f"{Path(__file__).parents[1]}/tasks/failing.py:Line"


def test_the_lead_is_measured_where_it_can_be(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert time_limit.seconds_to_stop(run) is None
    run.metrics.write_text('{"step_seconds": 2}\n{"step_seconds": 4}\n{"split": "valid"}\n{"step_sec')
    assert time_limit.seconds_to_stop(run) == time_limit.SHUTDOWN_SECONDS + 12
    (run.checkpoints / "train-5").mkdir(parents=True)
    (run.checkpoints / "train-5" / "x").write_bytes(b"0" * 10**6)
    assert time_limit.seconds_to_stop(run) == pytest.approx(
        time_limit.SHUTDOWN_SECONDS + 12 + 2e6 / time_limit.SLOW_STORE_BYTES_PER_SECOND
    )
    assert [sbatch_script.default_lead(s) for s in (60, 180, 3600)] == [15, 45, 120]


@pytest.mark.parametrize(
    ("left", "warned", "measured", "stops"),
    [
        (None, False, 0, False),  # no time limit
        (None, True, 0, True),
        (500, False, 0, False),
        (44, False, 0, True),
        (44 + 60, True, 0, False),  # Slurm's signal comes up to a minute early: there is time left
        (3000, True, 0, True),  # preempted, or asked by hand
        (200, False, 201, True),  # steps are longer than was thought
    ],
)
def test_when_a_job_stops(left: float | None, warned: bool, measured: float, stops: bool) -> None:
    assert should_save_now(left, warned, 45, measured) is stops


@pytest.mark.parametrize(
    ("why", "state", "before", "now", "reason"),
    [
        ("limit", "RUNNING", None, [0, 5], ""),
        ("limit", "RUNNING", [0, 5], [0, 6], ""),
        ("limit", "RUNNING", [0, 5], [1, 1], ""),
        ("term", "PREEMPTED", [0, 5], [0, 6], ""),
        ("limit", "", [0, 5], [0, 6], ""),
        ("limit", "RUNNING", [0, 5], [0, 5], "no checkpoint"),
        ("limit", "RUNNING", [1, 5], [0, 9], "no checkpoint"),
        ("limit", "RUNNING", None, None, "no checkpoint"),
        ("term", "CANCELLED", [0, 5], [0, 6], "CANCELLED"),
        ("term", "PENDING", [0, 5], [0, 6], "PENDING"),  # requeued by somebody else
        ("interrupt", "RUNNING", [0, 5], [0, 6], "signal"),
        ("", "RUNNING", [0, 5], [0, 6], "signal"),  # only the step's processes were signalled
    ],
)
def test_when_a_job_requeues_itself(
    why: str, state: str, before: list[int] | None, now: list[int] | None, reason: str
) -> None:
    answer = why_not_requeue(why, state, before, now)
    assert (reason in answer) if reason else not answer


def test_the_world_is_read_from_the_steps_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "hostnames", lambda text: tuple(text.split(",")))
    job = {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "a,b,c,d", "SLURM_JOB_ID": "7"}
    step = {"SLURM_STEP_NODELIST": "b,d", "SLURM_NODEID": "1"}
    assert StepNode.from_environment({**job, **step}).name == "d"
    with pytest.raises(UserError, match="step"):
        StepNode.from_environment(job)
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_GPUS_PER_NODE": "h100:8"}
    allocation = client.Allocation.from_environment({**job, **array})
    assert (allocation.job, allocation.gpus, len(allocation.nodes)) == ("7_3", 8, 4)


def test_a_node_that_does_not_see_the_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isobatch.launch.slurm.rendezvous.ANSWER_SECONDS", 0.2)
    meeting = tmp_path / "r" / "slurm" / "meeting-1"
    meeting.mkdir(parents=True)
    first, second = (StepNode(rank=rank, nodes=("n1", "n2")) for rank in (0, 1))
    atomic_files.write_json(meeting / "0.json", {"node": "n1", "sees_data": True})
    with pytest.raises(UserError, match=r"n2 did not see .* --out on a file system that all nodes share"):
        wait_for_answers(first, meeting, tmp_path)
    atomic_files.write_json(meeting / "1.json", {"node": "n2", "sees_data": False})
    with pytest.raises(UserError, match=r"n2 cannot see the prepared data .* ISOBATCH_CACHE"):
        wait_for_answers(first, meeting, tmp_path)
    monkeypatch.setattr("isobatch.launch.slurm.rendezvous.JOIN_EXTRA_SECONDS", 0.1)
    with pytest.raises(UserError, match=r"n2 does not see .* what n1 wrote"):
        join(second, tmp_path / "elsewhere" / "slurm" / "meeting-1", tmp_path)


def test_a_rendezvous_that_cannot_be_reached_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isobatch.launch.slurm.rendezvous.REACH_SECONDS", 0.2)
    atomic_files.write_json(tmp_path / "call.json", {"addresses": ["127.0.0.1"], "port": 1})
    assert not local_address("127.0.0.1", 1)
    with pytest.raises(UserError, match=r"n2 cannot reach n1 at 127\.0\.0\.1:1"):
        join(StepNode(rank=1, nodes=("n1", "n2")), tmp_path, tmp_path)


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


def test_every_flag_says_what_it_is_for() -> None:
    from isobatch.core.flags import flags_of

    assert all(flag.help for flag in flags_of(SlurmOptions, "slurm").values())
