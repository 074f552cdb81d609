"""The end of a run: held-out metrics, the exported model in final/, and summary.json."""

from __future__ import annotations

import contextlib
import re
import shutil
from typing import TYPE_CHECKING, Any

import torch

from isobatch.core import atomic_files
from isobatch.core.errors import StopRequestedError, TrainingError
from isobatch.core.terminal.status import doing
from isobatch.engine.checkpointing import checkpoint
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
from isobatch.engine.checkpointing.digests import bytes_digest, folder_digests
from isobatch.engine.model_setup.compile_model import uncompiled
from isobatch.engine.runs.summary import HELD_OUT_SPLITS, metrics_fields, startup_seconds, summarize
from isobatch.engine.train.evaluate import host_batches, refuse_nonfinite_metrics
from isobatch.engine.train.hooks import name_of
from isobatch.models import model_card
from isobatch.models.capabilities import (
    FinalRemark,
    FinishesUnmeasured,
    MeasuresExport,
    Samples,
    description_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import nn

    from isobatch.engine.distributed.stop_signals import StopFlag
    from isobatch.engine.hooks.remarks import Remarks
    from isobatch.engine.optimization.early_stopping import EarlyStopping
    from isobatch.engine.runs.metrics_log import MetricsLog
    from isobatch.engine.runs.peak_memory import PeakMemory
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.train.build import Builder
    from isobatch.engine.train.hooks import Hook
    from isobatch.engine.train.state import Training


class Finish:
    """Finishes a run, or stops it, while its last phase is still open."""

    def __init__(
        self,
        run: RunFolder,
        builder: Builder,
        log: MetricsLog,
        say: Callable[[str], None],
        peak: PeakMemory,
        flag: StopFlag,
        check_data: Callable[[Training], None],
        measure: Callable[[Training, str, float, int], dict[str, float]],
        checkpoint_of: Callable[[str, int], Path],
        remarks: Remarks,
        hooks: Sequence[Hook] = (),
    ) -> None:
        """`measure(state, split, fraction, step)` evaluates and logs; `checkpoint_of(phase, step)`: where.

        `hooks`: those whose tensors may be weights, which are exported beside.
        """
        self.run, self.builder, self.state, self.log, self.say = run, builder, builder.state, log, say
        self.peak, self.flag, self.check_data, self.measure = peak, flag, check_data, measure
        self.checkpoint_of, self.remarks, self.hooks = checkpoint_of, remarks, hooks
        self.resumed_from: str | None = None

    def stop(self) -> None:
        """Write the summary after a request to stop. Raises StopRequestedError. All ranks call this."""
        summary = self._summarize("stopped", self.flag.reason, {})
        if self.state.world.is_main:
            self.run.write_summary(summary)
        raise StopRequestedError(
            f"stopped at step {self.state.progress.step}, saved; go on with:"
            f" isobatch resume {self.run.folder}",
            self.flag.cause,
        )

    def _stop_if_asked(self) -> None:
        """Stop if any rank was asked to: at the end of a run no step carries the flag to the others."""
        if any(self.state.world.all_gather_objects(self.flag.requested)):
            self.stop()

    def finish(self, judge: EarlyStopping) -> None:
        """Measure, export and summarize the weights that `judge` finds best. All ranks call this."""
        state, world = self.state, self.state.world
        phase, step = state.progress.phase, state.progress.step
        exported = judge.best_step if judge.patience and judge.best_step else step
        folder = self.checkpoint_of(phase, exported)
        if exported != step:
            state.strategy.load_weights(checkpoint.open_on_all(folder, world))
            self.say(f"final/ is the best checkpoint, {folder.name}")
        self._refuse_nonfinite_weights()
        held_out = self._measure_held_out(exported)
        self.check_data(state)
        summary = self._summarize("done", "", held_out)
        world.is_finishing = True
        if world.is_main:
            doing("writing final/")
            world.mark_progress("the export")
            model = self.builder.gather_full_model(folder, phase)
            self._write_final(model, folder)
            summary |= self._sample(model)
            remark = self._measure_export(model, exported, held_out)
            summary |= {"remark": remark} if remark else {}
            self._write_model_card(exported, held_out, remark, judge)
            self.peak.observe("export")
            summary |= metrics_fields(held_out) | self.peak.fields()
            self._seal(folder, summary)
            self.run.write_summary(summary)
        world.barrier()

    def _refuse_nonfinite_weights(self) -> None:
        """Raise TrainingError on every rank if a weight is NaN or infinite: no loss saw the last update."""
        state = self.state
        finite = all(bool(part.isfinite().all()) for part in state.strategy.local_weights())
        if not all(state.world.all_gather_objects(finite)):
            raise TrainingError(
                f"weights are not finite after step {state.progress.step} of {state.progress.phase}: training"
                " has diverged; lower --lr or lengthen --warmup"
            )

    def _measure_held_out(self, step: int) -> dict[str, dict[str, Any]]:
        """Split -> metrics. `step`: that of the weights."""
        held_out: dict[str, dict[str, Any]] = {}
        for split in (s for s in reversed(HELD_OUT_SPLITS) if s in self.state.splits):
            self._stop_if_asked()
            held_out[split] = self.measure(self.state, split, 1.0, step)
            refuse_nonfinite_metrics(held_out[split], split)
        self._stop_if_asked()
        if not held_out:
            self.say("no split is held out: nothing was measured")
        return held_out

    def _summarize(self, status: str, reason: str, held_out: dict[str, dict[str, float]]) -> dict[str, Any]:
        """The content of summary.json. All ranks call this."""
        state, peak = self.state, self.peak
        peak.merge(state.world.all_gather_objects(peak.by_stage))
        return {
            "status": status,
            "reason": reason,
            **summarize(state.recipe, state.plan, state.progress, state.model, held_out),
            "startup_seconds": startup_seconds(self.remarks.first_step_at),
            **peak.fields(),
            "monitor": state.task.monitor[0],
            "resumed_from": self.resumed_from,
        }

    def _write_final(self, model: nn.Module, folder: Path) -> None:
        """Export the model to final/ atomically, and to final/NAME the weights that hooks hold."""
        state, temporary = self.state, self.run.folder / ".final.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        with atomic_files.explain_write_errors(temporary):
            temporary.mkdir(parents=True)
            state.task.export(model, temporary, state.facts)
            for hook in self.hooks:
                if hook.weights:
                    (beside := temporary / name_of(hook)).mkdir()
                    with _holding(model, SavedCheckpoint(folder), f"hook/{name_of(hook)}/"):
                        state.task.export(model, beside, state.facts)
            atomic_files.share_as_umask_allows(temporary)
        shutil.rmtree(self.run.final, ignore_errors=True)
        temporary.replace(self.run.final)

    def _sample(self, model: nn.Module) -> dict[str, str]:
        if not isinstance(self.state.task, Samples):
            return {}
        doing("writing a sample")
        with uncompiled(model):  # a text grows by a token at a time
            sample = self.state.task.sample(model, self.state.facts, self.run.final)
        if sample:
            self.say(f"sample:\n{sample}")
        return {"sample": sample} if sample else {}

    def _measure_export(self, model: nn.Module, step: int, held_out: dict[str, dict[str, Any]]) -> str:
        """Add the task's own measurements of its export to the metrics of the first held-out split; what the
        task remarks on them.
        """
        doing("measuring the exported model")
        task, splits, final, remark = self.state.task, self.state.splits, self.run.final, ""
        split = next((s for s in HELD_OUT_SPLITS if s in held_out), None)
        if split is None:
            remark = task.finish_unmeasured(model, final) if isinstance(task, FinishesUnmeasured) else ""
        else:
            if isinstance(task, MeasuresExport):
                more = task.final_metrics(
                    model, final, self.state.facts, lambda name=split: host_batches(splits[name])
                )
                refuse_nonfinite_metrics(more, split)
                held_out[split] |= more
                where = {"phase": self.state.progress.phase, "step": step, "split": split}
                if more:
                    self.log.log_metrics({**where, **held_out[split]})
            remark = task.final_remark(held_out[split]) if isinstance(task, FinalRemark) else ""
        remark = re.sub(r"\bRUN\b", str(self.run.folder), remark)
        if remark:
            self.say(remark)
        return remark

    def _write_model_card(
        self, step: int, held_out: dict[str, dict[str, Any]], remark: str, judge: EarlyStopping
    ) -> None:
        """Write final/README.md. `step`: of the exported weights, in the last phase."""
        state, final = self.state, self.run.final
        chosen_by = state.task.monitor[0] if judge.patience else ""
        steps = state.progress.steps_before + step
        measured = model_card.HeldOutFigures(held_out, steps, chosen_by, remark)
        described = description_of(state.task, final, state.facts)
        card = model_card.render(described, state.recipe, state.facts, measured)
        atomic_files.write_text(final / model_card.FILE, card)

    def _seal(self, folder: Path, summary: dict[str, Any]) -> None:
        """Log what was found, and seal the log."""
        state = self.state
        where: dict[str, Any] = {"phase": state.progress.phase, "step": state.progress.step}
        decisions = self.run.decisions
        self.log.log_metrics(
            {
                **where,
                "final": folder_digests(self.run.final),
                "exported": folder.name,
                "summary": summary,
                "data": state.facts.digest,
                "rounding": state.plan.rounding,
                "decisions": bytes_digest(decisions) if decisions.exists() else "",
                "invariance": state.plan.invariance,
            }
        )
        self.log.seal(**where)


@contextlib.contextmanager
def _holding(model: nn.Module, saved: SavedCheckpoint, prefix: str) -> Iterator[None]:
    """Inside, the model has the weights that a checkpoint holds under a prefix of keys."""
    own = {name: p for name, p in model.named_parameters() if prefix + name in saved.entries}
    before = {name: p.detach().clone() for name, p in own.items()}
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(saved.read(prefix + name))
        try:
            yield
        finally:
            for name, p in own.items():
                p.copy_(before[name])
