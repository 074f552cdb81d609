"""What is asked of a request that trains elsewhere: its devices, processes, run, and ends of logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from isobatch.core.errors import UserError
from isobatch.core.flags import spelling
from isobatch.core.plan import size_of
from isobatch.core.terminal import print_lines
from isobatch.engine.runs.run_folder import RunFolder, free_folder, run_name
from isobatch.launch.local.arguments import Request, parse_request, split_words
from isobatch.launch.local.run_setup import create_run, find_run, known_run

LOG_TAIL_CHARACTERS = 2500


@dataclass(frozen=True, kw_only=True, slots=True)
class ElsewhereOptions:
    """Flags of a cluster whose nodes alone have the data, beside the recipe's, the plan's and the run's."""

    data_is_elsewhere: ClassVar[bool] = True

    cpu: bool = False
    """Train on CPUs."""
    hardware: str | None = None
    """The card of the nodes, for the plan that is shown: h100, h100@100gbit with the network between them."""
    submit: bool = False
    """Hand it in; without it, it is printed."""


def parse(words: Sequence[str], command: str, kind: type, gpus: str, by: str = "") -> tuple[Request, Any]:
    """The request in a command's words, and its own flags as a `kind`. `gpus`: the flag with the number of
    each node's; `by`: the words that choose their type, whose name is put behind. Raises UserError.
    """
    card, is_typed, count = split_words(words)[1].get(gpus, "").rpartition(":")
    if is_typed:
        way = f"{spelling(gpus)} {count}{by and f' --{by}={card}'}"
        raise UserError(f"{spelling(gpus)} {card}:{count}: is a number here, without a type: {way}")
    request = parse_request(words, command, kind)
    print_lines(*request.notes, quiet=request.run.quiet)
    options = kind(**request.extra)
    return on_device(request, command, spelling(gpus), getattr(options, gpus), options.cpu), options


def on_device(request: Request, command: str, flag: str, gpus: int, cpu: bool) -> Request:
    """The request with --cpu as `--device cpu`. `gpus`: the value of `flag`. Raises UserError."""
    cpu = cpu or request.plan.device == "cpu"
    if cpu and (gpus or request.plan.device == "cuda"):
        raise UserError("--cpu: and GPUs were asked for, too; leave one of them out")
    if not cpu and not gpus:
        raise UserError(f"{command}: needs {flag}, or --cpu for nodes without GPUs")
    plan = dataclasses.replace(request.plan, device="cpu") if cpu else request.plan
    return dataclasses.replace(request, plan=plan)


def memory_bytes(typed: str, size: str, example: str) -> float:
    """Bytes of --mem. `size`: what its cluster reads, as `size_of` takes it. Raises UserError for none, and
    for less than 1 GB: its unit was forgotten.
    """
    if (found := size_of(size)) < 1e9:
        raise UserError(
            f"--mem {typed}: is less than 1 GB, or lacks its unit: give more, as in --mem {example}"
        )
    return found


def processes_each(request: Request, flag: str, count: int, gpus: int) -> int:
    """Processes of each of the `count` nodes or workers that `flag` asks for: --processes / count, else one
    for each of its GPUs, or one where there is none. Raises UserError.
    """
    asked = request.plan.processes
    if asked and (asked % count or asked > (gpus * count or asked)):
        most = f", and at most {gpus * count}, one per GPU" if gpus else ""
        raise UserError(f"--processes {asked}: must be a multiple of {flag} {count}{most}")
    return asked // count if asked else max(1, gpus)


def find_or_create(request: Request, family: str | None = None, makes: bool = True) -> RunFolder:
    """The run of a request on this data. `family`: the name of a sweep, whose runs are found by what they
    learn. With `makes` False a new one is where it would be, and nothing is written.
    """
    facts, run = known_run(request)
    if run is None and family is not None:
        same = find_run(request, facts, any_name=True)
        run = same if same and same.folder.name.startswith(f"{family}-") else None
    if run is None and not makes:
        out, name = Path(request.run.out).expanduser(), request.run.name
        run = RunFolder(out / name if name else free_folder(out, run_name(request.recipe)))
    run = RunFolder((run or create_run(request, facts)).folder.resolve())
    run.facts = facts
    return run


def ends_of_logs(paths: Iterable[Path]) -> str:
    """The ends of these files, one below the other."""
    ends = [(p.name, p.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]) for p in paths if p.is_file()]
    return "".join(f"--- {name}\n{text}\n" for name, text in ends)
