"""The flags of `slurm` beside those of `auto`, and the checks that need no run."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from isobatch.core.errors import UserError
from isobatch.core.number_ranges import Count, Positive
from isobatch.core.strategies import traits_of
from isobatch.launch.clusters.slurm.slurm_words import parse_srun_options, parse_time_limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.launch.local.arguments import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """Flags of `slurm` beside the recipe's, the plan's and the run's."""

    nodes: Positive = 1
    """Nodes of the job."""
    gpus_per_node: Count = 0
    """GPUs on each node."""
    time: str | None = None
    """Time limit of one leg: HH:MM:SS, or any other form of sbatch's. The job requeues itself until done."""
    cpu: bool = False
    """Train on CPUs: for partitions without GPUs."""
    partition: str | None = None
    """As sbatch's."""
    account: str | None = None
    """As sbatch's."""
    qos: str | None = None
    """As sbatch's."""
    constraint: str | None = None
    """As sbatch's."""
    mem: str | None = None
    """As sbatch's: memory per node."""
    cpus_per_task: Positive | None = None
    """Cores on each node; by default a fair share of the smallest node that sinfo shows."""
    array: str | None = None
    """One run per seed: 0-4, or 1,3,7, or 0-99%8 for eight at a time. Lists for the recipe's flags, such as
    --lr 1e-3,3e-3, make an array too."""
    parallel: Positive | None = None
    """Runs of an array that train at the same time, at most."""
    after: str | None = None
    """Start when this job is done: its number, or several with commas."""
    setup: str | None = None
    """A file of bash that the job reads first: modules, environments."""
    sbatch: str | None = None
    """More of sbatch's options, as in --sbatch "--exclusive --comment=mine"."""
    srun: str | None = None
    """More options for the srun of every step, as in --srun "--cpu-bind=cores --network=single_sn_all"."""
    container: str | None = None
    """Train inside this image: a .sif, a .sqsh, a folder, or a name such as docker://nvcr.io/nvidia/pytorch."""
    container_python: str = "python3"
    """The image's Python, which has torch and isobatch's other requirements."""
    mpi: str = "none"
    """As srun's: how MPI programs are started; training needs none."""
    job_name: str | None = None
    """The job's name; by default the run's."""
    lead: Positive | None = None
    """Seconds before the time limit at which Slurm tells the job to save; by default from measured steps."""
    signal: Literal["USR1", "USR2", "HUP"] = "USR1"
    """The signal by which Slurm tells it."""
    max_legs: Positive | None = None
    """Starts of the job at most; by default it goes on while each leg adds a checkpoint."""
    mail: str | None = None
    """An address that gets one e-mail when the run is over, done or failed."""
    submit: bool = False
    """Submit it and print the job's number."""
    json: bool = False
    """One JSON object on standard output."""


def join_sbatch_value(words: Sequence[str]) -> list[str]:
    """`--sbatch "--exclusive"` as one word: a value that starts with dashes would be taken for a flag."""
    joined = list(words)
    for flag in ("--sbatch", "--srun"):
        if flag in joined[:-1]:
            position = joined.index(flag)
            joined[position : position + 2] = [f"{flag}={joined[position + 1]}"]
    return joined


def validated(request: Request, options: SlurmOptions) -> Request:
    """The request with `--cpu` as `--device cpu`. Raises UserError for flags that contradict each other."""
    cpu = options.cpu or request.plan.device == "cpu"
    if cpu and (options.gpus_per_node or request.plan.device == "cuda"):
        raise UserError("--cpu: and GPUs were asked for, too; leave one of them out")
    if not cpu and not options.gpus_per_node:
        raise UserError("slurm: needs --gpus-per-node, or --cpu for a partition without GPUs")
    if options.time is None:
        raise UserError("slurm: needs --time, the limit of one leg, as in --time 12:00:00")
    if options.array and request.recipe.seed:
        raise UserError("--seed: each task of --array is a seed of its own; leave one of them out")
    if options.lead and options.lead >= parse_time_limit(options.time):
        raise UserError(f"--lead {options.lead}: must be shorter than --time {options.time}")
    processes = request.plan.processes
    gpus = options.nodes * options.gpus_per_node
    if processes and (processes % options.nodes or processes > (gpus or processes)):
        most = f", and at most {gpus}, one per GPU" if gpus else ""
        raise UserError(f"--processes {processes}: must be a multiple of --nodes {options.nodes}{most}")
    world_size, strategy = processes_per_node(request, options) * options.nodes, request.plan.strategy
    traits = None if strategy == "auto" else traits_of(strategy)
    if traits and traits.most_processes is not None and world_size > traits.most_processes:
        raise UserError(f"--strategy single: is one process, not {world_size}: leave it out, or take ddp")
    if traits and traits.shards and traits.least_processes > world_size:
        raise UserError(
            f"--strategy {strategy}: one process has nobody to share with: add --nodes or --processes"
        )
    if options.setup is not None and not Path(options.setup).expanduser().is_file():
        raise UserError(f"--setup {options.setup}: there is no such file")
    if options.mail is not None and not re.fullmatch(r"[^\s,=]+@[^\s,=]+", options.mail):
        raise UserError(f"--mail {options.mail}: is not one address")
    if options.mail is not None and "--mail" in (options.sbatch or ""):
        raise UserError(f"--mail {options.mail}: and --sbatch says something about mail, too; leave one out")
    if not re.fullmatch(r"\w+", options.mpi):
        raise UserError(f"--mpi {options.mpi}: is not a type that `srun --mpi=list` shows")
    if options.container is None and options.container_python != "python3":
        raise UserError(f"--container-python {options.container_python}: says nothing without --container")
    step_words(options)
    return (
        dataclasses.replace(request, plan=dataclasses.replace(request.plan, device="cpu")) if cpu else request
    )


def processes_per_node(request: Request, options: SlurmOptions) -> int:
    """Processes on a node: --processes / --nodes, else one per GPU, or one where there is none."""
    return (
        request.plan.processes // options.nodes if request.plan.processes else max(1, options.gpus_per_node)
    )


def step_words(options: SlurmOptions) -> tuple[str, ...]:
    """The words that srun gets in every step beside those of its nodes. Raises UserError.

    Each process of a node sees all of its GPUs, for NVLink: left out, the job's binding would be inherited.
    """
    binding = ("--gpu-bind=none",) if options.gpus_per_node else ()
    return (f"--mpi={options.mpi}", *binding, *(parse_srun_options(options.srun) if options.srun else ()))


def is_array(options: SlurmOptions, combinations: int) -> bool:
    """Whether the job is an array. Raises UserError where --parallel has nothing to limit."""
    in_array = bool(options.array) or combinations > 1
    if options.parallel and (not in_array or "%" in (options.array or "")):
        raise UserError(
            f"--parallel {options.parallel}: limits the runs of an array, as --array 0-9%{options.parallel}"
            " does: give one of them, with several values or seeds"
        )
    return in_array


def parallel_tasks(options: SlurmOptions) -> str:
    """How many tasks of an array may run at once; empty for all."""
    return str(options.parallel or (options.array or "").partition("%")[2])
