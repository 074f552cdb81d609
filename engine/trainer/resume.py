"""Find the newest intact checkpoint to resume from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import TrainingError
from isobatch.engine.checkpointing import checkpoint
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint, open_on_all
from isobatch.engine.optimization.left_out import is_consistent

if TYPE_CHECKING:
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.train.build import Builder


def newest_checkpoint(run: RunFolder, builder: Builder, say: Callable[[str], None]) -> SavedCheckpoint | None:
    """The newest checkpoint that is not damaged, the same on every rank; None where none was ever saved.

    Each rank verifies a share of the files. Damaged checkpoints are removed once an intact one is found,
    because they would count among the newest when old ones are deleted; so are those that were saved before a
    step before them was left out. Raises TrainingError where it is of another recipe or other data, and where
    none of those that the run has saved can be read: never a start from step 1 that nobody asked for.
    """
    state, world = builder.state, builder.state.world
    left_out = {schedule.name: schedule.left_out for schedule in builder.schedules}
    names = [p.name for p in checkpoint.list_checkpoints(run.checkpoints, builder.phases)]
    lost = "" if names or not world.is_main else _saved_before(run)
    names, lost = world.broadcast_object((names, lost))
    damaged: list[Path] = []
    for folder in (run.checkpoints / name for name in reversed(names)):
        saved, problem = _open(folder, world)
        if problems := [p for p in world.all_gather_objects(problem) if p]:
            say(problems[0])
            damaged.append(folder)
            lost = lost or problems[0]
            continue
        assert saved is not None
        if not is_consistent(left_out, saved.state):
            world.barrier()
            if world.is_main:
                checkpoint.remove(folder)
            continue
        origin = (saved.state["recipe_hash"], saved.state["fingerprint"])
        if origin != (state.recipe.hash(), state.facts.fingerprint):
            raise TrainingError(
                f"checkpoint {folder} belongs to another recipe or other data than the run's files say"
            )
        for other in damaged if world.is_main else ():
            checkpoint.remove(other)
        return saved
    if lost:
        raise TrainingError(
            f"none of the checkpoints that {run.folder} has saved can be read ({lost}): put one back from a"
            f" copy, or train anew: isobatch auto --like {run.folder} --again"
        )
    return None


def _saved_before(run: RunFolder) -> str:
    """What log or summary say of the last checkpoint, where none is on disk; empty where none was saved."""
    saved = [row["checkpoint"] for row in rows_in(run.metrics) if "checkpoint" in row]
    summary = run.summary() or {}
    if summary.get("status") == "stopped" and summary.get("steps"):
        saved.append(f"the one after {summary['steps']} steps")
    return f"{saved[-1]} is gone" if saved else ""


def _open(folder: Path, world: Communicator) -> tuple[SavedCheckpoint | None, str]:
    try:
        saved = open_on_all(folder, world)
        saved.verify_checksums(world.rank, world.size)
    except TrainingError as error:
        return None, str(error)
    return saved, ""
