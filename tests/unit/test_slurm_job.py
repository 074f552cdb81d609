"""Tests of Slurm jobs: when one stops and requeues itself, what ended a step, how its nodes meet."""

from __future__ import annotations

import socket
import subprocess
from typing import TYPE_CHECKING

import pytest

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.clusters.slurm import client, sbatch_script, time_limit
from isobatch.launch.clusters.slurm.job import should_save_now
from isobatch.launch.clusters.slurm.rendezvous import (
    StepNode,
    announce,
    job_is_there,
    join,
    rendezvous_folder,
    wait_for_answers,
)
from isobatch.launch.clusters.slurm.requeue import Leg, requeue
from isobatch.launch.clusters.slurm.step import ORPHANED, STEP_SHELL, Step, explain_end
from isobatch.launch.clusters.slurm.time_limit import LegClock
from isobatch.launch.local.interfaces import local_address

if TYPE_CHECKING:
    from pathlib import Path


def test_the_lead_is_measured_where_it_can_be(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert time_limit.seconds_to_stop(run) is None
    run.metrics.write_text('{"step_seconds": 2}\n{"step_seconds": 4}\n{"split": "valid"}\n{"step_sec')
    assert time_limit.seconds_to_stop(run) == time_limit.SHUTDOWN_SECONDS + 6
    (run.checkpoints / "train-5").mkdir(parents=True)
    (run.checkpoints / "train-5" / "x").write_bytes(b"0" * 10**6)
    assert time_limit.seconds_to_stop(run) == pytest.approx(
        time_limit.SHUTDOWN_SECONDS + 6 + 2e6 / time_limit.SLOW_STORE_BYTES_PER_SECOND
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
    ("why", "shown", "before", "now", "reason"),
    [
        ("limit", "RUNNING", None, [0, 5], ""),
        ("limit", "RUNNING", [0, 5], [0, 6], ""),
        ("limit", "RUNNING", [0, 5], [1, 1], ""),
        ("term", "PREEMPTED", [0, 5], [0, 6], ""),
        ("limit", "", [0, 5], [0, 6], ""),
        ("limit", "RUNNING", [0, 5], [0, 5], "no checkpoint"),
        ("limit", "RUNNING", [1, 5], [0, 9], "no checkpoint"),
        ("limit", "RUNNING", None, None, "no checkpoint"),
        ("term", "CANCELLED", [0, 5], [0, 6], "cancelled"),
        ("term", "COMPLETING", [0, 5], [0, 6], "cancelled"),
        ("term", "COMPLETING Restarts=1", [0, 5], [0, 6], "Slurm does so itself"),
        ("term", "PENDING Restarts=1", [0, 5], [0, 6], "Slurm does so itself"),
        ("interrupt", "RUNNING", [0, 5], [0, 6], "signal"),
        (
            "",
            "RUNNING PreemptTime=None",
            [0, 5],
            [0, 6],
            "signal",
        ),
        ("", "RUNNING PreemptTime=2026-11-22T20:41:37", [0, 5], [0, 6], ""),  # in the grace time
    ],
)
def test_when_a_job_requeues_itself(
    why: str, shown: str, before: list[int] | None, now: list[int] | None, reason: str
) -> None:
    words = f"JobState={shown}".split() if shown else []
    job = dict(word.split("=") for word in words)
    answer = Leg(reason=why, number=1, max_legs=None, before=before, now=now, job=job).why_not_requeue()
    assert (reason in answer) if reason else not answer


def test_a_job_has_so_many_legs_as_were_asked_for() -> None:
    legs = [
        Leg(reason="limit", number=n, max_legs=2, before=None, now=[0, 5], job={}).why_not_requeue()
        for n in (1, 2)
    ]
    assert legs == ["", "this was leg 2 of --max-legs 2"]


def test_a_requeue_is_tried_until_slurm_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["no controller", "no controller", ""])
    monkeypatch.setattr(client, "requeue", lambda job: next(answers))
    monkeypatch.setattr(client, "show_job", lambda job: {})
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert not requeue("7", lambda: 100.0)
    monkeypatch.setattr(client, "requeue", lambda job: "no controller")
    assert requeue("7", lambda: 1.0) == "no controller"  # no time is left
    monkeypatch.setattr(client, "show_job", lambda job: {"JobState": "PENDING"})
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it has answered"))
    assert requeue("7", lambda: 100.0) == "no controller"


