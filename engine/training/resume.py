"""Find the newest intact checkpoint to resume from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isobatch.core.errors import TrainingError
from isobatch.engine.checkpointing import checkpoint
from isobatch.engine.checkpointing.checkpoint import open_on_all
from isobatch.engine.optimization.left_out import is_consistent

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.training.session import Session


def newest_checkpoint(run: RunFolder, session: Session, say: Callable[[str], None]) -> SavedCheckpoint | None:
    """The newest checkpoint that is not damaged, the same on every rank; None without any.

    Each rank verifies a share of the files. Damaged checkpoints are removed, because they would count among
    the newest when old ones are deleted; so are those that were saved before a step before them was left out.
    Raises TrainingError where it is of another recipe or other data.
    """
    world = session.world
    names = [p.name for p in checkpoint.list_checkpoints(run.checkpoints, session.phases)]
    for folder in (run.checkpoints / name for name in reversed(world.broadcast_object(names))):
        saved, problem = _open(folder, world)
        if problems := [p for p in world.all_gather_objects(problem) if p]:
            say(f"{problems[0]}; trying the one before")
            if world.is_main:
                checkpoint.remove(folder)
            continue
        assert saved is not None
        if not is_consistent(session.left_out, saved.state):
            world.barrier()
            if world.is_main:
                checkpoint.remove(folder)
            continue
        origin = (saved.state["recipe_hash"], saved.state["fingerprint"])
        if origin != (session.recipe.hash(), session.facts.fingerprint):
            raise TrainingError(
                f"checkpoint {folder} belongs to another recipe or other data than the run's files say"
            )
        return saved
    return None


def _open(folder: Path, world: Communicator) -> tuple[SavedCheckpoint | None, str]:
    try:
        saved = open_on_all(folder, world)
        saved.verify_checksums(world.rank, world.size)
    except TrainingError as error:
        return None, str(error)
    return saved, ""
