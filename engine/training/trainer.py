"""A run from its newest checkpoint to final/: phases in order, held-out metrics, the export."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import StopRequestedError
from isobatch.engine.checkpointing import checkpoint
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
from isobatch.engine.distributed.stop_signals import StopFlag
from isobatch.engine.distributed.watchdog import Watchdog
from isobatch.engine.runs.console import format_duration, format_metrics
from isobatch.engine.runs.metrics_log import MetricsLog
from isobatch.engine.runs.summary import HELD_OUT_SPLITS, Progress, startup_seconds, summarize
from isobatch.engine.training import memory_probe
from isobatch.engine.training.evaluate import host_batches
from isobatch.engine.training.phase_loop import PhaseLoop
from isobatch.engine.training.recovery import newest_checkpoint, write_final
from isobatch.engine.training.session import Session

if TYPE_CHECKING:
    from torch import nn

    from isobatch.core.plan import Plan
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.optimization.schedule import PhaseSchedule
    from isobatch.engine.runs.console import Console
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.runs.run_options import RunOptions


class Trainer:
    """Trains a run's recipe by its plan, from wherever its last checkpoint is."""

    def __init__(
        self,
        run: RunFolder,
        world: Communicator,
        options: RunOptions,
        console: Console,
        end_process: Callable[[str], None],
        catch_signals: bool = True,
    ) -> None:
        """`end_process` is called by the watchdog, from its thread, with the reason."""
        self.run, self.world, self.options, self.console = run, world, options, console
        self.session = Session(run.recipe, run.facts, run.plan, world, console.say, self._record_plan)
        self.recipe, self.task = self.session.recipe, self.session.task
        self.log = MetricsLog(run, world.is_main, options.log_every, options.ledger)
        self.stop = StopFlag(catch_signals)
        self.watchdog = Watchdog(world, self.stop, options.hang_timeout, end_process)
        self.writer = checkpoint.CheckpointWriter(world, self._prune)
        self.progress = Progress(self.session.phases[0])
        self.first_step_at: float | None = None
        """Seconds since the epoch at the end of this process's first step."""
        self.peak_memory = 0
        """Bytes, of this process."""
        self.resumed_from: str | None = None
        self.sample: str | None = None
        self.loop: PhaseLoop | None = None
        """Of the phase that is being trained."""
        self.spared: set[str] = set()
        """The best checkpoint when the newest began to be written."""

    def fit(self) -> None:
        """Train every phase, evaluate, export; leaves summary.json."""
        if self.world.is_main:  # a task may have to build its model's outline for the first of them
            for line in (self._headline(), *self.session.facts.extra.get("notes", [])):
                self.console.say(line)
        with self.stop, self.watchdog, self.session:
            if self.world.is_main:
                checkpoint.remove_leftovers(self.run.checkpoints)
            saved = newest_checkpoint(self.run, self.session, self.console.say)
            if saved is None:
                self.log.truncate_after(self.session.phases, self.session.phases[0], 0)
            first = self.session.phases.index(saved.state["progress"]["phase"]) if saved else 0
            for schedule in self.session.schedules[first:]:
                self._train_phase(schedule, saved)
                saved = None

    def _train_phase(self, schedule: PhaseSchedule, saved: SavedCheckpoint | None) -> None:
        name = checkpoint.checkpoint_name(self.progress.phase, self.progress.step)
        with self.session.phase(schedule, saved, self.run.checkpoints / name, self._probe_memory) as active:
            self.loop = loop = PhaseLoop(self, active)
            if saved is not None:
                loop.continue_from(saved)
            loop.run()
            if schedule is self.session.schedules[-1]:
                self._finish(loop)

    def _probe_memory(self, phase: str) -> None:
        def report(budget: str) -> None:
            self.console.say(f"memory ran out in the rehearsal: micro-batches of at most {budget}")
            if self.world.is_main:
                self.run.log_decision("smaller micro-batches", reason="rehearsal", what=f"at most {budget}")

        memory_probe.probe_memory(self.session, phase, report)

    def _record_plan(self, plan: Plan) -> None:
        if self.world.is_main:
            self.run.write_plan(plan)

    def _prune(self) -> None:
        # The newest best may not be written yet: until then the one before is the best there is.
        spare = self.spared | (self.loop.best_checkpoint() if self.loop else set())
        checkpoint.delete_old(self.run.checkpoints, self.session.phases, self.options.keep, spare)

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
        self._summary("stopped", self.stop.reason, {})
        step, folder = self.progress.step, self.run.folder
        raise StopRequestedError(
            f"stopped at step {step}, saved; go on with: isobatch resume {folder}", self.stop.cause
        )

    def _stop_if_asked(self) -> None:
        """Between the parts of the end, where no step carries the flag."""
        if any(self.world.all_gather_objects(self.stop.requested)):
            self.stop_now()

    def _finish(self, loop: PhaseLoop) -> None:
        """Held-out metrics, final/, a sample, summary.json; while the last phase still holds the model."""
        exported, folder = self.progress.step, loop.checkpoint_folder(self.progress.step)
        if best := loop.earlier_best_step():
            exported, folder = best, loop.checkpoint_folder(best)
            loop.phase.strategy.load_weights(SavedCheckpoint(folder))
            self.console.say(f"final/ is the best checkpoint, {folder.name}")
        held_out: dict[str, dict[str, float]] = {}
        for split in (s for s in reversed(HELD_OUT_SPLITS) if s in self.session.splits):
            self._stop_if_asked()
            held_out[split] = self.measure(split, 1.0, exported)
        self._stop_if_asked()
        if self.world.is_main:
            self.world.mark_progress("the export")
            model = self.session.gather_full_model(folder, self.progress.phase)
            checksums = write_final(self.run, self.task, model, self.session.facts)
            self.sample = self.task.sample(model, self.session.facts, self.run.final)
            if self.sample:
                self.console.say(f"sample:\n{self.sample}")
            self._add_final_metrics(model, exported, held_out)
            self._seal(checksums)
        self._summary("done", "", held_out)
        self.world.barrier()

    def _add_final_metrics(self, model: nn.Module, step: int, held_out: dict[str, dict[str, Any]]) -> None:
        """The task's own measurements of what it exported, beside the metrics of the first held-out split."""
        split = next((s for s in HELD_OUT_SPLITS if s in held_out), None)
        if split is None:
            return
        more = self.task.final_metrics(
            model, self.run.final, self.session.facts, lambda: host_batches(self.session.splits[split])
        )
        if more:
            held_out[split] |= more
            where = {"phase": self.progress.phase, "step": step, "split": split}
            self.log.log_metrics({**where, **held_out[split]})

    def _seal(self, checksums: dict[str, int]) -> None:
        """The last row: what final/ holds, and how exact the run was."""
        where = {"phase": self.progress.phase, "step": self.progress.step}
        self.log.log_metrics({**where, "final": checksums, "invariance": self.session.plan.invariance})

    def _summary(self, status: str, reason: str, held_out: dict[str, dict[str, float]]) -> None:
        session = self.session
        summary = {
            "status": status,
            "reason": reason,
            **summarize(self.recipe, session.plan, self.progress, session.model, held_out),
            "startup_seconds": startup_seconds(self.first_step_at),
            "peak_memory_bytes": max(self.world.all_gather_objects(self.peak_memory)),
            "resumed_from": self.resumed_from,
            **({"sample": self.sample} if self.sample else {}),
        }
        if self.world.is_main:
            self.run.write_summary(summary)

    def _headline(self) -> str:
        steps, plan = sum(s.steps for s in self.session.schedules), self.session.plan
        remark = self.task.model_size(self.session.facts).remark
        return (
            f"{self.recipe.task}: {self.session.facts.samples['train']:,} samples, global batch"
            f" {self.recipe.batch_size}, {steps:,} steps on {self.world.size} x {self.world.device.type} in"
            f" {plan.precision} ({plan.invariance});"
            f" about {format_duration(steps * plan.predicted_step_seconds)}"
            + (f"\n{remark}" if remark else "")
        )