@pytest.mark.parametrize(
    ("said", "cause", "reason"),
    [
        (
            "slurmstepd-n2: error: StepId=1.0 exceeded memory limit (4 > 3), being killed",
            "job memory",
            "limit",
        ),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=9.0. Some of the", "job memory", "limit"),
        ("srun: error: n2: task 1: Out Of Memory", "job memory", "limit"),
        ("srun: error: n2: task 1: Killed\nsrun: error: n1: task 0: Terminated", "lost", "launcher on n2"),
        (
            "srun: error: Task launch for StepId=5.1 failed on node n2: Communication connection failure",
            "lost",
            "reach n2",
        ),
        ("isobatch: n2 does not see the run's folder /x: choose", "", "n2 does not see"),
        ("isobatch: rank 1 is lost\nsrun: error: n1: task 0: Exited with exit code 1", None, ""),
        ("srun: error: n1: task 0: Terminated", None, ""),
        ("srun: unrecognized option '--bogus'\nTry \"srun --help\"", "", "unrecognized option '--bogus'"),
        ("srun: error: Unable to create step for job 4: Unable to contact slurm controller", None, ""),
        ("srun: error: Unable to create step for job 46: Requested nodes are busy", "", "nodes are busy"),
        ("srun: error: n2: task 1: Exited with exit code 1\nsrun: error: n1: task 0: Killed", None, ""),
    ],
)
def test_what_srun_says_tells_what_ended_a_step(said: str, cause: str | None, reason: str) -> None:
    verdict = explain_end(said)
    assert (verdict is None) == (cause is None)
    if verdict:
        assert verdict.cause == cause
        assert reason in verdict.reason


@pytest.mark.parametrize(
    ("hides", "says"),
    [("slurm", "n2 does not see the run's folder {folder}"), ("python", "n2 does not see the Python env")],
)
def test_a_node_says_what_it_does_not_see(hides: str, says: str, tmp_path: Path) -> None:
    folder = tmp_path / "it's $(here)"
    folder.mkdir()
    if hides == "python":
        (folder / "slurm").mkdir()
    words = ["/bin/bash", "-c", STEP_SHELL, str(folder / "slurm"), str(folder / "python")]
    done = subprocess.run(words, env={"SLURMD_NODENAME": "n2"}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    verdict = explain_end(done.stderr)
    assert verdict
    assert verdict.code == 2
    assert verdict.reason.startswith(says.format(folder=folder))


def test_a_suspended_job_has_its_time_later() -> None:
    now, answers = [0.0], iter([100.0, None, 60.0])
    clock = LegClock(lambda: next(answers), 180.0, lambda: now[0])
    assert (clock.left(), clock.limit) == (100.0, 180.0)
    now[0] = 1.0
    assert clock.left() == 99.0
    clock.watch()
    now[0] = 63.0  # it was suspended, and Slurm does not answer
    clock.watch()
    assert clock.left() == 99.0
    for now[0] in range(64, 190, 2):
        clock.watch()
        left = clock.left()
    assert left == 60.0 - (now[0] - 184)  # asked again after two minutes


def test_waiting_for_slurm_takes_of_the_time_that_is_left() -> None:
    now = [0.0]
    clock = LegClock(lambda: None, 100.0, lambda: now[0])
    for now[0] in (60.0, 90.0):
        assert clock.left() == 100.0 - now[0]
    clock.begin_watch()
    now[0] = 90.5
    clock.watch()
    assert clock.left() == 9.5


def test_a_clock_without_an_answer_takes_what_was_asked_for() -> None:
    assert LegClock(lambda: None, 180.0, lambda: 0.0).left() == 180.0
    assert LegClock(lambda: None, None, lambda: 0.0).left() is None


def test_a_node_is_named_by_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobatch.launch.clusters.slurm.rendezvous.ANSWER_SECONDS", 0.1)
    monkeypatch.setattr("isobatch.launch.clusters.slurm.rendezvous.JOIN_EXTRA_SECONDS", 0.1)
    step = {"SLURM_STEP_ID": "0", "SLURMD_NODENAME": "d"}
    with pytest.raises(UserError, match=r"d does not see .* what the job wrote"):
        StepNode.find(step, tmp_path, "1")
    folder = rendezvous_folder(tmp_path, "1")
    folder.mkdir(parents=True)
    monkeypatch.setattr(client, "address_of", lambda node: f"address of {node}")
    announce(folder, ["b", "d"], 7)
    found = StepNode.find(step, tmp_path, "1")
    assert (found.name, found.rank, found.addresses, found.job_port) == ("d", 1, ("address of b",), 7)
    with pytest.raises(UserError, match="step"):
        StepNode.find({"SLURM_JOB_ID": "7"}, tmp_path, "1")


def test_an_allocation_is_read_from_the_jobs_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "hostnames", lambda text: tuple(text.split(",")))
    job = {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "a,b,c,d", "SLURM_JOB_ID": "7"}
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_GPUS_PER_NODE": "h100:8"}
    allocation = client.Allocation.from_environment({**job, **array})
    assert (allocation.job, allocation.gpus, len(allocation.nodes)) == ("7_3", 8, 4)


