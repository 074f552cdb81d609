"""`slurm`: make the run and its sbatch script, and print or submit the script.

The script runs `job` (job.py) on the first node, which runs `node` (node.py) on every node. It is a pure
function of `JobScript`: sbatch reads its #SBATCH lines, bash the rest, each word quoted for its reader. No
secrets are written: as a rule sbatch passes the submitter's environment on to the job. Where it does not, the
script has what it needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, UserError
from isobatch.core.flags import options_to_dict
from isobatch.core.measures import counted, format_duration
from isobatch.core.package import ROOT, own_command
from isobatch.core.terminal import compiled, print_lines, rendered
from isobatch.engine.machine.detect import detect
from isobatch.engine.machine.hardware import parse_hardware
from isobatch.engine.planning.comparison import short_duration, six_lines
from isobatch.engine.planning.estimate import Target, estimate
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.clusters.cluster import refuse_if_in_a_job, whose_job
from isobatch.launch.clusters.slurm import client, containers
from isobatch.launch.clusters.slurm import options as slurm_options
from isobatch.launch.clusters.slurm.legs import JobRequest, seconds_to_stop, stop_seconds
from isobatch.launch.clusters.slurm.options import SlurmOptions
from isobatch.launch.local.arguments import Request, labelled, parse_sweep
from isobatch.launch.local.placement import find_or_create, processes_each
from isobatch.launch.local.run_setup import environment_elsewhere

DEFAULT_CPUS, DEFAULT_CPUS_PER_GPU = 4, 8
"""Cores of a node without GPUs, and per GPU, where neither the user nor sinfo says."""
MEMORY_SHARE = 0.9
"""Of a node's memory: Slurm may keep some for the system (MemSpecLimit) and refuses jobs that ask for it."""

MAX_CHARACTERS = 1000
"""Characters of an #SBATCH line that sbatch reads."""
DEFAULT_LEAD_SECONDS = 120
"""Seconds before the time limit at which a job saves, where nothing was measured and the limit is long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobScript:
    """All that the script depends on."""

    name: str
    runs: dict[int, Path]
    """The run of each array task; one run under 0 where the options have no --array."""
    folder: Path
    """Folder of the job's output."""
    options: SlurmOptions
    """As they were given, with the cores and the memory of each node."""
    lead: int
    """Seconds before the time limit at which Slurm sends SIGUSR1."""
    environment: tuple[tuple[str, str], ...] = ()
    """Our own variables of the job: where sbatch passes none on (--export=NONE), there are no others."""
    start_folder: Path
    """The folder in which `slurm` was called: the path of a task's file may be relative to it."""
    making: tuple[str, ...] = ()
    """The command that makes the runs, for a script that is printed before there are any."""


