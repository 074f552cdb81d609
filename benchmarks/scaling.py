"""Strong scaling on two cores: one process of one thread against two of one thread each, the same recipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import report

WORDS = ["auto", "--task", "causal-lm", "--model", "small", "--batch-size", "32", "--max-length", "128"]


def measure(quick: bool) -> list[dict[str, Any]]:
    """Rows per number of processes and strategy, and what two processes are worth."""
    steps, repeats = (8, 1) if quick else (24, 3)
    contenders = {
        "1 process": lambda: _run(1, "single", steps),
        "2 processes, ddp": lambda: _run(2, "ddp", steps),
        "2 processes, zero2": lambda: _run(2, "zero2", steps),
    }
    found = report.interleaved(contenders, repeats)
    column = "samples_per_second"
    return [
        {
            "what": name,
            column: report.middle(rows, column),
            "over_one_process": report.paired_ratio(rows, found["1 process"], column),
            "loss": rows[0]["loss"],
        }
        for name, rows in found.items()
    ]


def _run(processes: int, strategy: str, steps: int) -> report.Row:
    """Pinned to as many cores as there are processes, so that each has one thread."""
    with tempfile.TemporaryDirectory() as folder:
        cores = sorted(os.sched_getaffinity(0))[:processes]
        plan = ["--processes", str(processes), "--strategy", strategy, "--steps", str(steps)]
        command = [sys.executable, "-m", "launch", *WORDS, *plan, "--name", "run", "--quiet"]
        subprocess.run(
            command,
            cwd=folder,
            check=True,
            capture_output=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        text = (Path(folder) / "runs" / "run" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    trained = [r for r in rows if "lr" in r]
    later = trained[len(trained) // 4 :]  # the first steps grow the heap and connect the world
    seconds = sum(r["step_seconds"] for r in later)
    count = later[-1]["samples"] - trained[-len(later) - 1]["samples"]
    return {"samples_per_second": count / seconds, "loss": trained[-1]["loss"]}
