"""Metrics of a step: its row (fields: engine/runs/step_rows.py), model FLOP utilisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.engine.machine.gpu_table import find_gpu_model
from isobatch.engine.runs.step_rows import LossAndNorm, StepRow, differences
from isobatch.models.base import CHANGES_SHAPE, ModelSize
from isobatch.models.flops import flops_per_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.core.plan import Plan
    from isobatch.engine.loading.loader import StepWork
    from isobatch.engine.optimization.schedule import PhaseSchedule
    from isobatch.engine.runs.summary import Progress
    from isobatch.engine.training.train_step import StepResult


def step_row(
    result: StepResult, losses: dict[str, float], norm: float, progress: Progress, schedule: PhaseSchedule
) -> dict[str, Any]:
    """A step's row of metrics.jsonl. Of several losses each has a field, besides `loss`, their sum."""
    seconds, work = max(1e-9, result.seconds), result.loaded.work
    row = StepRow(
        phase=schedule.name,
        step=progress.step,
        epoch=round(progress.step / schedule.steps_per_epoch, 6),
        loss=sum(losses.values()),
        lr=result.rate,
        grad_norm=norm,
        samples=progress.samples,
        tokens=progress.tokens,
        step_seconds=round(seconds, 6),
        data_seconds=round(result.loaded.wait_seconds, 6),
        samples_per_second=round(len(work.samples) / seconds, 3),
        tokens_per_second=round(work.tokens / seconds, 3),
        padding=round(work.padding, 4),
        chain=progress.chain,
        more=losses if len(losses) > 1 else {},
    )
    return row.to_dict()


def largest_differences(some: Sequence[LossAndNorm], others: Sequence[LossAndNorm]) -> LossAndNorm:
    """Largest differences between the same steps: of the loss, relative where it is above one, and relative
    of the norm.
    """
    losses, norms = zip(*map(differences, some, others), strict=True)
    return max(losses), max(norms)


def tracked_values(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row that a tracker draws: floats, and each of a list of floats under NAME/NUMBER."""
    found = {name: value for name, value in row.items() if isinstance(value, float)}
    for name, value in row.items():
        if isinstance(value, list) and all(isinstance(one, float) for one in value):
            found |= {f"{name}/{number}": one for number, one in enumerate(value)}
    return found


@dataclass(frozen=True, slots=True)
class FlopUtilisation:
    """Model FLOP utilisation (MFU) of steps (Chowdhery et al. 2022, "PaLM", appendix B).

        MFU = tokens/s x FLOPs a token / (dense peak of the GPU at the plan's precision x processes)

    Tokens are the samples', without padding. FLOPs a token are those of `models.flops.flops_per_token`, whose
    attention term takes the length of the token's own sample (the step's real lengths, neither padded nor
    averaged over the data). What activation checkpointing computes again does not count.
    """

    size: ModelSize
    peak: float
    """FLOP/s of all processes together."""

    def of(self, work: StepWork, seconds: float) -> float:
        """MFU of a step that took so many seconds: 0.45 is 45 %."""
        return work.tokens * flops_per_token(self.size, work.token_length) / (seconds * self.peak)


def flop_utilisation(size: ModelSize, plan: Plan, device_name: str) -> FlopUtilisation | None:
    """MFU on a CUDA device of this name; None where its peak or the model's FLOPs are not known.

    That is: outside of the GPU table, on a slice of a GPU, for a model that changes its shape as it trains,
    and for one that is no transformer.
    """
    known = find_gpu_model(device_name)
    peak = known.gpu.peak_flops[plan.precision] if known else None
    counted = size.layers > 0 and size.heads > 1 and not size.recurrent_layers
    if peak is None or not counted or size.why_unshardable == CHANGES_SHAPE:
        return None
    return FlopUtilisation(size, peak * plan.processes)
