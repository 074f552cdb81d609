"""The figures of a step: on their way from the device, on the host, and as a row of metrics.jsonl.

The fields of the row are spelled here alone, for those who write it and those who read it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import UserError
from isobatch.models.base import Change
from isobatch.models.capabilities import RecordsFigures

if TYPE_CHECKING:
    from isobatch.engine.loading.device_copies import HostCopy  # noqa: TC004  heavy, and no class here has flags
    from isobatch.engine.loading.loader import LoadedStep  # noqa: TC004
    from isobatch.engine.train.state import Training


@dataclass(slots=True)
class StepOutput:
    """The result of a step, on the device. Read one step later, its figures cost no wait."""

    loaded: LoadedStep
    rate: float = 0.0
    """Learning rate."""
    sums: HostCopy | None = None
    """1-d: losses over their global weights, what loss() recorded, the votes; summed over ranks. None for a
    step that is left out."""
    norm: HostCopy | None = None
    """0-d: norm of the whole reduced gradient before clipping."""
    names: list[str] = field(default_factory=list)
    """Of the losses."""
    votes: tuple[str, ...] = ()
    """Names of the last numbers of `sums`."""
    more: dict[str, Any] = field(default_factory=dict)
    """Figures for the row: of hooks and the task about gradients, and what its `after_step` logged."""
    change: Change | None = None
    """What the task's `after_step` changed in its model."""
    seconds: float = 0.0
    """From the end of the previous step to the end of this one, on the host's clock, without pauses."""

    def read(self, state: Training) -> StepFigures | None:
        """The figures on the host, counted into the run's progress; None where the step was left out.

        Waits for the device where it is not done with the step yet.
        """
        work, progress = self.loaded.work, state.progress
        progress.step = work.step + 1
        if self.sums is None or self.norm is None:
            return None
        with state.world.waiting_for("the step's metrics"):
            values, (norm,) = self.sums.read(), self.norm.read()
        losses = dict(zip(self.names, values, strict=False))
        progress.chain = extend_chain(progress.chain, work.samples)
        progress.samples += len(work.samples)
        progress.tokens += work.tokens
        progress.train_seconds += self.seconds
        progress.waited_seconds += self.loaded.wait_seconds
        progress.padding += work.padding
        seconds = max(1e-9, self.seconds)
        row = {
            **(losses if len(losses) > 1 else {}),
            "phase": state.schedule.name,
            "step": progress.step,
            "loss": sum(losses.values()),
            "lr": self.rate,
            "grad_norm": norm,
            "samples": progress.samples,
            "chain": progress.chain,
            "epoch": round(progress.step / state.schedule.steps_per_epoch, 6),
            "tokens": progress.tokens,
            "step_seconds": round(seconds, 6),
            "data_seconds": round(self.loaded.wait_seconds, 6),
            "samples_per_second": round(len(work.samples) / seconds, 3),
            "tokens_per_second": round(work.tokens / seconds, 3),
            "padding": round(work.padding, 4),
            **self.more,
        }
        steps = progress.steps_before + progress.step
        votes = dict(zip(self.votes, values[len(values) - len(self.votes) :], strict=True))
        has_recorded = bool(state.layout.recorded_shapes)
        if has_recorded and isinstance(state.task, RecordsFigures) and math.isfinite(row["loss"] + norm):
            row |= state.task.step_figures(state.layout.recorded_in(np.array(values)))
        return StepFigures(self, progress.step, steps, row["loss"], norm, row, votes)


@dataclass(slots=True)
class StepFigures:
    """The figures of a step, on the host."""

    output: StepOutput
    step: int
    """Of the phase, from 1."""
    steps: int
    """Of all phases so far."""
    loss: float
    """Of the global batch, the sum of its parts."""
    norm: float
    """Of the gradient before clipping."""
    row: dict[str, Any]
    """The step's row of metrics.jsonl; hooks add fields, and the log, the last of them, writes it."""
    votes: dict[str, float]
    """Name -> sum of all ranks' votes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """What a run logs of a step; as JSON with `more` beside the other fields."""

    phase: str
    step: int
    """Optimizer step of the phase, from 1."""
    loss: float
    """Of the global batch, the sum of its parts; NaN where it was not finite."""
    lr: float
    grad_norm: float
    """Before clipping; NaN where it was not finite."""
    samples: int
    """Seen by the run so far."""
    chain: str
    """Hash over all samples of the phase so far."""
    more: Mapping[str, Any]
    """The others of FIELDS, parts of a loss that has several, figures of the task, of the machine."""

    @property
    def place(self) -> tuple[str, int]:
        """(phase, step)."""
        return self.phase, self.step

    @property
    def figures(self) -> LossAndNorm:
        return self.loss, self.grad_norm

    def to_dict(self) -> dict[str, Any]:
        return {**self.more, **{name: getattr(self, name) for name in NEEDED}}


NEEDED = ("phase", "step", "loss", "lr", "grad_norm", "samples", "chain")
"""Fields without which a row says nothing of a step; a receipt has these alone."""
_RATES = ("step_seconds", "data_seconds", "samples_per_second", "tokens_per_second", "padding")
FIELDS = (*NEEDED, "epoch", "tokens", *_RATES)
"""Of every row of a step. `tokens` are those that the run has seen so far, without padding; `data_seconds` of
`step_seconds` those in which it waited for data; `padding` is the share of the tokens that were computed."""
FIGURES = ("loss", "grad_norm")
"""What a step computed, and is compared where it is computed again."""
LossAndNorm = tuple[float, float]
"""Of a step: the loss, and the norm of the gradient before clipping; or how two of them differ."""


def differences(one: LossAndNorm, other: LossAndNorm) -> LossAndNorm:
    """Of two losses, relative to the other where that is above one, and of two norms, relative."""
    return _difference(one[0], other[0], 1.0), _difference(one[1], other[1], 1e-12)


def _difference(one: float, other: float, least: float) -> float:
    """Infinite where only one is finite; 0 where neither is."""
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other) / max(least, abs(other))
    return 0.0 if math.isfinite(one) == math.isfinite(other) else math.inf


def is_step(row: Mapping[str, Any]) -> bool:
    """Whether a row of metrics.jsonl is that of a step: others are evaluations, seals and the like."""
    return "chain" in row


def read_step(row: Mapping[str, Any]) -> StepRow:
    """The row of a step from its JSON. Raises UserError where one that is needed lacks or has no form."""
    try:
        known: dict[str, Any] = {name: row[name] for name in NEEDED}
        known |= {name: math.nan if row[name] is None else float(row[name]) for name in FIGURES}
        known.update(phase=str(known["phase"]), step=int(known["step"]), lr=float(known["lr"]))
        return StepRow(**known, more={name: row[name] for name in row.keys() - known.keys()})
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"metrics.jsonl holds a row that no run writes: {error!r}") from None


def step_rows(metrics: Path) -> Iterator[StepRow]:
    """The steps of a metrics.jsonl, in order. Raises UserError where a row has another form."""
    return (read_step(row) for row in rows_in(metrics) if is_step(row))


def extend_chain(previous: str, samples: np.ndarray) -> str:
    """The hash over all samples seen so far, in order: sixteen hex digits of SHA-256."""
    data = np.ascontiguousarray(samples, dtype="<i8").tobytes()
    return hashlib.sha256(previous.encode() + data).hexdigest()[:16]
