"""Tests of `doctor RUN`: why a run failed or hangs, who waits for whom, which of its files are damaged."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core import atomic_files
from isobatch.core.errors import BUG, FAILED, WRONG_INPUT, UserError
from isobatch.engine.checkpointing.digests import folder_digests
from isobatch.engine.distributed import liveness
from isobatch.engine.runs.run_folder import NONCE, RunFolder, Verdict
from isobatch.engine.runs.run_options import RunOptions
from isobatch.launch.control.runs import look
from isobatch.launch.doctor import run_checks
from isobatch.launch.doctor.run_checks import check_ranks, describe_ranks, doctor
from isobatch.launch.local import worker
from isobatch.tests.unit.fake_slurm import queued
from isobatch.tests.unit.test_slurm_commands import make_run

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.launch.doctor.probes import Check
    from isobatch.tests.unit.fake_slurm import Say, Slurm

HERE = {"code": "read (mine.py:7)", "waiting": "", "still_seconds": 400.0, "silent_seconds": 0.0}
STEP_12 = {**HERE, "place": "step 12, micro-batch 1 of 2", "process": "4242 on n1"}
WAITS = {**STEP_12, "place": "step 12", "waiting": "an all-reduce", "process": "4243 on n1"}


def found_in(run: RunFolder) -> dict[str, Check]:
    """Name -> check; of several with one name the last."""
    return {check.name: check for check in run_checks.check_run(run.folder)}


def run_of(folder: Path, **made: Any) -> RunFolder:
    return make_run(folder / "r", **{"job": "", "steps": 7, **made})


def test_a_finished_run_is_well(tmp_path: Path) -> None:
    found = found_in(run_of(tmp_path, status="done"))
    assert {check.state for check in found.values()} == {"ok"}, found
    assert found["state"].text == "done, step 7 of 300"


@pytest.mark.parametrize("how", ["whole", "cut short", "gone"])
def test_a_finished_runs_model_is_what_the_run_wrote(how: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, status="done")
    run.final.mkdir()
    model = run.final / "model.safetensors"
    model.write_bytes(b"weights")
    atomic_files.append_row(run.metrics, {"phase": "train", "step": 7, "final": folder_digests(run.final)})
    if how == "cut short":
        model.write_bytes(b"weigh")
    if how == "gone":
        model.unlink()
    found = found_in(run)
    if how == "whole":
        assert "model" not in found
    else:
        said = "final/model.safetensors: missing, changed or added since the run wrote it"
        assert found["model"].text == said


@pytest.mark.parametrize("after", ["", "job 7, leg 1: n1, from the beginning\n"])
def test_what_a_jobs_script_refused_is_its_last_error(after: str, tmp_path: Path, slurm: Slurm) -> None:
    """A line that work followed was no refusal."""
    slurm(squeue=queued("7", "FAILED", "NonZeroExitCode"))
    run = run_of(tmp_path, job="7")
    said = f"loading\nisobatch: n1 does not see /scratch/x: submit from elsewhere\n{after}"
    (run.folder / "slurm" / "7.out").write_text(said)
    found = found_in(run)
    assert "job 7 FAILED (NonZeroExitCode)" in found["state"].text
    assert ("last error" in found) == (not after)
    assert after or "n1 does not see /scratch/x" in found["last error"].text


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("out of memory: CUDA out of memory. Tried to allocate 2 GiB", "--memory-limit 80%"),
        ("rank 1 was ended by signal 9", "dmesg"),
        ("something else", "isobatch logs"),
    ],
)
def test_why_a_run_failed(reason: str, remedy: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, status="failed", reason=reason)
    found = found_in(run)
    assert (found["state"].state, reason in found["state"].text) == ("broken", True)
    assert remedy in found["state"].remedy
    assert "{}" not in found["state"].remedy


@pytest.mark.parametrize(
    ("verdict", "said", "remedy"),
    [
        (
            Verdict(BUG, "a traceback, whose last line is KeyError: 'x'"),
            "a bug (exit code 1): a tra",
            "report",
        ),
        (Verdict(WRONG_INPUT, "--data x: is gone"), "wrong input (exit code 2): --data", "mend the words"),
    ],
)
def test_an_end_that_nothing_repeats_has_its_reason(
    verdict: Verdict, said: str, remedy: str, tmp_path: Path
) -> None:
    run = run_of(tmp_path)
    run.write_exit(verdict)
    assert (run.status(), (run.summary() or {})["reason"]) == ("failed", verdict.reason)
    state = found_in(run)["state"]
    assert (said in state.text, remedy in state.remedy) == (True, True), state


@pytest.mark.parametrize("processes", [1, 2])
def test_a_hang_of_one_process_is_told_by_who_has_no_launcher(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a launcher that one may go on from the last checkpoint."""
    run, hung = run_of(tmp_path), "rank 0 has stood still for 20 s in loss (mine.py:7)"
    monkeypatch.setenv(NONCE, "" if processes == 1 else "a")
    monkeypatch.setattr(worker.os, "_exit", exit_process)
    monkeypatch.setattr(liveness, "PeerMonitor", lambda _, end: end(hung))
    train: Any = worker._train  # noqa: SLF001
    with pytest.raises(SystemExit):
        train(run, RunOptions(quiet=True), SimpleNamespace(is_main=True), True)
    assert run.read_exit() == Verdict(FAILED, hung, "lost")
    state = found_in(run)["state"]
    assert (state.state == "broken", hung in state.text) == (processes == 1, processes == 1), state
    assert (look(run.folder).state, run.status()) == (
        ("failed",) * 2 if processes == 1 else ("unfinished",) * 2
    )


