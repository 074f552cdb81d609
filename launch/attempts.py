"""A run's attempts: begun again from its last checkpoint when memory ran out or a process was lost."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable

from engine.errors import BUG
from engine.run import NONCE, Run, Verdict
from launch.children import HOME, start_children

Start = Callable[[Run], Verdict | None]
"""Trains a run by its plan once, to the end of that attempt; None where no process left a verdict."""


def train(run: Run, start: Start) -> int:
    """Attempts until one ends for good; the run's exit code."""
    verdict = start(run)
    if verdict is None or verdict.code == BUG:
        sys.stderr.write((run.folder / "launcher.log").read_text(errors="replace")[-6000:])
        return BUG
    return verdict.code


def in_children(run: Run) -> Verdict | None:
    """One attempt in worker processes of this machine."""
    nonce = secrets.token_hex(8)
    arguments = ["--run", str(run.folder.resolve())]
    # accelerate's own code says only 0 or 1, and 1 for a clean stop too: the run's own file is the truth.
    start_children(run.plan(), HOME / "launch" / "train.py", arguments, run.folder, {NONCE: nonce})
    return run.read_exit(nonce)
