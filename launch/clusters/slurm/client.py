"""Calls of Slurm's own commands (squeue, sinfo, scontrol, sbatch), each with a time limit."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isobatch.core.errors import UserError
from isobatch.engine.runs.slurm_queue import run_slurm
from isobatch.launch.clusters.slurm.options import parse_time_limit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

UNUSABLE_STATES = ("DOWN", "FAIL", "DRAIN", "NOT_RESPONDING", "UNKNOWN", "POWER", "REBOOT", "MAINT")
"""Words in a node's state under which no new step can run there."""


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


def seconds_of(limit: str) -> float | None:
    """Seconds of a time that Slurm shows; None for its words of no limit."""
    try:
        return float(parse_time_limit(limit))
    except UserError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionNode:
    """A node as it belongs to a partition: a row of sinfo."""

    name: str
    partition: str
    is_default: bool
    """Whether that is the partition of jobs that name none."""
    cpus: int
    gpus: int
    usable: bool
    seconds: float | None
    """The partition's time limit; None where it has none."""


def partition_nodes() -> list[PartitionNode]:
    """The nodes of all partitions; none where sinfo does not say."""
    rows = run_slurm("sinfo", "-h", "-N", "-o", "%N|%R|%P|%c|%G|%T|%l|%a", seconds=10).out.splitlines()
    return [
        PartitionNode(
            name=name,
            partition=partition,
            is_default=marked.endswith("*"),
            cpus=int(cpus),
            gpus=sum(int(count) for count in re.findall(r"gpu\S*?:(\d+)", gres)),  # gpu:h100:8(S:0-1),nvme:2
            usable=is_usable(state) and up == "up",
            seconds=seconds_of(limit),
        )
        for name, partition, marked, cpus, gres, state, limit, up in (
            row.split("|") for row in rows if row.count("|") == 7
        )
    ]


def nodes_for(partition: str | None, nodes: Sequence[PartitionNode]) -> list[PartitionNode]:
    """Those of the partitions that a job asks for, or of the default one."""
    wanted = (partition or "").split(",")
    return [n for n in nodes if (n.partition in wanted if partition else n.is_default)]


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
    raise UserError(f"sbatch refuses {script}: {done.error}")


def requeue(job: str) -> str:
    """Put the running job back into the queue; returns Slurm's reason where it refuses, else nothing."""
    done = run_slurm("scontrol", "requeue", job)
    return "" if done.code == 0 else done.err.strip() or "scontrol did not answer"


def seconds_left(job: str) -> float | None:
    """Seconds until the job's time limit; None where Slurm does not say."""
    return seconds_of(run_slurm("squeue", "-h", "-j", job, "-o", "%L").out)
