"""Replays parts of a run under another plan: steps, the weights they give, held-out metrics, the export.

The loop is the one that trained the run, with other hooks: they compare in place of writing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from isobatch.core.errors import TrainingError
from isobatch.core.plan import Plan
from isobatch.core.recipe import Recipe
from isobatch.engine.checkpointing import checkpoint, portable_state
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
from isobatch.engine.checkpointing.portable_state import WEIGHT, TensorPiece
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.hooks.checkpoint import installed_versions
from isobatch.engine.optimization.early_stopping import EarlyStopping
from isobatch.engine.optimization.left_out import left_out_steps
from isobatch.engine.optimization.schedule import PhaseSchedule
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.summary import HELD_OUT_SPLITS
from isobatch.engine.train.build import Builder
from isobatch.engine.train.evaluate import at_least_few, evaluate, host_batches
from isobatch.engine.train.figures import LossAndNorm, StepFigures, StepRow, step_rows
from isobatch.engine.train.hooks import Hook, Hooks, Seen, Signal
from isobatch.engine.train.loop import run_phase
from isobatch.engine.train.state import Training
from isobatch.engine.verification.compare_export import compare_export
from isobatch.engine.verification.windows import INITIAL, Job, Redone, Window, redone_step
from isobatch.models.capabilities import monitor_of

FAR = 0.1
"""Share of what is allowed that few elements differ by: those whose gradient is rounding alone."""
ROUNDING = 1e-5
"""Difference allowed beside the bound, as a share of a tensor's largest element."""
NOT_LOGGED = 1e9
"""Difference of a part of the loss from what the log does not have."""
BOUNDED = ("adamw", "adamw8bit", "paged-adamw8bit")
"""Optimizers that move an element by about its learning rate a step at most."""


def _part_differences(figures: StepFigures, row: StepRow) -> dict[str, float]:
    """How each part of a loss that has several differs from the logged one; NOT_LOGGED without that."""
    names = figures.output.names
    if len(names) < 2:
        return {}
    pairs = [(name, figures.row[name], row.more.get(name)) for name in names]
    return {
        name: abs(value - logged) / max(1.0, abs(value)) if isinstance(logged, int | float) else NOT_LOGGED
        for name, value, logged in pairs
    }


@dataclass(eq=False)
class Compare(Hook):
    """Compares redone steps with the log, and the weights with the checkpoints that they reach."""

    run: RunFolder
    window: Window
    origin: SavedCheckpoint | None
    """Where the window begins."""
    rows: Mapping[tuple[str, int], StepRow]
    """What the run logged of its steps."""
    redone: Redone
    _rates: float = 0.0

    def on_figures(self, figures: StepFigures) -> None:
        window, redone, place = self.window, self.redone, (self.window.phase, figures.step)
        redone.parts = list(figures.output.names)
        if (row := self.rows.get(place)) is not None:
            parts, both = _part_differences(figures, row), (figures.loss, figures.norm)
            redone.steps.append(redone_step(row, both, window.checkpoint, figures.step - window.start, parts))
        if (change := figures.output.change) is not None:
            where = {"phase": window.phase, "step": figures.step, "decision": change.decision}
            redone.changes.append({**where, **change.facts})
        self._rates += figures.output.rate

    def _reached(self, step: int) -> str:
        return checkpoint.checkpoint_name(self.window.phase, step)

    def due(self, step: int) -> bool:
        return (self.run.checkpoints / self._reached(step) / "state.json").exists()

    def at_pause(self, state: Training, step: int, asked: set[Signal]) -> None:  # noqa: ARG002
        if self.due(step):
            saved = SavedCheckpoint(self.run.checkpoints / self._reached(step))
            bound = 2 * self._rates if self.run.recipe.optimizer in BOUNDED else None
            self.redone.weights[self._reached(step)] = compare_weights(state, saved, bound, self.origin)


