"""Calls of Slurm's own commands (squeue, sinfo, scontrol, sbatch), each with a time limit."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.package import table_beside
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.clusters.cluster import JobState
from isobatch.launch.clusters.slurm.options import parse_time_limit

TIMEOUT_SECONDS = 30
SQUEUE_SECONDS = 5
"""Slurm's own commands try for 18 s where the controller is away."""
NO_ANSWER = "Unable to contact slurm controller"
"""What Slurm's commands say while slurmctld is away."""
LATE = "no answer within"
"""What is said of one that exceeds its time limit."""
STATES: dict[str, str] = table_beside(__file__, "slurm_words")["states"]
"""Of jobs and nodes, by what they mean."""
FIELDS = "JobArrayID:40,State:24,RestartCnt:12,Reason:120"


Done = subprocess.CompletedProcess[str]


def run_slurm(*words: str, seconds: float = TIMEOUT_SECONDS) -> Done:
    """Run one Slurm command, for `seconds` at most; never raises. Its exit code is 127 where it is missing or
    exceeds its time limit.
    """
    try:
        return subprocess.run(words, input="", capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return Done(words, 127, "", f"{LATE} {seconds:g} s")
    except OSError as error:
        return Done(words, 127, "", str(error))


def error_of(done: Done) -> str:
    """What a command says is wrong, without the words that Slurm puts before; empty where it succeeded."""
    prefixes = r"^(\w+: |error: |fatal: |allocation failure: |slurm_\w+ error: )+"
    lines = [re.sub(prefixes, "", line.strip()) for line in done.stderr.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line)) if done.returncode else ""


def job_states(jobs: Sequence[str]) -> dict[str, JobState]:
    """Job -> state, of those that Slurm still knows, by one call of squeue; all are unknown where it does not
    answer. Empty on a machine without Slurm.
    """
    if not jobs or shutil.which("squeue") is None:
        return {}
    words = ("squeue", "-h", "-r", "-t", "all", "-O", FIELDS, "-j", ",".join(jobs))
    listed = run_slurm(*words, seconds=SQUEUE_SECONDS)
    if "Invalid job id" in listed.stderr or "configuration source" in listed.stderr:  # no cluster is set up
        return {}
    if listed.returncode:
        reason = f"Slurm does not answer ({error_of(listed) or 'squeue failed'})"
        return {job: JobState(stage="unknown", cluster="slurm", job=job, reason=reason) for job in jobs}
    rows = [row for line in listed.stdout.splitlines() if len(row := line.split(None, 3)) >= 3]
    return {job: _state(job, state, restarts, *rest) for job, state, restarts, *rest in rows}


