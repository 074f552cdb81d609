"""Replays parts of a run under another plan: steps, the weights they give, held-out metrics, the export."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import TrainingError
from isobatch.engine.checkpointing import checkpoint, portable_state
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.optimization.left_out import left_out_steps
from isobatch.engine.runs.summary import HELD_OUT_SPLITS
from isobatch.engine.training.evaluate import host_batches
from isobatch.engine.training.phase_loop import installed_versions
from isobatch.engine.training.session import Session
from isobatch.engine.verification.compare_export import compare_export
from isobatch.engine.verification.compare_weights import compare_weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from isobatch.core.plan import Plan
    from isobatch.core.recipe import Recipe
    from isobatch.engine.optimization.schedule import PhaseSchedule
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.training.active_phase import ActivePhase
    from isobatch.engine.training.train_step import StepResult

LoggedRows = dict[tuple[str, int], dict[str, Any]]
"""(phase, step) -> the row of metrics.jsonl."""
INITIAL = "the initial weights"
BOUNDED = ("adamw", "adamw8bit", "paged-adamw8bit")
"""Optimizers that move an element by about its learning rate a step at most."""


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive steps to redo."""

    checkpoint: str
    """Name of the checkpoint to start from; INITIAL for the weights before training."""
    phase: str
    """The phase of the steps: the checkpoint's own, or the next one where it is the last of its phase."""
    start: int
    """Steps of this phase before the first that is redone."""
    count: int

    @property
    def stop(self) -> int:
        """The last step that is redone, from 1."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Job:
    """What to redo under one plan. As JSON it goes to worker processes."""

    windows: list[Window] = field(default_factory=list)
    held_out: bool = False
    """Whether to measure the held-out splits with the exported weights, and to export them again."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Job:
        return cls([Window(**window) for window in values["windows"]], values["held_out"])


@dataclass(slots=True)
class Redone:
    """What a job found. Each field is JSON."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    """A dict for each redone step that is in the log: see `ReplayedStep`."""
    changes: list[dict[str, Any]] = field(default_factory=list)
    """What the task changed in its model in redone steps, as decisions.jsonl has it."""
    covered: list[list[Any]] = field(default_factory=list)
    """[phase, first step, last step] of each window, from 1."""
    weights: dict[str, dict[str, float]] = field(default_factory=dict)
    """Checkpoint that a window reached -> how the redone weights differ: see `compare_weights`."""
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Held-out split -> its metrics."""
    export: dict[str, Any] = field(default_factory=dict)
    """How the new export differs from final/: see `compare_export`."""
    losses: list[str] = field(default_factory=list)
    """Names of the parts of the loss."""
    wrong_parts: list[list[Any]] = field(default_factory=list)
    """[phase, step, steps since the start, name, difference] of each part of a loss that has several."""
    judged: float | None = None
    """The best evaluation of training measured again; None where none chose what was exported."""
    foreign_noise: bool = False
    """Whether the model draws from torch's own generators."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step, as logged and as replayed."""

    phase: str
    step: int
    start: str
    """Where the replay began: `the initial weights`, or a checkpoint's name."""
    after: int
    """Steps since then, with this one."""
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

    def to_dict(self) -> dict[str, Any]:
        differences = {"loss_difference": self.loss_difference, "norm_difference": self.norm_difference}
        return {**dataclasses.asdict(self), **differences}


def _wrong_parts(result: StepResult, row: dict[str, Any], step: ReplayedStep) -> list[list[Any]]:
    if len(result.names) < 2:
        return []
    parts = zip(result.names, result.sums.read(), strict=False)
    return [
        [step.phase, step.step, step.after, name, abs(value - row.get(name, math.inf)) / max(1.0, abs(value))]
        for name, value in parts
    ]


def open_checked(folder: Path) -> SavedCheckpoint:
    """A checkpoint with all its checksums verified. Raises TrainingError where it is damaged."""
    saved = SavedCheckpoint(folder)
    saved.verify_checksums()
    return saved


