"""The state of a run on one rank that lasts over its phases: session, files, logs, progress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from isobatch.core.errors import StopRequestedError
from isobatch.core.terminal.console import format_metrics
from isobatch.core.terminal.status import doing
from isobatch.engine.checkpointing import checkpoint
from isobatch.engine.checkpointing.remote_copy import RemoteCopies
from isobatch.engine.checkpointing.writer import CheckpointWriter
from isobatch.engine.distributed.stop_signals import StopFlag
from isobatch.engine.optimization.left_out import left_out_steps
from isobatch.engine.optimization.schedule import CLOSING_STEPS
from isobatch.engine.runs.gpu_monitor import GpuMonitor
from isobatch.engine.runs.metrics_log import MetricsLog
from isobatch.engine.runs.peak_memory import PeakMemory, trim_heap
from isobatch.engine.runs.summary import Progress, startup_seconds, summarize
from isobatch.engine.training.session import Session
from isobatch.engine.training.step_metrics import FlopUtilisation, flop_utilisation, tracked_values

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from isobatch.core.plan import Plan
    from isobatch.core.terminal.console import Console
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.runs.run_options import RunOptions


DATA_WRITTEN = "data written to"
"""The decision that a file of the data was written to while it was trained on, and holds the same again."""


class RunContext:
    """What the trainer and its phase loops share on one rank."""

    def __init__(
        self,
        run: RunFolder,
        world: Communicator,
        options: RunOptions,
        console: Console,
        catch_signals: bool = True,
        draw_plots: Callable[[], None] = lambda: None,
    ) -> None:
        """`draw_plots` is called when the run's figures are to be drawn; it must not wait."""
        self.run, self.world, self.options, self.console = run, world, options, console
        self.draw_plots = draw_plots
        self.tracks = options.tracker != "none"
        """Whether figures go to a tracker."""
        self.session = Session(run.recipe, run.facts, run.plan, world, console.say, self._record_plan)
        # Of one rank: the file may be a shared one, which another node sees a moment later.
        self.session.left_out = world.broadcast_object(left_out_steps(run) if world.is_main else {})
        self.recipe, self.task = self.session.recipe, self.session.task
        self.log = MetricsLog(run, world.is_main, options.log_every, options.ledger)
        answers = world.is_main and not options.quiet
        self.stop = StopFlag(catch_signals, others_wait=world.size > 1, answers=answers)
        self.copies = self._remote_copies()
        copy = self.copies.add if self.copies is not None else lambda *_: None
        self.writer = CheckpointWriter(world, self._checkpoint_is_complete, copy)
        self.progress = Progress(self.session.phases[0])
        self.first_step_at: float | None = None
        """Time (seconds since 1970) at the end of this process's first step."""
        self.peak_memory = PeakMemory(world.device)
        self.resumed_from: str | None = None
        self.spared: set[str] = set()
        """What `checkpoints_to_keep` returned when the newest save began."""
        last = self.session.schedules[-1]
        self.closing_checkpoint = {checkpoint.checkpoint_name(last.name, last.steps - CLOSING_STEPS)}
        """{name of the checkpoint from which `verify` redoes the last steps of the run}."""
        self.checkpoints_to_keep: Callable[[], set[str]] = set
        """Returns the names of those that early stopping needs; set by the phase loop."""
        self.gpu_monitor = GpuMonitor(world.device if world.is_main else None)
        self.flop_utilisation = self._flop_utilisation()

    def _flop_utilisation(self) -> FlopUtilisation | None:
        """For the main process, which writes the metrics: a task may have to build its model for its size."""
        if not self.world.is_main or self.world.device.type != "cuda":
            return None
        size = self.task.model_size(self.session.facts)
        return flop_utilisation(size, self.session.plan, torch.cuda.get_device_name(self.world.device))

    def _remote_copies(self) -> RemoteCopies | None:
        if (url := self.options.checkpoint_copy) is None:
            return None
        run, world, say = self.run, self.world, self.console.say
        name = "" if world.is_main else f"rank {world.rank}: "
        return RemoteCopies(
            url, run.folder, run.identity, world.is_main, lambda line: say(name + line, always=True)
        )

    def measure(self, split: str, fraction: float, step: int) -> dict[str, float]:
        """Evaluate a split, log and show its metrics; `step`: the step of the weights."""
        metrics = self.session.evaluate(split, fraction)
        self.peak_memory.observe("evaluate")
        trim_heap(self.world.device)
        self.log.log_metrics({"phase": self.progress.phase, "step": step, "split": split, **metrics})
        if step == self.progress.step:  # else they are of earlier weights: the final figures say those
            self.track({f"{split}/{name}": value for name, value in tracked_values(metrics).items()})
        # A perplexity of words is for comparison with papers, and has many digits until a model knows words.
        shown = {name: value for name, value in metrics.items() if not name.endswith("word_perplexity")}
        shown = {name: value for name, value in shown.items() if not name.startswith(self.task.told_once)}
        part = f", on {100 * fraction:g} % of its samples" if fraction < 1 else ""
        self.console.say(f"{split} after step {step}{part}: {format_metrics(shown, '.4f')}")
        return metrics

    def track(self, values: dict[str, float]) -> None:
        """Give figures to the tracker, over the steps of all phases. Training goes on where it fails."""
        if not self.tracks:
            return
        try:
            self.world.accelerator.log(values, step=self.progress.steps)
        except Exception as error:  # a library's own: its server may be gone
            self.tracks = False
            self.console.say(
                f"--tracker {self.options.tracker} gets nothing more: {type(error).__name__}: {error}"
            )

    def check_data(self) -> None:
        """Say and record which prepared files were written to; all ranks call this where they save.

        Raises TrainingError where one is not as it was prepared: what was learnt since then is not saved.
        """
        for name in self.session.prepared.check_written():
            what = f"prepared file {self.session.prepared.folder / name} was written to while it trained"
            self.console.say(f"{what}; it is as it was prepared, but what it held in between is not known")
            if self.world.is_main:
                where = {"at_phase": self.progress.phase, "at_step": self.progress.step}
                self.run.log_decision(DATA_WRITTEN, file=name, **where)

    def stop_now(self) -> None:
        """Finish the save and write the summary after a request to stop. Raises StopRequestedError."""
        doing("saving")
        self.writer.wait()
        self.write_summary("stopped", self.stop.reason)
        step, folder = self.progress.step, self.run.folder
        raise StopRequestedError(
            f"stopped at step {step}, saved; go on with: isobatch resume {folder}", self.stop.cause
        )

    def stop_if_asked(self) -> None:
        """Stop if any rank was asked to: at the end of a run no step carries the flag to the others."""
        if any(self.world.all_gather_objects(self.stop.requested)):
            self.stop_now()

    def write_summary(self, status: str, reason: str) -> None:
        """Write summary.json of an unfinished run on the main rank. All ranks call this."""
        summary = self.summarize(status, reason, {})
        if self.world.is_main:
            self.run.write_summary(summary)

    def summarize(
        self, status: str, reason: str, held_out: dict[str, dict[str, float]], **more: Any
    ) -> dict[str, Any]:
        """The content of summary.json. All ranks call this."""
        session, peak = self.session, self.peak_memory
        peak.merge(self.world.all_gather_objects(peak.by_stage))
        return {
            "status": status,
            "reason": reason,
            **summarize(self.recipe, session.plan, self.progress, session.model, held_out),
            "startup_seconds": startup_seconds(self.first_step_at),
            **self.peak_memory.fields(),
            "monitor": self.task.monitor[0],
            "resumed_from": self.resumed_from,
            **more,
        }

    def _record_plan(self, plan: Plan) -> None:
        if self.world.is_main:
            self.run.write_plan(plan)

    def log_checkpoint(self, folder: Path) -> None:
        """Log the digest of a checkpoint, so that it is sealed with the rows."""
        if digest := checkpoint.recorded_digest(folder):
            where = {"phase": self.progress.phase, "step": self.progress.step}
            self.log.log_metrics({**where, "checkpoint": folder.name, "digest": digest})

    def _checkpoint_is_complete(self, folder: Path) -> None:
        self.log_checkpoint(folder)
        # The newest best checkpoint may not be written yet: until then keep the previous best as well.
        spare = self.spared | self.checkpoints_to_keep() | self.closing_checkpoint
        checkpoint.delete_old(self.run.checkpoints, self.session.phases, self.options.keep, spare)
