"""Faults of a job on two nodes under Slurm: it is requeued, signalled, and loses nodes and ranks."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.benchmarks.soak.checks import STEPS, Disturbed, Tally, check_run
from isobatch.tests.slurm import nodes

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

available = nodes.available
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def run(rng: random.Random, tally: Tally, expected: list[float]) -> dict[str, Any]:
    """One job, submitted to a cluster that is started for it, until it is over."""
    with nodes.up() as cluster, tempfile.TemporaryDirectory() as name:
        flags = ["--nodes", "2", "--steps", str(STEPS), "--save-every", "15", "--keep", "3"]
        flags += ["--hang-timeout", "30", "--max-restarts", "1000"]
        job = cluster.submit("Slow", *flags, cwd=Path(name), limit="02:00:00")
        disturbed = DisturbedJob(job, rng, tally)
        disturbed.inject_faults(FAULTS)
        state = job.shown("JobState")
        if state != "COMPLETED":
            raise RuntimeError(f"the job is {state}: {job.said()}")
        return {**check_run(job.run, expected), "ends": [state]}


class DisturbedJob(Disturbed):
    """A job that gets faults; Slurm starts it again."""

    def __init__(self, job: nodes.Job, rng: random.Random, tally: Tally) -> None:
        super().__init__(job.run, rng, tally)
        self.job = job
        self.starts: set[str] = set()
        """Slurm's restart counts that were seen running."""

    def is_over(self) -> bool:
        time.sleep(0.3)  # Slurm is asked no oftener
        state, number = self.job.shown("JobState"), self.job.shown("Restarts")
        if state == "RUNNING" and number not in self.starts:
            self.starts.add(number)
            self.began = time.monotonic()
        return state in OVER

    def said(self) -> str:
        return self.job.said()

    def ask(self, *words: str) -> bool:
        self.job.cluster.ask(*words)
        return True

    def lose_node(self) -> bool:
        """Set the second node down for some seconds; the job's own script runs on the first."""
        self.ask("scontrol", "update", "nodename=n2", "state=down", "reason=soak")
        time.sleep(self.rng.uniform(1, 4))
        return self.ask("scontrol", "update", "nodename=n2", "state=resume")

    def kill_rank(self) -> bool:
        found = nodes.ranks(self.run)
        if found:
            os.kill(self.rng.choice(found).pid, signal.SIGKILL)
        return bool(found)

    def requeue(self) -> bool:
        return self.ask("scontrol", "requeue", self.job.number)

    def signal(self, name: str) -> bool:
        return self.ask("scancel", "--batch", f"--signal={name}", self.job.number)


FAULTS: dict[str, Callable[[DisturbedJob], bool]] = {
    "scontrol requeue": DisturbedJob.requeue,
    "node set down": DisturbedJob.lose_node,
    "SIGKILL of a rank": DisturbedJob.kill_rank,
    "SIGTERM to the job": functools.partial(DisturbedJob.signal, name="TERM"),
    "SIGUSR1 to the job": functools.partial(DisturbedJob.signal, name="USR1"),
}
