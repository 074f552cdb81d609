"""One step of a run again, with what is seen in it: losses by sample, modules, gradients, weights.

Of each output of a module two numbers a sample: its norm, and its product with fixed signs. The product
moves with the output's direction too, by about the norm of the change, so that two outputs of one norm are
told apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from isobatch.core.errors import UserError
from isobatch.engine.loading.device_copies import to_device, to_tensors
from isobatch.engine.train.figures import LossAndNorm, StepRow, step_rows
from isobatch.engine.train.first_step import preserve_state
from isobatch.engine.train.hooks import Hooks, Seen
from isobatch.engine.train.loop import run_phase
from isobatch.engine.train.state import Training
from isobatch.engine.train.step import Sums, measure_batch
from isobatch.engine.verification.replay import Replay
from isobatch.engine.verification.windows import Window
from isobatch.models.base import StepContext
from isobatch.models.capabilities import MeasuresBatch

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
    builder, state = replay.builder, replay.state
    builder.schedules = [
        dataclasses.replace(one, left_out=one.left_out - {window.stop}) if one.name == window.phase else one
        for one in builder.schedules
    ]
    rows = (row for row in step_rows(replay.run.metrics) if row.place == (window.phase, window.stop))
    with replay.before(window):
        samples = state.sampler.batch(window.stop - 1)
        weights = {
            name: figures_of(p.detach().cpu().double().reshape(1, -1))[:, 0]
            for name, p in state.model.named_parameters()
        }
        found = losses_alone(state, window.stop - 1) if alone else []
        watch = Watch(state, len(samples))
        run_phase(state, Hooks([watch]), window.stop - 1, window.stop)
        (seen,) = watch.figures
        return ObservedStep(
            window,
            samples,
            (seen.loss, seen.norm),
            seen.output.rate,
            next(rows, None),
            found,
            watch.recorder.outputs(),
            watch.gradients,
            weights,
        )


class Watch(Seen):
    """Records the outputs of all modules in a step, and the norms of its whole gradients before clipping."""

    def __init__(self, state: Training, samples: int) -> None:
        """`samples` of the global batch."""
        super().__init__()
        self.recorder = ModuleRecorder(state, samples)
        self.gradients: dict[str, float] = {}

    def around(self, state: Training, step: int) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        return self.recorder.hooked(state.model)

    def on_gradients(self, state: Training, step: int) -> None:  # noqa: ARG002
        for name, parameter in state.model.named_parameters():
            if (found := parameter.grad) is not None:
                values = found.coalesce().values() if found.is_sparse else found
                self.gradients[name] = float(torch.linalg.vector_norm(values.detach().float()))


def losses_alone(state: Training, step: int) -> list[tuple[np.ndarray, dict[str, float]]]:
    """(places in the global batch, share of each loss of the step) of this rank's samples, or cohorts, each
    computed alone. `step` counts from 0. Nothing that trains changes.
    """
    model, cohort, found = state.model, state.task.cohort, []
    (loaded,) = state.batches(step, step + 1)
    work = loaded.work
    with state.binding.preserve_state(), preserve_state(model, state.world.device):
        if isinstance(state.task, MeasuresBatch):
            measure_batch(state, loaded)
        for number, (micro, host) in enumerate(zip(work.micro_batches, loaded.batches, strict=True)):
            for start in range(0, len(micro.positions), cohort):
                rows = slice(start, start + cohort)
                part = {name: column[rows] for name, column in host.items()}
                places, sums = micro.positions[rows], Sums(state.layout, state.world.device, torch.float64)
                with state.bound(step, number, part, places, sums.record) as context:
                    with state.world.autocast():
                        losses = state.task.loss(model, to_device(part, state.world.device), context)
                    sums.add(losses, work.unit_weights)
                found.append((places, {name: float(share) for name, share in sums.losses.items()}))
    return found


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
    with replay.before(window) as state:
        step, numbers = window.stop - 1, state.sampler.batch(window.stop - 1)
        if samples and (missing := sorted({*samples} - {*numbers.tolist()})):
            raise UserError(f"sample {missing[0]}: is not in step {window.stop} of {window.phase}")
        numbers = numbers[np.isin(numbers, samples)] if samples else numbers
        host = to_tensors(state.splits["train"].fetch(numbers), pin=False)
        with state.bound(step, 0, host, np.arange(len(numbers)), lambda *_: None) as context:
            yield StepParts(state.model, to_device(host, state.world.device), context)


def figures_of(rows: Tensor) -> np.ndarray:
    """(2, n) fp64 of (n, width): the norm of each row, and its product with signs, always the same."""
    signs = 1 - 2 * (torch.arange(rows.shape[1], device=rows.device) * 2654435761 % 7919 % 2)
    found = torch.stack([torch.linalg.vector_norm(rows, dim=1), rows @ signs.to(rows)])
    return np.asarray(found.cpu().double())


class ModuleRecorder:
    """Hooks on all modules of a model while a step runs; passes without gradients are checks."""

    def __init__(self, state: Training, samples: int) -> None:
        """`samples` of the global batch."""
        self.binding, self.samples, self.rows_per_sample = state.binding, samples, state.task.rows_per_sample
        self._seen: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
        """(name, direction) -> (places, figures (2, rows)) of each micro-batch."""
        self._places: np.ndarray | None = None
        """In the global batch, of the samples of the micro-batch that is computed."""
        self._calls = Counter[str]()
        """Module -> its calls in this micro-batch."""

    @contextlib.contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        """Record what the model's modules compute within."""
        with contextlib.ExitStack() as handles:
            for name, module in model.named_modules():
                if name:
                    handles.enter_context(module.register_forward_hook(partial(self._record_output, name)))
            yield

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
        if tensor is None or not torch.is_grad_enabled():
            return
        if self._places is not self.binding.positions:
            self._places, self._calls = self.binding.positions, Counter[str]()
        assert self._places is not None
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