def slurm(words: Sequence[str]) -> int:
    """Usage: slurm --task TASK --nodes N --gpus-per-node G --time HH:MM:SS [flags] [--submit] [--json]

    flags: --make --cpu --partition --account --qos --constraint --mem --cpus-per-task --setup FILE
           --array 0-4 (a run per seed) --parallel N --after JOB --max-legs N
           --container IMAGE --container-python PYTHON --sbatch "OPTIONS" --srun "OPTIONS", and those of
           `auto`. A list such as --lr 1e-3,3e-3 trains a run for each value, and --lr 1e-4..1e-2 --trials 8
           for each of so many draws.
    """
    words = slurm_options.join_sbatch_value(words)
    points = parse_sweep(words, "slurm", SlurmOptions)
    options = slurm_options.with_sbatch_flags(SlurmOptions(**points[0][0].extra))
    if options.array:
        if points[0][0].recipe.seed or "seed" in points[0][1]:
            raise UserError("--seed: each task of --array is a seed of its own; leave one out")
        points = parse_sweep([*words, f"--seed={options.array}"], "slurm", SlurmOptions)
    points = [(slurm_options.validated(request, options), swept) for request, swept in points]
    if len(points) > 1:
        options = dataclasses.replace(options, array=array_text(range(len(points)), None))
    if options.parallel and not options.array:
        raise UserError(f"--parallel {options.parallel}: limits the runs of an array: give several values")
    requests = dict(enumerate(map(labelled, points)))
    name, out = points[0][0].run.name, Path(points[0][0].run.out).expanduser().resolve()
    draft = RunFolder(out / (name or "run"))  # for what no script may hold: nothing is written yet
    drafted = _script(dict.fromkeys(requests, draft), name, options)
    render(drafted)
    _container(points[0][0], draft.folder, options)
    print_lines(*dict.fromkeys(note for request in requests.values() for note in request.notes))
    longest = max((node.most_seconds for node in client.node_shapes(options.partition)), default=math.inf)
    if slurm_options.parse_time_limit(str(options.time)) > longest:
        where, most = options.partition or "the default partition", format_duration(longest)
        way = f"Slurm refuses the job or never starts it; give --time {most}"
        print_lines(f"--time {options.time}: {where} grants {most}: {way}")
    if options.hardware:  # a plan that is refused makes nothing
        _show_plan(requests[0], find_or_create(requests[0], makes=False), drafted, quiet=True)
    if options.submit and (silent := client.job_states(["1"]).get("1")) and silent.stage == "unknown":
        raise UserError(f"--submit: {silent.reason}")
    with contextlib.ExitStack() as locks:  # two submissions at once would make two jobs for a run
        runs = _runs_to_submit(requests, name if options.array else None, options, locks)
        if runs:
            script, first = _script(runs, name, options), next(iter(runs))
            if not (options.make or options.submit or options.assume_length):
                script = dataclasses.replace(script, making=tuple(own_command("slurm", *words, "--make")))
            script = _show_plan(requests[first], runs[first], script)
            _hand_in(runs, requests, script)
        elif options.json:
            print(atomic_files.json_text({"job": None, "script": None, "path": None, "runs": []}))
    return DONE


def _runs_to_submit(
    requests: Mapping[int, Request], family: str | None, options: SlurmOptions, locks: contextlib.ExitStack
) -> dict[int, RunFolder]:
    """Number -> run, of those with something left to train. An array leaves runs in the jobs they are in.
    Runs that are neither made nor submitted are only named.
    """
    runs, makes = {}, options.make or options.submit
    for number, request in requests.items():
        run = find_or_create(request, family, makes=makes)
        if run.status() == "done":
            print_lines(f"{run.folder} has this recipe and is done (--again for a new run)")
            continue
        if options.submit:
            locks.enter_context(run.lock("submit"))
        if options.array and (fact := whose_job(run)):
            print_lines(f"{fact}: it stays there")
            continue
        refuse_if_in_a_job(run)
        if makes:
            run.refuse_if_training()
            run.write_options(request.run)
        runs[number] = run
    return runs


