"""Trains a run: all phases from the newest checkpoint on, each with the hooks of a run; then finishes it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from isobatch.core import atomic_files
from isobatch.core.errors import TrainingError, UserError
from isobatch.core.measures import format_duration
from isobatch.core.plan import REHEARSED_STEPS
from isobatch.core.terminal import Console, doing, rendered
from isobatch.engine.checkpointing import checkpoint
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
from isobatch.engine.checkpointing.host_buffer import HostBuffer
from isobatch.engine.checkpointing.remote_copy import RemoteCopies
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.distributed.liveness import Watchdog
from isobatch.engine.distributed.stop_signals import StopFlag
from isobatch.engine.hooks.checkpoint import OTHER_LIBRARY, VERSIONED, Checkpoint, environment
from isobatch.engine.hooks.data_guard import DataGuard
from isobatch.engine.hooks.ema import Ema
from isobatch.engine.hooks.evaluate import Evaluate
from isobatch.engine.hooks.log import Log, NonFinite, Plots, ShowSteps, Tracker
from isobatch.engine.hooks.machine import Machine, Memory
from isobatch.engine.hooks.remarks import Remarks
from isobatch.engine.hooks.spikes import Spikes
from isobatch.engine.hooks.stop import Stop
from isobatch.engine.machine.detect import allowed_cpus, cpu_model
from isobatch.engine.optimization.left_out import is_consistent, left_out_steps
from isobatch.engine.optimization.schedule import PhaseSchedule
from isobatch.engine.planning.estimate import evaluation_seconds
from isobatch.engine.registry import TASKS
from isobatch.engine.runs.metrics_log import MetricsLog
from isobatch.engine.runs.peak_memory import PeakMemory
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.engine.train.build import Builder
from isobatch.engine.train.evaluate import evaluate, monitored
from isobatch.engine.train.figures import differences
from isobatch.engine.train.first_step import preserve_state
from isobatch.engine.train.hooks import Hook, Hooks
from isobatch.engine.train.loop import run_phase
from isobatch.engine.train.memory_probe import probe_memory
from isobatch.engine.train.state import Training
from isobatch.engine.trainer.finish import finish, stop
from isobatch.models.capabilities import monitor_of

TRIED_SAMPLES = 64
"""Held-out samples with which a user's own task is tried before its first step."""
FEW = 30
"""A run of fewer steps, by its epochs, is told so: a model and its head hardly move. So is one with fewer
held-out samples, of which one more right answer is over 3 %."""


@dataclass(slots=True)
class RunOnRank:
    """A run on one rank: its folder, logs and messages, which last over all phases."""

    folder: RunFolder
    world: Communicator
    options: RunOptions
    console: Console
    end_process: Callable[[str], None]
    """`end_process(reason)`: for the watchdog, which calls it from its thread."""
    own_hooks: Sequence[Hook] = ()
    """The user's."""
    catch_signals: bool = True
    draw_plots: Callable[[], None] = lambda: None
    """Called when the run's figures are to be drawn; it must not wait."""
    stop: StopFlag = field(init=False)
    log: MetricsLog = field(init=False)
    tracker: Tracker = field(init=False)
    peak: PeakMemory = field(init=False)
    buffer: HostBuffer = field(init=False)
    """Where checkpoints are copied; kept over the phases."""
    first_step_at: float | None = None
    """Time (seconds since 1970) at the end of this process's first step."""
    measured_before: float = 0.0
    """Seconds of the evaluation before training, which is no part of the start-up."""
    resumed_from: str | None = None
    """Name of the checkpoint."""

    def __post_init__(self) -> None:
        options, main = self.options, self.world.is_main
        answers = main and not options.quiet
        self.stop = StopFlag(self.catch_signals, others_wait=self.world.size > 1, answers=answers)
        self.log = MetricsLog(self.folder, main, options.log_every, options.ledger)
        self.tracker = Tracker(self.world, options.tracker, self.say)
        self.peak = PeakMemory(self.world.device)
        self.buffer = HostBuffer(self.world.device)

    def say(self, line: str, shown: bool = True) -> None:
        """A line for the user, on the main rank; in log.txt alone unless `shown`."""
        self.console.say(line, shown=shown)

    def mark_first_step(self) -> None:
        """Note the time of the first step, once."""
        self.first_step_at = self.first_step_at or time.time()