def exit_process(code: int) -> None:
    raise SystemExit(code)


@pytest.mark.parametrize("state", [state for state in run_checks.REMEDIES["ended"] if state != "any"])
def test_what_ended_a_job_that_wrote_nothing_is_told_apart(state: str, tmp_path: Path, slurm: Slurm) -> None:
    slurm(squeue=queued("7", state))
    told = found_in(run_of(tmp_path, job="7"))["state"]
    why, _ = run_checks.REMEDIES["ended"][state]
    assert f"job 7 {state}; {why}" in told.text
    assert "how it ended nobody wrote" not in told.text
    assert f"isobatch resume {tmp_path}/r" in told.remedy


def test_a_killed_run_is_as_far_as_its_last_checkpoint(tmp_path: Path) -> None:
    """Of many steps one in some is logged, and what is saved between two of those is not lost."""
    run = run_of(tmp_path)
    for name in ("train-4", "train-9", ".train-30"):
        (run.checkpoints / name).mkdir(parents=True)
        atomic_files.write_json(run.checkpoints / name / "index.json", {})
    (run.checkpoints / "train-20").mkdir()
    state = found_in(run)["state"]
    assert "step 9 of 300; how it ended nobody wrote" in state.text, "the others are not whole"
    assert "isobatch resume" in state.remedy


@pytest.mark.parametrize("where", ["disk", "log.txt", "launcher.log"])
def test_a_run_that_a_full_disk_ended_says_that_first(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path)
    said = "OSError: [Errno 28] No space left on device\n"
    if where == "disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    else:
        (run.folder / where).write_text(f"step 7\n{said}")
    state = found_in(run)["state"]
    assert "step 7 of 300; its disk is full" in state.text
    assert "make space, then: isobatch resume" in state.remedy
    (run.folder / "log.txt").write_text(f"{said}step 8\n")
    (run.folder / "launcher.log").unlink(missing_ok=True)
    assert ("its disk is full" in found_in(run)["state"].text) == (where == "disk")


@pytest.mark.parametrize(("status", "state"), [("done", "warning"), ("failed", "broken")])
def test_little_space_hinders_no_run_that_is_done(
    status: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, status=status, reason="cannot write x: No space left on device")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**8))
    found = found_in(run)
    assert found["disk space"].state == state
    assert ("make space" in found["state"].remedy) == (status == "failed")


LOG = """\
Traceback (most recent call last):
  File "mine.py", line 7, in read
[rank1]: ValueError: row 12 has no label
[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4410
Root Cause (first observed failure):
[0]:
  time      : 2026-11-23_00:10:11
  host      : n1
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 4242)
"""


