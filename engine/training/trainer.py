"""The trainer: runs all phases from the newest checkpoint on, then evaluates and exports to final/."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import TrainingError, UserError
from isobatch.core.measures import format_duration
from isobatch.core.plan import REHEARSED_STEPS
from isobatch.core.terminal.status import doing
from isobatch.engine.checkpointing import checkpoint
from isobatch.engine.checkpointing.digests import bytes_digest, folder_digests
from isobatch.engine.distributed.liveness import Watchdog
from isobatch.engine.model_setup.compile_model import uncompiled
from isobatch.engine.registry import TASKS
from isobatch.engine.runs.summary import HELD_OUT_SPLITS, metrics_fields
from isobatch.engine.training import memory_probe
from isobatch.engine.training.evaluate import host_batches, monitored, refuse_nonfinite_metrics
from isobatch.engine.training.loss_checks import preserve_state
from isobatch.engine.training.phase_loop import PhaseLoop
from isobatch.engine.training.resume import newest_checkpoint
from isobatch.engine.training.step_metrics import largest_differences
from isobatch.models import model_card

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

    from isobatch.core.facts import Facts
    from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
    from isobatch.engine.optimization.schedule import PhaseSchedule
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.strategies.base import Strategy
    from isobatch.engine.training.run_context import RunContext
    from isobatch.models.base import Task


TRIED_SAMPLES = 64
"""Held-out samples with which a user's own task is tried before its first step."""


def train(context: RunContext, end_process: Callable[[str], None]) -> None:
    """Train every phase, evaluate held-out splits, export to final/ and write summary.json.

    `end_process(reason)` is called by the watchdog, from its thread.
    """
    run, world, session = context.run, context.world, context.session
    if world.is_main:  # only there: for its size a task may have to build its model on the meta device
        for line in (_headline(context), *context.task.notes(session.facts)):
            context.console.say(line)
    watchdog = Watchdog(world, context.stop, context.options.hang_timeout, end_process, run.rank_record)
    with (
        context.stop,
        watchdog,
        context.gpu_monitor,
        context.copies or contextlib.nullcontext(),
        session,
    ):
        if world.is_main:
            checkpoint.remove_leftovers(run.checkpoints)
        saved = newest_checkpoint(run, session, context.console.say)
        if saved is None:
            context.log.begin(session.phases)
        first = session.phases.index(saved.state["progress"]["phase"]) if saved else 0
        for schedule in session.schedules[first:]:
            _train_phase(context, schedule, saved)
            saved = None


def _train_phase(context: RunContext, schedule: PhaseSchedule, saved: SavedCheckpoint | None) -> None:
    session, progress = context.session, context.progress
    previous = context.run.checkpoints / checkpoint.checkpoint_name(progress.phase, progress.step)
    probe = partial(_probe_memory, context)
    if saved is None and context.session.plan.invariance == "rounding":
        _measure_rounding(context, schedule, previous)
    with session.phase(schedule, saved, previous, probe) as active:
        loop = PhaseLoop(context, active)
        if saved is not None:
            loop.continue_from(saved)
        elif context.recipe.task not in TASKS and context.world.size == 1 and "valid" in session.splits:
            _try_monitor(context)
        loop.run()
        if schedule is session.schedules[-1]:
            _finish(context, loop)


def _try_monitor(context: RunContext) -> None:
    """Measure a few held-out samples with a user's own task: raise UserError where it monitors no metric.

    What else fails with so few, such as a figure that needs two classes, may be right with all of them.
    """
    session = context.session
    fraction = min(context.recipe.eval_fraction, TRIED_SAMPLES / len(session.splits["valid"]))
    try:
        with preserve_state(session.model, context.world.device):
            metrics = session.evaluate("valid", fraction)
    except UserError:
        raise
    except Exception:
        return
    monitored(metrics, context.task.monitor[0])