def train_run(run: RunOnRank) -> Training:
    """Train every phase, evaluate held-out splits, export to final/ and write summary.json.

    Raises StopRequestedError where a stop was asked for, with a checkpoint and a summary written.
    """
    folder, world = run.folder, run.world
    if world.is_main:  # now: a child of a process that has grown may count as large as that
        gpu = f"{torch.cuda.get_device_name(world.device)}, " if world.device.type == "cuda" else ""
        cpu = f"{cpu_model()} with {torch.backends.cpu.get_cpu_capability()}"
        machine = f"{gpu}{cpu}, {allowed_cpus(Path('/'), os.environ)} cores"
        earlier, made_by = folder.environment(), environment(machine, folder.plan.precision)
        for name in VERSIONED:
            if (old := earlier.get(name, made_by[name])) != made_by[name]:
                run.say(f"{name}: {made_by[name]} here, {old} before")
                folder.log_decision(OTHER_LIBRARY, library=name, before=old, here=made_by[name])
        atomic_files.write_json(folder.folder / "environment.json", made_by)
    # Of one rank: the file may be a shared one, which another node sees a moment later.
    left_out = world.broadcast_object(left_out_steps(folder) if world.is_main else {})
    record = folder.write_plan if world.is_main else lambda _: None
    builder = Builder(folder.recipe, folder.facts, folder.plan, world, run.say, record, left_out)
    state, copies, say = builder.state, None, partial(run.console.say, always=True)
    if world.is_main and (url := run.options.checkpoint_copy):
        copies = RemoteCopies(url, folder.folder, folder.identity, say)
    if world.is_main:  # only there: for its size a task may have to build its model on the meta device
        run.say(_headline(state, builder))
        base = Path(state.recipe.model or "").parent  # of a chain each stage has the same data
        told = RunFolder(base).facts.notes if (base / "facts.json").is_file() else ()
        for line in state.facts.notes:
            run.say(line, shown=line not in told)
    watchdog = Watchdog(world, run.stop, run.options.hang_timeout, run.end_process, folder.rank_record)
    with run.stop, watchdog, copies or contextlib.nullcontext(), builder:
        if world.is_main:
            checkpoint.remove_leftovers(folder.checkpoints)
        saved = newest_checkpoint(folder, builder, run.say)
        if saved is None:
            run.log.begin(builder.phases)
        first = builder.phases.index(saved.state["progress"]["phase"]) if saved else 0
        for schedule in builder.schedules[first:]:
            name = checkpoint.checkpoint_name(state.progress.phase, state.progress.step)
            previous = folder.checkpoints / name
            if saved is None and state.plan.invariance == "rounding":
                _measure_rounding(run, builder, schedule, previous)
            with builder.phase(schedule, saved, previous, partial(_probe_memory, run, builder)):
                guard = DataGuard(folder, builder.prepared, run.say)
                averages = [Ema(state.recipe.ema)] if state.recipe.ema is not None else []
                others = [*averages, *run.own_hooks]
                evaluation = Evaluate(state, run.log, run.peak, run.say, others, run.tracker.send)
                hooks = Hooks(_hooks(run, builder, guard, evaluation, copies))
                if saved is not None:
                    _continue(run, builder, hooks, saved)
                elif folder.recipe.task not in TASKS and world.size == 1 and "valid" in state.splits:
                    _try_monitor(state)
                before = state.task.measures_before if run.options.before is None else run.options.before
                is_first = saved is None and schedule is builder.schedules[0]
                if before and is_first and "valid" in state.splits:
                    began = time.time()
                    evaluation.measure("valid", state.recipe.eval_fraction, 0, {})
                    run.measured_before = time.time() - began
                if run_phase(state, hooks, state.progress.step) == "stopped":
                    stop(run, state)
                if schedule is builder.schedules[-1]:
                    finish(run, builder, evaluation, guard)
            saved = None
    return state


def newest_checkpoint(run: RunFolder, builder: Builder, say: Callable[[str], None]) -> SavedCheckpoint | None:
    """The newest checkpoint that is not damaged, the same on every rank; None where none was ever saved.

    Each rank verifies a share of the files. Damaged checkpoints are removed once an intact one is found,
    because they would count among the newest when old ones are deleted; so are those that were saved before a
    step before them was left out. Raises TrainingError where it is of another recipe or other data, and where
    none of those that the run has saved can be read: never a start from step 1 that nobody asked for.
    """
    state, world = builder.state, builder.state.world
    left_out = {schedule.name: schedule.left_out for schedule in builder.schedules}
    names = [p.name for p in checkpoint.list_checkpoints(run.checkpoints, builder.phases)]
    lost = "" if names or not world.is_main else _saved_before(run)
    names, lost = world.broadcast_object((names, lost))
    damaged: list[Path] = []
    for folder in (run.checkpoints / name for name in reversed(names)):
        problem = ""
        try:
            saved = checkpoint.open_on_all(folder, world)
            saved.verify_checksums(world.rank, world.size)
        except TrainingError as error:
            problem = str(error)
        if problems := [p for p in world.all_gather_objects(problem) if p]:
            say(problems[0])
            damaged.append(folder)
            lost = lost or problems[0]
            continue
        if not is_consistent(left_out, saved.state):
            world.barrier()
            if world.is_main:
                checkpoint.remove(folder)
            continue
        origin = (saved.state["recipe_hash"], saved.state["fingerprint"])
        if origin != (state.recipe.hash(), state.facts.fingerprint):
            raise TrainingError(
                f"checkpoint {folder} belongs to another recipe or other data than the run's files say"
            )
        for other in damaged if world.is_main else ():
            checkpoint.remove(other)
        return saved
    if lost:
        raise TrainingError(
            f"none of the checkpoints that {run.folder} has saved can be read ({lost}): put one back from a"
            f" copy, or train anew: isobatch auto --like {run.folder} --again"
        )
    return None


