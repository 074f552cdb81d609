"""The end of a run: held-out metrics, the exported model in final/, and summary.json."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import StopRequestedError, TrainingError
from isobatch.core.terminal import doing, rendered
from isobatch.engine.checkpointing import checkpoint
from isobatch.engine.checkpointing.digests import bytes_digest, folder_digests
from isobatch.engine.checkpointing.weight_files import export_beside
from isobatch.engine.distributed.stop_signals import TerminatedError
from isobatch.engine.model_setup.compile_model import uncompiled
from isobatch.engine.runs import summary as summaries
from isobatch.engine.train.evaluate import host_batches, refuse_nonfinite_metrics
from isobatch.models import capabilities, model_card

if TYPE_CHECKING:
    from torch import nn

    from isobatch.engine.hooks.data_guard import DataGuard
    from isobatch.engine.hooks.evaluate import Evaluate
    from isobatch.engine.train.build import Builder
    from isobatch.engine.train.state import Training
    from isobatch.engine.trainer.train_run import RunOnRank


def stop(run: RunOnRank, state: Training) -> None:
    """Write the summary after a request to stop. Raises StopRequestedError. All ranks call this."""
    signalled = any(run.world.all_gather_objects(run.stop.requested))
    reason = run.stop.reason if signalled else "a hook asked to stop"
    summary = _summarize(run, state, "stopped", reason)
    if run.world.is_main:
        run.folder.write_summary(summary)
    raise StopRequestedError(
        f"stopped at step {state.progress.step}, saved; go on with: isobatch resume {run.folder.folder}",
        run.stop.cause,
    )


def _stop_if_asked(run: RunOnRank, state: Training) -> None:
    """Stop if any rank was asked to: at the end of a run no step carries the flag to the others."""
    if any(run.world.all_gather_objects(run.stop.requested)):
        stop(run, state)


def finish(run: RunOnRank, builder: Builder, evaluation: Evaluate, guard: DataGuard) -> None:
    """Measure, export and summarize the best weights, while the last phase is open. All ranks call this."""
    state, judge, world = builder.state, evaluation.judge, run.world
    phase, step = state.progress.phase, state.progress.step
    exported = judge.exported(step)
    name = checkpoint.checkpoint_name(phase, exported)
    saved = checkpoint.open_on_all(run.folder.checkpoints / name, world)
    if exported != step:
        state.strategy.load_weights(saved)
        run.say(f"final/ is the best checkpoint, {saved.folder.name}")
    beside = {name: state.strategy.read_held(saved, name) for name in saved.hooks_with_weights()}
    _refuse_nonfinite_weights(state)
    held_out: dict[str, dict[str, Any]] = {}
    for split in (s for s in reversed(summaries.HELD_OUT_SPLITS) if s in state.splits):
        _stop_if_asked(run, state)
        held_out[split] = evaluation.measure(split, 1.0, exported, beside)
        refuse_nonfinite_metrics(held_out[split], split)
    _stop_if_asked(run, state)
    monitor = capabilities.monitor_of(state.task, state.facts)[0]
    if "valid" in held_out and (best := evaluation.better_before(held_out["valid"], beside)):
        run.say(f"{best}: `isobatch auto --like {run.folder.folder} --patience 3` keeps it")
    if not held_out:
        run.say("no split is held out: nothing was measured")
    guard.check(state)
    summary = _summarize(run, state, "done", "")
    world.is_finishing, is_whole = True, False
    with contextlib.suppress(TerminatedError):
        run.stop.interrupts = world.is_main
        if world.is_main and not run.stop.requested:
            doing("writing final/")
            world.mark_progress("the export")
            model = builder.gather_full_model(saved.folder, phase)
            _export(run, state, model, saved)
            summary |= _sample(run, state, model)
            remark = _measure_export(run, state, model, exported, held_out)
            summary |= {"remark": remark} if remark else {}
            chosen_by = monitor if judge.patience else ""
            steps = state.progress.steps_before + exported
            measured = model_card.HeldOutFigures(held_out, steps, chosen_by, remark)
            described = capabilities.description_of(state.task, run.folder.unfinished, state.facts)
            card = model_card.render(described, state.recipe, state.facts, measured)
            atomic_files.write_text(run.folder.unfinished / model_card.FILE, card)
            is_whole = True
        run.stop.interrupts = False
    if is_whole:
        shutil.rmtree(run.folder.final, ignore_errors=True)
        run.folder.unfinished.replace(run.folder.final)
        run.peak.observe()
        before = summaries.before_training(next(atomic_files.rows_in(run.folder.metrics), {}))
        shown = {"before": before, "after": held_out.get("valid", {}), "run": run.folder}
        if moved := rendered(__file__, "hardly_moved", **shown):
            run.say(moved)
        summary |= {"before": before, "peak_memory_bytes": run.peak.bytes}
        summary |= summaries.metrics_fields(held_out)
        _seal(run, state, saved.folder.name, summary)
        run.folder.write_summary(summary)
    if not world.broadcast_object(is_whole):
        stop(run, state)


def _refuse_nonfinite_weights(state: Training) -> None:
    """Raise TrainingError on every rank if a weight is NaN or infinite: no loss has seen the last update."""
    finite = all(bool(part.isfinite().all()) for _, part in state.strategy.held())
    if not all(state.world.all_gather_objects(finite)):
        raise TrainingError(
            f"weights are not finite after step {state.progress.step} of {state.progress.phase}: training"
            " has diverged; lower --lr or lengthen --warmup"
        )


def _summarize(run: RunOnRank, state: Training, status: str, reason: str) -> dict[str, Any]:
    """The content of summary.json before anything is measured. All ranks call this."""
    run.peak.bytes = max(run.world.all_gather_objects(run.peak.bytes))
    plan, progress, parameters = state.plan, state.progress, list(state.model.parameters())
    seconds = max(1e-9, progress.train_seconds)
    return {
        "status": status,
        "reason": reason,
        "task": state.recipe.task,
        "steps": progress.steps,
        "planned_steps": progress.steps_before + state.schedule.steps,
        "samples_seen": progress.samples,
        "tokens_seen": progress.tokens,
        "global_batch": state.recipe.batch_size,
        "world_size": plan.processes,
        "strategy": plan.strategy,
        "precision": plan.precision,
        "invariance": plan.invariance,
        "parameters": sum(map(_count, parameters)),
        "trainable_parameters": sum(_count(p) for p in parameters if p.requires_grad),
        "train_seconds": round(progress.train_seconds, 3),
        "samples_per_second": round(progress.samples / seconds, 3),
        "tokens_per_second": round(progress.tokens / seconds, 3),
        "data_wait_fraction": round(progress.waited_seconds / seconds, 4),
        "padding_fraction": round(progress.padding / max(1, progress.steps), 4),
        "predicted_peak_memory_bytes": plan.predicted_peak_memory_bytes,
        **summaries.metrics_fields({}),
        "startup_seconds": summaries.startup_seconds(run.first_step_at, run.measured_before),
        "peak_memory_bytes": run.peak.bytes,
        "monitor": capabilities.monitor_of(state.task, state.facts)[0],
        "resumed_from": run.resumed_from,
    }


def _count(p: Any) -> int:
    """Elements of a whole parameter: ZeRO-3 may hold none of it here, and a byte holds two 4-bit weights."""
    quantised = getattr(p, "quant_state", None)
    return int(getattr(p, "ds_numel", p.numel())) if quantised is None else math.prod(quantised.shape)


def _export(run: RunOnRank, state: Training, model: nn.Module, saved: checkpoint.SavedCheckpoint) -> None:
    """Export the model, and to NAME the weights that hooks hold, into the folder that becomes final/."""
    temporary = run.folder.unfinished
    shutil.rmtree(temporary, ignore_errors=True)
    with atomic_files.explain_write_errors(temporary):
        temporary.mkdir(parents=True)
        state.task.export(model, temporary, state.facts)
        export_beside(state.task, model, saved, temporary, state.facts)
        atomic_files.share_as_umask_allows(temporary)


def _sample(run: RunOnRank, state: Training, model: nn.Module) -> dict[str, str]:
    """A line or two that show what was learnt, as a field of the summary."""
    if not isinstance(state.task, capabilities.Samples):
        return {}
    doing("writing a sample")
    with uncompiled(model):  # a text grows by a token at a time
        sample = state.task.sample(model, state.facts, run.folder.unfinished)
    if sample:
        run.say(f"sample:\n{sample}")
    return {"sample": sample} if sample else {}


def _measure_export(
    run: RunOnRank, state: Training, model: nn.Module, step: int, held_out: dict[str, dict[str, Any]]
) -> str:
    """Add the task's own measurements of its export to the metrics of the first held-out split; what the task
    remarks on them.
    """
    doing("measuring the exported model")
    task, splits, final, remark = state.task, state.splits, run.folder.unfinished, ""
    split = summaries.first_held_out(held_out)
    if split is None and isinstance(task, capabilities.FinishesUnmeasured):
        remark = task.finish_unmeasured(model, final)
    if split is not None and isinstance(task, capabilities.MeasuresExport):
        more = task.final_metrics(model, final, state.facts, lambda s=split: host_batches(splits[s]))
        refuse_nonfinite_metrics(more, split)
        held_out[split] |= more
        where = {"phase": state.progress.phase, "step": step, "split": split}
        if more:
            run.log.log_metrics({**where, **held_out[split]})
    if split is not None and isinstance(task, capabilities.FinalRemark):
        remark = task.final_remark(held_out[split])
    remark = re.sub(r"\bRUN\b", str(run.folder.folder), remark)
    if remark:
        run.say(remark)
    return remark


def _seal(run: RunOnRank, state: Training, exported: str, summary: dict[str, Any]) -> None:
    """Log what was found, and seal the log. `exported`: name of the checkpoint."""
    where: dict[str, Any] = {"phase": state.progress.phase, "step": state.progress.step}
    decisions = run.folder.decisions
    found = {
        **where,
        "final": folder_digests(run.folder.final),
        "exported": exported,
        "summary": summary,
        "data": state.facts.digest,
        "rounding": state.plan.rounding,
        "decisions": bytes_digest(decisions) if decisions.exists() else "",
        "invariance": state.plan.invariance,
    }
    run.log.log_metrics(found)
    run.log.seal(**where)
