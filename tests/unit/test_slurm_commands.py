"""Tests of what users ask of jobs: `runs`, `logs`, `cancel`, refusals; Slurm's commands are stand-ins."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core import atomic_files
from isobatch.core.errors import WRONG_INPUT, UserError
from isobatch.core.facts import Facts
from isobatch.core.recipe import Recipe
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.launch.clusters.cluster import refuse_if_in_a_job
from isobatch.launch.clusters.local import here
from isobatch.launch.clusters.slurm import client
from isobatch.launch.clusters.slurm.job import Slurm as Slurm_
from isobatch.launch.clusters.slurm.job import job
from isobatch.launch.clusters.slurm.legs import JobRequest
from isobatch.launch.commands.auto import resume
from isobatch.launch.control import one_run
from isobatch.launch.control.runs import runs
from isobatch.launch.doctor.run_checks import check_run
from isobatch.launch.local import launch_run, run_setup, worker
from isobatch.launch.local.arguments import parse_request
from isobatch.tests.unit.fake_slurm import AWAY, FORGOTTEN, NO_CLUSTER, Say, Slurm, queued

if TYPE_CHECKING:
    from pathlib import Path

RECIPE = Recipe(task="causal-lm", steps=(300,), batch_size=8)
TWO_PHASES = Recipe(task="qat", epochs=(2.0, 1.0), batch_size=8)
FACTS = Facts(fingerprint="0", folder="", samples={"train": 64}, lengths=(1, 2, 3), extra={})


def make_run(
    folder: Path, job: str = "7", recipe: Recipe = RECIPE, steps: int = 0, status: str = "", **summary: object
) -> RunFolder:
    """A run of 300 steps that has logged some, and ended with this status if there is one."""
    run = RunFolder.create(folder, recipe, FACTS, RunOptions())
    if job:
        (folder / "slurm").mkdir()
        atomic_files.write_json(folder / "slurm" / "job.json", {"job": job})
    if steps:
        rows = [{"phase": "train", "step": k + 1, "step_seconds": 2.0} for k in range(steps)]
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if status:
        run.write_summary({"status": status, "steps": steps, "metrics": {}, **summary})
    return run


def listed(folder: Path, say: Say) -> dict[str, Any]:
    """The only run in a folder, as `runs --json` has it."""
    (row,) = json.loads(say(runs, str(folder), "--json")[1])["runs"]
    return dict(row)


def test_a_run_that_is_in_a_job_is_left_alone(tmp_path: Path, slurm: Slurm) -> None:
    run = make_run(tmp_path / "r")
    slurm(squeue=queued("7", "PENDING", "Resources", 1))
    refuse_if_in_a_job(run, "7")
    with pytest.raises(UserError, match=r"is in job 7 already \(PENDING \(Resources\), leg 2\): isobatch c"):
        refuse_if_in_a_job(run, "8")
    for over in ("NODE_FAIL", "COMPLETED", "PREEMPTED"):
        slurm(squeue=queued("7", over))
        refuse_if_in_a_job(run)


@pytest.mark.parametrize("answer", [FORGOTTEN, NO_CLUSTER, "exit 0"])
def test_a_job_that_slurm_does_not_know_holds_nothing(
    answer: str, tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(squeue=answer)
    run = make_run(tmp_path / "r")
    refuse_if_in_a_job(run)
    monkeypatch.setenv("PATH", str(tmp_path))  # a copy, where there is no Slurm
    refuse_if_in_a_job(run)


@pytest.mark.parametrize("answer", [AWAY, "sleep 5"])
def test_a_silent_slurm_lets_nobody_train_a_run_twice(
    answer: str, tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SQUEUE_SECONDS", 0.3)
    slurm(squeue=answer)
    with pytest.raises(UserError, match=r"was in job 7, which may still train it: Slurm does not answer"):
        refuse_if_in_a_job(make_run(tmp_path / "r"))


def test_nobody_trains_here_what_a_job_will_train(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto`, `isobatch.train` and --seeds by way of find_or_train."""
    run = make_run(tmp_path / "r")
    slurm(squeue=queued("7", "PENDING"))
    monkeypatch.setattr(run_setup, "known_run", lambda _: (FACTS, run))
    request = parse_request(["--task", "causal-lm"], "auto")
    monkeypatch.setattr(run_setup, "prepare_facts", lambda _: FACTS)
    monkeypatch.setattr(run_setup, "find_run", lambda *_: run)
    for train in (
        lambda: launch_run.find_or_train(request),
        lambda: resume([str(run.folder)]),
        lambda: worker.main(["--task", "causal-lm"]),  # under accelerate launch
    ):
        with pytest.raises(UserError, match=r"in job 7 already \(PENDING\): isobatch cancel .*/r first"):
            train()