def _show_plan(request: Request, run: RunFolder, script: JobScript, quiet: bool = False) -> JobScript:
    """Say what the job's nodes would make of the first run, as `plan` does, and whether --time is enough.

    The script, with the time that a stop takes by this plan. Raises UserError where --hardware has none.
    """
    say, here = partial(print_lines, quiet=quiet or request.run.quiet), detect()
    options, nodes, gpus = script.options, script.options.nodes, script.options.gpus_per_node
    like_here = dataclasses.replace(here, kind="cpu", gpus=(), source="asked")
    machine = dataclasses.replace(like_here, nodes=nodes, cpus=options.cpus_per_task or 1)
    if gpus:
        cards = [node.card for node in client.node_shapes(options.partition)] + [g.card for g in here.gpus]
        named = next(filter(None, [options.hardware, options.gpu_type, *cards]), "")
        try:
            machine = parse_hardware(f"{nodes}x{gpus}x{re.sub('^([0-9]+ ?x ?)+', '', named)}")
        except UserError as error:
            if options.hardware:
                raise
            why = error if named else "the nodes' GPUs are not known: --hardware h100 names them"
            say(f"no plan: {why}")
            return script
    if memory := slurm_options.parse_memory(options.mem or None):
        machine = dataclasses.replace(machine, ram_bytes=round(memory))
    world = processes_each(request, "--nodes", nodes, gpus) * nodes
    asked = dataclasses.replace(request.plan, processes=None)
    target = Target("nodes", request.workload, request.recipe, run.facts, machine, asked, world)
    found, free = estimate(target, {}), estimate(dataclasses.replace(target, world=None), {})
    if found.plan is None and options.hardware:
        raise UserError(found.why_not)
    if found.plan is None or found.size is None:
        say(f"no plan: {found.why_not}")
        return script
    say(six_lines(found))
    if gpus and free.plan and free.plan.processes < world:
        takes = short_duration(free.seconds or 0)
        say(f"{free.plan.processes} of the {world} GPUs would take {takes}: more gain little for this batch")
    limit = slurm_options.parse_time_limit(str(options.time))
    time = f"{options.time} minutes" if str(options.time).isdigit() else options.time  # as Slurm reads 24
    again = found.parts["start"] + found.parts["compile"]
    stop = stop_seconds(found.plan.predicted_step_seconds, 12.0 * found.size.trainable)
    lead = max(script.lead, min(round(stop), limit // 2))
    each, seconds = max(1.0, limit - lead - again), (found.seconds or 0, *found.interval)
    count, low, high = (max(1, math.ceil((one - again) / each)) for one in seconds)
    jobs = "one job" if high == 1 else f"{counted(count, 'job')} after each other ({low} to {high})"
    if count > (options.max_legs or count):
        jobs += f", of which --max-legs allows {options.max_legs}: leave it out, or give a longer --time"
    saves = f"saves every {request.run.save_every} and {lead} s before its limit, where the next goes on"
    say(f"--time {time}: {jobs} by this plan; each starts in {short_duration(again)}, {saves}")
    return dataclasses.replace(script, lead=lead)


def _hand_in(runs: Mapping[int, RunFolder], requests: Mapping[int, Request], script: JobScript) -> None:
    """Print the script of these runs; where that is asked for, write and submit it, and say so."""
    options, text, path, number = script.options, render(script), script.folder / "job.sh", None
    folders = [str(run.folder) for run in runs.values()]
    new = [run.folder for run in runs.values() if not (run.has_plan or (run.folder / "slurm").exists())]
    if options.make or options.submit:
        for task, run in runs.items():
            JobRequest(
                local=processes_each(requests[task], "--nodes", options.nodes, options.gpus_per_node),
                lead=script.lead,
                plan={**options_to_dict(requests[task].plan), "processes": None},
                seconds=slurm_options.parse_time_limit(str(options.time)),
                max_legs=options.max_legs,
                srun=slurm_options.step_words(options),
                container=_container(requests[task], run.folder, options),
            ).write(run.folder)
        script.folder.mkdir(exist_ok=True)
        atomic_files.write_text(path, text)
    if options.submit:
        number = client.submit(path, new)
        for task, run in runs.items():
            client.update_job_record(run, job=f"{number}_{task}" if options.array else number)
    if options.json:
        print(atomic_files.json_text({"job": number, "script": text, "path": str(path), "runs": folders}))
        return
    trained = ", ".join(folders)
    print(number or (path if options.make else text.rstrip("\n")))
    print_lines(rendered(__file__, "handed_in", trained=trained, number=number, path=path, options=options))


def _script(runs: Mapping[int, RunFolder], asked_name: str | None, options: SlurmOptions) -> JobScript:
    first = next(iter(runs.values())).folder
    name, seconds = asked_name or first.name, slurm_options.parse_time_limit(str(options.time))
    measured = max(round(seconds_to_stop(run)) for run in runs.values())
    cpus, memory = _fair_share(options)
    if any(word.startswith("--mem") for word in slurm_options.option_words("--sbatch", options.sbatch)):
        memory = ""
    setup = str(Path(options.setup).expanduser().resolve()) if options.setup else None
    return JobScript(
        name=slurm_options.refuse_control_characters(name, "--name"),
        runs={number: run.folder for number, run in runs.items()},
        folder=first.parent / f"slurm-{name}" if options.array else first / "slurm",
        options=dataclasses.replace(options, cpus_per_task=cpus, mem=options.mem or memory, setup=setup),
        lead=max(default_lead(seconds), min(measured, seconds // 2)),
        start_folder=Path.cwd(),
        environment=tuple(environment_elsewhere().items()),
    )


def _fair_share(options: SlurmOptions) -> tuple[int, str]:
    """(cores, memory) of the smallest node: cores as asked, else in proportion to the GPUs, all of them where
    it has none; of its memory the same share, less what the system takes. No memory where sinfo knows none.
    """
    gpus = options.gpus_per_node
    default = client.NodeShape(DEFAULT_CPUS_PER_GPU * gpus or DEFAULT_CPUS, 0, "", 0, math.inf)
    node = min(client.node_shapes(options.partition), default=default)
    share = gpus / node.gpus if node.gpus and gpus else 1.0
    cpus = options.cpus_per_task or max(1, int(node.cpus * share))
    memory = int(MEMORY_SHARE * node.megabytes * min(1.0, cpus / node.cpus))
    return cpus, f"{memory}M" if memory else ""


def _container(request: Request, folder: Path, options: SlurmOptions) -> dict[str, Any] | None:
    """The container of a run in `folder`, for request.json. Raises UserError."""
    if options.container is None:
        return None
    made = containers.Container(
        image=containers.checked_image(options.container),
        python=options.container_python,
        folder=str(Path.cwd()),
        mounts=containers.checked_mounts(containers.needed_paths(request.recipe, folder, request.run.hook)),
    )
    return dataclasses.asdict(made)


def array_text(numbers: Iterable[int], limit: int | None) -> str:
    """--array for these tasks, such as 0-4,7%2; `limit`: how many may run at once, None for all."""
    parts: list[str] = []
    for _, group in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return ",".join(parts) + (f"%{limit}" if limit else "")


def render(script: JobScript) -> str:
    """The text of the script. Raises UserError for control characters and lines too long for sbatch."""
    values = {f.name: getattr(script, f.name) for f in dataclasses.fields(script)}
    given = script.options
    if not str(given.time).strip()[-1].isdigit():  # as in 4h
        seconds = slurm_options.parse_time_limit(str(given.time))
        given = dataclasses.replace(given, time=format_duration(seconds))
    extra = [(flag, str(v)) for flag in slurm_options.TAKEN_OVER if (v := getattr(given, flag))]
    if given.after:
        # Without this Slurm keeps a job whose dependency failed in the queue for ever.
        jobs = given.after.replace(",", ":")
        extra += [("dependency", f"afterok:{jobs}"), ("kill-on-invalid-dep", "yes")]
    array = array_text(script.runs, given.parallel) if given.array else ""
    raw = slurm_options.option_words("--sbatch", given.sbatch)
    place = f"{pattern_path(script.folder)}/"  # without a run Slurm would find no such folder
    place = f"{pattern_path(script.start_folder / script.name)}-" if script.making else place
    output = f"{place}{'%A_%a' if array else '%j'}.out"
    options = _filled("options", sbatch_word, **values, output=output, extra=extra, array=array, raw=raw)
    if too_long := [line for line in options.splitlines() if len(line) > MAX_CHARACTERS]:
        raise UserError(f"{too_long[0][:60]}...: sbatch reads {MAX_CHARACTERS} characters a line: shorten it")
    return options + _filled("job", shlex.quote, **values, program=own_command("job"), root=ROOT)


def _filled(part: str, quote: Callable[[str], str], **values: object) -> str:
    """A part of the script, each value in it quoted. Raises UserError for control characters."""

    def finalize(value: object) -> str:
        return quote(slurm_options.refuse_control_characters(str(value)))

    template = Path(__file__).with_name(f"{part}.sh.jinja")
    return compiled(template, finalize=finalize, keep_trailing_newline=True).render(values)


def sbatch_word(word: str) -> str:
    """A word quoted for sbatch's reader of #SBATCH lines: plain, or between double quotes."""
    if re.fullmatch(r"[A-Za-z0-9_./:,=@%+-]+", word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def pattern_path(folder: Path) -> str:
    """A folder in a Slurm file name pattern, where % starts a placeholder. Raises UserError for a backslash,
    which turns placeholders off.
    """
    text = slurm_options.refuse_control_characters(str(folder), "--out")
    if "\\" in text:
        raise UserError(f"--out {text}: Slurm cannot write to a path with a backslash; choose another")
    return text.replace("%", "%%")


def default_lead(seconds: int) -> int:
    """Seconds before a time limit at which to save: 120, or a quarter of a limit shorter than 8 minutes."""
    return max(5, min(DEFAULT_LEAD_SECONDS, seconds // 4))
