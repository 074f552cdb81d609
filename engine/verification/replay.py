"""Replay logged steps of a run under another plan, to compare losses and gradient norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.engine.checkpointing import checkpoint, portable_state
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.training.session import Session

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from isobatch.core.plan import Plan
    from isobatch.core.recipe import Recipe
    from isobatch.engine.optimization.schedule import PhaseSchedule
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.training.active_phase import ActivePhase


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step, as logged and as replayed."""

    phase: str
    step: int
    start: str
    """Where the replay began: `the initial weights`, or a checkpoint's name."""
    logged_loss: float
    loss: float
    logged_norm: float
    norm: float

    @property
    def loss_difference(self) -> float:
        """Absolute difference, or relative where the logged loss is above one."""
        return abs(self.loss - self.logged_loss) / max(1.0, abs(self.logged_loss))

    @property
    def norm_difference(self) -> float:
        """Relative difference."""
        return abs(self.norm - self.logged_norm) / max(1e-12, abs(self.logged_norm))


def open_checked(folder: Path) -> SavedCheckpoint:
    """A checkpoint with all its checksums verified. Raises TrainingError where it is damaged."""
    saved = SavedCheckpoint(folder)
    saved.verify_checksums()
    return saved


class Replay:
    """A session of a run's recipe under the caller's plan."""

    def __init__(self, run: RunFolder, plan: Plan, recipe: Recipe | None = None) -> None:
        """`recipe`: in place of the run's own."""
        self.run = run
        self.world = Communicator(plan)
        self.session = Session(recipe or run.recipe, run.facts, plan, self.world)

    def load_trained(self) -> bool:
        """Load the best checkpoint's weights, or the newest's without early stopping; False without any."""
        found = self._checkpoints()
        if not found:
            return False
        saved = open_checked(found[-1])
        best = saved.state["judge"]["best_step"]
        if saved.state["judge"]["patience"] and best:
            phase = saved.state["progress"]["phase"]
            saved = open_checked(self.run.checkpoints / checkpoint.checkpoint_name(phase, best))
        self.session.prepare_phase(self._schedule(saved), saved)
        portable_state.load_weights(saved, self.session.model)
        return True

    def _checkpoints(self) -> list[Path]:
        return checkpoint.list_checkpoints(self.run.checkpoints, self.session.phases)

    def _schedule(self, saved: SavedCheckpoint) -> PhaseSchedule:
        return self.session.schedule_of(saved.state["progress"]["phase"])

    def evaluate(self, split: str) -> dict[str, float]:
        """Metrics of a whole split."""
        with self.session:
            return self.session.evaluate(split)

    def steps(self, count: int) -> list[ReplayedStep]:
        """Replay `count` steps from the initial weights and from the last checkpoint before logged steps.

        In this order, because loading a checkpoint overwrites the initial weights.
        """
        rows = {
            (r["phase"], r["step"]): r
            for r in atomic_files.read_jsonl(self.run.metrics)
            if "loss" in r and "lr" in r
        }
        with self.session as session:
            with session.phase(session.schedules[0]) as active:
                replayed = _replay_steps(active, 0, count, rows, "the initial weights")
            for folder in reversed(self._checkpoints()):
                saved = open_checked(folder)
                phase, step = saved.state["progress"]["phase"], int(saved.state["progress"]["step"])
                if any((phase, later) in rows for later in range(step + 1, step + count + 1)):
                    session.build_model()
                    with session.phase(self._schedule(saved), saved) as active:
                        return replayed + _replay_steps(active, step, count, rows, folder.name)
        return replayed


def _replay_steps(
    active: ActivePhase, start: int, count: int, rows: Mapping[tuple[str, int], Any], origin: str
) -> list[ReplayedStep]:
    """Run steps start..start+count-1 of a phase; those that are in the logged `rows` are returned."""
    phase, replayed = active.schedule.name, []
    for loaded in active.batches(start, min(start + count, active.schedule.steps)):
        step, result = loaded.work.step + 1, active.step(loaded)
        if (row := rows.get((phase, step))) is not None:
            loss, norm = sum(result.sums.read()[: len(result.names)]), result.norm.read()[0]
            replayed.append(ReplayedStep(phase, step, origin, row["loss"], loss, row["grad_norm"], norm))
    return replayed