class Replay:
    """A session of a run's recipe under the caller's plan."""

    def __init__(
        self,
        run: RunFolder,
        plan: Plan,
        recipe: Recipe | None = None,
        world: Communicator | None = None,
    ) -> None:
        """`recipe`: in place of the run's own. `world`: that of another replay in this process."""
        self.run = run
        self.world = world or Communicator(plan)
        self.session = Session(recipe or run.recipe, run.facts, plan, self.world)
        self.session.left_out = left_out_steps(run)

    def load_trained(self) -> bool:
        """Load the best checkpoint's weights, or the newest's without early stopping; False without any."""
        folder = self.trained()
        if folder is None:
            return False
        saved = open_checked(folder)
        self.session.prepare_phase(self._schedule(saved), saved)
        portable_state.load_weights(saved, self.session.model)
        return True

    def trained(self) -> Path | None:
        """The checkpoint that is exported: the best, or the newest without early stopping."""
        found = checkpoint.list_checkpoints(self.run.checkpoints, self.session.phases)
        if not found:
            return None
        state = SavedCheckpoint(found[-1]).state
        best = state["judge"]["best_step"]
        if not state["judge"]["patience"] or not best:
            return found[-1]
        return self.run.checkpoints / checkpoint.checkpoint_name(state["progress"]["phase"], best)

    def _schedule(self, saved: SavedCheckpoint) -> PhaseSchedule:
        return self.session.schedule_of(saved.state["progress"]["phase"])

    def evaluate(self, split: str) -> dict[str, float]:
        """Metrics of a whole split."""
        with self.session:
            return self.session.evaluate(split)

    def redo(self, job: Job) -> Redone:
        """Do a job. All ranks call this.

        The initial weights come first, because loading a checkpoint overwrites them.
        """
        redone, rows = Redone(), self._logged(job.windows)
        with self.session:
            for window in sorted(job.windows, key=lambda w: w.checkpoint != INITIAL):
                with self.phase_at(window) as (active, saved):
                    self._redo_steps(active, window, rows, redone, saved)
            if job.held_out:
                self._measure_held_out(redone)
        return redone

    @contextlib.contextmanager
    def phase_at(self, window: Window) -> Iterator[tuple[ActivePhase, SavedCheckpoint | None]]:
        """The phase of a window as it was at its start; the checkpoint too where it is of the same phase.

        The initial weights are those of the session's model: no other window may come before them.
        """
        session, schedule = self.session, self.session.schedule_of(window.phase)
        saved = None
        if window.checkpoint != INITIAL:  # its checksums were compared when the records were
            saved = SavedCheckpoint(self.run.checkpoints / window.checkpoint)
            session.build_model()
        if saved is None or self._schedule(saved) is schedule:
            with session.phase(schedule, saved) as active:
                yield active, saved
            return
        with session.phase(self._schedule(saved), saved):  # that phase has ended: the next one starts from it
            pass
        with session.phase(schedule, None, saved.folder) as active:
            yield active, None

    def _redo_steps(
        self,
        active: ActivePhase,
        window: Window,
        rows: LoggedRows,
        redone: Redone,
        origin: SavedCheckpoint | None = None,
    ) -> None:
        """Run the steps of a window, and compare with the log and with the checkpoints that it reaches."""
        phase, rates = window.phase, 0.0
        for loaded in active.batches(window.start, window.stop):
            step, result = loaded.work.step + 1, active.step(loaded)
            loss, norm = result.loss_and_norm()
            redone.losses = list(result.names)
            if (row := rows.get((phase, step))) is not None:
                logged = row["loss"], loss, row["grad_norm"], norm
                replayed = ReplayedStep(phase, step, window.checkpoint, step - window.start, *logged)
                redone.steps.append(replayed.to_dict())
                redone.wrong_parts += _wrong_parts(result, row, replayed)
            if result.change is not None:
                where = {"phase": phase, "step": step, "decision": result.change.decision}
                redone.changes.append({**where, **result.change.facts})
            rates += result.rate
            reached = checkpoint.checkpoint_name(phase, step)
            if (self.run.checkpoints / reached / "state.json").exists():
                saved = SavedCheckpoint(self.run.checkpoints / reached)
                bound = 2 * rates if self.run.recipe.optimizer in BOUNDED else None
                redone.weights[reached] = compare_weights(active.strategy, saved, bound, origin, self.world)
        redone.covered.append([phase, window.start + 1, window.stop])
        redone.foreign_noise |= bool(active.stepper.findings.foreign_noise)

    def _logged(self, windows: list[Window]) -> LoggedRows:
        """The logged steps of all windows, from one reading of the log."""
        wanted = {(w.phase, step) for w in windows for step in range(w.start + 1, w.stop + 1)}
        rows = (row for row in rows_in(self.run.metrics) if "chain" in row)
        return {place: row for row in rows if (place := (row["phase"], row["step"])) in wanted}

    def _measure_held_out(self, redone: Redone) -> None:
        """Measure the exported weights on the held-out splits, and export them again."""
        session, folder = self.session, self.trained()
        if folder is None:
            raise TrainingError("there is no checkpoint of the exported weights")
        session.build_model()
        saved = SavedCheckpoint(folder)
        with session.phase(self._schedule(saved), saved):
            for split in (s for s in HELD_OUT_SPLITS if s in session.splits):
                redone.metrics[split] = session.evaluate(split)
            judge = saved.state["judge"]
            if judge["patience"] and judge["best_step"] == saved.state["progress"]["step"]:
                found = session.evaluate("valid", self.run.recipe.eval_fraction)
                redone.judged = found[session.task.best_metric[0]]
            if self.world.is_main:
                model = session.gather_full_model(folder, saved.state["progress"]["phase"])
                first = next(iter(redone.metrics), None)
                splits = session.splits
                batches = (lambda name=first: host_batches(splits[name])) if first else None
                redone.export = compare_export(self.run, session.task, model, session.facts, batches)
                if first:
                    redone.metrics[first] |= redone.export["metrics"]
                redone.export["same_versions"] = saved.state.get("versions") == installed_versions()
            self.world.barrier()
