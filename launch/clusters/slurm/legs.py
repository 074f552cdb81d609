"""The legs of a job: what each reads of its request, how much time it has, whether it requeues itself."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.core import atomic_files
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.log_reader import newest_rows
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.clusters.slurm import client

ASK_AGAIN_SECONDS, PAUSE_SECONDS = 120.0, 5.0
"""How often Slurm is asked for the time that is left, and how long this process stands still where the job is
suspended."""
EARLY_SIGNAL_SECONDS = 65.0
"""Slurm may send its signal this much earlier than --signal asks."""
SLOW_SHARE = 0.9
"""This share of the steps takes no longer than the step that is counted with."""
SLOW_STORE_BYTES_PER_SECOND = 100e6
"""Write speed that a busy shared file system still reaches."""
SHUTDOWN_SECONDS = 15.0
"""From the end of training to the end of the job: processes exit, the job is requeued."""
REQUEUEABLE_STATES = ("", "RUNNING", "PREEMPTED", "TIMEOUT")
"""States of a job that may requeue itself after a stop; empty where Slurm does not answer."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 60.0
"""Between two tries, while slurmctld does not answer."""


Reached = list[int] | None
"""[number of the phase, step] of a checkpoint; None without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """RUN/slurm/request.json: what `slurm` was asked for and the job needs; every leg reads it."""

    local: int
    """Processes on a node: the number of nodes may change between attempts."""
    lead: int
    """Seconds before the time limit at which to save, at least."""
    plan: dict[str, Any]
    """The plan's options, without the number of processes."""
    seconds: int
    """The time limit, where Slurm does not answer."""
    max_legs: int | None = None
    """Starts of the job at most; None for no limit."""
    srun: tuple[str, ...] = ("--mpi=none",)
    """Further words of every srun."""
    container: dict[str, Any] | None = None
    """The fields of `containers.Container`; None for no container."""

    @classmethod
    def read(cls, run: Path) -> JobRequest:
        return cls(**atomic_files.read_json(run / "slurm" / "request.json"))

    def write(self, run: Path) -> None:
        (run / "slurm").mkdir(exist_ok=True)
        atomic_files.write_json(run / "slurm" / "request.json", dataclasses.asdict(self))


def seconds_to_stop(run: RunFolder) -> float:
    """Seconds from the signal to the job's end, as measured; 0 before the first step.

    One step in ten may be slower: a job may have been suspended in it.
    """
    said = (row.get("step_seconds") for row in newest_rows(run.metrics))
    steps = sorted(seconds for seconds in said if isinstance(seconds, float | int))
    if not steps:
        return 0.0
    folders = [p for p in run.checkpoints.glob("[!.]*-*") if p.is_dir()]
    largest = max((sum(f.stat().st_size for f in p.rglob("*") if f.is_file()) for p in folders), default=0)
    return stop_seconds(steps[int(SLOW_SHARE * (len(steps) - 1))], largest)


def stop_seconds(step: float, checkpoint: float) -> float:
    """Seconds that a stop takes with steps of so many seconds and checkpoints of so many bytes.

    Three steps: the one under way, the one whose reduction carries the stop flag, and the one in which the
    flag takes effect. Two checkpoints: a save under way ends before the last one begins.
    """
    return SHUTDOWN_SECONDS + 3 * step + 2 * checkpoint / SLOW_STORE_BYTES_PER_SECOND


def should_save_now(left: float, warned: bool, lead: float, measured: float) -> bool:
    """Whether to save and stop now. `left`: seconds to the time limit; `lead`, `measured`: seconds that a
    stop takes, as asked for and as measured.

    A warning of Slurm's long before the limit (`warned`) means preemption, so the job stops at once.
    """
    return left <= max(lead, measured) or (warned and left > lead + EARLY_SIGNAL_SECONDS)


class LegClock:
    """What is left of a leg's time limit. Slurm does not count the time in which a job is suspended, and an
    administrator may change the limit: so Slurm is asked now and then, and when this process stood still.
    """

    def __init__(self, ask: Callable[[], float | None], limit: float) -> None:
        """`ask`: Slurm for the seconds that are left, None where it does not answer."""
        self._ask, self.limit = ask, limit
        """`limit`: seconds of the whole leg, as far as is known."""
        self._looked = time.monotonic()
        self._end, self._asked = self._looked + limit, self._looked - ASK_AGAIN_SECONDS
        self.watch()

    def left(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()

    def watch(self) -> None:
        """To be called twice a second: asks Slurm where it is time to."""
        now = time.monotonic()
        paused = now - self._looked > PAUSE_SECONDS
        self._end += (now - self._looked) * paused  # Slurm's answer, where there is one, says it exactly
        if paused or now - self._asked >= ASK_AGAIN_SECONDS:
            left, self._asked = self._ask(), time.monotonic()
            if left is not None:
                self._end, self.limit = self._asked + left, max(left, self.limit)
        self._looked = time.monotonic()


def why_not_requeue(
    reason: str, leg: int, max_legs: int | None, before: Reached, now: Reached, shown: dict[str, str]
) -> str:
    """Why a stopped job does not requeue itself; empty where it does. `before`, `now`: where the leg before
    was requeued, and the furthest checkpoint; `shown`: what Slurm shows of the job.
    """
    state = shown.get("JobState", "")
    if int(shown.get("Restarts", 0)) >= leg:  # it counts up at once; the state is COMPLETING, as at any end
        return "Slurm does so itself"
    if state not in REQUEUEABLE_STATES:
        return "the job was cancelled" if state in ("CANCELLED", "COMPLETING") else f"the job is {state}"
    if reason not in ("limit", "term") and not was_preempted(shown):
        return "a signal asked for a stop, not the time limit"
    if max_legs and leg >= max_legs:
        return f"this was leg {leg} of --max-legs {max_legs}"
    if now is None or (before is not None and now <= before):
        return "no checkpoint was added since the last start: a longer --time gives it the time to reach one"
    return ""


def was_preempted(shown: dict[str, str]) -> bool:
    """Whether Slurm, by what it shows of a job, took its nodes for another, at once or after a grace time."""
    return shown.get("PreemptTime", "None") not in ("None", "Unknown")


def requeue(job: str, seconds_left: Callable[[], float]) -> str:
    """Requeue a job, until the time limit while slurmctld does not answer; why it failed, or nothing."""
    pause = FIRST_PAUSE_SECONDS
    while (done := client.run_slurm("scontrol", "requeue", job)).returncode:
        problem = done.stderr.strip() or "scontrol did not answer"
        if client.show("job", job) or seconds_left() < pause:
            return problem
        print(f"Slurm does not answer ({problem}): again in {pause:.0f} s", flush=True)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    return ""


def furthest_checkpoint(run: RunFolder) -> Reached:
    """The furthest checkpoint."""
    task, _ = workload_of(run.recipe).make(run.recipe)
    phases = [phase.name for phase in task.phases()]
    names = [path.name.rpartition("-") for path in run.checkpoints.glob("[!.]*-*")]
    return max(([phases.index(p), int(s)] for p, _, s in names if p in phases and s.isdigit()), default=None)