@pytest.mark.parametrize(
    ("squeue", "status", "state", "shown"),
    [
        (queued("7", "PENDING", "Resources"), "", "queued", "job 7 PENDING (Resources)"),
        (queued("7", "PENDING", "BeginTime", 1), "stopped", "queued", "job 7 PENDING (BeginTime), leg 2"),
        (queued("7", "RUNNING"), "", "running", "ETA 9:50  job 7 RUNNING"),
        (queued("7", "FAILED", "NonZeroExitCode"), "stopped", "stopped", "job 7  it is NaN\n"),
        (queued("7", "CANCELLED", "Resources"), "", "unfinished", "job 7 CANCELLED\n"),
        (FORGOTTEN, "failed", "failed", "it is NaN"),
    ],
)
def test_a_word_for_the_same_situation_in_every_leg(
    squeue: str, status: str, state: str, shown: str, tmp_path: Path, slurm: Slurm, say: Say
) -> None:
    slurm(squeue=squeue)
    make_run(tmp_path / "runs" / "r", steps=5, status=status, reason="it is NaN")
    row = listed(tmp_path / "runs", say)
    assert (row["state"], row["step"], row["steps_total"]) == (state, 5, 300)
    assert row["seconds_left"] == (590 if state == "running" else None)
    text = say(runs, str(tmp_path / "runs"))[1]
    assert shown in text
    assert f"  {state} " in text


def test_what_is_refused_inside_of_a_job_is_how_its_run_ended(
    tmp_path: Path, slurm: Slurm, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(squeue=queued("7", "FAILED", "NonZeroExitCode"), scontrol="echo n1")
    run = make_run(tmp_path / "runs" / "r", recipe=Recipe(task=f"{tmp_path}/sent.py:Task", steps=(300,)))
    (tmp_path / "sent.py").write_text("raise AssertionError('it runs')\n")
    JobRequest(local=1, lead=5, plan={}, seconds=60).write(run.folder)
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}.items():
        monkeypatch.setenv(name, value)
    assert job([str(run.folder)]) == WRONG_INPUT, "nobody agreed to its code"
    row = listed(tmp_path / "runs", say)
    assert row["state"] == "failed"
    assert row["reason"]
    assert row["reason"] in say(runs, str(tmp_path / "runs"))[1]


@pytest.mark.parametrize("status", ["stopped", "failed"])
def test_why_a_job_was_not_requeued_is_read_where_runs_are(
    status: str, tmp_path: Path, slurm: Slurm, say: Say
) -> None:
    """Slurm itself knows of code 75 alone."""
    slurm(squeue=queued("7", "FAILED", "NonZeroExitCode", 1), scontrol="echo JobState=RUNNING Restarts=1")
    run = make_run(tmp_path / "runs" / "r", steps=5, status=status, reason="asked to stop by a signal")
    ended = Slurm_()
    ended.allocation = client.Allocation(job="7", nodes=("n1",), cpus=1, gpus=0, restarts=1)
    ended.request = JobRequest(local=1, lead=5, plan={}, seconds=60, max_legs=2)
    ended.requeue_or_stop(run, "limit")
    why = "not requeued: this was leg 2 of --max-legs 2"
    text = say(runs, str(tmp_path / "runs"))[1]
    assert (why in text, "FAILED" in text) == (status == "stopped", status == "failed")
    assert (why in {c.name: c for c in check_run(run.folder)}["state"].text) == (status == "stopped")


def test_a_job_whose_script_failed_says_where_the_reason_is(tmp_path: Path, slurm: Slurm, say: Say) -> None:
    slurm(squeue=queued("7", "FAILED", "NonZeroExitCode"))
    run = make_run(tmp_path / "runs" / "r")
    assert f"`doctor {run.folder}` says why" in say(runs, str(tmp_path / "runs"))[1]


