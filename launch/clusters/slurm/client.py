"""Calls of Slurm's own commands (squeue, sinfo, scontrol, sbatch), each with a time limit."""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isobatch.core.errors import UserError
from isobatch.engine.runs.slurm_queue import SlurmSilentError, job_statuses, run_slurm
from isobatch.launch.clusters.slurm.options import parse_time_limit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

UNUSABLE_STATES = ("DOWN", "FAIL", "DRAIN", "NOT_RESPONDING", "UNKNOWN", "POWER", "REBOOT", "MAINT")
"""Words in a node's state under which no new step can run there."""
WATCH_SECONDS, WATCH_EVERY_SECONDS = 1.5, 0.3
"""How long after its submission a job's reason is looked for."""
NEVER_STARTS = {
    "PartitionTimeLimit": "--time is above the partition's limit",
    "PartitionNodeLimit": "--nodes is outside the partition's limits, or its nodes are down",
    "PartitionConfig": "the partition does not allow what it asks for",
    "BadConstraints": "no node has what --constraint asks for",
    "InvalidAccount": "--account is not valid",
    "InvalidQOS": "--qos is not valid",
    "JobHeld.*": "it is held, until scontrol release",
    "DependencyNeverSatisfied": "the job of --after failed",
    "(Assoc|QOS)Max.*(PerJob|PerNode|WallDuration).*|QOSMin.*|MaxMemPerLimit": "it asks for more, or less,"
    " than your account or QOS allows one job",
    "(Association|QOS)TimeLimit|(Assoc|QOS)Grp.*Minutes.*": "your account or QOS has no time left",
}
"""Reasons that do not go away when other jobs end, as patterns; from Slurm's job_reason_codes.html and
resource_limits.html."""


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
    allocated = hostnames(run_slurm("squeue", "-h", "-j", job, "-o", "%N").out.strip()) or tuple(nodes)
    rows = run_slurm("sinfo", "-h", "-N", "-n", ",".join(nodes), "-o", "%N %T")
    states = dict(line.split()[:2] for line in rows.out.splitlines() if len(line.split()) > 1)
    return tuple(n for n in nodes if n in allocated and is_usable(states.get(n, "")))


def hostnames(nodes: str) -> tuple[str, ...]:
    """The names in a Slurm node list such as n[1-2]."""
    return tuple(run_slurm("scontrol", "show", "hostnames", nodes).out.split()) if nodes else ()


def is_usable(state: str) -> bool:
    """Whether a step can run on a node in this state of sinfo."""
    # A star is Slurm's mark for a node that does not answer; a draining one still serves its jobs.
    return state.upper() == "DRAINING" or not (
        "*" in state or any(w in state.upper() for w in UNUSABLE_STATES)
    )


def address_of(node: str) -> str:
    """The address at which Slurm reaches a node (NodeAddr); empty where scontrol does not say."""
    match = re.search(r"NodeAddr=(\S+)", run_slurm("scontrol", "show", "node", node).out)
    return match[1] if match else ""


def show_job(job: str) -> dict[str, str]:
    """What `scontrol show job` tells of a job, such as JobState and Restarts; empty where it does not say."""
    return dict(re.findall(r"(\w+)=(\S*)", run_slurm("scontrol", "show", "job", job, seconds=10).out))


def cpus_and_gpus(partition: str | None) -> list[tuple[int, int]]:
    """(cores, GPUs) of each node of a partition, or of the default one; none where sinfo does not say."""
    words = ("-p", partition) if partition else ()
    said = run_slurm("sinfo", "-h", "-N", *words, "-o", "%P|%c|%G", seconds=10).out.splitlines()
    return [
        (int(cpus), sum(map(int, re.findall(r"gpu\S*?:(\d+)", gres))))  # gpu:h100:8(S:0-1),nvme:2
        for name, cpus, gres in (row.split("|") for row in said if row.count("|") == 2)
        if partition or name.endswith("*")
    ]


class RefusedError(UserError):
    """Slurm took no job."""


def submit(script: Path) -> str:
    """Submit a script; the number of the new job. Raises UserError with Slurm's reason where it refuses."""
    if shutil.which("sbatch") is None:
        raise UserError(f"--submit: there is no sbatch here; on a machine that has one: sbatch {script}")
    done = run_slurm("sbatch", "--parsable", str(script.resolve()))
    if done.code == 0:
        return done.out.strip().partition(";")[0]
    if done.silent:
        raise UserError(
            f"Slurm does not answer ({done.error}) and may have taken the job or not: where squeue does not"
            f" list it, sbatch {script}"
        )
    raise RefusedError(f"sbatch refuses the job: {done.error}")


def requeue(job: str) -> str:
    """Put the running job back into the queue; returns Slurm's reason where it refuses, else nothing."""
    done = run_slurm("scontrol", "requeue", job)
    return "" if done.code == 0 else done.err.strip() or "scontrol did not answer"


def seconds_left(job: str) -> float | None:
    """Seconds until the job's time limit; None where Slurm does not say, or there is none."""
    try:
        return float(parse_time_limit(run_slurm("squeue", "-h", "-j", job, "-o", "%L").out))
    except UserError:
        return None


def waiting_remark(jobs: Sequence[str]) -> str:
    """Why jobs that were just submitted wait, and what to do where they never start; empty where they run.

    Waits for Slurm's first look at them.
    """
    deadline, remark = time.monotonic() + WATCH_SECONDS, ""
    while time.monotonic() < deadline:
        try:
            statuses = job_statuses(jobs)
        except SlurmSilentError:
            return ""
        waiting = {job: s.reason for job, s in statuses.items() if s.waits and s.reason}
        for job, reason in waiting.items():
            remark = f"job {job} waits: {reason}"
            if why := next((why for words, why in NEVER_STARTS.items() if re.fullmatch(words, reason)), ""):
                return (
                    f"job {job} will not start by itself ({reason}): {why}; scontrol can change it, or cancel"
                    " the run and submit it anew"
                )
        if statuses and not any(s.waits for s in statuses.values()):
            return ""
        time.sleep(WATCH_EVERY_SECONDS)
    return remark
