"""`slurm`: the run is set up here, its sbatch script printed or submitted; the job then trains by itself.

What the job does is in job.py; what every node of it does, in node.py.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, UserError
from isobatch.core.flags import build_options, options_to_dict
from isobatch.core.number_ranges import Count, Positive
from isobatch.core.plan import PlanOptions
from isobatch.core.strategies import traits_of
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.local.arguments import Request, parse_request
from isobatch.launch.local.run_setup import create_run, find_run, prepare_facts
from isobatch.launch.slurm import client, sbatch_script, time_limit

CPUS, CPUS_PER_GPU = 4, 8
"""Cores asked for on a node where neither the user nor sinfo says."""
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
    """One run per seed: 0-4, or 1,3,7, or 0-99%8 for eight at a time."""
    after: str | None = None
    """Start when this job is done: its number, or several with commas."""
    setup: str | None = None
    """A file of bash that the job reads first: modules, environments."""
    sbatch: str | None = None
    """More of sbatch's options, as in --sbatch "--exclusive --mail-type=END"."""
    job_name: str | None = None
    """The job's name; by default the run's."""
    lead: Positive | None = None
    """Seconds before the time limit at which Slurm tells the job to save; by default from measured steps."""
    submit: bool = False
    """Submit it and print the job's number."""
    json: bool = False
    """One JSON object on standard output."""


def slurm(words: Sequence[str]) -> int:
    """Usage: slurm --task TASK --nodes N --gpus-per-node G --time HH:MM:SS [flags] [--submit] [--json]

    flags: --cpu --partition --account --qos --constraint --mem --cpus-per-task --job-name --setup FILE
           --array 0-4 (a run per seed) --after JOB --lead SECONDS --sbatch "OPTIONS", and those of `auto`
    """
    asked = parse_request(_joined(words), "slurm", SlurmOptions)
    own = SlurmOptions(**asked.extra)
    asked = _checked(asked, own)
    seeds = sbatch_script.parse_array(own.array) if own.array else [0]
    place = Path(asked.run.out).expanduser().resolve() / (asked.run.name or "run")
    # A draft first: what is wrong with the script is said before anything is made.
    sbatch_script.render(_script({seed: RunFolder(place) for seed in seeds}, asked, own))
    for note in asked.notes:
        print(note, file=sys.stderr)
    runs = {seed: run for seed, run in _runs(asked, own, seeds).items() if _is_open(run)}
    if not runs:
        return DONE
    script = _script(runs, asked, own)
    text = sbatch_script.render(script)
    for run in runs.values():
        _leave_request(run, asked, own, script.lead)
    script.folder.mkdir(exist_ok=True)
    path = script.folder / "job.sh"
    atomic_files.write_text(path, text)
    job = _submit(path, runs, own) if own.submit else None
    _answer(text, path, job, runs, own)
    return DONE


def _joined(words: Sequence[str]) -> list[str]:
    """`--sbatch "--exclusive"` as one word: its value starts with dashes, too."""
    joined = list(words)
    if "--sbatch" in joined[:-1]:
        place = joined.index("--sbatch")
        joined[place : place + 2] = [f"--sbatch={joined[place + 1]}"]
    return joined


def _checked(asked: Request, own: SlurmOptions) -> Request:
    """Everything that can be wrong, before anything is made. `--cpu` and `--device cpu` are one."""
    cpu = own.cpu or asked.plan.device == "cpu"
    if cpu and (own.gpus_per_node or asked.plan.device == "cuda"):
        raise UserError("--cpu: and GPUs were asked for, too; leave one of them out")
    if not cpu and not own.gpus_per_node:
        raise UserError("slurm: needs --gpus-per-node, or --cpu for a partition without GPUs")
    if own.time is None:
        raise UserError("slurm: needs --time, the limit of one leg, as in --time 12:00:00")
    if own.array and asked.recipe.seed:
        raise UserError("--seed: each task of --array is a seed of its own; leave one of them out")
    if own.lead and own.lead >= sbatch_script.parse_time_limit(own.time):
        raise UserError(f"--lead {own.lead}: must be shorter than --time {own.time}")
    processes = asked.plan.processes
    most = own.nodes * own.gpus_per_node or processes or 0
    if processes and (processes % own.nodes or processes > most):
        raise UserError(
            f"--processes {processes}: must be a multiple of --nodes {own.nodes}, and one per GPU at most"
        )
    world, strategy = _local(asked, own) * own.nodes, asked.plan.strategy
    traits = None if strategy == "auto" else traits_of(strategy)
    if traits and traits.most_processes is not None and world > traits.most_processes:
        raise UserError(f"--strategy single: is one process, not {world}: leave it out, or take ddp")
    if traits and traits.shards and traits.least_processes > world:
        raise UserError(
            f"--strategy {strategy}: one process has nobody to share with: add --nodes or --processes"
        )
    if own.setup is not None and not Path(own.setup).expanduser().is_file():
        raise UserError(f"--setup {own.setup}: there is no such file")
    return dataclasses.replace(asked, plan=dataclasses.replace(asked.plan, device="cpu")) if cpu else asked


def _runs(asked: Request, own: SlurmOptions, seeds: list[int]) -> dict[int, RunFolder]:
    """The run of each seed of the array; without one, the run."""
    if not own.array:
        return {0: _run(asked)}
    return {seed: _run(_with_seed(asked, seed)) for seed in seeds}


def _with_seed(asked: Request, seed: int) -> Request:
    name = f"{asked.run.name}-{seed}" if asked.run.name else None
    return dataclasses.replace(
        asked,
        recipe=dataclasses.replace(asked.recipe, seed=seed),
        run=dataclasses.replace(asked.run, name=name),
    )


