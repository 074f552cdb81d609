"""Strong scaling from one process to two on two cores, same recipe: `python -m benchmarks scaling`.

Each process has one thread. Two independent runs at once show the most that the two cores can do together.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.benchmarks import report
from isobatch.core.package import own_command

if TYPE_CHECKING:
    from collections.abc import Iterator

WORDS = ["auto", "--task", "causal-lm", "--model", "small", "--max-length", "128"]
STEPS = {32: 24, 128: 10}
"""By global batch."""


def measure(quick: bool) -> list[dict[str, Any]]:
    """A row per global batch, number of processes and strategy, with the speed over one process."""
    return [row for batch in ((32,) if quick else STEPS) for row in _measure(batch, 1 if quick else 3)]


def _measure(batch: int, repeats: int) -> Iterator[dict[str, Any]]:
    contenders = {
        "1 process": lambda: _run(batch, 1, "single"),
        "2 processes, ddp": lambda: _run(batch, 2, "ddp"),
        "2 processes, zero2": lambda: _run(batch, 2, "zero2"),
        "2 runs side by side": lambda: _side_by_side(batch),
    }
    found = report.interleaved(contenders, repeats)
    column = "samples_per_second"
    for name, rows in found.items():
        yield {
            "batch": batch,
            "what": name,
            column: report.middle(rows, column),
            "over_one_process": report.paired_ratio(rows, found["1 process"], column),
            "loss": rows[0]["loss"],
        }


def _side_by_side(batch: int) -> report.Row:
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda core: _run(batch, 1, "single", core), range(2)))
    return {**runs[0], "samples_per_second": sum(r["samples_per_second"] for r in runs)}


def _run(batch: int, processes: int, strategy: str, first: int = 0) -> report.Row:
    """Pinned to as many cores as there are processes, so that each has one thread."""
    with tempfile.TemporaryDirectory() as folder:
        cores = sorted(os.sched_getaffinity(0))[first : first + processes]
        plan = ["--processes", str(processes), "--strategy", strategy, "--steps", str(STEPS[batch])]
        plan += ["--batch-size", str(batch)]
        command = own_command(*WORDS, *plan, "--name", "run", "--quiet")
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
    later = trained[len(trained) // 4 :]  # the first steps grow the heap and connect the processes
    # The median: a program beside the runs stops one of two processes for whole steps, and so the other.
    return {"samples_per_second": report.middle(later, "samples_per_second"), "loss": trained[-1]["loss"]}
