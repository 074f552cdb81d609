"""Whether Slurm takes a job and will ever start it: asked before it is submitted, and just after.

`sbatch --test-only` refuses a job that no node could run, and one whose nodes are down just now, in the same
words; sinfo tells which. Where EnforcePartLimits is off it accepts what will wait for ever.
"""

from __future__ import annotations

import itertools
import re
import shutil
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isobatch.core.errors import UserError
from isobatch.core.measures import printable
from isobatch.engine.runs.slurm_queue import (
    SQUEUE_SECONDS,
    TIMEOUT_SECONDS,
    SlurmSilentError,
    job_statuses,
    run_slurm,
)
from isobatch.launch.clusters.slurm import sbatch_script
from isobatch.launch.clusters.slurm.client import gpus_in, is_usable
from isobatch.launch.clusters.slurm.slurm_words import format_time_limit, parse_time_limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.launch.clusters.slurm.sbatch_script import JobScript

WATCH_SECONDS, WATCH_EVERY_SECONDS = 1.5, 0.3
"""How long after its submission a job's reason is looked for."""
SHORT_OPTIONS = {"partition": "-p", "account": "-A", "qos": "-q", "constraint": "-C"}
NODE_FORMAT = "%N|%R|%P|%c|%m|%G|%T|%l|%a"
FLAGS_OF_ERRORS = {
    "Invalid partition": "partition",
    "permitted to use this partition": "partition",
    "account or account": "account",
    "Invalid account": "account",
    "qos spec": "qos",
    "time limit": "time",
    "feature": "constraint",
    "gres": "gpus-per-node",
    "Node count": "nodes",
    "CPU count": "cpus-per-task",
    "More processors": "cpus-per-task",
    "Memory": "mem",
}
"""Words of sbatch's errors -> our flag."""
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


@dataclass(frozen=True, slots=True)
class Objection:
    """Why Slurm would not start a job."""

    text: str
    passes: bool = False
    """Whether the job may be submitted all the same: it starts when nodes are back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionNode:
    """A node as it belongs to a partition: a row of sinfo."""

    name: str
    partition: str
    is_default: bool
    cpus: int
    memory: int
    """MB."""
    gpus: int
    usable: bool
    seconds: int | None
    """The partition's time limit; None where it has none."""


def check(script: JobScript, submit: bool) -> None:
    """Ask Slurm whether it would start such a job, before anything is made. Raises UserError where `submit`
    asks for one that it never would, or where it does not answer; without `submit` these are remarks.
    """
    try:
        objection = objection_to(script, TIMEOUT_SECONDS if submit else SQUEUE_SECONDS)
    except SlurmSilentError as error:
        if submit:
            raise UserError(f"--submit: {error}: nothing was submitted; try again later") from None
        return
    if objection is not None and submit and not objection.passes:
        raise UserError(objection.text)
    if objection is not None:
        print(printable(objection.text), file=sys.stderr)


def objection_to(script: JobScript, seconds: float = TIMEOUT_SECONDS) -> Objection | None:
    """Ask Slurm about a job, without submitting it; None where it may start, or where there is no Slurm.

    `seconds`: how long Slurm may take. Raises SlurmSilentError where Slurm does not answer.
    """
    if shutil.which("sbatch") is None:
        return None
    test = run_slurm("sbatch", "--test-only", text=sbatch_script.render(script), seconds=seconds)
    if test.no_cluster:
        return None
    if test.silent:
        raise SlurmSilentError(f"Slurm does not answer ({test.error})")
    nodes = _nodes_for(script)
    if test.code == 0:
        late = "" if script.raw_options or _asked(script, "qos") else _time_problem(script, nodes)
        return Objection(late) if late else None
    named = next((flag for words, flag in FLAGS_OF_ERRORS.items() if words in test.error), "")
    if named:
        return Objection(f"--{named} {_asked(script, named)}: {test.error}{_hint(named)}".replace(" :", ":"))
    if problem := _time_problem(script, nodes) or size_problem(script, nodes):
        return Objection(problem)
    down = sorted({node.name for node in nodes if not node.usable})
    if down:
        return Objection(
            f"the job will wait: {', '.join(down)} cannot be used now ({test.error})", passes=True
        )
    return Objection(f"Slurm refuses the job: {test.error}")