def _measure_rounding(context: RunContext, schedule: PhaseSchedule, previous: Path) -> None:
    """Record in the plan how far another cut moves the first steps of a phase that rounds to levels."""
    session = context.session
    if schedule.name not in {p.name for p in context.task.phases() if p.rounds}:
        return
    session.prepare_phase(schedule)
    _probe_memory(context, schedule.name)
    doing("rehearsing steps in other micro-batches")
    context.world.mark_progress("the rehearsal of another cut")
    plan = session.plan
    most = min(plan.micro_batch_samples, -(-session.recipe.batch_size // plan.processes))
    other = dataclasses.replace(plan, micro_batch_samples=most // 2 or 2)
    one, two = (session.rehearse(schedule, p, REHEARSED_STEPS, previous) for p in (plan, other))
    moved = largest_differences(one, two)
    reason = (
        f"fp32, rounded to levels: micro-batches of {other.micro_batch_samples} move the first {len(one)}"
        f" steps by {moved[0]:.1e} in the loss and {moved[1]:.1e} in the gradient norm"
    )
    context.console.say(reason)
    session.replan(dataclasses.replace(plan, rounding=moved, reasons={**plan.reasons, "invariance": reason}))


def _probe_memory(context: RunContext, phase: str) -> None:
    def report(budget: str) -> None:
        context.console.say(f"memory ran out in the rehearsal: micro-batches of at most {budget}")
        if context.world.is_main:
            context.run.log_decision("smaller micro-batches", reason="rehearsal", what=f"at most {budget}")

    memory_probe.probe_memory(context.session, phase, report)


def _finish(context: RunContext, loop: PhaseLoop) -> None:
    """Write held-out metrics, final/, a sample and summary.json, before the last phase is closed."""
    session, step = context.session, context.progress.step
    exported, folder = step, loop.checkpoint_folder(step)
    if best := loop.earlier_best_step():
        exported, folder = best, loop.checkpoint_folder(best)
        loop.phase.strategy.load_weights(checkpoint.open_on_all(folder, context.world))
        context.console.say(f"final/ is the best checkpoint, {folder.name}")
    _refuse_nonfinite_weights(context, loop.phase.strategy)
    held_out: dict[str, dict[str, float]] = {}
    for split in (s for s in reversed(HELD_OUT_SPLITS) if s in session.splits):
        context.stop_if_asked()
        held_out[split] = context.measure(split, 1.0, exported)
        refuse_nonfinite_metrics(held_out[split], split)
    context.stop_if_asked()
    if not held_out:
        context.console.say("no split is held out: nothing was measured")
    context.check_data()
    summary = context.summarize("done", "", held_out)
    context.world.is_finishing = True
    if context.world.is_main:
        doing("writing final/")
        context.world.mark_progress("the export")
        model = session.gather_full_model(folder, context.progress.phase)
        write_final(context.run, context.task, model, session.facts)
        doing("writing a sample")
        with uncompiled(model):  # a text grows by a token at a time
            sample = context.task.sample(model, session.facts, context.run.final)
        if sample:
            context.console.say(f"sample:\n{sample}")
            summary["sample"] = sample
        doing("measuring the exported model")
        if held_out:
            remark = _add_final_metrics(context, model, exported, held_out)
        else:
            remark = context.task.finish_unmeasured(model, context.run.final)
        remark = re.sub(r"\bRUN\b", str(context.run.folder), remark)
        if remark:
            context.console.say(remark)
            summary["remark"] = remark
        _write_model_card(context, loop, exported, held_out, remark)
        context.peak_memory.observe("export")
        summary |= metrics_fields(held_out) | context.peak_memory.fields()
        decisions = bytes_digest(context.run.decisions) if context.run.decisions.exists() else ""
        where: dict[str, Any] = {"phase": context.progress.phase, "step": context.progress.step}
        found = {
            **where,
            "final": folder_digests(context.run.final),
            "exported": folder.name,
            "summary": summary,
            "data": session.facts.digest,
            "rounding": session.plan.rounding,
            "decisions": decisions,
            "invariance": session.plan.invariance,
        }
        context.log.log_metrics(found)
        context.log.seal(**where)
        context.run.write_summary(summary)
    context.world.barrier()


def _refuse_nonfinite_weights(context: RunContext, strategy: Strategy) -> None:
    """Raise TrainingError on every rank if a weight is NaN or infinite: no loss has seen the last update."""
    finite = all(bool(part.isfinite().all()) for part in strategy.local_weights())
    if not all(context.world.all_gather_objects(finite)):
        raise TrainingError(
            f"weights are not finite after step {context.progress.step} of {context.progress.phase}: training"
            " has diverged; lower --lr or lengthen --warmup"
        )


def _add_final_metrics(
    context: RunContext, model: nn.Module, step: int, held_out: dict[str, dict[str, Any]]
) -> str:
    """Add the task's own measurements of its export to the metrics of the first held-out split; what the task
    remarks on them.
    """
    split = next(s for s in HELD_OUT_SPLITS if s in held_out)
    splits = context.session.splits
    more = context.task.final_metrics(
        model, context.run.final, context.session.facts, lambda name=split: host_batches(splits[name])
    )
    if more:
        refuse_nonfinite_metrics(more, split)
        held_out[split] |= more
        where = {"phase": context.progress.phase, "step": step, "split": split}
        context.log.log_metrics({**where, **held_out[split]})
    return context.task.final_remark(held_out[split])


def _headline(context: RunContext) -> str:
    """The first line for the user: task, data, steps, devices, predicted duration."""
    session, plan = context.session, context.session.plan
    steps = sum(s.steps for s in session.schedules)
    remark = context.task.model_size(session.facts).remark
    return (
        f"{context.recipe.task}: {session.facts.samples['train']:,} samples, global batch"
        f" {context.recipe.batch_size}, {steps:,} steps on {context.world.size} x"
        f" {context.world.device.type} in {plan.precision} ({plan.invariance});"
        f" about {format_duration(steps * plan.predicted_step_seconds)}" + (f"\n{remark}" if remark else "")
    )


def _write_model_card(
    context: RunContext, loop: PhaseLoop, step: int, held_out: dict[str, dict[str, Any]], remark: str
) -> None:
    """Write final/README.md. `step`: of the exported weights, in the last phase."""
    task, facts, final = context.task, context.session.facts, context.run.final
    chosen_by = task.monitor[0] if loop.early_stopping.patience else ""
    measured = model_card.HeldOutFigures(held_out, context.progress.steps_before + step, chosen_by, remark)
    card = model_card.render(task.describe_model(final, facts), context.recipe, facts, measured)
    atomic_files.write_text(final / model_card.FILE, card)


def write_final(run: RunFolder, task: Task, model: nn.Module, facts: Facts) -> None:
    """Export the model to final/ atomically."""
    temporary = run.folder / ".final.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    with atomic_files.explain_write_errors(temporary):
        temporary.mkdir(parents=True)
        task.export(model, temporary, facts)
        atomic_files.share_as_umask_allows(temporary)
    shutil.rmtree(run.final, ignore_errors=True)
    temporary.replace(run.final)
