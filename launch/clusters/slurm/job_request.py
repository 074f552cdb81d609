"""RUN/slurm/request.json: what `slurm` was asked for and the job needs; every leg reads it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.engine.machine.detect import detect
from isobatch.engine.planning.planner import make_plan
from isobatch.engine.registry import workload_of
from isobatch.launch.local.run_setup import plan_options_from_request

if TYPE_CHECKING:
    from isobatch.core.plan import Plan
    from isobatch.engine.runs.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """The content of request.json."""

    local: int
    """Processes on a node: the number of nodes may change between attempts."""
    lead: int
    """Seconds before the time limit at which to save, at least."""
    plan: dict[str, Any]
    """The plan's options, without the number of processes."""
    seconds: int | None = None
    """The time limit, where Slurm does not answer."""
    signal: str = "USR1"
    """Slurm's warning before the time limit, without SIG."""
    max_legs: int | None = None
    """Starts of the job at most; None for no limit."""
    srun: tuple[str, ...] = ("--mpi=none",)
    """Further words of every srun."""
    container: dict[str, Any] | None = None
    """The fields of `containers.Container`; None for no container."""

    @classmethod
    def read(cls, run: RunFolder) -> JobRequest:
        """Of a run; fields that this version does not know are ignored."""
        found = atomic_files.read_json(run.folder / "slurm" / "request.json")
        known: dict[str, Any] = {f.name: found[f.name] for f in dataclasses.fields(cls) if f.name in found}
        if "srun" in known:
            known["srun"] = tuple(known["srun"])
        return cls(**known)

    def write(self, run: RunFolder) -> None:
        (run.folder / "slurm").mkdir(exist_ok=True)
        atomic_files.write_json(run.folder / "slurm" / "request.json", dataclasses.asdict(self))


def plan_for_nodes(run: RunFolder, nodes: int, request: JobRequest) -> Plan:
    """The plan for `nodes` nodes like this one."""
    recipe, facts = run.recipe, run.facts
    task, _ = workload_of(recipe).make(recipe)
    options, world_size = plan_options_from_request(request.plan), request.local * nodes
    return make_plan(recipe, facts, task.model_size(facts), detect(nodes=nodes), options, world=world_size)
