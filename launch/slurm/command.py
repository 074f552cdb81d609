"""`slurm`: make the run and its sbatch script, and print or submit the script.

The script runs `job` (job.py) on the first node, which runs `node` (node.py) on every node.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, UserError
from isobatch.core.flags import options_to_dict
from isobatch.core.number_ranges import Count, Positive
from isobatch.core.strategies import traits_of
from isobatch.engine import consent
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.witness import use_witness, witness_environment
from isobatch.launch.local.arguments import Request, parse_request
from isobatch.launch.local.run_setup import create_run, find_run, prepare_facts
from isobatch.launch.slurm import client, job_record, sbatch_script, time_limit
from isobatch.launch.slurm.job_request import JobRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_CPUS, DEFAULT_CPUS_PER_GPU = 4, 8
"""Cores of a node without GPUs, and per GPU, where neither the user nor sinfo says."""


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
    request = parse_request(join_sbatch_value(words), "slurm", SlurmOptions)
    options = SlurmOptions(**request.extra)
    request = _validated(request, options)
    seeds = sbatch_script.parse_array(options.array) if options.array else [0]
    draft_folder = Path(request.run.out).expanduser().resolve() / (request.run.name or "run")
    # A script for a folder that is not made yet: errors in it are reported before anything is written.
    sbatch_script.render(_script({seed: RunFolder(draft_folder) for seed in seeds}, request, options))
    for note in request.notes:
        print(note, file=sys.stderr)
    runs = {seed: run for seed, run in _runs_by_seed(request, options, seeds).items() if _is_unfinished(run)}
    if not runs:
        return DONE
    script = _script(runs, request, options)
    text = sbatch_script.render(script)
    for run in runs.values():
        _write_request(run, request, options, script.lead)
    script.folder.mkdir(exist_ok=True)
    path = script.folder / "job.sh"
    atomic_files.write_text(path, text)
    job = _submit(path, runs, options) if options.submit else None
    _print_result(text, path, job, runs, options)
    return DONE


def join_sbatch_value(words: Sequence[str]) -> list[str]:
    """`--sbatch "--exclusive"` as one word: a value that starts with dashes would be taken for a flag."""
    joined = list(words)
    if "--sbatch" in joined[:-1]:
        position = joined.index("--sbatch")
        joined[position : position + 2] = [f"--sbatch={joined[position + 1]}"]
    return joined


def _validated(request: Request, options: SlurmOptions) -> Request:
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
    if options.lead and options.lead >= sbatch_script.parse_time_limit(options.time):
        raise UserError(f"--lead {options.lead}: must be shorter than --time {options.time}")
    processes = request.plan.processes
    max_processes = options.nodes * options.gpus_per_node or processes or 0
    if processes and (processes % options.nodes or processes > max_processes):
        raise UserError(
            f"--processes {processes}: must be a multiple of --nodes {options.nodes}, and one per GPU at most"
        )
    world_size, strategy = _processes_per_node(request, options) * options.nodes, request.plan.strategy
    traits = None if strategy == "auto" else traits_of(strategy)
    if traits and traits.most_processes is not None and world_size > traits.most_processes:
        raise UserError(f"--strategy single: is one process, not {world_size}: leave it out, or take ddp")
    if traits and traits.shards and traits.least_processes > world_size:
        raise UserError(
            f"--strategy {strategy}: one process has nobody to share with: add --nodes or --processes"
        )
    if options.setup is not None and not Path(options.setup).expanduser().is_file():
        raise UserError(f"--setup {options.setup}: there is no such file")
    return (
        dataclasses.replace(request, plan=dataclasses.replace(request.plan, device="cpu")) if cpu else request
    )


def _runs_by_seed(request: Request, options: SlurmOptions, seeds: list[int]) -> dict[int, RunFolder]:
    """Seed -> run, of the array; without --array one run under 0."""
    if not options.array:
        return {0: _find_or_create_run(request)}
    return {seed: _find_or_create_run(_with_seed(request, seed)) for seed in seeds}


def _with_seed(request: Request, seed: int) -> Request:
    name = f"{request.run.name}-{seed}" if request.run.name else None
    return dataclasses.replace(
        request,
        recipe=dataclasses.replace(request.recipe, seed=seed),
        run=dataclasses.replace(request.run, name=name),
    )


def _find_or_create_run(request: Request) -> RunFolder:
    facts = prepare_facts(request)
    consent.remember(request.recipe)
    run = find_run(request, facts) or create_run(request, facts)
    if run.status() != "done":
        job_record.refuse_if_in_a_job(run)
        run.refuse_if_training()
        run.write_options(request.run)
        use_witness(request.run.witness)
    return RunFolder(run.folder.resolve())


def _is_unfinished(run: RunFolder) -> bool:
    """Whether the run is not done; says so where it is."""
    if run.status() == "done":
        print(f"{run.folder} has this recipe and is done (--again for a new run)", file=sys.stderr)
        return False
    return True


def _script(runs: dict[int, RunFolder], request: Request, options: SlurmOptions) -> sbatch_script.JobScript:
    first = next(iter(runs.values()))
    name = sbatch_script.refuse_control_characters(
        options.job_name or request.run.name or first.folder.name, "--job-name"
    )
    seconds = sbatch_script.parse_time_limit(options.time or "")
    array_folder = first.folder.parent / f"slurm-{first.folder.name}"
    return sbatch_script.JobScript(
        name=name,
        runs={seed: run.folder for seed, run in runs.items()},
        folder=array_folder if options.array else first.folder / "slurm",
        nodes=options.nodes,
        seconds=seconds,
        lead=options.lead or _lead(seconds, runs),
        cpus=options.cpus_per_task or _fair_cpus(options),
        gpus=options.gpus_per_node,
        array=_remaining_array(options.array, runs) if options.array else "",
        extra_options=tuple(_extra_options(options)),
        raw_options=sbatch_script.parse_sbatch_options(options.sbatch) if options.sbatch else (),
        setup=Path(options.setup).expanduser().resolve() if options.setup else None,
        start_folder=Path.cwd(),
        environment=tuple({**consent.environment(), **witness_environment()}.items()),
    )


def _lead(seconds: int, runs: dict[int, RunFolder]) -> int:
    """Seconds before the time limit to save: the default, or what the slowest run was measured to need."""
    measured = max(round(time_limit.seconds_to_stop(run) or 0) for run in runs.values())
    return max(sbatch_script.default_lead(seconds), min(measured, seconds // 2))


def _remaining_array(array: str, runs: dict[int, RunFolder]) -> str:
    """--array for the seeds that are not done yet, with the limit asked for."""
    limit = array.partition("%")[2]
    return ",".join(map(str, runs)) + (f"%{limit}" if limit else "")


def _extra_options(options: SlurmOptions) -> list[tuple[str, str]]:
    names = ("partition", "account", "qos", "constraint", "mem")
    extra_options = [(name, str(getattr(options, name))) for name in names if getattr(options, name)]
    if options.after:
        jobs = options.after.split(",")
        if any(not job.replace("_", "", 1).isdigit() for job in jobs):
            raise UserError(f"--after {options.after}: is not a job's number, or several with commas")
        if options.submit and (unknown := [job for job in jobs if not client.job_state(job)]):
            print(
                f"--after {', '.join(unknown)}: Slurm knows no such job, and will not wait for it",
                file=sys.stderr,
            )
        # Without this Slurm keeps a job whose dependency failed in the queue for ever.
        extra_options += [("dependency", "afterok:" + ":".join(jobs)), ("kill-on-invalid-dep", "yes")]
    return extra_options


def _fair_cpus(options: SlurmOptions) -> int:
    """Cores of the smallest node in proportion to the GPUs asked for; all where it has no GPU."""
    smallest = client.smallest_node(options.partition)
    if smallest is None:
        return DEFAULT_CPUS_PER_GPU * options.gpus_per_node or DEFAULT_CPUS
    cpus, gpus = smallest
    return max(1, cpus * options.gpus_per_node // gpus) if gpus and options.gpus_per_node else cpus


def _write_request(run: RunFolder, request: Request, options: SlurmOptions, lead: int) -> None:
    plan = {**options_to_dict(request.plan), "processes": None}
    JobRequest(local=_processes_per_node(request, options), lead=lead, plan=plan).write(run)


def _processes_per_node(request: Request, options: SlurmOptions) -> int:
    """Processes on a node: --processes / --nodes, else one per GPU."""
    return (
        request.plan.processes // options.nodes if request.plan.processes else max(1, options.gpus_per_node)
    )


def _submit(path: Path, runs: dict[int, RunFolder], options: SlurmOptions) -> str:
    job = client.submit(path)
    for seed, run in runs.items():
        atomic_files.write_json(
            run.folder / "slurm" / "job.json", {"job": f"{job}_{seed}" if options.array else job}
        )
    return job


def _print_result(
    text: str, path: Path, job: str | None, runs: dict[int, RunFolder], options: SlurmOptions
) -> None:
    folders = [str(run.folder) for run in runs.values()]
    if options.json:
        print(atomic_files.json_text({"job": job, "script": text, "path": str(path), "runs": folders}))
    elif job:
        print(job)
        print(f"job {job} trains {', '.join(folders)}; `runs` shows how it stands", file=sys.stderr)
    else:
        print(text, end="")
        print(f"the run is ready: sbatch {path}, or --submit", file=sys.stderr)
