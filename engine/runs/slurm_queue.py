"""Slurm's queue as a run sees it: the job that a run is in, and what squeue says of it.

This stands beside the run folder's locks: a run that a job trains, or will train, is as taken as one that a
process of this machine trains.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.engine.runs.run_folder import RunFolder

TIMEOUT_SECONDS = 30
SQUEUE_SECONDS = 5
"""Slurm's own commands try for 18 s where the controller is away."""
NO_ANSWER = "Unable to contact slurm controller"
"""What Slurm's commands say while slurmctld is away."""
FINISHED_STATES = (
    "COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL OUT_OF_MEMORY BOOT_FAIL DEADLINE PREEMPTED REVOKED"
)
RUNNING_STATES = "RUNNING SUSPENDED COMPLETING STOPPED SIGNALING RESIZING STAGE_OUT"
"""States of a job whose script has begun. One that is neither here nor finished waits to begin."""
FIELDS = "JobArrayID:40,State:24,RestartCnt:12,Reason:120"


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Exit code and output of a Slurm command; code 127 where it is missing or exceeds its time limit."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """What it says is wrong, without the words that Slurm puts before; empty where it succeeded."""
        prefixes = r"^(\w+: |error: |fatal: |allocation failure: |slurm_\w+ error: )+"
        lines = [re.sub(prefixes, "", line.strip()) for line in self.err.splitlines()]
        return "; ".join(dict.fromkeys(line for line in lines if line)) if self.code else ""

    @property
    def silent(self) -> bool:
        """Whether the controller did not answer."""
        late = self.code == 127 and "no answer within" in self.err
        return late or (self.code != 0 and NO_ANSWER in self.err)

    @property
    def no_cluster(self) -> bool:
        """Whether Slurm's commands are installed here, and no cluster is."""
        return self.code != 0 and "configuration source" in self.err


def run_slurm(*words: str, seconds: float = TIMEOUT_SECONDS) -> CommandResult:
    """Run one Slurm command, for `seconds` at most; never raises."""
    try:
        done = subprocess.run(words, input="", capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return CommandResult(127, "", f"no answer within {seconds:g} s")
    except OSError as error:
        return CommandResult(127, "", str(error))
    return CommandResult(done.returncode, done.stdout, done.stderr)


class SlurmSilentError(UserError):
    """Slurm does not answer: nothing is known about jobs."""


class InAJobError(UserError):
    """A run is in a job that is not over. `fact`: the sentence without the way out."""

    def __init__(self, fact: str, run: RunFolder) -> None:
        super().__init__(f"{fact}: isobatch cancel {run.folder} first")
        self.fact = fact


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What squeue says of a job."""

    state: str
    """PENDING, RUNNING, FAILED ..."""
    reason: str = ""
    """Why it waits, or why it failed; empty where Slurm names none."""
    restarts: int = 0
    """How often it was requeued."""

    @property
    def is_over(self) -> bool:
        return self.state in FINISHED_STATES.split()

    @property
    def waits(self) -> bool:
        """Whether it is in the queue, for its first leg or a later one."""
        return not self.is_over and self.state not in RUNNING_STATES.split()

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        return self.state + reason + (f", leg {self.restarts + 1}" if self.restarts else "")


def job_statuses(jobs: Sequence[str]) -> dict[str, JobStatus]:
    """Job -> status, of those that Slurm still knows, by one call of squeue.

    Empty on a machine without Slurm. Raises SlurmSilentError where Slurm does not answer.
    """
    if not jobs or shutil.which("squeue") is None:
        return {}
    words = ("squeue", "-h", "-r", "-t", "all", "-O", FIELDS, "-j", ",".join(jobs))
    listed = run_slurm(*words, seconds=SQUEUE_SECONDS)
    if "Invalid job id" in listed.err or listed.no_cluster:
        return {}
    if listed.code:
        raise SlurmSilentError(f"Slurm does not answer ({listed.error or 'squeue failed'})")
    rows = [row for line in listed.out.splitlines() if len(row := line.split(None, 3)) >= 3]
    return {job: _status(state, restarts, *rest) for job, state, restarts, *rest in rows}


def _status(state: str, restarts: str, reason: str = "") -> JobStatus:
    # Why a job waited stays with one that was cancelled.
    said = "" if reason.strip() == "None" or state in ("CANCELLED", "COMPLETED") else reason.strip()
    return JobStatus(state, said, int(restarts) if restarts.isdigit() else 0)


def job_record(run: RunFolder) -> dict[str, Any]:
    """RUN/slurm/job.json: which job a run is in (`job`), and what the legs of a job tell each other."""
    path = run.folder / "slurm" / "job.json"
    return atomic_files.read_json(path) if path.exists() else {}


def update_job_record(run: RunFolder, **facts: Any) -> None:
    """Update job.json; entries of another job are dropped."""
    before = job_record(run)
    if "job" in facts and before.get("job") != facts["job"]:
        before = {}
    (run.folder / "slurm").mkdir(exist_ok=True)
    atomic_files.write_json(run.folder / "slurm" / "job.json", {**before, **facts})


def last_job_of(run: RunFolder) -> str:
    """The number of the run's last job; empty where there was none."""
    job = str(job_record(run).get("job", ""))
    return job if re.fullmatch(r"\d+(_\d+)?", job) else ""


def refuse_if_in_a_job(run: RunFolder, asking_job: str = "") -> None:
    """Refuse a run that another job than `asking_job` trains or will train.

    Raises InAJobError, and UserError where Slurm does not say.
    """
    job, status = last_job_of(run), None
    if job and job != asking_job:
        try:
            status = job_statuses([job]).get(job)
        except SlurmSilentError as error:
            raise UserError(
                f"{run.folder} was in job {job}, which may still train it: {error}; try again when squeue"
                f" answers, or remove {run.folder}/slurm/job.json if you know that the job is over"
            ) from None
    if status is not None and not status.is_over:
        raise InAJobError(f"{run.folder} is in job {job} already ({status})", run)
