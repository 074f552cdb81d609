"""After a stop: whether a job puts itself back into the queue, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isobatch.core.errors import STOPPED
from isobatch.engine.registry import workload_of
from isobatch.launch.slurm import client, job_record

if TYPE_CHECKING:
    from isobatch.engine.runs.run_folder import RunFolder

REQUEUEABLE_STATES = ("RUNNING", "PREEMPTED", "TIMEOUT")
"""States of a job that may requeue itself after a stop; a cancelled one may not."""


def requeue_or_stop(run: RunFolder, allocation: client.Allocation, reason: str) -> int:
    """After a stop: requeue the job if it made progress. Returns the exit code STOPPED."""
    before = job_record.read(run).get("requeued_at")
    now = furthest_checkpoint(run)
    why_not = why_not_requeue(reason, client.job_state(allocation.job), before, now)
    if why_not:
        print(f"stopped and not requeued: {why_not}", flush=True)
        return STOPPED
    job_record.update(run, requeued_at=now)
    print(f"requeueing at step {now[1] if now else 0} (leg {allocation.restarts + 1})", flush=True)
    if problem := client.requeue(allocation.job):
        print(f"Slurm does not requeue the job: {problem}", flush=True)
    return STOPPED


def why_not_requeue(reason: str, state: str, before: list[int] | None, now: list[int] | None) -> str:
    """Why a stopped job does not requeue itself; empty where it does."""
    if reason not in ("limit", "term"):
        return "a signal asked for a stop, not the time limit"
    if state and state not in REQUEUEABLE_STATES:
        return f"the job is {state}"
    if now is None or (before is not None and now <= before):
        return "no checkpoint was added since the last start: a longer --time gives it the time to reach one"
    return ""


def furthest_checkpoint(run: RunFolder) -> list[int] | None:
    """[phase, step] of the furthest checkpoint."""
    task, _ = workload_of(run.recipe).make(run.recipe)
    phases = [phase.name for phase in task.phases()]
    names = [path.name.rpartition("-") for path in run.checkpoints.glob("[!.]*-*")]
    return max(([phases.index(p), int(s)] for p, _, s in names if p in phases and s.isdigit()), default=None)
