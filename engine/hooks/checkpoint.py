"""Checkpoints: when one is due, what is in it, and which of them are kept."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import math
from typing import TYPE_CHECKING, Any

from isobatch.core.measures import now
from isobatch.core.terminal.status import doing
from isobatch.engine.checkpointing import checkpoint
from isobatch.engine.checkpointing.writer import CheckpointWriter
from isobatch.engine.optimization.left_out import until
from isobatch.engine.optimization.schedule import CLOSING_STEPS
from isobatch.engine.train.hooks import Hook, Signal, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.optimization.schedule import PhaseSchedule
    from isobatch.engine.runs.metrics_log import MetricsLog
    from isobatch.engine.runs.peak_memory import PeakMemory
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.runs.run_options import RunOptions
    from isobatch.engine.train.figures import StepFigures
    from isobatch.engine.train.state import Training

VERSIONED = ("torch", "accelerate", "transformers")


class Checkpoint(Hook):
    """Saves by the clock of rank 0 or by the count of steps, and where a hook asks for it."""

    votes = ("save", "written", "failed")

    def __init__(
        self,
        run: RunFolder,
        world: Communicator,
        options: RunOptions,
        log: MetricsLog,
        peak: PeakMemory,
        schedules: Sequence[PhaseSchedule],
        others: Sequence[Hook],
        leads: Callable[[int], bool],
        best: Callable[[int], set[int]],
        copy: Callable[[Path, str, str], None] = lambda *_: None,
    ) -> None:
        """`others`: the hooks whose state is saved. `leads(step)`: whether an evaluation that may
        choose the best weights follows closely. `best(step)`: the steps that this choice needs.
        """
        self.run, self.world, self.options, self.log, self.peak = run, world, options, log, peak
        self.others, self.leads, self.best = others, leads, best
        self.phases = [schedule.name for schedule in schedules]
        self.writer = CheckpointWriter(world, self._is_complete, copy)
        self.closing_step = schedules[-1].steps - CLOSING_STEPS
        """The step of the checkpoint from which `verify` redoes the last steps of the run."""
        self.spared: set[str] = set()
        """Those that were needed when the newest save began."""
        self.saved_step = -1
        self._resumed = self._is_whole = False

    @contextlib.contextmanager
    def phase(self, state: Training) -> Iterator[None]:
        self._state = state
        schedule, every = state.schedule, self.options.save_every
        self._saved_at, self._minutes, self._every = now(), every.value, 0
        if every.unit != "minutes":
            self._minutes, self._every = math.inf, every.steps(schedule.steps_per_epoch, schedule.steps)
        self._is_last = schedule.name == self.phases[-1]
        self.saved_step, self._resumed = state.progress.step if self._resumed else -1, False
        yield
        doing("saving")
        self.writer.wait()

    def vote(self, step: int) -> Mapping[str, float]:  # noqa: ARG002
        save = float(self.world.rank == 0 and now() - self._saved_at >= 60 * self._minutes)
        if not self.writer.is_writing:
            return {"save": save}
        written, failed = self.writer.rank_flags()
        return {"save": save, "written": written, "failed": failed}

    def on_figures(self, figures: StepFigures) -> set[Signal]:
        votes = figures.votes
        self._is_whole = bool(votes["failed"]) or votes["written"] == self.world.size
        asked: set[Signal] = {"pause"} if self._is_whole else set()
        return asked | {"save"} if votes["save"] else asked

    def due(self, step: int) -> bool:
        by_count = self._every and step % self._every == 0
        return bool(by_count or (self._is_last and step == self.closing_step) or self.leads(step))

    def at_pause(self, state: Training, step: int, asked: set[Signal]) -> set[Signal]:
        if self._is_whole:
            self._is_whole = False
            self.writer.complete()
        if (asked - {"pause"} or self.due(step)) and self.saved_step != step:
            self._save(state, step)
        return set()

    def _save(self, state: Training, step: int) -> None:
        strategy = state.strategy
        self.writer.wait()  # the log of this checkpoint holds the digest of the one before
        self.log.flush_skipped()
        facts = {
            "logs": self.log.seal(state.schedule.name, step),
            "progress": dataclasses.asdict(state.progress),
            "hooks": {name_of(hook): found for hook in self.others if (found := hook.state())},
            "left_out": until(state.schedule.left_out, step),
            "scaling": strategy.loss_scale(),
            "recipe_hash": state.recipe.hash(),
            "fingerprint": state.facts.fingerprint,
            "world_size": state.world.size,
            "strategy": state.plan.strategy,
            "versions": installed_versions(),
        }
        more = {name_of(hook): tensors for hook in self.others if (tensors := hook.tensors())}
        self.writer.start(self.folder(state.schedule.name, step), strategy.collect_state(more), facts)
        self.peak.observe("save")
        self.spared = self._needed()
        self.saved_step = step
        self._saved_at = now()

    def folder(self, phase: str, step: int) -> Path:
        """The folder of the checkpoint after a step of a phase."""
        return self.run.checkpoints / checkpoint.checkpoint_name(phase, step)

    def _needed(self) -> set[str]:
        state = self._state
        return {
            checkpoint.checkpoint_name(state.schedule.name, step) for step in self.best(state.progress.step)
        }

    def log_digest(self, state: Training, folder: Path) -> None:
        """Log the digest of a checkpoint, so that it is sealed with the rows."""
        if digest := checkpoint.recorded_digest(folder):
            where = {"phase": state.progress.phase, "step": state.progress.step}
            self.log.log_metrics({**where, "checkpoint": folder.name, "digest": digest})

    def _is_complete(self, folder: Path) -> None:
        self.log_digest(self._state, folder)
        # The newest best checkpoint may not be written yet: until then keep the previous best as well.
        closing = checkpoint.checkpoint_name(self.phases[-1], self.closing_step)
        spare = self.spared | self._needed() | {closing}
        checkpoint.delete_old(self.run.checkpoints, self.phases, self.options.keep, spare)

    def load(self, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:  # noqa: ARG002
        self._resumed = True


def installed_versions() -> dict[str, str]:
    """Versions of the libraries that shape what a run learns and exports."""
    return {name: importlib.metadata.version(name) for name in VERSIONED}
