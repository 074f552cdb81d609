"""Checkpoints: when one is due, what is in it, and which of them are kept."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from isobatch.core.atomic_files import rows_in
from isobatch.core.measures import now
from isobatch.core.package import ROOT
from isobatch.core.terminal import doing
from isobatch.engine.checkpointing import checkpoint
from isobatch.engine.checkpointing.host_buffer import HostBuffer
from isobatch.engine.checkpointing.writer import CheckpointWriter
from isobatch.engine.machine.detect import run_command
from isobatch.engine.optimization.left_out import until
from isobatch.engine.optimization.schedule import CLOSING_STEPS
from isobatch.engine.runs.metrics_log import MetricsLog
from isobatch.engine.runs.peak_memory import PeakMemory
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.engine.train.figures import StepFigures
from isobatch.engine.train.hooks import Hook, Signal, name_of, saved_of
from isobatch.engine.train.state import Training

VERSIONED = ("torch", "accelerate", "transformers")
OTHER_LIBRARY = "another library"


class ChoosesBest(Protocol):
    """What chooses the best checkpoint."""

    def leads(self, step: int) -> bool:
        """Whether an evaluation that may choose the best weights follows closely."""

    def needed(self, step: int) -> set[int]:
        """The steps whose checkpoints the choice needs."""


class Checkpoint(Hook):
    """Saves by the clock of rank 0 or by the count of steps, and where a hook asks for it."""

    votes = ("save", "written", "failed")

    def __init__(
        self,
        run: RunFolder,
        state: Training,
        phases: list[str],
        options: RunOptions,
        log: MetricsLog,
        peak: PeakMemory,
        copy: Callable[[Path, str], None],
        buffer: HostBuffer,
        others: Sequence[Hook],
        judge: ChoosesBest,
    ) -> None:
        """`state`: of the phase that is saved. `phases`: all of the run. `others`: hooks that are saved.
        `copy`: see `RemoteCopies.add`; `buffer`: see `CheckpointWriter`.
        """
        self.run, self.training, self.log, self.peak = run, state, log, peak
        self.others, self.judge, self.keep = others, judge, options.keep
        self.phases, self.copy = phases, copy
        schedule, every = state.schedule, options.save_every
        self.minutes, self.every = every.value, 0
        """Between two saves, by the clock or by the count of steps."""
        if every.unit != "minutes":
            self.minutes, self.every = math.inf, every.steps(schedule.steps_per_epoch, schedule.steps)
        self.closing_step = schedule.steps - CLOSING_STEPS if schedule.name == self.phases[-1] else -1
        """The step of the checkpoint from which `verify` redoes the last steps of the run."""
        self.spared: set[str] = set()
        """Those that were needed when the newest save began."""
        self.saved_step, self._saved_at = -1, now()
        self._is_whole = False
        self.writer = CheckpointWriter(state.world, self._is_complete, buffer)

    @contextlib.contextmanager
    def phase(self, state: Training) -> Iterator[None]:  # noqa: ARG002
        yield
        doing("saving")
        self.writer.wait()

    def vote(self, step: int) -> Mapping[str, float]:  # noqa: ARG002
        save = float(self.training.world.rank == 0 and now() - self._saved_at >= 60 * self.minutes)
        if self.writer.folder is None:
            return {"save": save}
        written, failed = self.writer.rank_flags()
        return {"save": save, "written": written, "failed": failed}

    def on_figures(self, figures: StepFigures) -> set[Signal]:
        votes = figures.votes
        self._is_whole = bool(votes["failed"]) or votes["written"] == self.training.world.size
        asked: set[Signal] = {"pause"} if self._is_whole else set()
        return asked | {"save"} if votes["save"] else asked

    def due(self, step: int) -> bool:
        by_count = self.every and step % self.every == 0
        return bool(by_count or step == self.closing_step or self.judge.leads(step))

    def at_pause(self, state: Training, step: int, asked: set[Signal]) -> None:
        if self._is_whole:
            self._is_whole = False
            self.writer.complete()
        if (asked - {"pause"} or self.due(step)) and self.saved_step != step:
            self._save(state, step)

    def _save(self, state: Training, step: int) -> None:
        strategy = state.strategy
        self.writer.wait()  # the log of this checkpoint holds the digest of the one before
        self.log.flush_skipped()
        hooks, tensors = saved_of(self.others, state, step)
        facts = {
            "logs": self.log.seal(state.schedule.name, step),
            "progress": dataclasses.asdict(state.progress),
            "hooks": hooks,
            "weights": [name_of(hook) for hook in self.others if hook.weights and name_of(hook) in tensors],
            "left_out": until(state.schedule.left_out, step),
            "scaling": strategy.loss_scale(),
            "recipe_hash": state.recipe.hash(),
            "fingerprint": state.facts.fingerprint,
            "world_size": state.world.size,
            "strategy": state.plan.strategy,
            "versions": installed_versions(),
        }
        folder = self.run.checkpoints / checkpoint.checkpoint_name(state.schedule.name, step)
        self.writer.start(folder, strategy.collect_state(tensors), facts)
        self.peak.observe()
        self.spared = self._needed()
        self.saved_step = step
        self._saved_at = now()

    def _needed(self) -> set[str]:
        state = self.training
        steps = self.judge.needed(state.progress.step)
        return {checkpoint.checkpoint_name(state.schedule.name, step) for step in steps}

    def _is_complete(self, folder: Path, save: str) -> None:
        self.log.log_checkpoint(self.training.progress, folder)
        # The newest best checkpoint may not be written yet: until then keep the previous best as well.
        closing = checkpoint.checkpoint_name(self.training.schedule.name, self.closing_step)
        spare = self.spared | self._needed() | {closing}
        checkpoint.delete_old(self.run.checkpoints, self.phases, self.keep, spare)
        self.copy(folder, save)

    def load(self, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:  # noqa: ARG002
        self.saved_step = self.training.progress.step


def installed_versions() -> dict[str, str]:
    """Versions of the libraries that shape what a run learns and exports."""
    return {name: metadata.version(name) for name in VERSIONED}


def versions_apart(run: RunFolder) -> list[str]:
    """Libraries of VERSIONED whose version here is not all that trained a run, a phrase each."""
    here, said = installed_versions(), []
    changes = [row for row in rows_in(run.decisions) if row.get("decision") == OTHER_LIBRARY]
    for name in VERSIONED:
        before = [str(row.get("before")) for row in changes if row.get("library") == name]
        trained = dict.fromkeys([*before, str(run.environment().get(name, here[name]))])
        if trained.keys() != {here[name]}:
            said.append(f"{name} {' and '.join(trained)} trained it, {here[name]} is here")
    return said


def environment(machine: str, precision: str) -> dict[str, Any]:
    """What trains a run: versions, a clone's commit (`-dirty`: its files are others), machine, precision."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return {
        **{name: installed_packages().get(name) for name in ("isobatch", *VERSIONED)},
        "commit": (run_command(git) or "").strip() if (ROOT / ".git").exists() else "",
        "python": platform.python_version(),
        **{"machine": machine, "precision": precision},
        "packages": installed_packages(),
    }


@functools.cache
def installed_packages() -> dict[str, str]:
    """Name -> version, sorted: what a process has installed stays, and reading all of it takes 0.2 s."""
    # One reading of each: `name` and `version` of a distribution parse its file anew.
    found = (one.metadata for one in metadata.distributions())
    return dict(sorted((str(one["Name"]), one["Version"]) for one in found))
