"""The sbatch script as a pure function of `JobScript`, with words quoted for sbatch or for bash.

#SBATCH lines are read by sbatch, the rest by bash. No secrets are written: as a rule
sbatch passes the submitter's environment on to the job. Where it does not, the script has what it needs.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from isobatch.core.errors import UserError
from isobatch.core.package import ROOT, own_command
from isobatch.launch.clusters.slurm.options import refuse_control_characters

MAX_CHARACTERS = 1000
"""Characters of an #SBATCH line that sbatch reads."""
DEFAULT_LEAD_SECONDS = 120
"""Seconds before the time limit at which a job saves, where nothing was measured and the limit is long."""
TEMPLATE = Path(__file__).with_name("job.sh.jinja")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobScript:
    """All that the script depends on."""

    name: str
    runs: dict[int, Path]
    """The run of each array task; one run under 0 where `array` is empty."""
    folder: Path
    """Folder of the job's output."""
    nodes: int
    time: str
    """Time limit, in a form of sbatch's."""
    lead: int
    """Seconds before the time limit at which Slurm sends SIGUSR1."""
    cpus: int
    """Per node."""
    gpus: int = 0
    """Per node."""
    array: str = ""
    extra_options: tuple[tuple[str, str], ...] = ()
    """Further options of sbatch: (name, value)."""
    raw_options: tuple[str, ...] = ()
    """Words of --sbatch, passed on as they are."""
    setup: Path | None = None
    environment: tuple[tuple[str, str], ...] = ()
    """Our own variables of the job: where sbatch passes none on (--export=NONE), there are no others."""
    start_folder: Path
    """The folder in which `slurm` was called: the path of a task's file may be relative to it."""


def render(script: JobScript) -> str:
    """The text of the script. Raises UserError for control characters and lines too long for sbatch."""
    from jinja2 import Environment, StrictUndefined

    words = [[f"--{name}" + (f"={value}" if value else "")] for name, value in options_of(script)]
    lines = ["#SBATCH " + " ".join(map(sbatch_word, line)) for line in [*words, script.raw_options] if line]
    if too_long := [line for line in lines if len(line) > MAX_CHARACTERS]:
        raise UserError(f"{too_long[0][:60]}...: sbatch reads {MAX_CHARACTERS} characters a line: shorten it")
    environment = Environment(finalize=_bash_word, undefined=StrictUndefined, keep_trailing_newline=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    values = {f.name: getattr(script, f.name) for f in dataclasses.fields(script)}
    body = template.render(**values, program=own_command("job"), root=ROOT)
    return "\n".join(["#!/bin/bash", *lines, "", body])


def options_of(script: JobScript) -> list[tuple[str, str]]:
    """(name, value) of all options but those of --sbatch."""
    pattern = "%A_%a.out" if script.array else "%j.out"
    return [
        ("job-name", script.name),
        ("nodes", str(script.nodes)),
        # One launcher per node starts a process per GPU, so that all processes see all GPUs of the node.
        ("ntasks-per-node", "1"),
        ("cpus-per-task", str(script.cpus)),
        *([("gpus-per-node", str(script.gpus))] if script.gpus else []),
        ("time", script.time),
        *script.extra_options,
        *([("array", script.array)] if script.array else []),
        # B: only the batch script is signalled; `job` forwards the stop.
        ("signal", f"B:USR1@{script.lead}"),
        ("requeue", ""),
        # A node that fails does not end the allocation of the others.
        ("no-kill", ""),
        ("open-mode", "append"),
        ("output", f"{pattern_path(script.folder)}/{pattern}"),
    ]


def _bash_word(value: object) -> str:
    """A value quoted for bash. Raises UserError for control characters."""
    return shlex.quote(refuse_control_characters(str(value)))


def sbatch_word(word: str) -> str:
    """A word quoted for sbatch's reader of #SBATCH lines: plain, or between double quotes."""
    refuse_control_characters(word)
    if re.fullmatch(r"[A-Za-z0-9_./:,=@%+-]+", word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def pattern_path(folder: Path) -> str:
    """A folder in a Slurm file name pattern, where % starts a placeholder. Raises UserError for a backslash,
    which turns placeholders off.
    """
    text = refuse_control_characters(str(folder), "--out")
    if "\\" in text:
        raise UserError(f"--out {text}: Slurm cannot write to a path with a backslash; choose another")
    return text.replace("%", "%%")


def default_lead(seconds: int) -> int:
    """Seconds before a time limit at which to save: 120, or a quarter of a limit shorter than 8 minutes."""
    return max(5, min(DEFAULT_LEAD_SECONDS, seconds // 4))
