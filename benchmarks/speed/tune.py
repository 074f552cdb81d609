"""`tune` on the demo of every task: what each commonly named speed-up is worth on this machine.

python -m benchmarks tune
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

from isobatch.core.package import own_command

if TYPE_CHECKING:
    from isobatch.benchmarks.report import Row

TASKS = ("causal-lm", "classifier", "pruning", "qat", "recommender", "sequence-vae")
MINUTES = "2"

QUOTED = {
    "batch": (1.3, 2.0),
    "accumulation": (1.1, 1.5),
    "loading": (1.2, 1.5),
    "mixed precision": (1.2, 2.0),
    "length limit": (1.2, 1.4),
    "optimizer": (1.1, 1.3),
    "monitoring interval": (1.05, 1.15),
    "compile": (1.1, 2.0),
}
"""Measure -> least and largest factor in common guides for one GPU."""


def measure(quick: bool) -> list[Row]:
    """A row for each measure and task, with what helps together at the end of a task's rows."""
    return [row for task in TASKS[: 1 if quick else None] for row in _tune(task, "0.7" if quick else MINUTES)]


def _tune(task: str, minutes: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        words = ["tune", "--task", task, "--minutes", minutes, "--json", "--out", folder]
        print(" ".join(words), file=sys.stderr)
        done = subprocess.run(own_command(*words), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    rows = [_row(task, row) for row in found["rows"]]
    keep = {**(found["keep"] or {"flags": ""}), "measure": "together"}
    whole = {"measure": "the time asked for", "flags": f"{minutes} minutes", "ratio": found["seconds"] / 60}
    return [*rows, *(_row(task, row) for row in (keep, found["noise"], whole))]


def _row(task: str, row: Row) -> Row:
    ratio = row.get("ratio")
    low_high = QUOTED.get(row["measure"])
    return {
        "task": task,
        "measure": row["measure"],
        "tried": row["flags"],
        "quoted": "{}-{}".format(*low_high) if low_high else "",
        "here": None if ratio is None else round(ratio, 3),
        "spread": None if row.get("spread") is None else round(row["spread"], 3),
        "memory": None if not row.get("memory") else round(row["memory"], 2),
        "problem": row.get("problem", ""),
    }
