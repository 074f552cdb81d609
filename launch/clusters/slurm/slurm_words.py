"""Slurm's own words: times, arrays, and options that the user hands on to sbatch and srun."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from isobatch.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

RESERVED_OPTIONS = {
    "nodes": "--nodes",
    "ntasks": "--nodes",
    "ntasks-per-node": "--nodes",
    "gpus-per-task": "--gpus-per-node",
    "gpus-per-node": "--gpus-per-node",
    "cpus-per-task": "--cpus-per-task",
    "time": "--time",
    "signal": "--lead or --signal",
    "array": "--array",
    "dependency": "--after",
    "job-name": "--job-name",
    "output": "--out",
    "open-mode": "--out",
    "chdir": "--out",
    "wrap": "--task",
    "parsable": "--submit",
    "test-only": "--submit",
    "wait": "--submit",
    "no-requeue": "--nodes",
}
"""Options of sbatch that the script sets itself -> the flag of `slurm` to use instead."""
SHORT_OPTIONS = {
    "N": "nodes",
    "n": "ntasks",
    "c": "cpus-per-task",
    "t": "time",
    "a": "array",
    "d": "dependency",
}
SHORT_OPTIONS |= {"J": "job-name", "o": "output", "D": "chdir", "W": "wait"}
RESERVED_STEP_OPTIONS = {
    **dict.fromkeys(("nodes", "ntasks", "nodelist", "ntasks-per-node"), "it runs one launcher on each node"),
    **dict.fromkeys(("gpus-per-task", "gpus-per-node"), "use --gpus-per-node"),
    "cpus-per-task": "use --cpus-per-task",
    "mpi": "use --mpi",
    "export": "what a node needs is in its environment",
    "kill-on-bad-exit": "one launcher that fails ends the others",
    "overlap": "a step may have to share a node with one that died",
    "exclusive": "a step may have to share a node with one that died",
    "jobid": "it runs in its own job",
    "het-group": "a run is planned for nodes of one kind",
    **dict.fromkeys(("output", "error", "input", "pty", "unbuffered"), "each node has a log in slurm/"),
    **dict.fromkeys(("container", "container-image", "container-workdir"), "use --container"),
}
"""Options of srun that each step sets itself -> why, or the flag of `slurm` to use instead."""
SWITCHES = "HhkOQsvV"
"""Short options of sbatch without a value, which others may follow in one word (-Hn2)."""


def refuse_control_characters(word: str, flag: str = "") -> str:
    """The word. Raises UserError for control characters such as a line break."""
    if any(not c.isprintable() for c in word):
        raise UserError(f"{flag or 'sbatch option'} {word!r}: holds a control character, which no script may")
    return word


def parse_sbatch_options(text: str) -> tuple[str, ...]:
    """The words of --sbatch. Raises UserError for options that the script sets itself."""
    words = _option_words("--sbatch", text, "--exclusive")
    for word in words:
        if name := _reserved_option(word, RESERVED_OPTIONS, SHORT_OPTIONS):
            raise UserError(f"--sbatch {word}: the script sets this itself; use {RESERVED_OPTIONS[name]}")
    return words


def parse_srun_options(text: str) -> tuple[str, ...]:
    """The words of --srun. Raises UserError for options that each step sets itself."""
    words = _option_words("--srun", text, "--cpu-bind=cores")
    for word in words:
        if re.match(r"-[A-Za-z]", word):
            raise UserError(f"--srun {word}: write srun's options out, as in --cpu-bind=cores")
        if name := _reserved_option(word, RESERVED_STEP_OPTIONS, {}):
            raise UserError(f"--srun {word}: each step sets this itself; {RESERVED_STEP_OPTIONS[name]}")
    return words


def _option_words(flag: str, text: str, example: str) -> tuple[str, ...]:
    try:
        words = shlex.split(refuse_control_characters(text, flag))
    except ValueError as error:
        raise UserError(f"{flag} {text}: {error}") from None
    if ":" in words or "hetjob" in words:
        raise UserError(
            f"{flag} {text}: a heterogeneous job has nodes of several kinds, and a run is planned for one:"
            " leave it out"
        )
    if not words or not words[0].startswith("-"):
        raise UserError(f'{flag} {text}: holds {flag[2:]}\'s own options, as in {flag} "{example}"')
    return tuple(words)


def _reserved_option(word: str, reserved: Mapping[str, str], short: Mapping[str, str]) -> str:
    """The key of `reserved` that a word sets, or nothing; Slurm accepts --nod=2 and -Hn2, too."""
    if word.startswith("--"):
        name = word[2:].partition("=")[0]
        if name in reserved:
            return name
        return next((own for own in reserved if name and own.startswith(name)), "")
    letter = word[1:].lstrip(SWITCHES)[:1] if word.startswith("-") else ""
    return short.get(letter, "")


def parse_time_limit(text: str) -> int:
    """Seconds of a Slurm time: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S. Raises UserError."""
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


def format_time_limit(seconds: int) -> str:
    """Seconds as [D-]HH:MM:SS."""
    days, rest = divmod(seconds, 86400)
    text = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{text}" if days else text


def parse_array(array: str) -> list[int]:
    """The task numbers of --array: 0-4, 1,3,7 or 0-10:2, each with an optional %LIMIT. Raises UserError."""
    body, _, limit = array.partition("%")
    found: list[int] = []
    for part in body.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if match is None or (limit and not re.fullmatch(r"[1-9]\d*", limit)) or array.endswith("%"):
            raise UserError(f"--array {array}: is not a list of seeds such as 0-4 or 1,3,7 or 0-99%8")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if first > last:
            raise UserError(f"--array {array}: {first} is above {last}; turn them round")
        if not (last < first + 1000 and step > 0):
            raise UserError(f"--array {array}: has 1,000 tasks at most, in steps of 1 or more")
        found += range(first, last + 1, step)
    return sorted(set(found))
