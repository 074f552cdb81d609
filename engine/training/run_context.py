"""What a run's training shares from phase to phase: its files, its records, where it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isobatch.core.errors import StopRequestedError
from isobatch.engine.checkpointing import checkpoint
from isobatch.engine.distributed.stop_signals import StopFlag
from isobatch.engine.runs.console import format_metrics
from isobatch.engine.runs.metrics_log import MetricsLog
from isobatch.engine.runs.summary import Progress, startup_seconds, summarize
from isobatch.engine.training.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from isobatch.core.plan import Plan
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.runs.console import Console
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.runs.run_options import RunOptions


class RunContext:
    """One rank's view of the run that is being trained."""

    def __init__(
        self,
        run: RunFolder,
        world: Communicator,
        options: RunOptions,
        console: Console,
        catch_signals: bool = True,
    ) -> None:
        self.run, self.world, self.options, self.console = run, world, options, console
        self.session = Session(run.recipe, run.facts, run.plan, world, console.say, self._record_plan)
        self.recipe, self.task = self.session.recipe, self.session.task
        self.log = MetricsLog(run, world.is_main, options.log_every, options.ledger)
        self.stop = StopFlag(catch_signals)
        self.writer = checkpoint.CheckpointWriter(world, self._delete_old_checkpoints)
        self.progress = Progress(self.session.phases[0])
        self.first_step_at: float | None = None
        """Seconds since the epoch at the end of this process's first step."""
        self.peak_memory = 0
        """Bytes, of this process."""
        self.resumed_from: str | None = None
        self.spared: set[str] = set()
        """The best checkpoint when the newest began to be written."""
        self.best_checkpoint: Callable[[], set[str]] = set
        """The name of the best checkpoint so far, where the phase looks for one."""

    def measure(self, split: str, fraction: float, step: int) -> dict[str, float]:
        """Metrics of a split, logged and shown; `step` is the one that the weights are from."""
        metrics = self.session.evaluate(split, fraction)
        self.log.log_metrics({"phase": self.progress.phase, "step": step, "split": split, **metrics})
        self.console.say(f"{split} after step {step}: {format_metrics(metrics, '.4f')}")
        return metrics

    def stop_now(self) -> None:
        """End as a signal asked for. Raises StopRequestedError."""
        self.writer.wait()
        self.console.end_phase()
        self.write_summary("stopped", self.stop.reason, {})
        step, folder = self.progress.step, self.run.folder
        raise StopRequestedError(
            f"stopped at step {step}, saved; go on with: isobatch resume {folder}", self.stop.cause
        )

    def stop_if_asked(self) -> None:
        """Between the parts of the end, where no step carries the flag."""
        if any(self.world.all_gather_objects(self.stop.requested)):
            self.stop_now()

    def write_summary(
        self, status: str, reason: str, held_out: dict[str, dict[str, float]], **more: Any
    ) -> None:
        """summary.json, by the main rank."""
        session = self.session
        summary = {
            "status": status,
            "reason": reason,
            **summarize(self.recipe, session.plan, self.progress, session.model, held_out),
            "startup_seconds": startup_seconds(self.first_step_at),
            "peak_memory_bytes": max(self.world.all_gather_objects(self.peak_memory)),
            "resumed_from": self.resumed_from,
            **more,
        }
        if self.world.is_main:
            self.run.write_summary(summary)

    def _record_plan(self, plan: Plan) -> None:
        if self.world.is_main:
            self.run.write_plan(plan)

    def _delete_old_checkpoints(self) -> None:
        # The newest best may not be written yet: until then the one before is the best there is.
        spare = self.spared | self.best_checkpoint()
        checkpoint.delete_old(self.run.checkpoints, self.session.phases, self.options.keep, spare)
