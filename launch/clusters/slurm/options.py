"""The flags of `slurm` beside those of `auto`, their checks that need no run, and Slurm's own words."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isobatch.core.errors import UserError, explain_errors, nearest_file
from isobatch.core.measures import parse_duration
from isobatch.core.number_ranges import Count, Positive, Trials
from isobatch.core.package import table_beside
from isobatch.core.strategies import traits_of
from isobatch.launch.local.arguments import Request
from isobatch.launch.local.options import PlannedOptions
from isobatch.launch.local.placement import memory_bytes, on_device, processes_each

RESERVED: dict[str, str] = table_beside(__file__, "slurm_words")["reserved"]
"""Options of sbatch that the script sets, or that are flags of `slurm`; of srun that each step sets."""
TAKEN_OVER = ("time", "partition", "account", "qos", "constraint", "mem")
"""Flags that are sbatch's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions(PlannedOptions):
    """Flags of `slurm` beside the recipe's, the plan's and the run's."""

    nodes: Positive = 1
    """Nodes of the job."""
    gpus_per_node: Count = 0
    """GPUs on each node; a100:4 asks for four of this type."""
    gpu_type: str | None = None
    """The type of these GPUs, as Slurm names it (`sinfo -o %G`)."""
    time: str | None = None
    """Time limit of one leg: 4h, HH:MM:SS or another of sbatch's. The job requeues itself until done."""
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
    """As sbatch's: memory per node. By default of the smallest node's as large a share as of its cores."""
    hardware: str | None = None
    """The card of these nodes, for the plan that is shown: h100, h100@100gbit with the network between nodes.
    By default as sinfo names it."""
    cpus_per_task: Positive | None = None
    """Cores on each node; by default a fair share of the smallest node that sinfo shows."""
    array: str | None = None
    """One run per seed, as --seed 0-4 or 1,3,7 lists them. Lists for the recipe's other flags, such as --lr
    1e-3,3e-3, make an array too."""
    trials: Trials | None = None
    """As of `auto`: draws from flags with a range, such as --lr 1e-4..1e-2, which make an array."""
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
    max_legs: Positive | None = None
    """Starts of the job at most; by default it goes on while each leg adds a checkpoint."""
    make: bool = False
    """Make the runs and write the script, for sbatch: a script that was only printed does so as it begins."""
    submit: bool = False
    """Submit it and print the job's number."""


def join_sbatch_value(words: Sequence[str]) -> list[str]:
    """`--sbatch "--exclusive"` as one word: a value that starts with dashes would be taken for a flag."""
    joined = list(words)
    for flag in ("--sbatch", "--srun"):
        if flag in joined[:-1]:
            position = joined.index(flag)
            joined[position : position + 2] = [f"{flag}={joined[position + 1]}"]
    return joined


def with_sbatch_flags(options: SlurmOptions) -> SlurmOptions:
    """The options with those of --sbatch that are flags as well, such as --mem: the plan counts with them.

    Raises UserError where one is given both ways.
    """
    words, found, others = iter(option_words("--sbatch", options.sbatch)), {}, []
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if name not in TAKEN_OVER:
            others.append(word)
        elif name in found or getattr(options, name):
            raise UserError(f"--sbatch {word}: --{name} is given already: leave one out")
        else:
            found[name] = value if equals else next(words, "")
    # All of TAKEN_OVER are texts.
    return dataclasses.replace(options, sbatch=shlex.join(others) or None, **found)  # type: ignore[arg-type]


