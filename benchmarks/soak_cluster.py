"""The soak on a cluster: a job on two nodes that is requeued, signalled, and loses nodes and ranks."""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isobatch.benchmarks.soak import BOUND_SECONDS, STEPS, Progress, Times, checked
from isobatch.tests.slurm import nodes

available = nodes.available
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def run_under_fire(
    draw: random.Random, counts: dict[str, int], wanted: int, times: Times, expected: list[float]
) -> dict[str, Any]:
    """One job, submitted to a cluster of its own, until it is over."""
    with nodes.up() as cluster, tempfile.TemporaryDirectory() as name:
        flags = ["--nodes", "2", "--steps", str(STEPS), "--save-every", "15", "--keep", "3"]
        flags += ["--hang-timeout", "30", "--max-restarts", "1000"]
        fire = Fire(cluster.submit("Slow", *flags, cwd=Path(name), limit="02:00:00"), draw, times)
        while fire.trains_for(draw.uniform(0.2, 2.5)):
            if sum(counts.values()) < wanted:
                kind = draw.choice(list(FAULTS))
                if FAULTS[kind](fire):
                    counts[kind] = counts.get(kind, 0) + 1
                    print(f"fault {sum(counts.values())}: {kind}", file=sys.stderr)
        state = fire.job.shown("JobState")
        if state != "COMPLETED":
            raise RuntimeError(f"the job is {state}: {fire.job.said()}")
        return {**checked(fire.job.run, expected), "ends": [state]}


class Fire:
    """A job, and what it has been through."""

    def __init__(self, job: nodes.Job, draw: random.Random, times: Times) -> None:
        self.job, self.draw, self.times = job, draw, times
        self.progress = Progress(job.run)
        self.began: float | None = None
        """When a leg that has not taken a step yet was first seen to run."""
        self.legs: set[str] = set()

    def trains_for(self, seconds: float) -> bool:
        """Wait for a step and this long; False where the job ended first."""
        began, moved = time.monotonic(), None
        while self.job.shown("JobState") not in OVER:
            self._note_leg()
            if self.progress.moved() and moved is None:
                moved = time.monotonic()
                if self.began is not None:
                    self.times.to_step.append(moved - self.began)
                    self.began = None
            if moved is not None and time.monotonic() - moved > seconds:
                return True
            if time.monotonic() - began > BOUND_SECONDS:
                raise RuntimeError(f"hangs: {self.job.said()}")
            time.sleep(0.3)
        return False

    def _note_leg(self) -> None:
        number = self.job.shown("Restarts")
        if self.job.shown("JobState") == "RUNNING" and number not in self.legs:
            self.legs.add(number)
            self.began = time.monotonic()

    def ask(self, *words: str) -> bool:
        self.job.cluster.ask(*words)
        return True

    def lose_node(self) -> bool:
        """The second one: the job's own script runs on the first. It comes back before long."""
        self.ask("scontrol", "update", "nodename=n2", "state=down", "reason=soak")
        time.sleep(self.draw.uniform(1, 4))
        return self.ask("scontrol", "update", "nodename=n2", "state=resume")

    def kill_rank(self) -> bool:
        found = nodes.ranks(self.job.run)
        if found:
            os.kill(self.draw.choice(found).pid, signal.SIGKILL)
        return bool(found)

    def requeue(self) -> bool:
        return self.ask("scontrol", "requeue", self.job.number)

    def signal(self, name: str) -> bool:
        return self.ask("scancel", "--batch", f"--signal={name}", self.job.number)


FAULTS: dict[str, Callable[[Fire], bool]] = {
    "scontrol requeue": Fire.requeue,
    "node set down": Fire.lose_node,
    "SIGKILL of a rank": Fire.kill_rank,
    "SIGTERM to the job": functools.partial(Fire.signal, name="TERM"),
    "SIGUSR1 to the job": functools.partial(Fire.signal, name="USR1"),
}
