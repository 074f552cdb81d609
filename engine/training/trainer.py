"""The loop. One for every workload: a workload is a loss."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.clock import now
from isobatch.core.errors import StopRequestedError, TrainingError
from isobatch.engine.checkpointing import checkpoint
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.distributed.stop_signals import StopFlag
from isobatch.engine.distributed.watchdog import Watchdog
from isobatch.engine.loading.sampler import extend_chain
from isobatch.engine.optimization.early_stopping import EarlyStopping
from isobatch.engine.optimization.schedule import PhaseSchedule, SaveTimer
from isobatch.engine.runs.console import Console, format_duration, format_metrics
from isobatch.engine.runs.metrics_log import MetricsLog
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.engine.runs.summary import HELD_OUT_SPLITS, Progress, startup_seconds, summarize
from isobatch.engine.training import memory_probe
from isobatch.engine.training.evaluate import host_batches
from isobatch.engine.training.recovery import newest_checkpoint, write_final
from isobatch.engine.training.session import Session
from isobatch.engine.training.step_metrics import gpu_reading, memory_bytes, step_row
from isobatch.engine.training.train_step import StepResult

if TYPE_CHECKING:
    from torch import nn


class Trainer:
    """Trains a run's recipe by its plan, from wherever its last checkpoint is."""

    def __init__(
        self,
        run: RunFolder,
        world: Communicator,
        options: RunOptions,
        console: Console,
        end: Callable[[str], None],
    ) -> None:
        self.run, self.world, self.options, self.console = run, world, options, console
        self.session = Session(run.recipe(), run.facts(), run.plan(), world, console.say)
        self.recipe, self.plan, self.task = self.session.recipe, self.session.plan, self.session.task
        self.journal = MetricsLog(run, world.is_main, options.log_every, options.ledger)
        self.stop = StopFlag()
        self.watch = Watchdog(world, self.stop, options.hang_timeout, end)
        self.writer = checkpoint.CheckpointWriter(world, self._prune)
        self.progress = Progress(self.session.phases[0])
        self.first_step: float | None = None
        self.peak_memory = 0
        self.resumed_from: str | None = None
        self.sample: str | None = None
        self.spared: set[str] = set()
        """The best checkpoint when the newest began to be written."""

    def fit(self) -> None:
        """Train every phase, evaluate, export; leaves summary.json."""
        if self.world.is_main:  # a task may have to build its model's outline for the first of them
            for line in (self._headline(), *self.session.facts.extra.get("notes", [])):
                self.console.say(line)
        with self.stop, self.watch:
            if self.world.is_main:
                checkpoint.remove_leftovers(self.run.checkpoints)
            found = newest_checkpoint(self.run, self.session, self.console.say)
            if found is None:
                self.journal.truncate_after(self.session.phases, self.session.phases[0], 0)
            first = self.session.phases.index(found.state["progress"]["phase"]) if found else 0
            for stretch in self.session.stretches[first:]:
                before = self._here()
                self._begin(stretch, found)
                if found is not None:
                    self._go_to(found)
                    found = None
                elif self.plan.strategy.startswith("zero") and before.exists():
                    self.session.strategy.put_weights(SavedCheckpoint(before), first=True)
                self._train(stretch)
            self._finish()

    def _begin(self, stretch: PhaseSchedule, found: SavedCheckpoint | None) -> None:
        self.session.leave()
        self.session.begin(stretch, found)
        self.plan = memory_probe.probe_memory(self.session, stretch.name, self.run, self.console.say)
        self.session.enter(stretch)
        self.judge = EarlyStopping(
            self.task.monitor[1], self.recipe.patience if stretch.judged else 0, self.recipe.min_delta
        )
        self.progress = self.progress.next(stretch.name)
        self.alarm = SaveTimer(self.options.save_every, stretch.steps_per_epoch, now())
        self.saved_step = -1

    def _go_to(self, saved: SavedCheckpoint) -> None:
        self.session.put(saved)
        self.progress = Progress(**saved.state["progress"])
        self.judge = EarlyStopping(**saved.state["judge"])
        self.saved_step = self.progress.step
        self.resumed_from = saved.folder.name
        self.journal.truncate_after(self.session.phases, self.progress.phase, self.progress.step)
        self.console.say(f"resumed from {self.resumed_from}: {self.progress.samples:,} samples seen")

    def _train(self, stretch: PhaseSchedule) -> None:
        """Steps until the phase ends. A step's figures are read while the next one runs, so nothing waits."""
        session, progress = self.session, self.progress
        self.console.start_phase(stretch.name, progress.step, stretch.steps)
        self.mark = now()
        pending: StepResult | None = None
        last = progress.step if self.judge.should_stop else stretch.steps
        for loaded in session.feed().steps(progress.step, last):
            result = session.step(loaded, self._votes())
            result.seconds, self.mark = now() - self.mark, now()
            asked, pending = self._settle(pending), result
            if asked or self._due(loaded.work.step + 1):
                asked |= self._settle(pending)
                pending = None
                if self._stand(asked):
                    break
        self._settle(pending)
        if self.saved_step != progress.step:
            self._save()
        self.writer.wait()
        self.console.end_phase()

    def _due(self, step: int) -> bool:
        return self._evaluation_is_due(step) or self.alarm.due_at(step)

    def _evaluation_is_due(self, step: int) -> bool:
        """The end of training is measured anyway, unless the best checkpoint is looked for."""
        stretch = self.session.stretch
        if step == stretch.steps:
            return self.judge.patience > 0
        return step % stretch.eval_every == 0

    def _votes(self) -> list[float]:
        """What this rank asks of all: to stop, to save (rank 0's clock). Counted with the step's losses."""
        save = self.world.is_main and self.alarm.due_by(now())
        return [float(self.stop.requested), float(save), *self.writer.rank_flags()]

    def _stand(self, asked: set[str]) -> bool:
        """At a step border with everything settled: evaluate, save, stop; True ends the phase early."""
        step = self.progress.step
        began = now()
        enough = self._evaluation_is_due(step) and self._evaluate()
        if asked or enough or self.alarm.due_at(step):
            self._save()
        if "stop" in asked:
            self._stop()
        self.mark += now() - began
        return enough

    def _stop_if_asked(self) -> None:
        """Between the parts of the end, where no step carries the vote."""
        if any(self.world.all_gather_objects(self.stop.requested)):
            self._stop()

    def _stop(self) -> None:
        self.writer.wait()
        self.console.end_phase()
        self._summary("stopped", self.stop.reason, {})
        step, folder = self.progress.step, self.run.folder
        raise StopRequestedError(
            f"stopped at step {step}, saved; go on with: isobatch resume {folder}", self.stop.cause
        )

    def _settle(self, result: StepResult | None) -> set[str]:
        """Read a step's figures, count and log them; what the ranks asked for."""
        if result is None:
            return set()
        with self.world.waiting_for("the step's figures"):
            values, norm = result.sums.tolist(), float(result.norm)
        losses = dict(zip(result.names, values, strict=False))
        self._refuse_nonfinite(sum(losses.values()), norm, result.loaded.work.step)
        if self.first_step is None:
            self.first_step = time.time()
            self._own_up_to_foreign_noise()
        self._count(result)
        self._log(result, losses, norm)
        if result.change is not None:
            self._decide("change of the model", **result.change.facts)
        stop, save, written, failed = values[len(result.names) :]
        self.writer.complete_if_written(written, failed)
        return {name for name, votes_for in (("stop", stop), ("save", save)) if votes_for}

    def _own_up_to_foreign_noise(self) -> None:
        """A model with noise of its own (a GRU's dropout, say) learns the same only in distribution."""
        seen = any(self.world.all_gather_objects(self.session.stepper.foreign_noise))
        if seen and self.plan.invariance == "exact":
            reason = "this model draws noise of its own, from torch's generators, which the cut changes"
            reasons = {**self.plan.reasons, "invariance": reason}
            self.plan = dataclasses.replace(self.plan, invariance="noise", reasons=reasons)
            self.console.say(f"invariance is noise, not exact: {reason}")
            if self.world.is_main:
                self.run.write_plan(self.plan)

    def _count(self, result: StepResult) -> None:
        work, progress = result.loaded.work, self.progress
        progress.step = work.step + 1
        progress.chain = extend_chain(progress.chain, work.samples)
        progress.samples += len(work.samples)
        progress.tokens += work.tokens
        progress.train_seconds += result.seconds
        progress.waited_seconds += result.loaded.wait_seconds
        progress.padding += work.padding

    def _refuse_nonfinite(self, loss: float, norm: float, step: int) -> None:
        for what, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise TrainingError(
                    f"the {what} became {value} at step {step + 1} of {self.progress.phase}: lower --lr,"
                    " lengthen --warmup, or find the operation with --anomaly; checkpoints are from before"
                )

    def _log(self, result: StepResult, losses: dict[str, float], norm: float) -> None:
        progress, stretch = self.progress, self.session.stretch
        self.peak_memory = max(self.peak_memory, memory_bytes(self.world.device))
        row = {**step_row(result, losses, norm, progress, stretch), **result.figures}
        row |= {"memory_bytes": self.peak_memory, **gpu_reading(self.world.device)}
        self.journal.log_step(row, result.loaded.work.samples)
        if self.options.tracker != "none":
            self.world.accelerator.log(
                {k: v for k, v in row.items() if isinstance(v, float)}, step=row["step"]
            )
        average = (progress.train_seconds - progress.seconds_before) / progress.step
        self.console.show_step(row, stretch.steps, (stretch.steps - progress.step) * average)

    def _evaluate(self) -> bool:
        """Evaluate on the validation split; whether to stop early."""
        if "valid" not in self.session.splits:
            return False
        name, _ = self.task.monitor
        metrics = self._measure("valid", self.recipe.eval_fraction, self.progress.step)
        if self.judge.update(metrics[name], self.progress.step) and self.judge.patience:
            self._decide("best checkpoint", metric=name, value=self.judge.best)
            self._save()
        if self.judge.should_stop:
            why = f"{name} has not improved for {self.judge.waited} evaluations"
            self._decide("early stop", reason=why, best_step=self.judge.best_step)
            self.console.say(f"stopped early at step {self.progress.step}: {why}")
        return self.judge.should_stop

    def _measure(self, split: str, fraction: float, step: int) -> dict[str, float]:
        """Metrics of a split; `step` is the one the weights are from."""
        metrics = self.session.evaluate(split, fraction)
        self.journal.log_metrics({"phase": self.progress.phase, "step": step, "split": split, **metrics})
        self.console.say(f"{split} after step {step}: {format_metrics(metrics, '.4f')}")
        return metrics

    def _decide(self, decision: str, **facts: Any) -> None:
        row = {"phase": self.progress.phase, "step": self.progress.step, "decision": decision}
        self.journal.log_decision({**row, **facts})

    def _save(self) -> None:
        if self.saved_step == self.progress.step and not self.judge.should_stop:
            return
        self.journal.flush_skipped()
        session = self.session
        state = {
            "progress": self.progress.to_dict(),
            "judge": self.judge.to_dict(),
            "scaling": session.strategy.scaling(),
            "recipe_hash": self.recipe.hash(),
            "fingerprint": session.facts.fingerprint,
            "world_size": self.world.size,
            "strategy": self.plan.strategy,
            "versions": {n: importlib.metadata.version(n) for n in ("torch", "accelerate", "transformers")},
        }
        self.writer.start(self._here(), session.strategy.state(), state)
        self.spared = self._best()
        self.saved_step = self.progress.step
        self.alarm.reset(now())

    def _here(self) -> Path:
        """The checkpoint of the step where training stands."""
        return self.run.checkpoints / checkpoint.checkpoint_name(self.progress.phase, self.progress.step)

    def _prune(self) -> None:
        # The newest best may not be written yet: until then the one before is the best there is.
        spare = self.spared | self._best()
        checkpoint.delete_old(self.run.checkpoints, self.session.phases, self.options.keep, spare)

    def _best(self) -> set[str]:
        return (
            {checkpoint.checkpoint_name(self.progress.phase, self.judge.best_step)}
            if self.judge.patience
            else set()
        )

    def _finish(self) -> None:
        """Held-out metrics, final/, a sample, summary.json."""
        exported, folder = self.progress.step, self._here()
        if self.judge.patience and self.judge.best_step not in (0, self.progress.step):
            (best,) = self._best()
            exported, folder = self.judge.best_step, self.run.checkpoints / best
            self.session.strategy.put_weights(SavedCheckpoint(folder))
            self.console.say(f"final/ is the best checkpoint, {best}")
        held_out: dict[str, dict[str, float]] = {}
        for split in (s for s in reversed(HELD_OUT_SPLITS) if s in self.session.splits):
            self._stop_if_asked()
            held_out[split] = self._measure(split, 1.0, exported)
        self._stop_if_asked()
        if self.world.is_main:
            self.world.mark_progress("the export")
            model = self.session.whole_model(folder)
            sums = write_final(self.run, self.task, model, self.session.facts)
            self.sample = self.task.sample(model, self.session.facts, self.run.final)
            if self.sample:
                self.console.say(f"sample:\n{self.sample}")
            self._appraise(model, exported, held_out)
            self._seal(sums)
        self._summary("done", "", held_out)
        self.world.barrier()

    def _appraise(self, model: nn.Module, step: int, held_out: dict[str, dict[str, Any]]) -> None:
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
            self.journal.log_metrics({**where, **held_out[split]})

    def _seal(self, sums: dict[str, int]) -> None:
        """The last row: what final/ holds, and how exact the run was."""
        where = {"phase": self.progress.phase, "step": self.progress.step}
        self.journal.log_metrics({**where, "final": sums, "invariance": self.plan.invariance})

    def _summary(self, status: str, reason: str, held_out: dict[str, dict[str, float]]) -> None:
        summary = {
            "status": status,
            "reason": reason,
            **summarize(self.recipe, self.plan, self.progress, self.session.model, held_out),
            "startup_seconds": startup_seconds(self.first_step),
            "peak_memory_bytes": max(self.world.all_gather_objects(self.peak_memory)),
            "resumed_from": self.resumed_from,
            **({"sample": self.sample} if self.sample else {}),
        }
        if self.world.is_main:
            atomic_files.write_json(self.run.folder / "summary.json", summary)

    def _headline(self) -> str:
        steps, plan = sum(s.steps for s in self.session.stretches), self.plan
        remark = self.task.model_size(self.session.facts).remark
        return (
            f"{self.recipe.task}: {self.session.facts.samples['train']:,} samples, global batch"
            f" {self.recipe.batch_size}, {steps:,} steps on {self.world.size} x {self.world.device.type} in"
            f" {plan.precision} ({plan.invariance});"
            f" about {format_duration(steps * plan.predicted_step_seconds)}"
            + (f"\n{remark}" if remark else "")
        )