@pytest.mark.usefixtures("slurm")
def test_a_stop_is_no_longer_the_end_of_a_run_that_trained_on(tmp_path: Path, say: Say) -> None:
    run = make_run(tmp_path / "runs" / "r", job="", steps=9, status="stopped")
    assert listed(tmp_path / "runs", say)["state"] == "stopped"
    run.write_summary({"status": "stopped", "steps": 5})  # of the leg before
    assert listed(tmp_path / "runs", say)["state"] == "unfinished"


@pytest.mark.usefixtures("slurm")
def test_steps_are_those_of_all_phases(tmp_path: Path, say: Say) -> None:
    run = make_run(tmp_path / "runs" / "r", job="", recipe=TWO_PHASES)
    row = listed(tmp_path / "runs", say)
    assert (row["step"], row["steps_total"]) == (None, 2 * 8 + 8)  # 64 samples in batches of 8
    run.metrics.write_text('{"phase": "qat", "step": 3, "step_seconds": 0.5}\n{"phase": "qat", "st')
    assert listed(tmp_path / "runs", say)["step"] == 2 * 8 + 3


@pytest.mark.usefixtures("slurm")
def test_a_run_that_a_process_here_trains_is_running(tmp_path: Path, say: Say) -> None:
    run = make_run(tmp_path / "runs" / "r", job="", status="stopped")
    for role in ("launch", "train"):
        with run.lock(role):
            assert listed(tmp_path / "runs", say)["state"] == "running"
    assert listed(tmp_path / "runs", say)["state"] == "stopped"


def test_all_runs_are_one_question_and_silence_is_said(tmp_path: Path, slurm: Slurm, say: Say) -> None:
    for number in (7, 8):
        make_run(tmp_path / "runs" / str(number), job=str(number), steps=1)
    slurm(squeue=AWAY)
    code, out, err = say(runs, str(tmp_path / "runs"))
    assert (code, out.count("(Slurm does not answer (")) == (0, 2)
    assert err.count("\n") == 1
    assert "Slurm does not answer (Unable to contact slurm controller" in err
    assert (tmp_path / "bin" / "calls").read_text().count("squeue") == 1
    row = json.loads(say(runs, str(tmp_path / "runs"), "--json")[1])["runs"][0]
    assert (row["job"], row["job_state"]) == ("7", None)


def test_logs_are_the_last_lines_of_a_runs_own(tmp_path: Path, say: Say) -> None:
    run = make_run(tmp_path / "r")
    for words in ([], ["-f"]):
        assert "has no log yet (it is unfinished)" in say(one_run.logs, str(run.folder), *words)[2]
    (run.folder / "log.txt").write_text("one\ntwo\n\x1b[2J\n")
    assert say(one_run.logs, str(run.folder), "--lines", "2")[1] == "two\n\\x1b[2J\n"
    for wrong in (["--lines", "0"], ["--node", "n1"], ["--tail"]):
        with pytest.raises(UserError, match=wrong[0]):
            one_run.logs([str(run.folder), *wrong])


@pytest.mark.parametrize(("status", "code"), [("done", 0), ("failed", 3), ("stopped", 75)])
def test_logs_are_followed_over_legs_until_the_run_ends(
    status: str, code: int, tmp_path: Path, slurm: Slurm, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_run, "READ_SECONDS", 0.01)
    monkeypatch.setattr(one_run, "FOLLOW_SECONDS", 0.05)
    run = make_run(tmp_path / "r", status="stopped")
    log = run.folder / "log.txt"
    slurm(squeue=queued("7", "PENDING", "BeginTime", 1))
    log.write_text("leg 1\n")

    def live() -> None:
        time.sleep(0.2)
        slurm(squeue=queued("7", "RUNNING", restarts=1))
        with log.open("a") as stream:
            stream.write("leg 2\n")
        run.write_summary({"status": status})
        slurm(squeue=queued("7", "COMPLETED"))

    life = threading.Thread(target=live)
    life.start()
    found = say(one_run.logs, "-f", str(run.folder))
    life.join()
    assert found == (code, "leg 1\nleg 2\n", f"{run.folder}: job 7 is PENDING (BeginTime), leg 2\n")