def _saved_before(run: RunFolder) -> str:
    """What log or summary say of the last checkpoint, where none is on disk; empty where none was saved."""
    saved = [row["checkpoint"] for row in atomic_files.rows_in(run.metrics) if "checkpoint" in row]
    summary = run.summary() or {}
    if summary.get("status") == "stopped" and summary.get("steps"):
        saved.append(f"the one after {summary['steps']} steps")
    return f"{saved[-1]} is gone" if saved else ""


def _hooks(
    run: RunOnRank, builder: Builder, guard: DataGuard, evaluation: Evaluate, copies: RemoteCopies | None
) -> list[Hook]:
    """The hooks of a phase. In this order they see figures and act in a pause: what may end the run comes
    before what writes of it, and the checkpoint, which holds the state of all others, last.
    """
    state, say, world = builder.state, run.say, run.world
    hooks: list[Hook] = [Spikes(run.folder, state, say), NonFinite(run.folder.folder)]
    hooks += [Stop(run.stop, run.options.stop_at, evaluation.due)]
    hooks += [Remarks(builder.replan, run.mark_first_step, say), Memory(run.peak)]
    hooks += [Machine(state)] if world.is_main and world.device.type == "cuda" else []
    hooks += [*evaluation.others, Log(run.log, say)]
    hooks += [Plots(every, run.draw_plots)] if (every := state.task.plot_every) else []
    hooks += [run.tracker] if run.tracker.tracker else []
    hooks += [ShowSteps(state, run.console), evaluation, guard]
    copy = copies.add if copies is not None else lambda *_: None
    saves = Checkpoint(
        run.folder, state, builder.phases, run.options, run.log, run.peak, copy, run.buffer, hooks, evaluation
    )
    return [*hooks, saves]


def _continue(run: RunOnRank, builder: Builder, hooks: Hooks, saved: SavedCheckpoint) -> None:
    """Give the hooks what a checkpoint holds of them; the strategy has loaded its tensors already."""
    state, progress = builder.state, builder.state.progress
    hooks.load(state, saved)
    run.resumed_from = saved.folder.name
    if lost := run.log.resume(saved.state["logs"], builder.phases, progress.phase, progress.step):
        run.say(f"{lost}; training goes on, and `verify` will name it")
    if run.world.is_main:
        run.log.log_checkpoint(progress, saved.folder)
    run.say(f"resumed from {saved.folder.name}: {progress.samples:,} samples seen")


def _try_monitor(state: Training) -> None:
    """Measure a few held-out samples with a user's own task: raise UserError where it monitors no metric.

    What else fails with so few, such as a figure that needs two classes, may be right with all of them.
    """
    fraction = min(state.recipe.eval_fraction, TRIED_SAMPLES / len(state.splits["valid"]))
    try:
        with preserve_state(state.model, state.world.device):
            metrics = evaluate(state, "valid", fraction)
    except UserError:
        raise
    except Exception:
        return
    monitored(metrics, monitor_of(state.task, state.facts)[0])


def _measure_rounding(run: RunOnRank, builder: Builder, schedule: PhaseSchedule, previous: Path) -> None:
    """Record in the plan how far another cut moves the first steps of a phase that rounds to levels."""
    state = builder.state
    if schedule.name not in {p.name for p in state.task.phases() if p.rounds}:
        return
    builder.prepare_phase(schedule)
    _probe_memory(run, builder)
    doing("rehearsing steps in other micro-batches")
    state.world.mark_progress("the rehearsal of another cut")
    plan = state.plan
    most = min(plan.micro_batch_samples, -(-state.recipe.batch_size // plan.processes))
    other = dataclasses.replace(plan, micro_batch_samples=most // 2 or 2)
    one, two = (builder.rehearse(schedule, p, REHEARSED_STEPS, previous) for p in (plan, other))
    losses, norms = zip(*map(differences, one, two), strict=True)
    moved = max(losses), max(norms)
    reason = (
        f"fp32, rounded to levels: micro-batches of {other.micro_batch_samples} move the first {len(one)}"
        f" steps by {moved[0]:.1e} in the loss and {moved[1]:.1e} in the gradient norm"
    )
    run.console.say(reason)
    builder.replan(dataclasses.replace(plan, rounding=moved, reasons={**plan.reasons, "invariance": reason}))


def _probe_memory(run: RunOnRank, builder: Builder) -> None:
    def report(budget: str) -> None:
        run.console.say(f"memory ran out in the rehearsal: micro-batches of at most {budget}")
        if run.world.is_main:
            run.folder.log_decision("smaller micro-batches", reason="rehearsal", what=f"at most {budget}")

    probe_memory(builder, report)


def _headline(state: Training, builder: Builder) -> str:
    """The first line for the user: task, data, steps, devices, predicted duration."""
    steps = sum(schedule.steps for schedule in builder.schedules)
    size = state.task.model_size(state.facts)
    evaluating = evaluation_seconds(state.recipe, state.facts, builder.schedules, size, state.plan)
    shown = {"seconds": steps * state.plan.predicted_step_seconds + evaluating, "duration": format_duration}
    return rendered(__file__, "headline", state=state, steps=steps, remark=size.remark, few=FEW, **shown)
