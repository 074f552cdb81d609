"""Errors on one process or on all, and changed files: the run ends in order with one line."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from isobatch.core.package import own_command
from isobatch.tests.integration.helpers import ROOT, launch, rows, summary, warm_command

TASKS = f"{ROOT}/tests/tasks/failing.py"


def words(task: str, *more: str) -> list[str]:
    return ["auto", "--task", f"{TASKS}:{task}", "--name", "run", "--quiet", *more]


@pytest.mark.parametrize(
    ("task", "hint"), [("OneRankFails", "rank 1 has had enough"), ("ExportFails", "nothing to export to")]
)
def test_an_error_on_one_rank_ends_all(task: str, hint: str, tmp_path: Path) -> None:
    began = time.monotonic()
    done = launch(*words(task, "--processes", "2", "--micro-batch", "2"), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(f"isobatch: {hint}") == 1
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 60


def test_workers_do_not_outlive_the_command(tmp_path: Path) -> None:
    """Killed without a chance, `auto` leaves workers that save and stop, and no second training may start."""
    run = tmp_path / "runs" / "run"
    command = own_command(*words("Slow", "--processes", "2", "--steps", "2000"))
    process = subprocess.Popen([w for w in command if w != "--quiet"], cwd=tmp_path)
    metrics = run / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 3):
        time.sleep(0.05)
    workers = [
        p for p in psutil.Process(process.pid).children(recursive=True) if "train.py" in " ".join(p.cmdline())
    ]
    assert len(workers) >= 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    at_once = launch("resume", str(run), "--processes", "1", cwd=tmp_path)
    assert at_once.returncode == 2
    assert "is being trained by another process" in at_once.stderr
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    assert summary(run)["status"] == "stopped"
    assert json.loads((run / "exit.json").read_text())["code"] == 75
    steps = [r["step"] for r in rows(run) if "lr" in r]
    assert steps == list(range(1, len(steps) + 1))


def test_a_refused_command_leaves_the_plan_alone(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    process = subprocess.Popen(warm_command(*words("Slow", "--steps", "1000")), cwd=tmp_path)
    while process.poll() is None and not (run / "metrics.jsonl").exists():
        time.sleep(0.05)
    plan = (run / "plan.json").read_text()
    refused = launch(
        *words("Slow", "--steps", "1000", "--processes", "2", "--micro-batch", "1"), cwd=tmp_path
    )
    assert refused.returncode == 2
    assert (run / "plan.json").read_text() == plan
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 75