class Replay:
    """The training of a run's recipe under the caller's plan."""

    def __init__(
        self, run: RunFolder, plan: Plan, recipe: Recipe | None = None, world: Communicator | None = None
    ) -> None:
        """`recipe`: in place of the run's own. `world`: that of another replay in this process."""
        self.run = run
        self.world = world or Communicator(plan)
        left_out = left_out_steps(run)
        self.builder = Builder(recipe or run.here, run.facts, plan, self.world, left_out=left_out)
        self.state = self.builder.state

    def load_trained(self) -> Path | None:
        """Load the weights of the checkpoint that is exported, and return its folder; None without any.

        Raises TrainingError where it is damaged.
        """
        folder = self.trained()
        if folder is not None:
            saved = SavedCheckpoint(folder)
            saved.verify_checksums()
            self.builder.prepare_phase(self._schedule(saved), saved)
            portable_state.load_weights(saved, self.state.model)
        return folder

    def trained(self) -> Path | None:
        """The checkpoint that is exported: the best, or the newest without early stopping."""
        found = checkpoint.list_checkpoints(self.run.checkpoints, self.builder.phases)
        if not found:
            return None
        state = SavedCheckpoint(found[-1]).state
        progress, judge = state["progress"], EarlyStopping(**state["hooks"]["evaluate"])
        name = checkpoint.checkpoint_name(progress["phase"], judge.exported(progress["step"]))
        return self.run.checkpoints / name

    def _schedule(self, saved: SavedCheckpoint) -> PhaseSchedule:
        return self.builder.schedule_of(saved.state["progress"]["phase"])

    def evaluate(self, split: str) -> dict[str, float]:
        """Metrics of a whole split. Who asks leaves `builder` behind the last."""
        return evaluate(self.state, split)

    def redo(self, job: Job) -> Redone:
        """Do a job. All ranks call this.

        The initial weights come first, because loading a checkpoint overwrites them.
        """
        wanted = {(w.phase, step) for w in job.windows for step in range(w.start + 1, w.stop + 1)}
        rows = {row.place: row for row in step_rows(self.run.metrics) if row.place in wanted}
        redone = Redone()
        with self.builder:
            for window in sorted(job.windows, key=lambda w: w.checkpoint != INITIAL):
                with self.phase_at(window) as origin:
                    compare = Compare(self.run, window, origin, rows, redone)
                    run_phase(self.state, Hooks([compare]), window.start, window.stop)
                    redone.foreign_noise |= bool(self.state.layout.foreign_noise)
                redone.covered.append([window.phase, window.start + 1, window.stop])
            if job.held_out:
                self._measure_held_out(redone)
        return redone

    def figures(self, window: Window) -> list[LossAndNorm]:
        """Of every step of a window."""
        seen = Seen()
        with self.builder, self.phase_at(window):
            run_phase(self.state, Hooks([seen]), window.start, window.stop)
        return [(figures.loss, figures.norm) for figures in seen.figures]

    @contextlib.contextmanager
    def before(self, window: Window) -> Iterator[Training]:
        """The phase of a window as it was before the window's last step."""
        with self.builder, self.phase_at(window):
            run_phase(self.state, Hooks(), window.start, window.stop - 1)
            yield self.state

    @contextlib.contextmanager
    def phase_at(self, window: Window) -> Iterator[SavedCheckpoint | None]:
        """The phase of a window as it was at its start; yields the checkpoint where it is of the same phase.

        The initial weights are those of the builder's model: no other window may come before them.
        """
        builder, schedule = self.builder, self.builder.schedule_of(window.phase)
        saved = None
        if window.checkpoint != INITIAL:  # its checksums were compared when the records were
            saved = SavedCheckpoint(self.run.checkpoints / window.checkpoint)
            builder.build_model()
        if saved is None or self._schedule(saved) is schedule:
            with builder.phase(schedule, saved):
                yield saved
            return
        with builder.phase(self._schedule(saved), saved):  # that phase has ended: the next starts from it
            pass
        with builder.phase(schedule, None, saved.folder):
            yield None

    def _measure_held_out(self, redone: Redone) -> None:
        """Measure the exported weights on the held-out splits, and export them again."""
        builder, state, folder = self.builder, self.state, self.trained()
        if folder is None:
            raise TrainingError("there is no checkpoint of the exported weights")
        builder.build_model()
        saved = SavedCheckpoint(folder)
        phase, step = saved.state["progress"]["phase"], saved.state["progress"]["step"]
        with builder.phase(self._schedule(saved), saved):
            beside = {name: state.strategy.read_held(saved, name) for name in saved.hooks_with_weights()}
            for split in (s for s in HELD_OUT_SPLITS if s in state.splits):
                redone.metrics[split] = evaluate(state, split, beside=beside)
            judge = saved.state["hooks"]["evaluate"]
            if judge["patience"] and judge["best_step"] == step:
                share = at_least_few(self.run.recipe.eval_fraction, state.splits["valid"])
                redone.judged = evaluate(state, "valid", share)[monitor_of(state.task, state.facts)[0]]
            if self.world.is_main:
                model = builder.gather_full_model(folder, phase)
                first = next(iter(redone.metrics), None)
                batches = (lambda name=first: host_batches(state.splits[name])) if first else None
                redone.export = compare_export(self.run, state.task, model, saved, batches)
                redone.export["hooks"] = list(beside)
                if first:
                    redone.metrics[first] |= redone.export["metrics"]
                redone.export["same_versions"] = saved.state.get("versions") == installed_versions()
            self.world.barrier()