def test_a_job_that_waits_leaves_the_queue(tmp_path: Path, slurm: Slurm, say: Say) -> None:
    run = make_run(tmp_path / "r", job="7_3")
    slurm(squeue=queued("7_3", "PENDING", "Resources"), scancel="exit 0")
    code, out, _ = say(one_run.cancel, str(run.folder))
    assert (code, out) == (
        0,
        f"{run.folder}: job 7_3 was PENDING (Resources), and is cancelled; nothing was saved\n",
    )
    assert "scancel 7_3\n" in (tmp_path / "bin" / "calls").read_text()


@pytest.mark.parametrize("now", [False, True])
def test_a_job_that_runs_saves_first(
    now: bool, tmp_path: Path, slurm: Slurm, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_run, "LOOK_SECONDS", 0.01)
    run = make_run(tmp_path / "r", steps=120, status="stopped")
    (run.checkpoints / "train-100").mkdir(parents=True)
    ended = tmp_path / "ended"
    states = f"[ -e {ended} ] && {queued('7', 'CANCELLED')} || {queued('7', 'RUNNING')}"
    slurm(squeue=states, scancel=f"cp {run.folder}/slurm/job.json {ended}")
    code, out, err = say(one_run.cancel, *(["--now"] if now else []), str(run.folder))
    calls = (tmp_path / "bin" / "calls").read_text()
    assert (code, err.count("\n")) == (0, 1)
    if now:
        assert "scancel 7\n" in calls
        assert "stopped; `resume" in out
    else:
        assert "scancel --batch --signal=INT 7\n" in calls
        assert json.loads(ended.read_text()) == {"job": "7", "cancel": "save"}, "the mark is there in time"
        assert f"stopped; `resume {run.folder}` goes on from train-100" in out


def test_what_cannot_be_cancelled_is_said(tmp_path: Path, slurm: Slurm, say: Say) -> None:
    run = make_run(tmp_path / "r", status="done")
    said = f"{run.folder}: it is done: there is nothing to cancel\n"
    assert say(one_run.cancel, str(run.folder))[:2] == (0, said)
    run.write_summary({"status": "stopped"})
    slurm(squeue=queued("7", "SUSPENDED"))
    with pytest.raises(UserError, match="job 7 is suspended: scontrol resume 7 first, or c"):
        one_run.cancel([str(run.folder)])
    slurm(squeue=AWAY)
    with pytest.raises(UserError, match="Slurm does not answer"):
        one_run.cancel([str(run.folder)])
    slurm(squeue=queued("7", "PENDING"), scancel='echo "scancel: error: Access denied" >&2; exit 1')
    with pytest.raises(UserError, match="scancel 7: Access denied"):
        one_run.cancel([str(run.folder)])


TRAINER = """
import json, os, signal, sys, time, filelock
with filelock.FileLock(sys.argv[1] + "/.launch.lock"):
    def save(*_):
        with open(sys.argv[1] + "/.new", "w") as new:  # as a run does: whole, or not there
            json.dump({"status": "stopped", "steps": 12}, new)
        os.replace(new.name, sys.argv[1] + "/summary.json")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        (time.sleep(30) if sys.argv[2] == "slow" else sys.exit(75))
    signal.signal(signal.SIGINT, save)
    print("ready", flush=True)
    time.sleep(30)
"""


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(("kind", "flags"), [("quick", []), ("slow", ["--now"])])
def test_a_run_that_trains_here_is_interrupted(
    kind: str, flags: list[str], tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_run, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(here, "SECOND_SIGNAL_SECONDS", 0.2)
    run = make_run(tmp_path / "r", job="", steps=12)
    words = [sys.executable, "-c", TRAINER, str(run.folder), kind]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as trainer:
        assert trainer.stdout is not None
        trainer.stdout.readline()
        code, out, _ = say(one_run.cancel, str(run.folder), *flags)
        trainer.wait(5)
    assert code == 0
    assert "stopped; nothing was saved" in out


def test_what_a_finished_run_would_not_follow_is_refused_or_said(tmp_path: Path, say: Say) -> None:
    run = make_run(tmp_path / "r", job="", status="done")
    with pytest.raises(UserError, match=f"`auto --from {run.folder} --data more.csv` trains on"):
        say(resume, str(run.folder), "--data", "more.csv")
    for words in (["--processes", "1"], ["--save-every", "5"], ["--workers", "2"]):
        code, _, said = say(resume, str(run.folder), *words)
        assert (code, f"is done: {words[0]} had no effect" in said) == (0, True), said
    assert "no effect" not in say(resume, str(run.folder), "--debug")[2]
