"""Faults at random moments: `python -m benchmarks soak` checks that training ends as if there were none.

A run of two processes, or one, is killed, stopped, starved of memory and disk, and loses checkpoints while it
trains; what ended is resumed under a strategy drawn at random. A finished run must have every sample once in
its ledger, the losses of an undisturbed run, and pass `verify`; no process may be left over. Where Slurm's
daemons are installed, a job on two nodes gets faults too, with those that only a cluster has.
"""

from __future__ import annotations

import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isobatch.benchmarks.soak import cluster, one_machine
from isobatch.benchmarks.soak.checks import STEPS, Tally
from isobatch.core.package import ROOT, own_command
from isobatch.tests.integration.helpers import losses

UNDISTURBED = f"{ROOT}/tests/tasks/failing.py:Line"
FAULTS, QUICK_FAULTS = 105, 6
CLUSTER_FAULTS, QUICK_CLUSTER_FAULTS = 25, 3

OneRun = Callable[[random.Random, Tally, list[float]], dict[str, Any]]
"""(rng, tally, losses of an undisturbed run) -> what one run with faults came to."""


def measure(quick: bool, seed: int = 0) -> list[dict[str, Any]]:
    """A row per kind of fault, and one of what was checked, on this machine and on a cluster."""
    expected = undisturbed_losses()
    rows = repeat_runs(one_machine.run, QUICK_FAULTS if quick else FAULTS, seed, expected, "1 machine")
    if cluster.available():
        wanted = QUICK_CLUSTER_FAULTS if quick else CLUSTER_FAULTS
        rows += repeat_runs(cluster.run, wanted, seed, expected, "2 nodes under Slurm")
    return rows


def repeat_runs(
    one_run: OneRun, wanted: int, seed: int, expected: list[float], where: str
) -> list[dict[str, Any]]:
    """Runs, one after the other, until there were as many faults as wanted."""
    tally, began = Tally(wanted), time.monotonic()
    runs: list[dict[str, Any]] = []
    while not tally.is_full:
        runs.append(one_run(random.Random(seed + len(runs)), tally, expected))
    checks = {
        "where": where,
        "runs": len(runs),
        "faults": tally.counts.total(),
        "largest_loss_difference": max(r["difference"] for r in runs),
        "samples_lost_or_repeated": sum(r["odd"] for r in runs),
        "verified": all(r["verified"] for r in runs),
        "left_over_processes": sum(r["left"] for r in runs),
        "ends": " ".join(sorted({e for r in runs for e in r["ends"]})),
        **tally.seconds(),
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    kinds = [{"where": where, "fault": kind, "times": n} for kind, n in sorted(tally.counts.items())]
    return [*kinds, checks]


def undisturbed_losses() -> list[float]:
    with tempfile.TemporaryDirectory() as name:
        words = ["auto", "--task", UNDISTURBED, "--name", "run", "--steps", str(STEPS)]
        subprocess.run(own_command(*words), cwd=name, check=True, capture_output=True)
        return losses(Path(name) / "runs" / "run")