def compare_weights(
    state: Training, saved: SavedCheckpoint, bound: float | None, origin: SavedCheckpoint | None
) -> dict[str, float]:
    """How a training's trainable weights and buffers differ from a checkpoint's, over all ranks.

    `bound`: largest difference that rounding may come to; twice the sum of the redone steps' learning rates
    for Adam, which moves an element by about its rate a step at most (Kingma and Ba 2015, section 2.1),
    whatever the rounding of its gradient. Without it (None) a tensor may differ by half of the largest step
    that an element of it took from `origin`, where the redone steps began.

    Returns `largest` (difference of an element), `beyond` (elements that differ by more than is allowed, or
    are not finite), `far` (that differ by more than FAR of it), `different` (elements that are not the same
    bit for bit) and `elements`.
    """
    buffers = {WEIGHT + name for name in state.strategy.buffers()}
    largest, counts = 0.0, dict.fromkeys(("beyond", "far", "different", "elements"), 0)
    for piece in state.strategy.collect_state().pieces:
        if not piece.name.startswith(WEIGHT) or piece.name not in saved.entries:
            continue
        wanted = saved.read_slice(piece.name, piece.start, piece.start + piece.values.numel())
        found = piece.values.detach().to("cpu", wanted.dtype)
        counts["elements"] += found.numel()
        if torch.equal(found, wanted):
            continue
        difference = (found.double() - wanted.double()).abs()
        allowed = _allowed(piece, found, bound, origin) + ROUNDING * float(wanted.double().abs().max())
        counts["different"] += int((difference != 0).sum())
        if piece.name not in buffers:  # a buffer moves by no rate; the losses show what it does
            counts["beyond"] += int((~(difference <= allowed)).sum())
            counts["far"] += int((~(difference <= FAR * allowed)).sum())
            largest = max(largest, float(difference.max()))
    shares = state.world.all_gather_objects((largest, counts))
    worst = max((share for share, _ in shares), key=lambda x: math.inf if math.isnan(x) else x)
    return {"largest": worst, **{name: sum(share[name] for _, share in shares) for name in counts}}


def _allowed(piece: TensorPiece, found: Tensor, bound: float | None, origin: SavedCheckpoint | None) -> float:
    if bound is not None:
        return bound
    if origin is None or piece.name not in origin.entries:
        return math.inf
    before = origin.read_slice(piece.name, piece.start, piece.start + found.numel())
    return 0.5 * float((found.double() - before.double()).abs().max())