def validated(request: Request, options: SlurmOptions) -> Request:
    """The request with `--cpu` as `--device cpu`. Raises UserError for flags that contradict each other."""
    request = on_device(request, "slurm", "--gpus-per-node", options.gpus_per_node, options.cpu)
    if options.time is None:
        raise UserError("slurm: needs --time, the limit of one leg, as in --time 12:00:00")
    parse_time_limit(options.time)
    parse_memory(options.mem)
    if (options.make or options.submit) and options.assume_length:
        raise UserError("--assume-length: is for the plan that is shown: leave it out where a job trains")
    if (setup := options.setup) and not Path(setup).expanduser().is_file():
        raise UserError(f"--setup {setup}: there is no such file{nearest_file(setup)}")
    nodes, strategy = options.nodes, request.plan.strategy
    world = processes_each(request, "--nodes", nodes, options.gpus_per_node) * nodes
    traits = None if strategy == "auto" else traits_of(strategy)
    if traits and world > (traits.most_processes or world):
        raise UserError(f"--strategy {strategy}: is one process, not {world}: leave it out, or take ddp")
    if traits and traits.shards and world < traits.least_processes:
        raise UserError(f"--strategy {strategy}: one process shares with nobody: add --nodes or --processes")
    step_words(options)
    return request


def parse_memory(text: str | None) -> float | None:
    """Bytes of --mem, megabytes without a unit; None without it, or where 0 asks for all of a node's.

    Raises UserError.
    """
    size = f"{text}M" if text and text.isdigit() else f"{text}".upper().removesuffix("B")
    return None if text in (None, "0") else memory_bytes(str(text), f"{size}iB", "64G")


def step_words(options: SlurmOptions) -> tuple[str, ...]:
    """The words that srun gets in every step beside those of its nodes. Raises UserError.

    Each process of a node sees all of its GPUs, for NVLink: left out, the job's binding would be inherited.
    """
    binding = ("--gpu-bind=none",) if options.gpus_per_node else ()
    return ("--mpi=none", *binding, *option_words("--srun", options.srun))


def refuse_control_characters(word: str, flag: str = "sbatch option") -> str:
    """The word. Raises UserError for control characters such as a line break."""
    if any(not c.isprintable() for c in word):
        raise UserError(f"{flag} {word!r}: holds a control character, which no script may")
    return word


def option_words(flag: str, text: str | None) -> tuple[str, ...]:
    """The words of --sbatch or --srun; none without a text. Raises UserError for those of RESERVED, and for
    short options: letters in one word may hide a reserved one. Slurm takes --nod=2, too.
    """
    if text is None:
        return ()
    with explain_errors(f"{flag} {text}", ValueError):
        words = shlex.split(refuse_control_characters(text, flag))
    if not words or not words[0].startswith("-") or any(re.match("-[^-]", word) for word in words):
        raise UserError(f'{flag} {text}: holds {flag[2:]}\'s own options, written out: {flag} "--comment=a"')
    if flag == "--sbatch" and re.search(r"--(gpus|(gres|tres-per-node)[= ]\S*gpu)[=: /]", text):
        raise UserError(f"{flag} {text}: sbatch refuses two requests for GPUs: give --gpus-per-node a100:4")
    for word in words:
        name = word[2:].partition("=")[0] if word.startswith("--") else ""
        if name and any(own.startswith(name) for own in RESERVED[flag].split()):
            way = (
                "--max-legs 1 starts the job once" if "requeue" in name else "`describe slurm` has its flags"
            )
            raise UserError(f"{flag} {word}: isobatch sets this itself; {way}")
    return tuple(words)


def parse_time_limit(text: str) -> int:
    """Seconds of a Slurm time, minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S, or as in 4h. Raises UserError."""
    with contextlib.suppress(ValueError):
        return math.ceil(parse_duration(text))
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:
        raise UserError(f"--time {text}: is not a time such as 12:00:00 or 1-00:00:00")
    days, *parts = match.groups()
    numbers = [int(p) for p in parts if p is not None]
    # Without days the first number is minutes unless all three are there; with days it is hours.
    units = [3600, 60, 1] if days or len(numbers) == 3 else [60, 1]
    total = int(days or 0) * 86400 + sum(n * unit for n, unit in zip(numbers, units, strict=False))
    if total <= 0:
        raise UserError(f"--time {text}: must be above 0")
    return total
