"""`runs rm`: removes the folders of runs that nobody trains."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isobatch.core.atomic_files import explain_write_errors
from isobatch.core.errors import DONE, UserError
from isobatch.core.measures import format_bytes
from isobatch.core.terminal.status import doing
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.control.run_state import look
from isobatch.launch.local.arguments import read_command

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoveOptions:
    """Flags of `runs rm`."""

    yes: bool = False
    """Do not ask."""


def remove(words: Sequence[str]) -> int:
    """Usage: runs rm RUN... [--yes]: removes runs with their checkpoints; asks first on a terminal."""
    positional, options = read_command(words, RemoveOptions, "runs rm")
    if not positional:
        raise UserError("runs rm: give the folders of runs, as in: runs rm runs/old (`runs` lists them)")
    runs = [RunFolder.open(place) for place in positional]
    for run in runs:
        if run.folder.is_symlink():
            raise UserError(f"rm: {run.folder} is a link; remove what it points to, or the link itself")
        if not (seen := look(run.folder)).is_over:
            raise UserError(f"rm: {run.folder} is {seen.state}: `runs cancel {run.folder}` ends it first")
    for run in runs:
        size = format_bytes(sum(p.stat().st_size for p in run.folder.rglob("*") if p.is_file()))
        if not options.yes and not _agreed(f"remove {run.folder} ({size})?"):
            print(f"{run.folder} stays", file=sys.stderr)
            continue
        with run.lock("launch"), explain_write_errors(run.folder):
            run.refuse_if_training()
            shutil.rmtree(run.folder)
        print(f"removed {run.folder} ({size})")
    return DONE


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UserError(f"{question} Nobody can be asked here: say --yes")
    doing()
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
