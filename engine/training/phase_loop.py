"""The training loop of a phase, the same for every workload."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import SpikeError, TrainingError
from isobatch.core.measures import now
from isobatch.core.terminal.status import doing
from isobatch.engine.checkpointing import checkpoint
from isobatch.engine.loading.sampler import extend_chain
from isobatch.engine.optimization.early_stopping import EarlyStopping
from isobatch.engine.optimization.left_out import leave_out, refuse_where_steps_matter, until
from isobatch.engine.optimization.schedule import CLOSING_STEPS, SaveTimer
from isobatch.engine.optimization.spikes import MOST_LEFT_OUT, WINDOW, SpikeWatch, first_left_out
from isobatch.engine.runs.peak_memory import trim_heap
from isobatch.engine.runs.summary import Progress
from isobatch.engine.training.evaluate import monitored
from isobatch.engine.training.step_metrics import step_row, tracked_values
from isobatch.engine.training.train_step import Votes
from isobatch.models import fused_kernels

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
    from isobatch.engine.training.run_context import RunContext
    from isobatch.engine.training.session import ActivePhase
    from isobatch.engine.training.train_step import StepResult
    from isobatch.models.base import Change

TRIM_EVERY = 8
"""Steps between two calls of `trim_heap`."""
VERSIONED = ("torch", "accelerate", "transformers")


class PhaseLoop:
    """Trains one phase: steps, evaluations, checkpoints, early stopping."""

    def __init__(self, context: RunContext, phase: ActivePhase) -> None:
        self.context, self.phase, self.schedule = context, phase, phase.schedule
        self.session, self.world = context.session, context.world
        self.early_stopping = EarlyStopping(
            context.task.monitor[1],
            context.recipe.patience if self.schedule.early_stopping else 0,
            context.recipe.min_delta,
        )
        self.spikes = SpikeWatch()
        self.save_timer = SaveTimer(context.options.save_every, self.schedule, now())
        self.saved_step = -1
        self.step_began = now()
        self.noise_checked = False
        self._first_step, self._seconds_before = 0, 0.0
        context.progress = context.progress.next(self.schedule.name)
        context.checkpoints_to_keep = self.checkpoints_to_keep

    @property
    def progress(self) -> Progress:
        """The run's progress."""
        return self.context.progress

    def continue_from(self, saved: SavedCheckpoint) -> None:
        """Continue from a checkpoint of this phase; the strategy has loaded its tensors already."""
        context = self.context
        context.progress = Progress(**saved.state["progress"])
        self.early_stopping = EarlyStopping(**saved.state["judge"])
        self.spikes = SpikeWatch(**saved.state.get("spikes", {}))
        self.saved_step = self.progress.step
        context.resumed_from = saved.folder.name
        where = self.progress.phase, self.progress.step
        if lost := context.log.resume(saved.state["logs"], self.session.phases, *where):
            context.console.say(f"{lost}; training goes on, and `verify` will name it")
        if self.world.is_main:
            context.log_checkpoint(saved.folder)
        context.console.say(f"resumed from {context.resumed_from}: {self.progress.samples:,} samples seen")

    def run(self) -> None:
        """Train until the phase ends. A step's metrics are read while the next one runs, without a wait."""
        schedule, start = self.schedule, self.progress.step
        self._first_step, self._seconds_before = start, self.progress.train_seconds
        doing(f"{schedule.name}: the first steps")
        self.context.peak_memory.observe("load")
        trim_heap(self.world.device)
        self.step_began = now()
        pending: StepResult | None = None
        last = start if self.early_stopping.should_stop else schedule.steps
        done = start
        for loaded in self.phase.batches(start, last):
            if done < loaded.work.step:
                if self._leave_out(done, loaded.work.step, pending):
                    break
                pending, self.step_began = None, now() - loaded.wait_seconds
            done = loaded.work.step + 1
            result = self.phase.step(loaded, self._votes())
            result.seconds, self.step_began = now() - self.step_began, now()
            requests, pending = self._read_metrics(pending), result
            if loaded.work.step % TRIM_EVERY == 0:
                trim_heap(self.world.device)
            if requests or self._something_is_due(loaded.work.step + 1):
                requests |= self._read_metrics(pending)
                pending = None
                if self._evaluate_save_stop(requests):
                    break
        else:
            if done < last:
                self._leave_out(done, last, pending)
                pending = None
        self._read_metrics(pending)
        if self.saved_step != self.progress.step:
            self._save()
        doing("saving")
        self.context.writer.wait()

    def _leave_out(self, start: int, stop: int, pending: StepResult | None) -> bool:
        """Pass over steps start..stop-1: what is due after them is done. Returns whether to stop early."""
        requests = self._read_metrics(pending)
        if requests and self._evaluate_save_stop(requests):
            return True
        for step in range(start + 1, stop + 1):
            self.progress.step = step
            self.context.log.log_left_out(self.schedule.name, step)
            if self._something_is_due(step) and self._evaluate_save_stop(set()):
                return True
        return False

    def _answer_spike(self, step: int, why: str) -> None:
        """Say that a step is a spike, or decide to go back and leave it out: raises SpikeError then.

        All ranks read the same figures, so that all decide the same.
        """
        run, phase, mode = self.context.run, self.schedule.name, self.context.recipe.on_spike
        said = f"step {step} of {phase} is a spike: {why}"
        if mode == "warn":
            self._warn(said, step)
            return
        refuse_where_steps_matter(self.context.task)
        first = first_left_out(mode, step)
        before = {n for n in self.session.left_out.get(phase, ()) if step - WINDOW < n <= step}
        if len(before | set(range(first, step + 1))) > MOST_LEFT_OUT[mode]:
            raise TrainingError(
                f"{said}; {len(before)} of the {WINDOW} steps before were left out: lower --lr"
            )
        if self.world.is_main:
            leave_out(run, phase, first, step, said)
        steps = f"step {step}" if first == step else f"steps {first} to {step}"
        raise SpikeError(f"{said}; {steps} will be left out")

    def _warn(self, said: str, step: int) -> None:
        """Say that a step is a spike, and how to see it and to leave it out: once for all that follow it."""
        follows = step - self.spikes.warned_at < WINDOW and self.spikes.warned_at
        self.spikes.warned_at = step
        if not follows:
            place = f"{self.context.run.folder} --phase {self.schedule.name} --step {step}"
            self.context.console.say(f"{said}; `isobatch replay {place}` shows its samples")

    def checkpoint_folder(self, step: int) -> Path:
        """The folder of the checkpoint after a step of this phase."""
        return self.context.run.checkpoints / checkpoint.checkpoint_name(self.schedule.name, step)

    def earlier_best_step(self) -> int | None:
        """The step of the best checkpoint, if early stopping is on and it is not the last; else None."""
        best = self.early_stopping.best_step
        return best if self.early_stopping.patience and best not in (0, self.progress.step) else None

    def _something_is_due(self, step: int) -> bool:
        return self._evaluation_is_due(step) or self._save_is_due(step)

    def _save_is_due(self, step: int) -> bool:
        name = checkpoint.checkpoint_name(self.schedule.name, step)
        return self.save_timer.due_at(step) or name in self.context.closing_checkpoint or self._is_lead(step)

    def _is_lead(self, step: int) -> bool:
        """Whether an evaluation that may choose the best checkpoint follows, so that `verify` can redo it."""
        chooses = self.early_stopping.patience > 0 and step + CLOSING_STEPS <= self.schedule.steps
        return chooses and self._evaluation_is_due(step + CLOSING_STEPS)

    def _evaluation_is_due(self, step: int) -> bool:
        """The last step is evaluated only for early stopping: the end of the run evaluates anyway."""
        if step == self.schedule.steps:
            return self.early_stopping.patience > 0
        return step % self.schedule.eval_every == 0

    def _votes(self) -> Votes:
        save = self.world.is_main and self.save_timer.due_by(now())
        return Votes(float(self.context.stop.requested), float(save), *self.context.writer.rank_flags())

    def _evaluate_save_stop(self, requests: set[str]) -> bool:
        """Between two steps, after all metrics are read: do what is due. Returns whether to stop early."""
        step, began = self.progress.step, now()
        stop_early = self._evaluation_is_due(step) and self._evaluate()
        if requests or stop_early or self._save_is_due(step):
            self._save()
        if "stop" in requests:
            self.context.stop_now()
        self.step_began += now() - began
        return stop_early

    def _read_metrics(self, result: StepResult | None) -> set[str]:
        """Read a step's metrics from the device and log them; returns what ranks request: stop, save."""
        if result is None:
            return set()
        with self.world.waiting_for("the step's metrics"):
            values, (norm,) = result.sums.read(), result.norm.read()
        losses = dict(zip(result.names, values, strict=False))
        loss = sum(losses.values())
        if why := self.spikes.judge(loss, norm):
            self._answer_spike(result.loaded.work.step + 1, why)
        self._refuse_nonfinite(loss, norm, result.loaded.work.step)
        self.spikes.take_in(loss, norm)
        if self.context.first_step_at is None:
            self.context.first_step_at = time.time()
        if not self.noise_checked:
            self.noise_checked = True
            self._check_foreign_noise()
            self._check_reduction()
            if problem := fused_kernels.take_failure():
                self.context.console.say(problem)
        self._count(result)
        self._log(result, losses, norm, values)
        if result.change is not None:
            self._log_change(result.change)
        votes = result.votes()
        self.context.writer.complete_if_written(votes.written, votes.failed)
        return {name for name in ("stop", "save") if getattr(votes, name)}

    def _check_foreign_noise(self) -> None:
        """After the first step: lower the plan's invariance if the model draws its own noise (a GRU may)."""
        seen = any(self.world.all_gather_objects(self.phase.stepper.findings.foreign_noise))
        plan = self.session.plan
        if seen and plan.invariance in ("exact", "rounding"):
            reason = "this model draws noise of its own, from torch's generators, which the cut changes"
            self.session.replan(
                dataclasses.replace(plan, invariance="noise", reasons={**plan.reasons, "invariance": reason})
            )
            self.context.console.say(f"invariance is noise, not {plan.invariance}: {reason}")

    def _check_reduction(self) -> None:
        """After the first step: correct the plan where gradients cannot be reduced as it says."""
        plan, why = self.session.plan, self.phase.strategy.why_not_overlapped
        if plan.reduction == "overlapped" and why:
            reasons = {
                **plan.reasons,
                "reduction": f"{why}, so that they are reduced after the last backward",
            }
            self.session.replan(dataclasses.replace(plan, reduction="explicit", reasons=reasons))
            self.context.console.say(f"gradients are reduced after the backward pass: {why}")

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
                    " lengthen --warmup, or find the operation with --anomaly; checkpoints are from before;"
                    f" `isobatch replay {self.context.run.folder} --phase {self.progress.phase} --step"
                    f" {step + 1}` shows the samples and the first module with a NaN"
                )

    def _log(self, result: StepResult, losses: dict[str, float], norm: float, values: list[float]) -> None:
        context, progress, schedule = self.context, self.progress, self.schedule
        context.peak_memory.observe("train")
        row = {**step_row(result, losses, norm, progress, schedule), **result.figures}
        if result.recorded:
            row |= context.task.step_figures(_recorded_arrays(result, values))
        row |= {"memory_bytes": context.peak_memory.bytes, **context.gpu_monitor.latest()}
        if context.flop_utilisation is not None:
            row["mfu"] = round(context.flop_utilisation.of(result.loaded.work, result.seconds), 4)
        context.log.log_step(row, result.loaded.work.samples)
        if (every := context.task.plot_every) and progress.step % every == 0:
            context.draw_plots()
        context.track(tracked_values(row))
        context.console.show_step(row, schedule.steps, self._seconds_left())

    def _seconds_left(self) -> float:
        """Of the phase, as fast as its steps of this process were so far."""
        progress = self.progress
        seconds = progress.train_seconds - self._seconds_before
        return (self.schedule.steps - progress.step) * seconds / (progress.step - self._first_step)

    def _evaluate(self) -> bool:
        """Evaluate on the validation split; whether to stop early."""
        if "valid" not in self.session.splits:
            return False
        name, _ = self.context.task.monitor
        stopping, step = self.early_stopping, self.progress.step
        metrics = self.context.measure("valid", self.context.recipe.eval_fraction, step)
        if stopping.update(monitored(metrics, name), step) and stopping.patience:
            self._log_decision("best checkpoint", metric=name, value=stopping.best)
            self._save()
        if stopping.should_stop:
            why = f"{name} has not improved for {stopping.waited} evaluations"
            self._log_decision("early stop", reason=why, best_step=stopping.best_step)
            if step < self.schedule.steps:
                self.context.console.say(f"stopped early at step {step}: {why}")
        return stopping.should_stop

    def _log_decision(self, decision: str, **facts: Any) -> None:
        row = {"phase": self.progress.phase, "step": self.progress.step, "decision": decision}
        self.context.log.log_decision({**row, **facts})

    def _log_change(self, change: Change) -> None:
        self._log_decision(change.decision, **change.facts)
        self.spikes = SpikeWatch()  # another model has another loss
        if change.stop:
            raise TrainingError(change.message)
        if change.message:
            self.context.console.say(change.message)

    def _save(self) -> None:
        if self.saved_step == self.progress.step and not self.early_stopping.should_stop:
            return
        context, strategy = self.context, self.phase.strategy
        context.check_data()
        context.writer.wait()  # the log of this checkpoint holds the digest of the one before
        context.log.flush_skipped()
        state = {
            "logs": context.log.seal(self.progress.phase, self.progress.step),
            "progress": dataclasses.asdict(self.progress),
            "judge": dataclasses.asdict(self.early_stopping),
            "spikes": dataclasses.asdict(self.spikes),
            "left_out": until(self.session.left_out, self.progress.phase, self.progress.step),
            "scaling": strategy.loss_scale(),
            "recipe_hash": context.recipe.hash(),
            "fingerprint": self.session.facts.fingerprint,
            "world_size": self.world.size,
            "strategy": self.session.plan.strategy,
            "versions": installed_versions(),
        }
        context.writer.start(self.checkpoint_folder(self.progress.step), strategy.collect_state(), state)
        context.peak_memory.observe("save")
        context.spared = self.checkpoints_to_keep()
        self.saved_step = self.progress.step
        self.save_timer.reset(now())

    def checkpoints_to_keep(self) -> set[str]:
        """Names of the best checkpoint so far, and of those from which it and the next one can be redone.

        Empty where early stopping is off.
        """
        if not self.early_stopping.patience:
            return set()
        best, every = self.early_stopping.best_step, self.schedule.eval_every
        coming = min((self.progress.step // every + 1) * every, self.schedule.steps)
        evaluations = (best, coming, self.progress.step)
        steps = {best, *(step - CLOSING_STEPS for step in evaluations)}
        return {checkpoint.checkpoint_name(self.schedule.name, step) for step in steps}


def installed_versions() -> dict[str, str]:
    """Versions of the libraries that shape what a run learns and exports."""
    return {name: importlib.metadata.version(name) for name in VERSIONED}


def _recorded_arrays(result: StepResult, values: list[float]) -> dict[str, np.ndarray]:
    """What loss() recorded, as arrays; `values`: `result.sums` on the host."""
    arrays, offset = {}, len(result.names)
    for name, value in result.recorded.items():
        arrays[name] = np.array(values[offset : offset + value.numel()]).reshape(tuple(value.shape))
        offset += value.numel()
    return arrays
