"""The sbatch script as a pure function of `JobScript`, with words quoted for sbatch or for bash.

#SBATCH lines are read by sbatch, the rest by bash. No secrets are written: as a rule
sbatch passes the submitter's environment on to the job. Where it does not, the script has what it needs.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from isobatch.core.errors import UserError
from isobatch.core.package import ROOT, own_command
from isobatch.launch.clusters.slurm.options import refuse_control_characters

MAX_CHARACTERS = 1000
"""Characters of an #SBATCH line that sbatch reads."""
DEFAULT_LEAD_SECONDS = 120
"""Seconds before the time limit at which a job saves, where nothing was measured and the limit is long."""


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
    values = {f.name: getattr(script, f.name) for f in dataclasses.fields(script)}
    output = f"{pattern_path(script.folder)}/{'%A_%a' if script.array else '%j'}.out"
    options = _filled("options", sbatch_word, **values, output=output)
    if too_long := [line for line in options.splitlines() if len(line) > MAX_CHARACTERS]:
        raise UserError(f"{too_long[0][:60]}...: sbatch reads {MAX_CHARACTERS} characters a line: shorten it")
    return options + _filled("job", shlex.quote, **values, program=own_command("job"), root=ROOT)


def _filled(part: str, quote: Callable[[str], str], **values: object) -> str:
    """A part of the script, each value in it quoted. Raises UserError for control characters."""
    from jinja2 import Environment, StrictUndefined

    def finalize(value: object) -> str:
        return quote(refuse_control_characters(str(value)))

    environment = Environment(finalize=finalize, undefined=StrictUndefined, keep_trailing_newline=True)
    template = Path(__file__).with_name(f"{part}.sh.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(values)


def sbatch_word(word: str) -> str:
    """A word quoted for sbatch's reader of #SBATCH lines: plain, or between double quotes."""
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