def size_problem(script: JobScript, nodes: Sequence[PartitionNode]) -> str:
    """Which flag asks for more than these nodes have; empty where none does."""
    where = f"partition {', '.join(sorted({node.partition for node in nodes}))}"
    most = max((sum(n.partition == p.partition for n in nodes) for p in nodes), default=script.nodes)
    if script.nodes > most:
        return f"--nodes {script.nodes}: {where} has {most}"
    memory = _megabytes(_asked(script, "mem"))
    for flag, value, asked, has in (
        ("cpus-per-task", script.cpus, script.cpus, lambda node: node.cpus),
        ("gpus-per-node", script.gpus, script.gpus, lambda node: node.gpus),
        ("mem", _asked(script, "mem"), memory, lambda node: node.memory),
    ):
        largest = sorted(map(has, nodes))[-script.nodes :]
        if largest and asked > largest[0]:
            unit = " MB" if flag == "mem" else ""
            return f"--{flag} {value}: {where} has {script.nodes} node(s) with at most {largest[0]}{unit}"
    return ""


def _time_problem(script: JobScript, nodes: Sequence[PartitionNode]) -> str:
    limits = [node.seconds for node in nodes]
    longest = None if None in limits else max((s for s in limits if s is not None), default=None)
    if longest is None or script.seconds <= longest:
        return ""
    names = ", ".join(sorted({node.partition for node in nodes}))
    return (
        f"--time {format_time_limit(script.seconds)}: partition {names} allows {format_time_limit(longest)};"
        " a job requeues itself until its run is done"
    )


def _nodes_for(script: JobScript) -> list[PartitionNode]:
    """The nodes of the partitions that a job asks for, or of the default one; none where sinfo fails."""
    asked = _asked(script, "partition")
    rows = run_slurm("sinfo", "-h", "-N", "-o", NODE_FORMAT, *(["-p", asked] if asked else [])).out
    nodes = [_partition_node(*cells) for line in rows.splitlines() if len(cells := line.split("|")) == 9]
    return nodes if asked else [node for node in nodes if node.is_default]


def _partition_node(
    name: str, partition: str, marked: str, cpus: str, memory: str, gres: str, state: str, limit: str, up: str
) -> PartitionNode:
    try:
        seconds = parse_time_limit(limit)
    except UserError:  # infinite, n/a
        seconds = None
    return PartitionNode(
        name=name,
        partition=partition,
        is_default=marked.endswith("*"),
        cpus=int(cpus),
        memory=int(memory),
        gpus=gpus_in(gres),
        usable=is_usable(state) and up == "up",
        seconds=seconds,
    )


def _asked(script: JobScript, name: str) -> str:
    """The value of an option of sbatch, as the user gave it by our flag or in --sbatch; empty without one."""
    own = {
        "nodes": str(script.nodes),
        "time": format_time_limit(script.seconds),
        "cpus-per-task": str(script.cpus),
        "gpus-per-node": str(script.gpus),
        **dict(script.extra_options),
    }
    return own.get(name) or _in_raw_options(script.raw_options, name)


def _in_raw_options(words: Sequence[str], name: str) -> str:
    """The value of --name=VALUE, --name VALUE, -n VALUE or -nVALUE; empty without one."""
    short = SHORT_OPTIONS.get(name, "--" + name)
    for word, following in itertools.pairwise([*words, ""]):
        if word in (f"--{name}", short):
            return following
        if word.startswith((f"--{name}=", short)):
            return word.removeprefix(f"--{name}=") if word.startswith("--") else word[2:]
    return ""


def _hint(flag: str) -> str:
    if flag != "partition":
        return ""
    names = run_slurm("sinfo", "-h", "-o", "%R").out.split()
    return f"; there are {', '.join(names)}" if names else ""


def _megabytes(text: str) -> int:
    """Of sbatch's --mem: a number with K, M, G or T; MB without a letter."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    powers = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}
    return int(int(match[1]) * powers[match[2]]) if match else 0


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
            if why := why_never(reason):
                return (
                    f"job {job} will not start by itself ({reason}): {why}; scontrol can change it, or cancel"
                    " the run and submit it anew"
                )
        remark = next((f"job {job} waits: {reason}" for job, reason in waiting.items()), "")
        if statuses and not any(s.waits for s in statuses.values()):
            return ""
        time.sleep(WATCH_EVERY_SECONDS)
    return remark


def why_never(reason: str) -> str:
    """Why a job that waits for this reason never starts by itself; empty where it may."""
    return next((why for pattern, why in NEVER_STARTS.items() if re.fullmatch(pattern, reason)), "")
