"""What a run that had faults is held to, and the figures that are kept of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil

from isobatch.core.package import own_command
from isobatch.engine.runs.ledger import read_ledger
from isobatch.engine.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 240
"""Optimizer steps of every run."""
HANG_SECONDS = 120
"""Longer without a new step, or an end, is a hang."""


class SoakProgress:
    """Whether a run took a step; a resume first cuts its metrics back."""

    def __init__(self, run: Path) -> None:
        self.path, self.size = run / "metrics.jsonl", 0

    def moved(self) -> bool:
        size = self.path.stat().st_size if self.path.exists() else 0
        grew, self.size = size > self.size, size
        return grew


@dataclass
class Tally:
    """Faults so far in all runs of one kind, and the seconds that they cost."""

    wanted: int
    """Faults to inject in all."""
    counts: Counter[str] = field(default_factory=Counter)
    """Kind of fault -> how often."""
    to_exit: list[float] = field(default_factory=list)
    """From a signal that asks for a stop to the end of all processes."""
    to_step: list[float] = field(default_factory=list)
    """From the start of a command, or of a requeued job, to its first new step."""

    @property
    def is_full(self) -> bool:
        return self.counts.total() >= self.wanted

    def add(self, kind: str) -> None:
        self.counts[kind] += 1
        print(f"fault {self.counts.total()}: {kind}", file=sys.stderr)

    def seconds(self) -> dict[str, Any]:
        return {
            "signals": len(self.to_exit),
            "slowest_signal_to_exit_seconds": round(max(self.to_exit, default=0), 1),
            "median_start_to_step_seconds": round(median(self.to_step), 1) if self.to_step else 0,
            "slowest_start_to_step_seconds": round(max(self.to_step, default=0), 1),
        }


def check_run(run: Path, expected: list[float]) -> dict[str, Any]:
    """Compare a finished run with an undisturbed one; count wrong samples and processes left over."""
    ledger = [one.step for one in read_ledger(RunFolder(run))]
    verify = own_command("verify", str(run))
    done = subprocess.run(verify, cwd=run, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
    left = [p for p in psutil.process_iter(["cmdline"]) if str(run) in " ".join(p.info["cmdline"] or [])]
    for p in left:
        print(f"left over: {p.info['cmdline']}", file=sys.stderr)
    return {
        "difference": max(abs(a - b) for a, b in zip(losses(run), expected, strict=True)),
        "odd": len(set(ledger) ^ set(range(1, STEPS + 1))) + len(ledger) - len(set(ledger)),
        "verified": done.returncode == 0,
        "left": len(left),
    }


def losses(run: Path) -> list[float]:
    """The training loss of every step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [r["loss"] for r in rows if "lr" in r]
