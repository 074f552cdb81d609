"""One step of a run again, with what is seen in it: losses by sample, modules, gradients, weights."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import UserError
from isobatch.engine.checkpointing.checkpoint import list_checkpoints
from isobatch.engine.forensics.module_record import BACKWARD, FORWARD, ModuleOutput, ModuleRecorder
from isobatch.engine.loading.device_copies import to_tensors
from isobatch.engine.verification.replay import INITIAL, Replay, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from isobatch.engine.loading.loader import LoadedStep
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.training.active_phase import ActivePhase
    from isobatch.engine.training.session import Session
    from isobatch.models.base import StepContext


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
    logged: dict[str, Any]
    """The run's row of the step; empty where it logged none."""
    alone: list[tuple[np.ndarray, dict[str, float]]] = field(default_factory=list)
    """(places in the batch, share of each loss) of each sample, or cohort, computed alone."""
    outputs: list[ModuleOutput] = field(default_factory=list)
    """Forward in order, then backward in order."""
    gradients: dict[str, float] = field(default_factory=dict)
    """Parameter -> norm of its gradient, before clipping."""
    weights: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Parameter -> (norm, product with fixed signs) before the step."""

    @property
    def first_not_finite(self) -> ModuleOutput | None:
        """The first output that holds a NaN or an infinity, forward before backward."""
        return next((output for output in self.outputs if not output.is_finite), None)


def window_to(run: RunFolder, phases: list[str], phase: str, step: int) -> Window:
    """From the nearest kept state before a step of a phase to that step. Raises UserError where none leads
    there: a phase that is not the first, with nothing kept before it.
    """
    before = []
    for path in list_checkpoints(run.checkpoints, phases):
        name, _, number = path.name.rpartition("-")
        if name == phase and int(number) < step:
            before.append((path.name, int(number)))
        elif phases.index(name) == phases.index(phase) - 1:
            before.append((path.name, 0))
    if before:
        name, start = before[-1]
        return Window(name, phase, start, step - start)
    if phase != phases[0]:
        kept = ", ".join(path.name for path in list_checkpoints(run.checkpoints, phases)) or "none"
        raise UserError(
            f"{run.folder}: no kept checkpoint leads to step {step} of {phase} (kept: {kept}); the steps of"
            f" {phases[0]} can be replayed, and `--keep 20` keeps more of the next run"
        )
    return Window(INITIAL, phase, 0, step)


def observe_step(
    replay: Replay,
    window: Window,
    alone: bool = True,
    around: Callable[[nn.Module], contextlib.AbstractContextManager[None]] | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
    only: int | None = None,
) -> ObservedStep:
    """Redo a window and observe its last step, in this process.

    `alone`: also compute each sample's losses by itself, or those of the sample `only`. `around(model)` is
    entered for the observed step; `prepare(model)` is called when the model is built.
    """
    logged = logged_row(replay.run, window.phase, window.stop)
    _take_back(replay, window)
    with replay.session, replay.phase_at(window) as (active, _):
        if prepare is not None:
            prepare(replay.session.model)
        for loaded in active.batches(window.start, window.stop):
            if loaded.work.step + 1 < window.stop:
                active.step(loaded)
                continue
            within = around(active.strategy.unwrapped) if around else contextlib.nullcontext()
            with within:
                return observe_loaded(replay.session, active, loaded, window, logged, alone, only)
    raise AssertionError("a window has at least one step")


def _take_back(replay: Replay, window: Window) -> None:
    """Let the last step of a window be made, even where the run left it out."""
    steps = replay.session.left_out
    steps = {**steps, window.phase: steps.get(window.phase, frozenset()) - {window.stop}}
    replay.session.left_out = steps


def redo_figures(replay: Replay, window: Window) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step of a window."""
    with replay.session, replay.phase_at(window) as (active, _):
        return [active.step(loaded).loss_and_norm() for loaded in active.batches(window.start, window.stop)]


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


def logged_row(run: RunFolder, phase: str, step: int) -> dict[str, Any]:
    """The row that a run logged of a step; empty where it has none."""
    rows = (row for row in rows_in(run.metrics) if "chain" in row)
    return next((row for row in rows if (row["phase"], row["step"]) == (phase, step)), {})


def observe_loaded(
    session: Session,
    active: ActivePhase,
    loaded: LoadedStep,
    window: Window,
    logged: dict[str, Any],
    alone: bool,
    only: int | None = None,
) -> ObservedStep:
    """Train on a loaded step, the last of a window, and observe it. `logged`: what the run logged of it."""
    model, task = active.strategy.unwrapped, session.task
    weights = {name: _figures(p) for name, p in model.named_parameters()}
    losses_alone = active.stepper.losses_alone(loaded, only) if alone else []
    recorder = ModuleRecorder(len(loaded.work.samples), task.rows_per_sample)
    gradients: dict[str, float] = {}
    with recorder.hooked(model), _binding(active, recorder), _seeing_gradients(active, gradients):
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
def _binding(active: ActivePhase, recorder: ModuleRecorder) -> Iterator[None]:
    """Tell the recorder which samples each forward pass has; passes without gradients are checks."""
    losses = active.session.task.loss

    def bound(model: Any, batch: Any, step: Any) -> Any:
        recorder.bind(step.positions if torch.is_grad_enabled() else None)
        return losses(model, batch, step)

    active.session.task.loss = bound  # type: ignore[method-assign]
    try:
        yield
    finally:
        del active.session.task.loss


@contextlib.contextmanager
def _seeing_gradients(active: ActivePhase, found: dict[str, float]) -> Iterator[None]:
    """Take the norms of the whole step's gradients before they are clipped."""
    observe = active.session.task.observe

    def seen(model: Any, step: Any) -> Any:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
                found[name] = float(torch.linalg.vector_norm(gradient.detach().float()))
        return observe(model, step)

    active.session.task.observe = seen  # type: ignore[method-assign]
    try:
        yield
    finally:
        del active.session.task.observe
