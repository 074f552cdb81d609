"""Where a run begins and where it ends: its newest whole checkpoint, and final/."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core import atomic_files
from isobatch.core.errors import TrainingError
from isobatch.engine.checkpointing import checkpoint
from isobatch.engine.checkpointing.checkpoint import Saved

if TYPE_CHECKING:
    from torch import nn

    from isobatch.core.facts import Facts
    from isobatch.engine.distributed.communicator import World
    from isobatch.engine.runs.run_folder import Run
    from isobatch.engine.training.session import Session
    from isobatch.models.base import Task


def newest(run: Run, session: Session, say: Callable[[str], None]) -> Saved | None:
    """The newest checkpoint that is whole, the same on every rank. The ranks share the reading.

    Damaged ones are removed: they would count among the newest when old ones are deleted.
    """
    world = session.world
    names = [p.name for p in checkpoint.listed(run.checkpoints, session.phases)]
    for folder in (run.checkpoints / name for name in reversed(world.agree(names))):
        saved, problem = _open(folder, world)
        if problems := [p for p in world.gather(problem) if p]:
            say(f"{problems[0]}; trying the one before")
            if world.is_main:
                checkpoint.remove(folder)
            continue
        assert saved is not None
        origin = (saved.facts["recipe_hash"], saved.facts["fingerprint"])
        if origin != (session.recipe.hash(), session.facts.fingerprint):
            raise TrainingError(
                f"checkpoint {folder} belongs to another recipe or other data than the run's files say"
            )
        return saved
    return None


def _open(folder: Path, world: World) -> tuple[Saved | None, str]:
    try:
        saved = Saved(folder)
        saved.check(world.rank, world.size)
    except TrainingError as error:
        return None, str(error)
    return saved, ""


def write_final(run: Run, task: Task, model: nn.Module, facts: Facts) -> dict[str, int]:
    """Write final/ beside its place and rename it, so that it is whole or absent; its checksums."""
    temporary = run.folder / ".final.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    with atomic_files.naming_errors(temporary):
        temporary.mkdir(parents=True)
        task.export(model, temporary, facts)
    shutil.rmtree(run.final, ignore_errors=True)
    os.replace(temporary, run.final)
    return atomic_files.checksums(run.final)
