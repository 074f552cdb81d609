"""After a stop: whether a job puts itself back into the queue, and how."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isobatch.engine.registry import workload_of
from isobatch.launch.clusters.slurm import client, job_record

if TYPE_CHECKING:
    from collections.abc import Callable

    from isobatch.engine.runs.run_folder import RunFolder

REQUEUEABLE_STATES = ("RUNNING", "PREEMPTED", "TIMEOUT")
"""States of a job that may requeue itself after a stop; a cancelled one may not."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 60.0
"""Between two tries, while slurmctld does not answer."""
WITHOUT_LIMIT_SECONDS = 3600.0
"""How long a job without a time limit tries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """One start of a job, as it stands after a stop."""

    reason: str
    """Of the stop, as JobStop says it."""
    number: int
    """Of the leg, from 1."""
    max_legs: int | None
    before: list[int] | None
    """[phase, step] at which the leg before was requeued."""
    now: list[int] | None
    """[phase, step] of the furthest checkpoint."""
    job: dict[str, str]
    """What Slurm shows of the job; empty where it does not answer."""

    @property
    def is_requeued_by_slurm(self) -> bool:
        """Its number of restarts counts up at once; its state is COMPLETING, as after any end."""
        return int(self.job.get("Restarts", 0)) >= self.number

    def why_not_requeue(self) -> str:
        """Why a stopped job does not requeue itself; empty where it does."""
        state = self.job.get("JobState", "")
        if self.is_requeued_by_slurm:
            return "Slurm does so itself"
        if state and state not in REQUEUEABLE_STATES:
            return "the job was cancelled" if state in ("CANCELLED", "COMPLETING") else f"the job is {state}"
        if self.reason not in ("limit", "term") and not was_preempted(self.job):
            return "a signal asked for a stop, not the time limit"
        if self.max_legs and self.number >= self.max_legs:
            return f"this was leg {self.number} of --max-legs {self.max_legs}"
        if self.now is None or (self.before is not None and self.now <= self.before):
            return (
                "no checkpoint was added since the last start: a longer --time gives it the time to reach one"
            )
        return ""


def was_preempted(job: dict[str, str]) -> bool:
    """Whether Slurm, by what it shows of a job, took its nodes for another, at once or after a grace time."""
    return job.get("PreemptTime", "None") not in ("None", "Unknown")


def requeue_or_stop(
    run: RunFolder,
    allocation: client.Allocation,
    reason: str,
    max_legs: int | None,
    seconds_left: Callable[[], float | None],
) -> None:
    """After a stop: requeue the job if it made progress, and say so."""
    now = furthest_checkpoint(run)
    record = job_record.read(run)
    step = now[1] if now else 0
    if record.get("cancel"):
        saved = f"saved at step {step} and cancelled: `resume` goes on"
        print(saved if now else "cancelled before anything was saved", flush=True)
        client.run_slurm("scancel", allocation.job)
        return
    leg = Leg(
        reason=reason,
        number=allocation.restarts + 1,
        max_legs=max_legs,
        before=record.get("requeued_at"),
        now=now,
        job=client.show_job(allocation.job),
    )
    if why_not := leg.why_not_requeue():
        print(f"stopped at step {step} and not requeued: {why_not}", flush=True)
        return
    job_record.update(run, requeued_at=now)
    print(f"{'preempted: ' * was_preempted(leg.job)}requeueing at step {step} (leg {leg.number})", flush=True)
    if problem := requeue(allocation.job, seconds_left):
        print(f"Slurm does not requeue the job: {problem}", flush=True)


def requeue(job: str, seconds_left: Callable[[], float | None]) -> str:
    """Requeue a job, until the time limit while slurmctld does not answer; why it failed, or nothing."""
    began, pause = time.monotonic(), FIRST_PAUSE_SECONDS
    while (problem := client.requeue(job)) and not client.show_job(job):
        left = seconds_left()
        if left is None:
            left = WITHOUT_LIMIT_SECONDS - (time.monotonic() - began)
        if left < pause:
            break
        print(f"Slurm does not answer ({problem}): again in {pause:.0f} s", flush=True)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    return problem


def furthest_checkpoint(run: RunFolder) -> list[int] | None:
    """[phase, step] of the furthest checkpoint."""
    task, _ = workload_of(run.recipe).make(run.recipe)
    phases = [phase.name for phase in task.phases()]
    names = [path.name.rpartition("-") for path in run.checkpoints.glob("[!.]*-*")]
    return max(([phases.index(p), int(s)] for p, _, s in names if p in phases and s.isdigit()), default=None)
