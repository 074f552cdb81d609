"""Replays parts of a run under another plan: steps, the weights they give, held-out metrics, the export."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import torch

from isobatch.core.errors import TrainingError
from isobatch.engine.checkpointing import checkpoint, portable_state
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
from isobatch.engine.checkpointing.portable_state import WEIGHT
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.optimization.left_out import left_out_steps
from isobatch.engine.train.figures import step_rows
from isobatch.engine.runs.summary import HELD_OUT_SPLITS
from isobatch.engine.train.evaluate import host_batches
from isobatch.engine.training.phase_loop import installed_versions
from isobatch.engine.training.session import Session
from isobatch.engine.verification.compare_export import compare_export
from isobatch.engine.verification.windows import INITIAL, Redone, redone_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from isobatch.core.plan import Plan
    from isobatch.core.recipe import Recipe
    from isobatch.engine.checkpointing.portable_state import TensorPiece
    from isobatch.engine.optimization.schedule import PhaseSchedule
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.train.figures import LossAndNorm, StepRow
    from isobatch.engine.strategies.base import Strategy
    from isobatch.engine.training.session import ActivePhase
    from isobatch.engine.training.train_step import StepResult
    from isobatch.engine.verification.windows import Job, Window

FAR = 0.1
"""Share of what is allowed that few elements differ by: those whose gradient is rounding alone."""
ROUNDING = 1e-5
"""Difference allowed beside the bound, as a share of a tensor's largest element."""
NOT_LOGGED = 1e9
"""Difference of a part of the loss from what the log does not have."""
BOUNDED = ("adamw", "adamw8bit", "paged-adamw8bit")
"""Optimizers that move an element by about its learning rate a step at most."""


def _part_differences(result: StepResult, row: StepRow) -> dict[str, float]:
    """How each part of a loss that has several differs from the logged one; NOT_LOGGED without that."""
    if len(result.names) < 2:
        return {}
    pairs = [(n, v, row.more.get(n)) for n, v in zip(result.names, result.sums.read(), strict=False)]
    return {
        name: abs(value - logged) / max(1.0, abs(value)) if isinstance(logged, int | float) else NOT_LOGGED
        for name, value, logged in pairs
    }


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
        """Load the best checkpoint's weights, or the newest's without early stopping; False without any.

        Raises TrainingError where it is damaged.
        """
        folder = self.trained()
        if folder is None:
            return False
        saved = SavedCheckpoint(folder)
        saved.verify_checksums()
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
        wanted = {(w.phase, step) for w in job.windows for step in range(w.start + 1, w.stop + 1)}
        rows = {row.place: row for row in step_rows(self.run.metrics) if row.place in wanted}
        redone = Redone()
        with self.session:
            for window in sorted(job.windows, key=lambda w: w.checkpoint != INITIAL):
                self._redo_window(window, rows, redone)
            if job.held_out:
                self._measure_held_out(redone)
        return redone

    def figures(self, window: Window) -> list[LossAndNorm]:
        """Of every step of a window."""
        with self.session, self.phase_at(window) as (active, _):
            return [
                active.step(loaded).loss_and_norm() for loaded in active.batches(window.start, window.stop)
            ]

    @contextlib.contextmanager
    def before(self, window: Window) -> Iterator[ActivePhase]:
        """The phase of a window as it was before the window's last step."""
        with self.session, self.phase_at(window) as (active, _):
            for loaded in active.batches(window.start, window.stop - 1):
                active.step(loaded)
            yield active

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

    def _redo_window(self, window: Window, rows: Mapping[tuple[str, int], StepRow], redone: Redone) -> None:
        """Run the steps of a window, and compare with the log and with the checkpoints that it reaches."""
        phase, rates = window.phase, 0.0
        with self.phase_at(window) as (active, origin):
            for loaded in active.batches(window.start, window.stop):
                step, result = loaded.work.step + 1, active.step(loaded)
                figures = result.loss_and_norm()
                redone.parts = list(result.names)
                if (row := rows.get((phase, step))) is not None:
                    parts = _part_differences(result, row)
                    redone.steps.append(
                        redone_step(row, figures, window.checkpoint, step - window.start, parts)
                    )
                if result.change is not None:
                    where = {"phase": phase, "step": step, "decision": result.change.decision}
                    redone.changes.append({**where, **result.change.facts})
                rates += result.rate
                reached = checkpoint.checkpoint_name(phase, step)
                if (self.run.checkpoints / reached / "state.json").exists():
                    saved = SavedCheckpoint(self.run.checkpoints / reached)
                    bound = 2 * rates if self.run.recipe.optimizer in BOUNDED else None
                    redone.weights[reached] = compare_weights(
                        active.strategy, saved, bound, origin, self.world
                    )
            redone.foreign_noise |= bool(active.stepper.findings.foreign_noise)
        redone.covered.append([phase, window.start + 1, window.stop])

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
                redone.judged = found[session.task.monitor[0]]
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


def compare_weights(
    strategy: Strategy,
    saved: SavedCheckpoint,
    bound: float | None,
    origin: SavedCheckpoint | None,
    world: Communicator,
) -> dict[str, float]:
    """How a strategy's trainable weights and buffers differ from a checkpoint's, over all ranks.

    `bound`: largest difference that rounding may come to; twice the sum of the redone steps' learning rates
    for Adam, which moves an element by about its rate a step at most (Kingma and Ba 2015, section 2.1),
    whatever the rounding of its gradient. Without it (None) a tensor may differ by half of the largest step
    that an element of it took from `origin`, where the redone steps began.

    Returns `largest` (difference of an element), `beyond` (elements that differ by more than is allowed, or
    are not finite), `far` (that differ by more than FAR of it), `different` (elements that are not the same
    bit for bit) and `elements`.
    """
    buffers = {WEIGHT + name for name in strategy.buffers()}
    largest, beyond, far, different, elements = 0.0, 0, 0, 0, 0
    for piece in strategy.collect_state().pieces:
        if not piece.name.startswith(WEIGHT) or piece.name not in saved.entries:
            continue
        wanted = saved.read_slice(piece.name, piece.start, piece.start + piece.values.numel())
        found = piece.values.detach().to("cpu", wanted.dtype)
        elements += found.numel()
        if torch.equal(found, wanted):
            continue
        difference = (found.double() - wanted.double()).abs()
        allowed = _allowed(piece, found, bound, origin) + ROUNDING * float(wanted.double().abs().max())
        different += int((difference != 0).sum())
        if piece.name not in buffers:  # a buffer moves by no rate; the losses show what it does
            beyond += int((~(difference <= allowed)).sum())
            far += int((~(difference <= FAR * allowed)).sum())
            largest = max(largest, float(difference.max()))
    shares = world.all_gather_objects((largest, beyond, far, different, elements))
    worst = max((share[0] for share in shares), key=lambda x: math.inf if math.isnan(x) else x)
    names = ("beyond", "far", "different", "elements")
    return {"largest": worst, **{n: sum(share[k] for share in shares) for k, n in enumerate(names, 1)}}


def _allowed(piece: TensorPiece, found: Tensor, bound: float | None, origin: SavedCheckpoint | None) -> float:
    if bound is not None:
        return bound
    if origin is None or piece.name not in origin.entries:
        return math.inf
    before = origin.read_slice(piece.name, piece.start, piece.start + found.numel())
    return 0.5 * float((found.double() - before.double()).abs().max())
