"""Tests of Slurm jobs: when one stops and requeues itself, what ended a step, how its nodes meet."""

from __future__ import annotations

import socket
import subprocess
from typing import TYPE_CHECKING

import pytest

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.clusters.slurm import client, legs, node
from isobatch.launch.clusters.slurm.command import default_lead
from isobatch.launch.clusters.slurm.legs import LegClock, requeue, should_save_now, why_not_requeue
from isobatch.launch.clusters.slurm.node import Meeting
from isobatch.launch.clusters.slurm.step import ORPHANED, STEP_SHELL, explain_end

if TYPE_CHECKING:
    from pathlib import Path


def test_the_lead_is_measured_where_it_can_be(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert legs.seconds_to_stop(run) == 0
    run.metrics.write_text('{"step_seconds": 2}\n{"step_seconds": 4}\n{"split": "valid"}\n{"step_sec')
    assert legs.seconds_to_stop(run) == legs.SHUTDOWN_SECONDS + 6
    (run.checkpoints / "train-5").mkdir(parents=True)
    (run.checkpoints / "train-5" / "x").write_bytes(b"0" * 10**6)
    written = 2e6 / legs.SLOW_STORE_BYTES_PER_SECOND
    assert legs.seconds_to_stop(run) == pytest.approx(legs.SHUTDOWN_SECONDS + 6 + written)
    assert [default_lead(s) for s in (60, 180, 3600)] == [15, 45, 120]


@pytest.mark.parametrize(
    ("left", "warned", "measured", "stops"),
    [
        (500, False, 0, False),
        (44, False, 0, True),
        (44 + 60, True, 0, False),  # Slurm's signal comes up to a minute early: there is time left
        (3000, True, 0, True),  # preempted, or asked by hand
        (200, False, 201, True),  # steps are longer than was thought
    ],
)
def test_when_a_job_stops(left: float, warned: bool, measured: float, stops: bool) -> None:
    assert should_save_now(left, warned, 45, measured) is stops


@pytest.mark.parametrize(
    ("why", "shown", "before", "now", "reason"),
    [
        ("limit", "RUNNING", None, [0, 5], ""),
        ("limit", "RUNNING", [0, 5], [1, 1], ""),
        ("term", "PREEMPTED", [0, 5], [0, 6], ""),
        ("limit", "RUNNING", [0, 5], [0, 5], "no checkpoint"),
        ("limit", "RUNNING", None, None, "no checkpoint"),
        ("term", "COMPLETING", [0, 5], [0, 6], "cancelled"),
        ("term", "COMPLETING Restarts=1", [0, 5], [0, 6], "Slurm does so itself"),
        ("", "RUNNING PreemptTime=None", [0, 5], [0, 6], "signal"),
        ("", "RUNNING PreemptTime=2026-11-22T20:41:37", [0, 5], [0, 6], ""),  # in the grace time
    ],
)
def test_when_a_job_requeues_itself(
    why: str, shown: str, before: list[int] | None, now: list[int] | None, reason: str
) -> None:
    job = dict(word.split("=") for word in f"JobState={shown}".split())
    answer = why_not_requeue(why, 1, None, before, now, job)
    assert (reason in answer) if reason else not answer
    assert "--max-legs 1" in why_not_requeue("limit", 1, 1, None, [0, 5], {})


def test_a_requeue_is_tried_until_slurm_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    silent, done = client.Done((), 1, "", "no controller"), client.Done((), 0, "", "")
    answers = iter([silent, silent, done])
    monkeypatch.setattr(client, "run_slurm", lambda *_: next(answers, silent))
    monkeypatch.setattr(client, "show", lambda kind, job: {})
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert not requeue("7", lambda: 100.0)
    assert requeue("7", lambda: 1.0) == "no controller"  # no time is left
    monkeypatch.setattr(client, "show", lambda kind, job: {"JobState": "PENDING"})
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it has answered"))
    assert requeue("7", lambda: 100.0) == "no controller"


@pytest.mark.parametrize(
    ("said", "cause", "reason"),
    [
        ("slurmstepd-n2: error: StepId=1.0 exceeded memory limit (4 > 3), being", "job memory", "limit"),
        ("srun: error: n2: task 1: Killed\nsrun: error: n1: task 0: Terminated", "lost", "launcher on n2"),
        ("srun: error: Task launch for StepId=5.1 failed on node n2: Communication", "lost", "reach n2"),
        ("isobatch: n2 does not see the run's folder /x: choose", "", "n2 does not see"),
        ("isobatch: rank 1 is lost\nsrun: error: n1: task 0: Exited with exit code 1", None, ""),
        ("srun: unrecognized option '--bogus'\nTry \"srun --help\"", "", "unrecognized option '--bogus'"),
        ("srun: error: Unable to create step for job 4: Unable to contact slurm controller", None, ""),
        ("srun: error: Unable to create step for job 46: Requested nodes are busy", "", "nodes are busy"),
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
    [
        ("slurm", "n2 does not see the run's folder {folder}"),
        ("data", "n2 does not see the prepared data {folder}/data"),
        ("python", "n2 does not see the Python env"),
    ],
)
def test_a_node_says_what_it_does_not_see(hides: str, says: str, tmp_path: Path) -> None:
    folder = tmp_path / "it's $(here)"
    seen = {"slurm": [], "data": ["slurm"], "python": ["slurm", "data"]}[hides]
    for name in seen:
        (folder / name).mkdir(parents=True)
        (folder / name / "facts.json").touch()
    words = ["/bin/bash", "-c", STEP_SHELL, *(str(folder / name) for name in ("slurm", "data", "python"))]
    done = subprocess.run(words, env={"SLURMD_NODENAME": "n2"}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    verdict = explain_end(done.stderr)
    assert verdict
    assert verdict.code == 2
    assert verdict.reason.startswith(says.format(folder=folder))


def test_a_suspended_job_has_its_time_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now, answers = [0.0], iter([100.0, 98.0, None, 60.0])
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = LegClock(lambda: next(answers), 180.0)
    assert (clock.left(), clock.limit) == (100.0, 180.0)
    now[0] = 62.0  # it was suspended
    clock.watch()
    assert clock.left() == 98.0
    for now[0] in range(64, 184, 2):  # asked again after two minutes: no answer
        clock.watch()
    assert clock.left() == 98.0 - (now[0] - 62)
    now[0] = 302.0
    clock.watch()
    assert clock.left() == 60.0
    assert LegClock(lambda: None, 180.0).left() == 180.0


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANSWER_SECONDS", "JOB_GONE_SECONDS", "REACH_SECONDS"):
        monkeypatch.setattr(node, name, 0.1)


@pytest.mark.usefixtures("_hasty")
def test_a_node_asks_whether_the_job_is_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        meeting = Meeting(tmp_path, ("127.0.0.1", "n2"), 1, server.getsockname()[1])
        assert meeting.job_is_there()
    assert not meeting.job_is_there()


@pytest.mark.usefixtures("_hasty")
def test_a_node_that_cannot_join_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "r" / "slurm" / "meeting-1"
    folder.mkdir(parents=True)
    second = Meeting(folder, ("n1", "n2"), 1)
    with pytest.raises(UserError, match=r"n2 does not see what n1 wrote .* --out"), second.hold():
        pass
    atomic_files.write_json(folder / "call.json", {"addresses": ["127.0.0.1"], "port": 1})
    with pytest.raises(UserError, match=r"n2 cannot reach n1 at 127\.0\.0\.1:1"), second.hold():
        pass


@pytest.mark.parametrize(
    ("array", "job"), [({}, "7"), ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, "7_2")]
)
def test_the_shell_of_an_orphaned_node_requeues_the_job_until_slurm_answers(
    array: dict[str, str], job: str, tmp_path: Path
) -> None:
    """It stands outside of a container, which has none of Slurm's commands, and slurmctld may be away."""
    (tmp_path / "slurm").mkdir()
    (tmp_path / "facts.json").touch()
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
    words = ["/bin/bash", "-c", STEP_SHELL, str(tmp_path / "slurm"), str(tmp_path), "launcher"]
    done = subprocess.run(words, env=environment, timeout=20, check=False)
    assert done.returncode == ORPHANED
    assert asked.read_text().splitlines() == [f"requeue {job}"] * 3


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", -9), (None, 2)])
def test_the_shell_ends_as_its_launcher_does(script: str | None, code: int, tmp_path: Path) -> None:
    """A second after its last words, whatever ended it: srun would lose them."""
    (tmp_path / "slurm").mkdir()
    (tmp_path / "sleep").write_text("#!/bin/sh\necho slept $1")
    (tmp_path / "sleep").chmod(0o755)
    if script is not None:  # else it is refused
        (tmp_path / "facts.json").touch()
    shell = ["/bin/bash", "-c", STEP_SHELL, str(tmp_path / "slurm"), str(tmp_path)]
    words = [*shell, "/bin/sh", "-c", script or ""]
    environment = {"SLURMD_NODENAME": "n2", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(words, env=environment, capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (code, b"slept 1\n" if code else b"")
