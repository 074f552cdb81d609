"""The fields of summary.json, and the record of training progress they are computed from."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from isobatch.core.plan import Plan
    from isobatch.core.recipe import Recipe

HELD_OUT_SPLITS = ("test", "valid")
"""Splits that can be held out; the first of them that exists gives the summary's metrics."""

PLACE = ("phase", "step", "split")
"""Fields of an evaluation's row that are no metrics."""


@dataclass(slots=True)
class Progress:
    """How far training is. A checkpoint holds these fields."""

    phase: str
    step: int = 0
    """Optimizer steps done in this phase."""
    samples: int = 0
    tokens: int = 0
    chain: str = ""
    """Hash over all samples seen, in order."""
    train_seconds: float = 0.0
    waited_seconds: float = 0.0
    padding: float = 0.0
    """Sum over steps of the share of padding."""
    steps_before: int = 0
    """Optimizer steps of earlier phases."""
    seconds_before: float = 0.0
    """Their part of train_seconds."""

    @property
    def steps(self) -> int:
        """Optimizer steps of all phases so far."""
        return self.steps_before + self.step

    def next(self, phase: str) -> Progress:
        """The progress at the start of the next phase."""
        return dataclasses.replace(
            self, phase=phase, step=0, chain="", steps_before=self.steps, seconds_before=self.train_seconds
        )


def summarize(
    recipe: Recipe, plan: Plan, progress: Progress, model: nn.Module, held_out: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """The fields of summary.json that follow from the progress and the metrics of held-out splits."""
    seconds = max(1e-9, progress.train_seconds)
    parameters = list(model.parameters())
    return {
        "task": recipe.task,
        "steps": progress.steps,
        "samples_seen": progress.samples,
        "tokens_seen": progress.tokens,
        "global_batch": recipe.batch_size,
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
        **metrics_fields(held_out),
    }


def metrics_fields(held_out: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The fields of summary.json about the metrics of held-out splits."""
    split = next((s for s in HELD_OUT_SPLITS if s in held_out), None)
    return {"split": split, "metrics": held_out[split] if split else {}, "metrics_by_split": held_out}


def before_training(row: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of the first row of metrics.jsonl, if it is an evaluation before training; else {}."""
    is_one = row.get("split") is not None and row.get("step") == 0
    return {name: value for name, value in row.items() if name not in PLACE} if is_one else {}


def startup_seconds(first_step: float | None, measured: float) -> float:
    """Seconds from the user's command to `first_step`, the time at which the first optimizer step ended.

    `measured`: those of the evaluation before training, which do not count.
    """
    import psutil

    begin = float(os.environ.get("ISOBATCH_STARTED") or psutil.Process().create_time())
    return round((first_step or time.time()) - begin - measured, 3)


def _count(p: Any) -> int:
    """Elements of a whole parameter: ZeRO-3 may hold none of it here, and a byte holds two 4-bit weights."""
    quantised = getattr(p, "quant_state", None)
    return int(getattr(p, "ds_numel", p.numel())) if quantised is None else math.prod(quantised.shape)
