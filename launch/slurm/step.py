"""A step of a job: the srun command that starts a launcher on every node, and what the nodes logged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isobatch.core.package import own_command
from isobatch.launch.slurm.containers import (
    ENVIRONMENT,
    Container,
    find_runtime,
    node_command,
    srun_words,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.launch.slurm import client
    from isobatch.launch.slurm.job_request import JobRequest

LOG_TAIL_CHARACTERS = 2500
STEP_SHELL = """trap '' USR1 TERM INT; exec "$@" >>"$0/node-$SLURMD_NODENAME.log" 2>&1"""
"""A log per node. Signals are ignored while Python starts; job repeats them until the workers handle them."""


def srun_command(
    run: RunFolder, nodes: Sequence[str], allocation: client.Allocation, request: JobRequest, nonce: str
) -> list[str]:
    """The command of a step: one launcher per node; one that fails ends the others.

    Raises UserError where the container cannot be had.
    """
    words = ("node", str(run.folder.resolve()), nonce)
    if request.container is None:
        before, inside, launcher = [], [], own_command(*words)
    else:
        container = Container(**request.container)
        runtime = find_runtime(container.image)
        before, inside = list(ENVIRONMENT), srun_words(container, runtime)
        launcher = node_command(container, runtime, allocation.gpus, *words)
    return [
        *before,
        "srun",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        f"--nodelist={','.join(nodes)}",
        "--ntasks-per-node=1",
        # A step does not inherit --cpus-per-task from sbatch.
        f"--cpus-per-task={allocation.cpus}",
        *([f"--gpus-per-node={allocation.gpus}"] if allocation.gpus else []),
        "--kill-on-bad-exit=1",
        "--unbuffered",
        # A job that was submitted with --export=NONE would hand that on to its steps.
        "--export=ALL",
        *request.srun,
        *inside,
        *("/bin/bash", "-c", STEP_SHELL, str(run.folder.resolve() / "slurm")),
        *launcher,
    ]


def node_logs(run: RunFolder, nodes: Sequence[str]) -> str:
    """The ends of the nodes' logs, one below the other."""
    paths = [run.folder / "slurm" / f"node-{name}.log" for name in nodes]
    ends = [(p.name, p.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]) for p in paths if p.is_file()]
    return "".join(f"--- {name}\n{text}\n" for name, text in ends)