def test_the_last_error_is_that_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    (run.folder / "launcher.log").write_text(LOG)
    found = found_in(run)
    assert found["last error"].text == "rank 1: ValueError: row 12 has no label"
    (run.folder / "launcher.log").write_text("\n".join(LOG.splitlines()[3:4]))
    assert "Connection closed by peer" in found_in(run)["last error"].text, "where nothing else is told"


@pytest.mark.parametrize("record", ["recipe.json", "facts.json", "plan.json", "run.json", "summary.json"])
@pytest.mark.parametrize("content", ["[]", "\x00\xff"])
def test_damaged_records_are_shown_with_what_there_is(record: str, content: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, status="done")
    (run.folder / record).write_text(content, encoding="latin-1")
    found = found_in(run)
    assert found[record].state == "broken", found
    assert "disk space" in found, "the rest is shown"


def test_a_damaged_row_is_found_and_one_that_is_being_written_is_not(tmp_path: Path) -> None:
    run = run_of(tmp_path, status="done")
    with run.metrics.open("a") as stream:
        stream.write('{"step": 12, "lo')
        stream.flush()
        assert "metrics.jsonl" not in found_in(run)
        stream.write("garbage\n")
        stream.flush()
        assert found_in(run)["metrics.jsonl"].state == "broken"


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(UserError, match="is not a run"):
            list(run_checks.check_run(folder))


def test_a_run_that_links_elsewhere_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    (run.folder / "launcher.log").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="is a link to"):
        found_in(run)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (
            [WAITS, {**WAITS, "rank": 1}, {**STEP_12, "rank": 2}, {**WAITS, "rank": 3}],
            "rank 2 at step 12, micro-batch 1 of 2, in read (mine.py:7); "
            "ranks 0, 1, 3 at step 12, waiting in an all-reduce",
        ),
        (
            [WAITS, {**WAITS, "rank": 1, "silent_seconds": 300.0}, {"rank": 2}],
            "rank 1 (silent for 300 s) at step 12, waiting in an all-reduce; rank 2 was never heard of; "
            "rank 0 at step 12, waiting in an all-reduce",
        ),
        (
            [WAITS, {**WAITS, "rank": 1}],
            "ranks 0, 1 at step 12, waiting in an all-reduce; each waits for the others",
        ),
    ],
)
def test_who_waits_for_whom(ranks: list[dict[str, Any]], text: str) -> None:
    ranks = [{"rank": 0, **rank} for rank in ranks]
    assert describe_ranks(ranks) == text
    check = check_ranks({"ranks": ranks}, 3.0, True, "runs/r")
    assert check.state == "broken"
    assert check.text == f"no step for 403 s: {text}"
    assert "isobatch cancel runs/r --now" in check.remedy


def test_a_run_that_moves_is_well() -> None:
    record = {
        "ranks": [{**STEP_12, "rank": 0, "still_seconds": 2.0}, {**WAITS, "rank": 1, "still_seconds": 9.0}]
    }
    assert check_ranks(record, 3.0, True, "r").state == "ok"
    slow = {"ranks": [{**STEP_12, "rank": 0, "still_seconds": 100.0}]}
    assert check_ranks(slow, 3.0, True, "r").state == "broken"
    assert check_ranks(slow, 3.0, True, "r", step_seconds=30.0).state == "ok", "its steps are that long"
    assert check_ranks(record, 300.0, False, "r").text.startswith("in the ten seconds before it ended: ")


@pytest.mark.parametrize("content", ["{}", '{"ranks": [{}]}', "x"])
def test_a_damaged_record_of_ranks(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path)
    run.rank_record.write_text(content)
    for training in (True, False):
        monkeypatch.setattr(RunFolder, "is_training", lambda _, value=training: value)
        assert found_in(run)["ranks"].state in ("warning", "ok", "broken")


def test_exit_codes_and_json(tmp_path: Path, say: Say) -> None:
    run = run_of(tmp_path, status="failed", reason="a \x1b[2J reason")
    code, out, _ = say(doctor, str(run.folder), "--json")
    checks = json.loads(out)["checks"]
    assert code == 3
    assert all(check.keys() == {"name", "state", "text", "remedy"} for check in checks)
    assert all(check["remedy"] for check in checks if check["state"] != "ok")
