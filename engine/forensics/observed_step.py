"""One step of a run again, with what is seen in it: losses by sample, modules, gradients, weights.

Of each output of a module two numbers a sample: its norm, and its product with fixed signs. The product
moves with the output's direction too, by about the norm of the change, so that two outputs of one norm are
told apart.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from isobatch.core.errors import UserError
from isobatch.engine.loading.device_copies import to_tensors
from isobatch.engine.train.figures import LossAndNorm, StepRow, step_rows
from isobatch.engine.verification.windows import Window

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from isobatch.engine.verification.replay import Replay
    from isobatch.models.base import StepContext, Task

FORWARD, BACKWARD = "forward", "backward"
Outputs = dict[tuple[str, str], np.ndarray]
"""(module, FORWARD, or BACKWARD for the gradient) -> (2, n) fp64: the norm, and the product with the signs,
of each sample of the global batch; n is 1 where rows are not samples. Forward in order, then backward in
order. A module that is called a second time is `NAME#2`."""


@dataclass(frozen=True, slots=True, eq=False)
class ObservedStep:
    """A step as it was computed again, beside what the run logged of it."""

    window: Window
    """Whose last step it is."""
    samples: np.ndarray
    """(B,) sample numbers in the recipe's order."""
    figures: LossAndNorm
    rate: float
    logged: StepRow | None
    """The run's row of the step; None where it logged none."""
    alone: list[tuple[np.ndarray, dict[str, float]]]
    """(places in the batch, share of each loss) of each sample, or cohort, computed alone."""
    outputs: Outputs
    gradients: dict[str, float]
    """Parameter -> norm of its gradient, before clipping."""
    weights: dict[str, np.ndarray]
    """Parameter -> (2,) norm and product with the signs before the step."""


def observe_step(replay: Replay, window: Window, alone: bool = True) -> ObservedStep:
    """Redo a window and observe its last step, in this process, even where the run left that out.

    `alone`: also compute each sample's losses by itself.
    """
    session, task = replay.session, replay.session.task
    left_out = session.left_out.get(window.phase, frozenset())
    session.left_out = {**session.left_out, window.phase: left_out - {window.stop}}
    rows = (row for row in step_rows(replay.run.metrics) if row.place == (window.phase, window.stop))
    with replay.before(window) as active:
        for loaded in active.batches(window.stop - 1, window.stop):
            model, samples = active.strategy.unwrapped, loaded.work.samples
            weights = {
                name: figures_of(p.detach().cpu().double().reshape(1, -1))[:, 0]
                for name, p in model.named_parameters()
            }
            losses = active.stepper.losses_alone(loaded) if alone else []
            recorder, gradients = ModuleRecorder(len(samples), task.rows_per_sample), dict[str, float]()
            with recorder.hooked(model), _watching(task, recorder, gradients):
                result = active.step(loaded)
            seen = losses, recorder.outputs(), gradients, weights
            figures, logged = result.loss_and_norm(), next(rows, None)
            return ObservedStep(window, samples, figures, result.rate, logged, *seen)
    raise AssertionError("a window has at least one step")


class StepParts(NamedTuple):
    """What the task's loss gets in a step."""

    model: nn.Module
    """With the weights before the step."""
    batch: dict[str, Tensor]
    """The whole global batch, or the samples asked for, on the device."""
    step: StepContext
    """Draws the step's noise of these samples."""


@contextlib.contextmanager
def open_step(replay: Replay, window: Window, samples: Sequence[int] = ()) -> Iterator[StepParts]:
    """Redo a window but for its last step, and hand over what that one computes with; in the batch's order.

    `samples`: only these of the batch. Raises UserError where one is not in it.
    """
    with replay.before(window) as active:
        numbers = replay.session.sampler.batch(window.stop - 1)
        if samples and (missing := sorted({*samples} - {*numbers.tolist()})):
            raise UserError(f"sample {missing[0]}: is not in step {window.stop} of {window.phase}")
        numbers = numbers[np.isin(numbers, samples)] if samples else numbers
        host = to_tensors(replay.session.splits["train"].fetch(numbers), pin=False)
        batch, step = active.stepper.hand_over(window.stop - 1, host)
        yield StepParts(active.strategy.unwrapped, batch, step)


def figures_of(rows: Tensor) -> np.ndarray:
    """(2, n) fp64 of (n, width): the norm of each row, and its product with signs, always the same."""
    signs = 1 - 2 * (torch.arange(rows.shape[1], device=rows.device) * 2654435761 % 7919 % 2)
    found = torch.stack([torch.linalg.vector_norm(rows, dim=1), rows @ signs.to(rows)])
    return np.asarray(found.cpu().double())


class ModuleRecorder:
    """Hooks on all modules of a model while a step runs; `bind` says which samples a micro-batch has."""

    def __init__(self, samples: int, rows_per_sample: int = 1) -> None:
        """`samples` of the global batch."""
        self.samples, self.rows_per_sample = samples, rows_per_sample
        self._seen: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
        """(name, direction) -> (places, figures (2, rows)) of each micro-batch."""
        self.bind(None)

    def bind(self, places: np.ndarray | None) -> None:
        """The places in the global batch of the next forward pass; None: it is not recorded."""
        self._places, self._calls = places, Counter[str]()

    @contextlib.contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        """Record what the model's modules compute within."""
        modules = [(name, module) for name, module in model.named_modules() if name]
        handles = [m.register_forward_hook(partial(self._record_output, name)) for name, m in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def outputs(self) -> Outputs:
        """All outputs, by sample of the global batch."""
        keys = sorted(self._seen, key=lambda key: key[1] == BACKWARD)
        return {key: self._joined(*zip(*self._seen[key], strict=True)) for key in keys}

    def _joined(self, places: Sequence[np.ndarray], figures: Sequence[np.ndarray]) -> np.ndarray:
        order, (norms, products) = np.concatenate(places), np.concatenate(figures, axis=1)
        if len(order) == len(norms) == self.samples:
            return np.stack([norms, products])[:, np.argsort(order)]
        return np.array([[np.sqrt(np.square(norms).sum())], [products.sum()]])

    def _record_output(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        tensor = _first_tensor(output)
        if tensor is None or self._places is None:
            return
        self._calls[name] += 1
        key = name if self._calls[name] == 1 else f"{name}#{self._calls[name]}"
        self._add(key, FORWARD, self._places, tensor)
        if tensor.requires_grad:
            tensor.register_hook(partial(self._add, key, BACKWARD, self._places))

    def _add(self, name: str, direction: str, places: np.ndarray, tensor: Tensor) -> None:
        by_sample = tensor.ndim > 0 and tensor.shape[0] == len(places) * self.rows_per_sample > 0
        rows = tensor.detach().float().reshape(len(places) if by_sample else 1, -1)
        self._seen[name, direction].append((places if by_sample else places[:0], figures_of(rows)))


def _first_tensor(output: Any) -> Tensor | None:
    """The first tensor of floats in what a module returns."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() and output.numel() else None
    parts = (
        output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    )
    return next((tensor for tensor in map(_first_tensor, parts) if tensor is not None), None)


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
            if (found := parameter.grad) is not None:
                values = found.coalesce().values() if found.is_sparse else found
                gradients[name] = float(torch.linalg.vector_norm(values.detach().float()))
        return observe(model, step)

    task.loss, task.observe = bound, seen  # type: ignore[method-assign]
    try:
        yield
    finally:
        del task.loss, task.observe
