"""RUN/slurm/job.json: which Slurm job a run is in, and what the legs of a job tell each other."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.launch.slurm import client

if TYPE_CHECKING:
    from isobatch.engine.runs.run_folder import RunFolder

FINISHED_STATES = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
)


def read(run: RunFolder) -> dict[str, Any]:
    path = run.folder / "slurm" / "job.json"
    return atomic_files.read_json(path) if path.exists() else {}


def update(run: RunFolder, **facts: Any) -> None:
    """Update job.json; entries of another job are dropped."""
    before = read(run)
    if "job" in facts and before.get("job") != facts["job"]:
        before = {}
    (run.folder / "slurm").mkdir(exist_ok=True)
    atomic_files.write_json(run.folder / "slurm" / "job.json", {**before, **facts})


def last_job_of(run: RunFolder) -> str:
    """The number of the run's last job, from slurm/job.json; empty where there was none."""
    path = run.folder / "slurm" / "job.json"
    job = str(atomic_files.read_json(path).get("job", "")) if path.exists() else ""
    return job if re.fullmatch(r"\d+(_\d+)?", job) else ""


def refuse_if_in_a_job(run: RunFolder, asking_job: str = "") -> None:
    """Refuse a run that another job than `asking_job` trains or will train. Raises UserError."""
    job = last_job_of(run)
    if (
        job
        and job != asking_job
        and (state := client.job_states([job]).get(job))
        and state not in FINISHED_STATES
    ):
        raise UserError(f"{run.folder} is in job {job} already ({state}): scancel {job} first")
