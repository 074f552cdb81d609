"""A run that gets faults, what it is held to, and the figures that are kept of it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil

from isobatch.core.package import own_command
from isobatch.engine.runs.ledger import read_ledger
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.tests.integration.helpers import losses

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping
    from pathlib import Path

STEPS = 240
"""Optimizer steps of every run."""
HANG_SECONDS = 120
"""Longer without a new step, or an end, is a hang."""


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


class Disturbed:
    """A run that gets faults. What is started again when it ended, and how, is the subclass's."""

    def __init__(self, run: Path, rng: random.Random, tally: Tally) -> None:
        self.run, self.rng, self.tally = run, rng, tally
        self.log, self.size = run / "metrics.jsonl", 0
        self.began: float | None = None
        """When it was last started; None after its first new step."""

    def is_over(self) -> bool:
        raise NotImplementedError

    def said(self) -> str:
        """What it printed."""
        raise NotImplementedError

    def trains_for(self, seconds: float) -> bool:
        """Wait for a step and then so many seconds; False if it ended first."""
        began, moved = time.monotonic(), None
        while not self.is_over():
            if self._grew() and moved is None:
                moved = time.monotonic()
                if self.began is not None:
                    self.tally.to_step.append(moved - self.began)
                    self.began = None
            if moved is not None and time.monotonic() - moved > seconds:
                return True
            if time.monotonic() - began > HANG_SECONDS:
                raise RuntimeError(f"hangs: {self.said()[-2000:]}")
            time.sleep(0.02)
        return False

    def _grew(self) -> bool:
        """Whether it logged a step; a resume first cuts its metrics back."""
        size = self.log.stat().st_size if self.log.exists() else 0
        grew, self.size = size > self.size, size
        return grew

    def inject_faults(self, faults: Mapping[str, Callable[[Any], bool]]) -> None:
        """Faults drawn at random moments until it is over; none once all that are wanted were injected."""
        while self.trains_for(self.rng.uniform(0.2, 2.5)):
            if not self.tally.is_full:
                kind = self.rng.choice(list(faults))
                began = time.monotonic()
                if faults[kind](self):
                    self.tally.add(kind)
                    self.after_fault(kind, began)

    def after_fault(self, kind: str, began: float) -> None:
        """What a subclass notes of a fault."""


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
