"""The fields of summary.json, and the record of training progress they are computed from."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

HELD_OUT_SPLITS = ("test", "valid")
"""Splits that can be held out, in the order of `first_held_out`."""

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


def first_held_out(splits: Collection[str]) -> str | None:
    """Of a run's splits the one on which its model is measured; None where none is held out."""
    return next((split for split in HELD_OUT_SPLITS if split in splits), None)


def metrics_fields(held_out: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The fields of summary.json about the metrics of held-out splits."""
    split = first_held_out(held_out)
    return {"split": split, "metrics": held_out[split] if split else {}, "metrics_by_split": held_out}


def changed_fields(said: Mapping[str, Any], logged: Mapping[str, Any]) -> list[str]:
    """Names of the fields that differ, within another as `metrics.loss`."""
    pairs = {name: (said.get(name), logged.get(name)) for name in sorted({*said, *logged})}
    changed = []
    for name, (one, other) in pairs.items():
        inside = changed_fields(one, other) if isinstance(one, dict) and isinstance(other, dict) else []
        changed += [f"{name}.{field}" for field in inside] or ([name] if one != other else [])
    return changed


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
