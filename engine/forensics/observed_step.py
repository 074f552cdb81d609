"""One step of a run again, with what is seen in it: losses by sample, modules, gradients, weights."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from isobatch.core.errors import UserError
from isobatch.engine.forensics.module_record import BACKWARD, FORWARD, ModuleOutput, ModuleRecorder
from isobatch.engine.loading.device_copies import to_tensors
from isobatch.engine.runs.step_rows import LossAndNorm, StepRow, step_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from isobatch.engine.loading.loader import LoadedStep
    from isobatch.engine.training.session import ActivePhase, Session
    from isobatch.engine.verification.replay import Replay
    from isobatch.engine.verification.windows import Window
    from isobatch.models.base import StepContext, Task


@dataclass(slots=True)
class ObservedStep:
    """A step as it was computed again, beside what the run logged of it."""

    phase: str
    step: int
    """From 1."""
    start: str
    """The checkpoint, or the initial weights, from which it was redone."""
    samples: np.ndarray
    """(B,) sample numbers in the recipe's order."""
    loss: float
    norm: float
    rate: float
    logged: StepRow | None
    """The run's row of the step; None where it logged none."""
    alone: list[tuple[np.ndarray, dict[str, float]]] = field(default_factory=list)
    """(places in the batch, share of each loss) of each sample, or cohort, computed alone."""
    outputs: list[ModuleOutput] = field(default_factory=list)
    """Forward in order, then backward in order."""
    gradients: dict[str, float] = field(default_factory=dict)
    """Parameter -> norm of its gradient, before clipping."""
    weights: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Parameter -> (norm, product with fixed signs) before the step."""

    @property
    def figures(self) -> LossAndNorm:
        return self.loss, self.norm

    @property
    def first_not_finite(self) -> ModuleOutput | None:
        """The first output that holds a NaN or an infinity, forward before backward."""
        return next((output for output in self.outputs if not output.is_finite), None)


def observe_step(replay: Replay, window: Window, alone: bool = True) -> ObservedStep:
    """Redo a window and observe its last step, in this process, even where the run left that out.

    `alone`: also compute each sample's losses by itself.
    """
    session = replay.session
    left_out = session.left_out.get(window.phase, frozenset())
    session.left_out = {**session.left_out, window.phase: left_out - {window.stop}}
    rows = (row for row in step_rows(replay.run.metrics) if row.place == (window.phase, window.stop))
    with session, replay.phase_at(window) as (active, _):
        for loaded in active.batches(window.start, window.stop):
            if loaded.work.step + 1 == window.stop:
                return _observe_loaded(session, active, loaded, window, next(rows, None), alone)
            active.step(loaded)
    raise AssertionError("a window has at least one step")


class StepParts(NamedTuple):
    """What the task's loss gets in a step."""

    model: nn.Module
    """With the weights before the step."""
    batch: dict[str, torch.Tensor]
    """The whole global batch, or the samples asked for, on the device."""
    step: StepContext
    """Draws the step's noise of these samples."""


@contextlib.contextmanager
def open_step(replay: Replay, window: Window, samples: Sequence[int] = ()) -> Iterator[StepParts]:
    """Redo a window but for its last step, and hand over what that one computes with; in the batch's order.

    `samples`: only these of the batch. Raises UserError where one is not in it.
    """
    with replay.session, replay.phase_at(window) as (active, _):
        for loaded in active.batches(window.start, window.stop - 1):
            active.step(loaded)
        numbers = replay.session.sampler.batch(window.stop - 1)
        if samples and (missing := sorted({*samples} - {*numbers.tolist()})):
            raise UserError(f"sample {missing[0]}: is not in step {window.stop} of {window.phase}")
        numbers = numbers[np.isin(numbers, samples)] if samples else numbers
        host = to_tensors(replay.session.splits["train"].fetch(numbers), pin=False)
        batch, step = active.stepper.hand_over(window.stop - 1, host)
        yield StepParts(active.strategy.unwrapped, batch, step)


def _observe_loaded(
    session: Session,
    active: ActivePhase,
    loaded: LoadedStep,
    window: Window,
    logged: StepRow | None,
    alone: bool,
) -> ObservedStep:
    """Train on a loaded step, the last of a window, and observe it. `logged`: what the run logged of it."""
    model, task = active.strategy.unwrapped, session.task
    weights = {name: _figures(p) for name, p in model.named_parameters()}
    losses_alone = active.stepper.losses_alone(loaded) if alone else []
    recorder = ModuleRecorder(len(loaded.work.samples), task.rows_per_sample)
    gradients: dict[str, float] = {}
    with recorder.hooked(model), _watching(task, recorder, gradients):
        result = active.step(loaded)
        loss, norm = result.loss_and_norm()
    return ObservedStep(
        window.phase,
        window.stop,
        window.checkpoint,
        loaded.work.samples,
        loss,
        norm,
        result.rate,
        logged,
        losses_alone,
        [*recorder.outputs(FORWARD), *recorder.outputs(BACKWARD)],
        gradients,
        weights,
    )


def _figures(tensor: torch.Tensor) -> tuple[float, float]:
    """The norm, and the product with alternating signs of a fixed pattern."""
    flat = tensor.detach().double().reshape(-1)
    signs = torch.where(torch.arange(len(flat), device=flat.device) * 2654435761 % 7919 % 2 == 0, 1.0, -1.0)
    return float(flat.norm()), float(flat @ signs.double())


@contextlib.contextmanager
def _watching(task: Task, recorder: ModuleRecorder, gradients: dict[str, float]) -> Iterator[None]:
    """Tell the recorder which samples each forward pass has (passes without gradients are checks), and take
    the norms of the whole step's gradients before they are clipped.
    """
    losses, observe = task.loss, task.observe

    def bound(model: Any, batch: Any, step: Any) -> Any:
        recorder.bind(step.positions if torch.is_grad_enabled() else None)
        return losses(model, batch, step)

    def seen(model: Any, step: Any) -> Any:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
                gradients[name] = float(torch.linalg.vector_norm(gradient.detach().float()))
        return observe(model, step)

    task.loss, task.observe = bound, seen  # type: ignore[method-assign]
    try:
        yield
    finally:
        del task.loss, task.observe
