"""`slurm`: make the run and its sbatch script, and print or submit the script.

The script runs `job` (job.py) on the first node, which runs `node` (node.py) on every node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE
from isobatch.core.flags import options_to_dict
from isobatch.core.measures import printable
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.slurm_queue import (
    InAJobError,
    job_statuses,
    last_job_of,
    refuse_if_in_a_job,
    update_job_record,
)
from isobatch.launch.clusters.common import find_or_create, processes_each
from isobatch.launch.clusters.slurm import client, containers
from isobatch.launch.clusters.slurm.legs import JobRequest, seconds_to_stop
from isobatch.launch.clusters.slurm.options import (
    SlurmOptions,
    is_array,
    join_sbatch_value,
    parse_array,
    parse_sbatch_options,
    parse_time_limit,
    refuse_control_characters,
    step_words,
    validated,
)
from isobatch.launch.clusters.slurm.sbatch_script import JobScript, default_lead, render
from isobatch.launch.local.arguments import Request, distinct, labelled, named, parse_sweep, with_seed
from isobatch.launch.local.run_setup import environment_elsewhere

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from isobatch.core.recipe import Recipe

DEFAULT_CPUS, DEFAULT_CPUS_PER_GPU = 4, 8
"""Cores of a node without GPUs, and per GPU, where neither the user nor sinfo says."""
SUBMITTED = "array.json"
"""In an array's folder once it was submitted: the run of each job."""
MAX_INDEX = 1000
"""Largest number of an array's task where the cluster does not say otherwise (MaxArraySize)."""


def slurm(words: Sequence[str]) -> int:
    """Usage: slurm --task TASK --nodes N --gpus-per-node G --time HH:MM:SS [flags] [--submit] [--json]

    flags: --cpu --partition --account --qos --constraint --mem --cpus-per-task --setup FILE
           --array 0-4 (a run per seed) --parallel N --after JOB --lead SECONDS --max-legs N
           --container IMAGE --container-python PYTHON --sbatch "OPTIONS" --srun "OPTIONS", and those of
           `auto`. A list such as --lr 1e-3,3e-3 trains a run for each value.
    """
    points = parse_sweep(join_sbatch_value(words), "slurm", SlurmOptions)
    options = SlurmOptions(**points[0][0].extra)
    points = [(validated(request, options), swept) for request, swept in points]
    in_array = is_array(options, len(points))
    requests = numbered(points, options.array)
    submission = Submission(points[0][0], options, in_array)
    submission.check(requests)
    for note in dict.fromkeys(note for request in requests.values() for note in request.notes):
        print(note, file=sys.stderr)
    if options.submit:
        job_statuses(["1"])  # raises where Slurm does not answer: nothing is written yet
    with contextlib.ExitStack() as locks:  # two submissions at once would make two jobs for a run
        runs = _runs_to_submit(requests, submission, locks)
        if runs:
            submission.make(runs, requests)
        elif options.json:
            print(atomic_files.json_text({"job": None, "script": None, "path": None, "runs": []}))
    return DONE


def _runs_to_submit(
    requests: Mapping[int, Request], submission: Submission, locks: contextlib.ExitStack
) -> dict[int, RunFolder]:
    """Number -> run, of those with something left to train. An array leaves runs in the jobs they are in."""
    runs = {}
    for number, request in requests.items():
        run = find_or_create(request, submission.name if submission.in_array else None)
        if run.status() == "done":
            print(f"{run.folder} has this recipe and is done (--again for a new run)", file=sys.stderr)
            continue
        locks.enter_context(run.lock("submit"))
        try:
            refuse_if_in_a_job(run)
        except InAJobError as error:
            if not submission.in_array:
                raise
            print(f"{error.fact}: it stays there", file=sys.stderr)
            continue
        run.refuse_if_training()
        run.write_options(request.run)
        runs[number] = run
    return runs


