"""`slurm`: make the run and its sbatch script, and print or submit the script.

The script runs `job` (job.py) on the first node, which runs `node` (node.py) on every node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, UserError
from isobatch.core.flags import options_to_dict
from isobatch.core.measures import printable
from isobatch.engine import consent
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.slurm_queue import (
    InAJobError,
    last_job_of,
    refuse_if_in_a_job,
)
from isobatch.launch.clusters.slurm import (
    acceptance,
    client,
    containers,
    job_record,
    sbatch_script,
    slurm_words,
    time_limit,
)
from isobatch.launch.clusters.slurm.array import SUBMITTED, array_folder, array_text, numbered
from isobatch.launch.clusters.slurm.job_request import JobRequest
from isobatch.launch.clusters.slurm.options import (
    SlurmOptions,
    is_array,
    join_sbatch_value,
    parallel_tasks,
    processes_per_node,
    step_words,
    validated,
)
from isobatch.launch.local.arguments import Request, parse_sweep
from isobatch.launch.local.run_setup import (
    create_run,
    environment_elsewhere,
    find_run,
    prepare_facts,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.core.recipe import Recipe

DEFAULT_CPUS, DEFAULT_CPUS_PER_GPU = 4, 8
"""Cores of a node without GPUs, and per GPU, where neither the user nor sinfo says."""


def slurm(words: Sequence[str]) -> int:
    """Usage: slurm --task TASK --nodes N --gpus-per-node G --time HH:MM:SS [flags] [--submit] [--json]

    flags: --cpu --partition --account --qos --constraint --mem --cpus-per-task --job-name --setup FILE
           --array 0-4 (a run per seed) --parallel N --after JOB --lead SECONDS --signal NAME --max-legs N
           --mail ADDRESS --container IMAGE --container-python PYTHON --sbatch "OPTIONS" --srun "OPTIONS"
           --mpi TYPE, and those of `auto`. A list such as --lr 1e-3,3e-3 trains a run for each value.
    """
    points = parse_sweep(join_sbatch_value(words), "slurm", SlurmOptions)
    options = SlurmOptions(**points[0][0].extra)
    points = [(validated(request, options), swept) for request, swept in points]
    asked, in_array = points[0][0], is_array(options, len(points))
    requests = numbered(points, options.array)
    draft = RunFolder(Path(asked.run.out).expanduser().resolve() / (asked.run.name or "run"))
    # A script for a folder that is not made yet: errors in it are reported before anything is written.
    draft_script = _script(dict.fromkeys(requests, draft), asked, options, in_array)
    sbatch_script.render(draft_script)
    _container(asked.recipe, draft.folder, options)
    acceptance.check(draft_script, options.submit)
    _warn_of_unknown_jobs(options)
    for note in dict.fromkeys(note for request in requests.values() for note in request.notes):
        print(note, file=sys.stderr)
    with contextlib.ExitStack() as locks:  # two submissions at once would make two jobs for a run
        family = asked.run.name if in_array else None
        runs = _runs_to_submit(requests, family, in_array, locks)
        if runs:
            return _make_job(runs, requests, asked, options, in_array)
    if options.json:
        print(atomic_files.json_text({"job": None, "script": None, "path": None, "runs": []}))
    return DONE


def _make_job(
    runs: dict[int, RunFolder],
    requests: dict[int, Request],
    asked: Request,
    options: SlurmOptions,
    in_array: bool,
) -> int:
    """Write the script of these runs, and submit it where that is asked for."""
    script = _script(runs, asked, options, in_array)
    text = sbatch_script.render(script)
    for number, run in runs.items():
        _write_request(run, requests[number], options, script.lead)
    script.folder.mkdir(exist_ok=True)
    path = script.folder / "job.sh"
    atomic_files.write_text(path, text)
    job = _submit(path, runs, in_array) if options.submit else None
    _print_result(text, path, job, runs, options)
    if job and (remark := acceptance.waiting_remark([last_job_of(run) for run in runs.values()])):
        print(printable(remark), file=sys.stderr)
    return DONE


def _warn_of_unknown_jobs(options: SlurmOptions) -> None:
    if options.submit and options.after:
        jobs = options.after.split(",")
        if unknown := [job for job in jobs if not client.job_state(job)]:
            print(
                f"--after {', '.join(unknown)}: Slurm knows no such job, and will not wait for it",
                file=sys.stderr,
            )


def _runs_to_submit(
    requests: dict[int, Request], family: str | None, in_array: bool, locks: contextlib.ExitStack
) -> dict[int, RunFolder]:
    """Number -> run, of those with something left to train. An array leaves runs in the jobs they are in."""
    runs = {}
    for number, request in requests.items():
        run = _find_or_create_run(request, family)
        if run.status() == "done":
            print(f"{run.folder} has this recipe and is done (--again for a new run)", file=sys.stderr)
            continue
        locks.enter_context(run.lock("submit"))
        try:
            refuse_if_in_a_job(run)
        except InAJobError as error:
            if not in_array:
                raise
            print(f"{error.fact}: it stays there", file=sys.stderr)
            continue
        run.refuse_if_training()
        run.write_options(request.run)
        runs[number] = run
    return runs


def _find_or_create_run(request: Request, family: str | None) -> RunFolder:
    """The run of a request; `family`: the name of a sweep, whose runs are found by what they learn."""
    facts = prepare_facts(request)
    consent.remember(request.recipe, request.run.sends())
    run = find_run(request, facts)
    if run is None and family is not None:
        unnamed = dataclasses.replace(request, run=dataclasses.replace(request.run, name=None))
        same = find_run(unnamed, facts)
        run = same if same and same.folder.name.startswith(f"{family}-") else None
    return RunFolder((run or create_run(request, facts)).folder.resolve())


def _script(
    runs: dict[int, RunFolder], request: Request, options: SlurmOptions, in_array: bool
) -> sbatch_script.JobScript:
    first = next(iter(runs.values()))
    name = slurm_words.refuse_control_characters(
        options.job_name or request.run.name or first.folder.name, "--job-name"
    )
    seconds = slurm_words.parse_time_limit(options.time or "")
    return sbatch_script.JobScript(
        name=name,
        runs={number: run.folder for number, run in runs.items()},
        folder=array_folder(first.folder.parent, request.run.name or first.folder.name)
        if in_array
        else first.folder / "slurm",
        nodes=options.nodes,
        seconds=seconds,
        lead=options.lead or _lead(seconds, runs),
        cpus=options.cpus_per_task or _fair_cpus(options),
        gpus=options.gpus_per_node,
        array=array_text(runs, parallel_tasks(options)) if in_array else "",
        extra_options=tuple(_extra_options(options)),
        raw_options=slurm_words.parse_sbatch_options(options.sbatch) if options.sbatch else (),
        setup=Path(options.setup).expanduser().resolve() if options.setup else None,
        start_folder=Path.cwd(),
        signal=options.signal,
        environment=tuple(environment_elsewhere().items()),
    )


def _lead(seconds: int, runs: dict[int, RunFolder]) -> int:
    """Seconds before the time limit to save: the default, or what the slowest run was measured to need."""
    measured = max(round(time_limit.seconds_to_stop(run) or 0) for run in runs.values())
    return max(sbatch_script.default_lead(seconds), min(measured, seconds // 2))


def _extra_options(options: SlurmOptions) -> list[tuple[str, str]]:
    names = ("partition", "account", "qos", "constraint", "mem")
    extra_options = [(name, str(getattr(options, name))) for name in names if getattr(options, name)]
    if options.after:
        jobs = options.after.split(",")
        if any(not job.replace("_", "", 1).isdigit() for job in jobs):
            raise UserError(f"--after {options.after}: is not a job's number, or several with commas")
        # Without this Slurm keeps a job whose dependency failed in the queue for ever.
        extra_options += [("dependency", "afterok:" + ":".join(jobs)), ("kill-on-invalid-dep", "yes")]
    if options.mail:
        # Slurm 22.05 sends neither END nor FAIL for a job that is requeued: one e-mail, whatever the legs.
        extra_options += [("mail-user", options.mail), ("mail-type", "END,FAIL")]
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
    JobRequest(
        local=processes_per_node(request, options),
        lead=lead,
        plan=plan,
        seconds=slurm_words.parse_time_limit(options.time or ""),
        signal=options.signal,
        max_legs=options.max_legs,
        srun=step_words(options),
        container=_container(run.recipe, run.folder, options),
    ).write(run)


def _container(recipe: Recipe, folder: Path, options: SlurmOptions) -> dict[str, Any] | None:
    """The container of a run in `folder`, for request.json. Raises UserError."""
    if options.container is None:
        return None
    image, python = containers.checked_image(options.container), options.container_python
    mounts = containers.checked_mounts(containers.needed_paths(recipe, folder))
    made = containers.Container(image=image, python=python, folder=str(Path.cwd()), mounts=mounts)
    return dataclasses.asdict(made)


def _submit(path: Path, runs: dict[int, RunFolder], in_array: bool) -> str:
    job = client.submit(path)
    jobs = {number: f"{job}_{number}" if in_array else job for number in runs}
    for number, run in runs.items():
        job_record.update(run, job=jobs[number])
    if in_array:
        tasks = {jobs[number]: str(run.folder) for number, run in runs.items()}
        atomic_files.write_json(path.parent / SUBMITTED, tasks)
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
