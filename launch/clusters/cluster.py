"""What is asked of a cluster, whichever it is, and which there are.

A new one is a folder beside this file with a `Cluster` in it, a line in CLUSTERS, and a row in
launch/commands.csv: `submit --to NAME`, a function that trains the request in these words there. Its flags
are a dataclass named after the class, as SlurmOptions; what runs inside its jobs may be a row without help.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from isobatch.core.errors import UserError
from isobatch.core.package import load
from isobatch.engine.runs.run_folder import RunFolder, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """What a cluster says of the job that trains a run, or did."""

    stage: Literal["queued", "running", "over", "unknown"]
    """unknown: the cluster does not answer."""
    cluster: str
    """Its name in CLUSTERS."""
    job: str = ""
    """The job's number; empty for a process of this machine."""
    state: str = ""
    """The cluster's own word: PENDING, RUNNING, FAILED ..."""
    reason: str = ""
    """Why it waits, failed, or is not known; empty where the cluster names none."""
    restarts: int = 0
    """How often it was requeued."""

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.state}{reason}".strip() + (f", leg {self.restarts + 1}" if self.restarts else "")


@runtime_checkable
class Cluster(Protocol):
    """Where runs train. What it has to remember of one lies in RUN/NAME, by its name in CLUSTERS."""

    def attempt(self, run: RunFolder) -> Verdict | None:
        """Train a run by its plan once, asked by who drives it; None where nobody left a verdict."""

    def state(self, runs: Sequence[RunFolder]) -> dict[Path, JobState]:
        """By folder, those of these runs that it knows, by one question."""

    def cancel(self, run: RunFolder, job: JobState, now: bool) -> None:
        """Ask a job to save and end, or to end `now`; one that waits leaves the queue. Raises UserError."""


CLUSTERS = {
    "slurm": "slurm.job:Slurm",
    "k8s": "kubernetes.job:Kubernetes",
    "ray": "ray.driver:Ray",
    "local": "local.here:Local",
}
"""Name -> its class in launch/clusters; of two that know a run, the first counts."""


def cluster(name: str, **settings: Any) -> Cluster:
    """A cluster by its name; imports its module."""
    return load(f"launch.clusters.{CLUSTERS[name]}")(**settings)


def job_states(runs: Sequence[RunFolder]) -> dict[Path, JobState]:
    """By folder, what trains these runs, will, or did last; nothing of those that no cluster knows."""
    found: dict[Path, JobState] = {}
    for name in CLUSTERS:
        had = [run for run in runs if name == "local" or (run.folder / name).is_dir()]
        for folder, job in (cluster(name).state(had) if had else {}).items():
            if folder not in found or found[folder].stage == "over":
                found[folder] = job
    return found


def whose_job(run: RunFolder, own: str = "") -> str:
    """In which other job than `own` a run is, as a sentence; empty where it is in none.

    Raises UserError where its cluster does not say.
    """
    job = job_states([run]).get(run.folder)
    if job is None or job.job == own:
        return ""
    if job.stage == "unknown":
        said = f"{run.folder} was in job {job.job}, which may still train it: {job.reason}; try again later"
        raise UserError(f"{said}, or remove {run.folder}/{job.cluster}/job.json if you know that it is over")
    is_in_job = job.job and job.stage in ("queued", "running")
    return f"{run.folder} is in job {job.job} already ({job})" if is_in_job else ""


def refuse_if_in_a_job(run: RunFolder, own: str = "") -> None:
    """Raises UserError for a run that another job than `own` trains or will train."""
    if fact := whose_job(run, own):
        raise UserError(f"{fact}: isobatch cancel {run.folder} first")