def _state(job: str, state: str, restarts: str, reason: str = "") -> JobState:
    over, begun = (state in STATES[what].split() for what in ("finished", "begun"))
    # Why a job waited stays with one that was cancelled.
    said = "" if reason.strip() == "None" or state in ("CANCELLED", "COMPLETED") else reason.strip()
    return JobState(
        stage="over" if over else "running" if begun else "queued",
        cluster="slurm",
        job=job,
        state=state,
        reason=said,
        restarts=int(restarts) if restarts.isdigit() else 0,
    )


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
    with contextlib.suppress(UserError, AttributeError):  # a received run may hold anything
        job = str(job_record(run).get("job", ""))
        return job if re.fullmatch(r"\d+(_\d+)?", job) else ""
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """This job's allocation, from the environment variables of its batch step."""

    job: str
    """The job's number, or ARRAY_TASK in an array, where the number alone may mean the whole array."""
    nodes: tuple[str, ...]
    cpus: int
    """Per node."""
    gpus: int
    """Per node."""
    restarts: int = 0
    """How often the job was requeued."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Allocation:
        """Raises UserError outside a Slurm job."""
        if "SLURM_JOB_ID" not in environment:
            raise UserError("job: runs inside a Slurm job; `slurm --task ... --submit` starts one")
        array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
        gpus = environment.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]  # 8, or h100:8
        return cls(
            job=f"{array}_{task}" if array else environment["SLURM_JOB_ID"],
            nodes=hostnames(environment["SLURM_JOB_NODELIST"]),
            cpus=int(environment.get("SLURM_CPUS_PER_TASK", 1)),
            gpus=int(gpus) if gpus.isdigit() else 0,
            restarts=int(environment.get("SLURM_RESTART_COUNT", 0)),
        )


def available_nodes(job: str, nodes: Sequence[str]) -> tuple[str, ...]:
    """The nodes that a job still has and that respond; all of `nodes` where Slurm does not say.

    A node that failed leaves the job (`--no-kill`) and does not return to it, even where it is up again.
    """
    allocated = hostnames(run_slurm("squeue", "-h", "-j", job, "-o", "%N").stdout.strip()) or tuple(nodes)
    rows = run_slurm("sinfo", "-h", "-N", "-n", ",".join(nodes), "-o", "%N %T")
    states = dict(line.split()[:2] for line in rows.stdout.splitlines() if len(line.split()) > 1)
    return tuple(n for n in nodes if n in allocated and is_usable(states.get(n, "")))


def hostnames(nodes: str) -> tuple[str, ...]:
    """The names in a Slurm node list such as n[1-2]."""
    return tuple(run_slurm("scontrol", "show", "hostnames", nodes).stdout.split()) if nodes else ()


def is_usable(state: str) -> bool:
    """Whether a step can run on a node in this state of sinfo."""
    # A star is Slurm's mark for a node that does not answer; a draining one still serves its jobs.
    is_away = "*" in state or any(word in state.upper() for word in STATES["unusable"].split())
    return state.upper() == "DRAINING" or not is_away


def show(kind: Literal["job", "node"], name: str) -> dict[str, str]:
    """What `scontrol show` tells of a job, such as JobState and Restarts, or of a node, such as NodeAddr, at
    which Slurm reaches it; empty where it does not say.
    """
    return dict(re.findall(r"(\w+)=(\S*)", run_slurm("scontrol", "show", kind, name, seconds=10).stdout))


class NodeShape(NamedTuple):
    """What a node has."""

    cpus: int
    gpus: int
    card: str
    """Of its GPUs; empty where Slurm does not name it."""
    megabytes: int
    """Of its memory, as Slurm counts it; 1 where nobody has configured it."""
    most_seconds: float
    """The longest time limit of a job in its partition; infinite where there is none."""


def node_shapes(partition: str | None) -> list[NodeShape]:
    """The nodes of a partition, or of the default one; none where sinfo does not say."""
    words = ("-p", partition) if partition else ()
    said = run_slurm("sinfo", "-h", "-N", *words, "-o", "%P|%c|%G|%m|%l", seconds=10).stdout.splitlines()
    found = []
    for name, cpus, gres, memory, limit in (row.split("|") for row in said if row.count("|") == 4):
        if partition or name.endswith("*"):
            gpus = re.findall(r"gpu(?::([^:,(]+))??:(\d+)", gres)  # gpu:h100:8(S:0-1),nvme:2
            card = gpus[0][0] if gpus else ""
            seconds = parse_time_limit(limit) if limit[0].isdigit() else math.inf
            found.append(NodeShape(int(cpus), sum(int(n) for _, n in gpus), card, int(memory), seconds))
    return found


def submit(script: Path, new: Sequence[Path] = ()) -> str:
    """Submit a script; the number of the new job. Raises UserError with Slurm's reason where it refuses, and
    removes the runs that are `new`.
    """
    if shutil.which("sbatch") is None:
        raise UserError(f"--submit: there is no sbatch here; on a machine that has one: sbatch {script}")
    done = run_slurm("sbatch", "--parsable", str(script.resolve()))
    if done.returncode and (NO_ANSWER in done.stderr or LATE in done.stderr):
        said = f"Slurm does not answer ({error_of(done)}) and may have taken the job or not"
        raise UserError(f"{said}: where squeue does not list it, sbatch {script}")
    if done.returncode:
        for folder in new:
            shutil.rmtree(folder)
        raise UserError(f"sbatch refuses the job: {error_of(done)}; mend that, and submit again")
    return done.stdout.strip().partition(";")[0]


def seconds_left(job: str) -> float | None:
    """Seconds until the job's time limit; None where Slurm does not say, or there is none."""
    try:
        return float(parse_time_limit(run_slurm("squeue", "-h", "-j", job, "-o", "%L").stdout))
    except UserError:
        return None