def test_a_node_asks_whether_the_job_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobatch.launch.clusters.slurm.rendezvous.JOB_GONE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = StepNode(rank=1, nodes=("127.0.0.1", "n2"), job_port=server.getsockname()[1])
        assert job_is_there(node)
    assert not job_is_there(node)


def test_a_node_that_does_not_see_the_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isobatch.launch.clusters.slurm.rendezvous.ANSWER_SECONDS", 0.2)
    meeting = tmp_path / "r" / "slurm" / "meeting-1"
    meeting.mkdir(parents=True)
    first, second = (StepNode(rank=rank, nodes=("n1", "n2")) for rank in (0, 1))
    atomic_files.write_json(meeting / "0.json", {"node": "n1", "sees_data": True})
    with pytest.raises(UserError, match=r"n2 did not see .* --out on a file system that all nodes share"):
        wait_for_answers(first, meeting, tmp_path)
    atomic_files.write_json(meeting / "1.json", {"node": "n2", "sees_data": False})
    with pytest.raises(UserError, match=r"n2 cannot see the prepared data .* ISOBATCH_CACHE"):
        wait_for_answers(first, meeting, tmp_path)
    monkeypatch.setattr("isobatch.launch.clusters.slurm.rendezvous.JOIN_EXTRA_SECONDS", 0.1)
    with pytest.raises(UserError, match=r"n2 does not see .* what n1 wrote"):
        join(second, tmp_path / "elsewhere" / "slurm" / "meeting-1", tmp_path)


def test_a_rendezvous_that_cannot_be_reached_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isobatch.launch.clusters.slurm.rendezvous.REACH_SECONDS", 0.2)
    atomic_files.write_json(tmp_path / "call.json", {"addresses": ["127.0.0.1"], "port": 1})
    assert not local_address("127.0.0.1", 1)
    with pytest.raises(UserError, match=r"n2 cannot reach n1 at 127\.0\.0\.1:1"):
        join(StepNode(rank=1, nodes=("n1", "n2")), tmp_path, tmp_path)


def test_the_first_line_of_a_step_is_a_nodes(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["srun: error: n2: task 1", "isobatch: n2 does not see /x: mend it", "srun: done", "loss 1.0"]
    step = Step(["/bin/sh", "-c", 'printf "%s\\n" "$@" >&2', "sh", *words], "job 7, leg 1")
    assert step.said().splitlines() == words
    assert capfd.readouterr().err.splitlines() == [words[1], words[0], words[2], "job 7, leg 1", words[3]]


@pytest.mark.parametrize(
    ("array", "job"), [({}, "7"), ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, "7_2")]
)
def test_the_shell_of_an_orphaned_node_requeues_the_job_until_slurm_answers(
    array: dict[str, str], job: str, tmp_path: Path
) -> None:
    """It stands outside of a container, which has none of Slurm's commands, and slurmctld may be away."""
    (tmp_path / "slurm").mkdir()
    asked = tmp_path / "asked"
    stand_ins = {
        "launcher": f"exit {ORPHANED}",
        "scontrol": f'echo "$@" >>{asked}; [ $(wc -l <{asked}) = 3 ]',
        "sleep": "exit 0",
    }
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"SLURMD_NODENAME": "n2", "SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:/usr/bin:/bin"} | array
    words = ["/bin/bash", "-c", STEP_SHELL, str(tmp_path / "slurm"), "launcher"]
    done = subprocess.run(words, env=environment, timeout=20, check=False)
    assert done.returncode == ORPHANED
    assert asked.read_text().splitlines() == [f"requeue {job}"] * 3


def test_the_shell_ends_as_its_launcher_does(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    for script, code in (("exit 3", 3), ("kill -9 $$", -9)):
        words = ["/bin/bash", "-c", STEP_SHELL, str(tmp_path / "slurm"), "/bin/sh", "-c", script]
        done = subprocess.run(words, env={"SLURMD_NODENAME": "n2"}, timeout=20, check=False)
        assert done.returncode == code


def test_a_killed_srun_is_seen() -> None:
    killed = Step(["/bin/sh", "-c", "kill -9 $$"], "")
    assert (killed.said(), killed.was_killed) == ("", True)
    failed = Step(["/bin/sh", "-c", "exit 1"], "")
    assert (failed.said(), failed.was_killed) == ("", False)