def _run(asked: Request) -> RunFolder:
    facts = prepare_facts(asked)
    run = find_run(asked, facts) or create_run(asked, facts)
    if run.status() != "done":
        refuse_if_in_a_job(run)
        run.refuse_if_training()
        run.write_options(asked.run)
    return RunFolder(run.folder.resolve())


def refuse_if_in_a_job(run: RunFolder, own: str = "") -> None:
    """Two jobs of one run would take turns at it; `own` is the one that asks."""
    job = client.job_of(run)
    if job and job != own and (state := client.job_states([job]).get(job)) and state not in FINISHED_STATES:
        raise UserError(f"{run.folder} is in job {job} already ({state}): scancel {job} first")


def _is_open(run: RunFolder) -> bool:
    """Whether there is something left to train."""
    if run.status() == "done":
        print(f"{run.folder} has this recipe and is done (--again for a new run)", file=sys.stderr)
        return False
    return True


def _script(runs: dict[int, RunFolder], asked: Request, own: SlurmOptions) -> sbatch_script.JobScript:
    first = next(iter(runs.values()))
    name = sbatch_script.refuse_control_characters(
        own.job_name or asked.run.name or first.folder.name, "--job-name"
    )
    seconds = sbatch_script.parse_time_limit(own.time or "")
    many = first.folder.parent / f"slurm-{first.folder.name}"
    return sbatch_script.JobScript(
        name=name,
        runs={seed: run.folder for seed, run in runs.items()},
        folder=many if own.array else first.folder / "slurm",
        nodes=own.nodes,
        seconds=seconds,
        lead=own.lead or _lead(seconds, runs),
        cpus=own.cpus_per_task or _fair_cpus(own),
        gpus=own.gpus_per_node,
        array=_array(own.array, runs) if own.array else "",
        wishes=tuple(_wishes(own)),
        passed=sbatch_script.parse_sbatch_options(own.sbatch) if own.sbatch else (),
        setup=Path(own.setup).expanduser().resolve() if own.setup else None,
        start=Path.cwd(),
    )


def _lead(seconds: int, runs: dict[int, RunFolder]) -> int:
    """What the slowest of these runs was measured to need, where that is more than usual."""
    need = max(round(time_limit.seconds_to_stop(run) or 0) for run in runs.values())
    return max(sbatch_script.default_lead(seconds), min(need, seconds // 2))


def _array(asked: str, runs: dict[int, RunFolder]) -> str:
    """The seeds that are not done yet, with the limit asked for."""
    limit = asked.partition("%")[2]
    return ",".join(map(str, runs)) + (f"%{limit}" if limit else "")


def _wishes(own: SlurmOptions) -> list[tuple[str, str]]:
    names = ("partition", "account", "qos", "constraint", "mem")
    wishes = [(name, str(getattr(own, name))) for name in names if getattr(own, name)]
    if own.after:
        jobs = own.after.split(",")
        if any(not job.replace("_", "", 1).isdigit() for job in jobs):
            raise UserError(f"--after {own.after}: is not a job's number, or several with commas")
        if own.submit and (unknown := [job for job in jobs if not client.job_state(job)]):
            print(
                f"--after {', '.join(unknown)}: Slurm knows no such job, and will not wait for it",
                file=sys.stderr,
            )
        # A job before it that failed will never be done: do not wait for ever.
        wishes += [("dependency", "afterok:" + ":".join(jobs)), ("kill-on-invalid-dep", "yes")]
    return wishes


def _fair_cpus(own: SlurmOptions) -> int:
    """All cores of a node for its share of the GPUs; all of them where it has none."""
    found = client.smallest_node(own.partition)
    if found is None:
        return CPUS_PER_GPU * own.gpus_per_node or CPUS
    cpus, gpus = found
    return max(1, cpus * own.gpus_per_node // gpus) if gpus and own.gpus_per_node else cpus


def _leave_request(run: RunFolder, asked: Request, own: SlurmOptions, lead: int) -> None:
    """What the job plans from. Its world is the nodes it has, so a number of processes is one per node."""
    local = _local(asked, own)
    (run.folder / "slurm").mkdir(exist_ok=True)
    plan = {**options_to_dict(asked.plan), "processes": None}
    atomic_files.write_json(
        run.folder / "slurm" / "request.json", {"local": local, "lead": lead, "plan": plan}
    )


def _local(asked: Request, own: SlurmOptions) -> int:
    """Processes on a node."""
    return asked.plan.processes // own.nodes if asked.plan.processes else max(1, own.gpus_per_node)


def _submit(path: Path, runs: dict[int, RunFolder], own: SlurmOptions) -> str:
    job = client.submit(path)
    for seed, run in runs.items():
        atomic_files.write_json(
            run.folder / "slurm" / "job.json", {"job": f"{job}_{seed}" if own.array else job}
        )
    return job


def _answer(text: str, path: Path, job: str | None, runs: dict[int, RunFolder], own: SlurmOptions) -> None:
    folders = [str(run.folder) for run in runs.values()]
    if own.json:
        print(json.dumps({"job": job, "script": text, "path": str(path), "runs": folders}))
    elif job:
        print(job)
        print(f"job {job} trains {', '.join(folders)}; `runs` shows how it stands", file=sys.stderr)
    else:
        print(text, end="")
        print(f"the run is ready: sbatch {path}, or --submit", file=sys.stderr)


def stored_plan(values: dict[str, Any]) -> PlanOptions:
    return build_options(PlanOptions, {k: v for k, v in values.items() if v is not None}, "plan")
