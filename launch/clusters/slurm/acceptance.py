"""Whether Slurm takes a job and will ever start it: asked before it is submitted, and just after.

`sbatch --test-only` refuses a job that no node could run, and one whose nodes are down just now, in the same
words; sinfo tells which. Where EnforcePartLimits is off it accepts what will wait for ever.
"""

from __future__ import annotations

import math
import re
import shutil
import sys
import time
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
from isobatch.launch.clusters.slurm.client import nodes_for, partition_nodes
from isobatch.launch.clusters.slurm.options import format_time_limit
from isobatch.launch.clusters.slurm.sbatch_script import options_of, render

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.launch.clusters.slurm.client import PartitionNode
    from isobatch.launch.clusters.slurm.sbatch_script import JobScript

WATCH_SECONDS, WATCH_EVERY_SECONDS = 1.5, 0.3
"""How long after its submission a job's reason is looked for."""
FLAGS_OF_ERRORS = {
    **{"Invalid partition": "partition", "permitted to use this partition": "partition"},
    **{"account or account": "account", "Invalid account": "account", "qos spec": "qos"},
    **{"time limit": "time", "feature": "constraint", "gres": "gpus-per-node", "Node count": "nodes"},
    **{"CPU count": "cpus-per-task", "More processors": "cpus-per-task", "Memory": "mem"},
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


def check(script: JobScript, submit: bool) -> None:
    """Ask Slurm about a job, without submitting it; nothing is asked where there is no Slurm.

    With `submit`: raises UserError where it will never start, or Slurm does not answer. Else that is printed.
    """
    if shutil.which("sbatch") is None:
        return
    seconds = TIMEOUT_SECONDS if submit else SQUEUE_SECONDS
    test = run_slurm("sbatch", "--test-only", text=render(script), seconds=seconds)
    if test.no_cluster or (test.silent and not submit):
        return
    if test.silent:
        raise UserError(
            f"--submit: Slurm does not answer ({test.error}): nothing was submitted; try again later"
        )
    nodes = [] if script.raw_options else partition_nodes()  # these may ask for another partition
    named = next((flag for words, flag in FLAGS_OF_ERRORS.items() if words in test.error), "")
    wanted = dict(options_of(script))
    ours = nodes_for(wanted.get("partition"), nodes)
    if problem := named and f"--{named} {wanted.get(named, '')}".rstrip() + f": {test.error}":
        if named == "partition" and nodes:
            problem += f"; there are {_names(nodes)}"
    elif test.error:
        problem = too_long(script, ours) or too_much(script, ours)
    elif "qos" not in wanted:
        problem = too_long(script, ours)
    down = ", ".join(sorted({node.name for node in ours if not node.usable}))
    if test.error and not problem and down:
        print(printable(f"the job will wait: {down} cannot be used now ({test.error})"), file=sys.stderr)
    elif problem := problem or (test.error and f"Slurm refuses the job: {test.error}"):
        if submit:
            raise UserError(problem)
        print(printable(problem), file=sys.stderr)


def too_long(script: JobScript, nodes: Sequence[PartitionNode]) -> str:
    """What --time asks for beyond the limit of these nodes' partitions; empty where it does not."""
    limits = [node.seconds or math.inf for node in nodes]
    if not limits or script.seconds <= max(limits):
        return ""
    return (
        f"--time {format_time_limit(script.seconds)}: partition {_names(nodes)} allows"
        f" {format_time_limit(int(max(limits)))}; a job requeues itself until its run is done"
    )


def too_much(script: JobScript, nodes: Sequence[PartitionNode]) -> str:
    """Which flag asks for more than these nodes have; empty where none does."""
    most = max((sum(n.partition == of.partition for n in nodes) for of in nodes), default=script.nodes)
    if script.nodes > most:
        return f"--nodes {script.nodes}: partition {_names(nodes)} has {most}"
    for flag, asked, has in (
        ("cpus-per-task", script.cpus, [node.cpus for node in nodes]),
        ("gpus-per-node", script.gpus, [node.gpus for node in nodes]),
    ):
        largest = sorted(has)[-script.nodes :]
        if largest and asked > largest[0]:
            return (
                f"--{flag} {asked}: partition {_names(nodes)} has {script.nodes} node(s) with at most"
                f" {largest[0]}"
            )
    return ""


def _names(nodes: Sequence[PartitionNode]) -> str:
    return ", ".join(sorted({node.partition for node in nodes}))


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