class Submission:
    """One job for some runs: its script, what each run's folder holds for it, and what is printed."""

    def __init__(self, asked: Request, options: SlurmOptions, in_array: bool) -> None:
        self._asked, self._options, self.in_array = asked, options, in_array
        self.name = asked.run.name

    def check(self, requests: Mapping[int, Request]) -> None:
        """Raise UserError for what no script may hold: nothing is written yet."""
        draft = RunFolder(Path(self._asked.run.out).expanduser().resolve() / (self.name or "run"))
        script = self._script(dict.fromkeys(requests, draft))
        render(script)
        self._container(self._asked.recipe, draft.folder)

    def make(self, runs: dict[int, RunFolder], requests: Mapping[int, Request]) -> None:
        """Write the script of these runs, submit it where that is asked for, and say so."""
        script, options = self._script(runs), self._options
        text, path, number = render(script), script.folder / "job.sh", None
        used = [run for run in runs.values() if run.metrics.exists() or (run.folder / "slurm").exists()]
        for task, run in runs.items():
            self._request(run, requests[task], script).write(run.folder)
        script.folder.mkdir(exist_ok=True)
        atomic_files.write_text(path, text)
        if options.submit:
            try:
                number = client.submit(path)
            except client.RefusedError:
                for run in (run for run in runs.values() if run not in used):
                    with run.lock("launch"):
                        run.refuse_if_training()
                        shutil.rmtree(run.folder)  # its name is free again
                raise
            jobs = {task: f"{number}_{task}" if self.in_array else number for task in runs}
            for task, run in runs.items():
                update_job_record(run, job=jobs[task])
            if self.in_array:
                tasks = {jobs[task]: str(run.folder) for task, run in runs.items()}
                atomic_files.write_json(script.folder / SUBMITTED, tasks)
        folders = [str(run.folder) for run in runs.values()]
        if options.json:
            print(atomic_files.json_text({"job": number, "script": text, "path": str(path), "runs": folders}))
        elif number:
            print(number)
            print(f"job {number} trains {', '.join(folders)}; `runs` shows how it stands", file=sys.stderr)
        else:
            print(text, end="")
            print(f"the run is ready: sbatch {path}, or --submit", file=sys.stderr)
        if number and (remark := client.waiting_remark([last_job_of(run) for run in runs.values()])):
            print(printable(remark), file=sys.stderr)

    def _script(self, runs: Mapping[int, RunFolder]) -> JobScript:
        options, first = self._options, next(iter(runs.values())).folder
        seconds, name = parse_time_limit(options.time or ""), self.name or first.name
        measured = max(round(seconds_to_stop(run)) for run in runs.values())
        at_once = str(options.parallel or "") or (parse_array(options.array)[1] if options.array else "")
        return JobScript(
            name=refuse_control_characters(name, "--name"),
            runs={number: run.folder for number, run in runs.items()},
            folder=array_folder(first.parent, name) if self.in_array else first / "slurm",
            nodes=options.nodes,
            seconds=seconds,
            lead=options.lead or max(default_lead(seconds), min(measured, seconds // 2)),
            cpus=options.cpus_per_task or self._fair_cpus(),
            gpus=options.gpus_per_node,
            array=array_text(runs, at_once) if self.in_array else "",
            extra_options=tuple(self._extra_options()),
            raw_options=parse_sbatch_options(options.sbatch) if options.sbatch else (),
            setup=Path(options.setup).expanduser().resolve() if options.setup else None,
            start_folder=Path.cwd(),
            environment=tuple(environment_elsewhere().items()),
        )

    def _extra_options(self) -> list[tuple[str, str]]:
        options = self._options
        names = ("partition", "account", "qos", "constraint", "mem")
        extra = [(name, str(value)) for name in names if (value := getattr(options, name))]
        if options.after:
            # Without this Slurm keeps a job whose dependency failed in the queue for ever.
            jobs = options.after.replace(",", ":")
            extra += [("dependency", f"afterok:{jobs}"), ("kill-on-invalid-dep", "yes")]
        return extra

    def _fair_cpus(self) -> int:
        """Cores of the smallest node in proportion to the GPUs asked for; all where it has no GPU."""
        options = self._options
        cpus, has = min(
            client.cpus_and_gpus(options.partition),
            default=(DEFAULT_CPUS_PER_GPU * options.gpus_per_node or DEFAULT_CPUS, 0),
        )
        return max(1, cpus * options.gpus_per_node // has) if has and options.gpus_per_node else cpus

    def _request(self, run: RunFolder, request: Request, script: JobScript) -> JobRequest:
        return JobRequest(
            local=processes_each(request, "--nodes", script.nodes, script.gpus),
            lead=script.lead,
            plan={**options_to_dict(request.plan), "processes": None},
            seconds=script.seconds,
            max_legs=self._options.max_legs,
            srun=step_words(self._options),
            container=self._container(run.recipe, run.folder),
        )

    def _container(self, recipe: Recipe, folder: Path) -> dict[str, Any] | None:
        """The container of a run in `folder`, for request.json. Raises UserError."""
        if self._options.container is None:
            return None
        made = containers.Container(
            image=containers.checked_image(self._options.container),
            python=self._options.container_python,
            folder=str(Path.cwd()),
            mounts=containers.checked_mounts(containers.needed_paths(recipe, folder)),
        )
        return dataclasses.asdict(made)


def numbered(points: Sequence[tuple[Request, tuple[str, ...]]], array: str | None) -> dict[int, Request]:
    """Number -> request, of a sweep's points (request, names of what was swept) with all seeds of --array.

    A task has its seed as its number where only seeds differ, else they are counted from 0.
    """
    points, seeds = distinct(points), parse_array(array)[0] if array else []
    if not array and len(points) == 1:
        return {0: points[0][0]}
    if array and not points[0][1]:
        return {seed: named(with_seed(points[0][0], seed), str(seed)) for seed in seeds}
    if array:
        points = [(with_seed(r, seed), (*swept, "seed")) for r, swept in points for seed in seeds]
    requests = [labelled(point) for point in points]
    seeds = [request.recipe.seed for request in requests]
    if set(points[0][1]) == {"seed"} and max(seeds) <= MAX_INDEX:
        return dict(zip(seeds, requests, strict=True))
    return dict(enumerate(requests))


def array_text(numbers: Iterable[int], limit: str) -> str:
    """--array for these tasks, such as 0-4,7%2; `limit`: how many may run at once, empty for all."""
    parts: list[str] = []
    for _, group in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return ",".join(parts) + (f"%{limit}" if limit else "")


def array_folder(out: Path, name: str) -> Path:
    """The folder for an array's script and output: the first slurm-NAME, slurm-NAME-2 ... that no earlier
    submission has.
    """
    endings = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    folders = (out / f"slurm-{name}{ending}" for ending in endings)
    return next(folder for folder in folders if not (folder / SUBMITTED).exists())
