"""One optimizer step: the gradient of a global batch, however it is cut, and one update by it.

A loss comes as a sum with its unit (`Loss`). Divided by the unit's weight in the whole global batch, the
shares of all micro-batches on all ranks add up to the loss of the batch, and their gradients to its gradient:
neither the number of micro-batches nor that of ranks can change what is learnt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobatch.core.errors import TrainingError
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.loading.device_copies import HostCopy, to_device
from isobatch.engine.loading.loader import LoadedStep
from isobatch.engine.optimization.schedule import learning_rate
from isobatch.engine.train.figures import StepOutput
from isobatch.engine.train.first_step import agree_on_names, check_loss_form
from isobatch.engine.train.hooks import Hooks
from isobatch.engine.train.state import StepLayout, Training
from isobatch.models.base import Batch, Loss
from isobatch.models.capabilities import MeasuresBatch, SeesGradients

FIRST = np.zeros(1, np.int64)
"""The place in the batch that a dummy micro-batch says it has."""

SUM_DTYPES = {"mps": torch.float32}
"""The number format of sums over the global batch, by the kind of device; float64 on all others."""


def train_step(state: Training, batch: LoadedStep, hooks: Hooks) -> StepOutput:
    """One optimizer step. What it returns is on the device still: nothing here waits for it."""
    task, strategy, world = state.task, state.strategy, state.world
    work, step, part = batch.work, batch.work.step, world.recorder.part
    dtype = SUM_DTYPES.get(world.device.type, torch.float64)
    schedule, more = state.schedule, dict[str, Any]()
    rate = learning_rate(task.recipe, schedule.lr, step, schedule.steps, schedule.steps_per_epoch)
    see_gradients = partial(_see_gradients, state, step, hooks, more) if hooks.see_gradients else None

    if isinstance(task, MeasuresBatch):
        measure_batch(state, batch)
    norm = None
    while norm is None:  # fp16 overflowed: the same step again, with a smaller loss scale
        sums = Sums(state.layout, world.device, dtype)
        with strategy.accumulate_gradients(), state.whole_step(step):
            last = len(work.micro_batches) - 1
            for number, host, positions, sums.weight in computed(state, batch):
                world.mark_progress(f"step {step + 1}, micro-batch {number + 1} of {last + 1}")
                with (
                    state.bound(step, number, host, positions, sums.record) as context,
                    strategy.forward_backward(number == last),
                ):
                    with part("forward"):
                        with world.autocast():
                            losses = task.loss(strategy.model, to_device(host, world.device), context)
                        total = sums.add(losses, work.unit_weights)
                    with part("backward"):
                        strategy.backward(total)
        if state.binding.packing is not None:
            state.binding.packing.bind(None)
        with part("optimizer"):  # gradients are reduced, seen, clipped and applied
            norm = strategy.step_optimizer(rate, see_gradients)
    hooks.updated(state, step + 1)
    # One reduction carries what all ranks must know of the step: losses, recorded sums, and the hooks' votes.
    packed = sums.reduce(world, hooks.vote(state, step + 1))
    recorded = state.layout.recorded_in(packed) if state.layout.recorded_shapes else {}
    copies = HostCopy(packed), HostCopy(norm)
    output = StepOutput(batch, rate, *copies, state.layout.names, hooks.votes, more)
    # A task that prunes or grows its model does so here, before the next forward pass: nothing may hold on to
    # a strategy that is made anew.
    del strategy
    output.change = state.after_step(step, recorded, more.__setitem__)
    if output.change is not None and output.change.keep:
        hooks.cut(state, output.change.keep)
    return output


def computed(state: Training, batch: LoadedStep) -> Iterator[tuple[int, Batch, np.ndarray, float]]:
    """(number, samples, their places in the batch, weight) of each micro-batch that this rank computes.

    A rank that has no samples computes one with weight zero where the strategy's passes are collectives: the
    others wait for it in them.
    """
    for number, (micro, host) in enumerate(zip(batch.work.micro_batches, batch.batches, strict=True)):
        if len(micro.positions):
            yield number, host, micro.positions, 1.0
        elif state.strategy.computes_dummies:
            yield number, host, FIRST, 0.0


@torch.no_grad()
def measure_batch(state: Training, batch: LoadedStep) -> None:
    """Let the task measure the whole global batch before its losses. On all ranks."""
    task, strategy, world = state.task, state.strategy, state.world
    assert isinstance(task, MeasuresBatch), "the caller has asked"
    dtype = SUM_DTYPES.get(world.device.type, torch.float64)
    step, found = batch.work.step, torch.zeros((), dtype=dtype, device=world.device)
    with world.recorder.part("forward"):
        for number, host, positions, weight in computed(state, batch):
            world.mark_progress(f"step {step + 1}, before micro-batch {number + 1}")
            with (
                state.bound(step, number, host, positions, lambda *_: None) as context,
                strategy.forward_backward(last=False),
                world.autocast(),
            ):
                value = task.measure(strategy.model, to_device(host, world.device), context)
            if weight:
                found += value
        state.binding.measured = world.all_reduce_sum(found) / len(batch.work.samples)


@dataclass(slots=True)
class Sums:
    """What a rank adds up over the micro-batches of a step: its shares of the losses, and recorded sums."""

    layout: StepLayout
    device: torch.device
    dtype: torch.dtype
    weight: float = 1.0
    """Of the micro-batch that is computed: 0 for a dummy."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    recorded: dict[str, Tensor] = field(default_factory=dict)

    def add(self, losses: Mapping[str, Loss], unit_weights: Mapping[str, float]) -> Tensor:
        """The micro-batch's share of the step's total loss, 0-d, whose gradient is to be taken.

        A unit that weighs nothing in this batch counts nothing. Raises TrainingError for an unknown unit.
        """
        if not self.layout.names:
            check_loss_form(losses)
        total = None
        for name, loss in losses.items():
            if loss.unit not in unit_weights:
                known = ", ".join(unit_weights)
                raise TrainingError(f"loss() counts in {loss.unit!r}, and this data weighs {known}")
            weight = unit_weights[loss.unit]
            share = loss.sum * (1 / weight if weight else 0.0) * self.weight
            before, own = self.losses.get(name), share.detach()
            self.losses[name] = own if before is None else before + own
            total = share if total is None else total + share
        if total is None:
            raise TrainingError("loss() returned no part: return all parts always")
        return total

    def record(self, name: str, value: Tensor) -> None:
        """Add what loss() records."""
        share = value.detach().to(self.dtype)
        share = share if self.weight == 1 else share * self.weight
        self.recorded[name] = self.recorded[name] + share if name in self.recorded else share

    def reduce(self, world: Communicator, votes: Sequence[float]) -> Tensor:
        """1-d: losses, recorded sums, votes, summed over ranks. What this rank has not seen is zero.

        Raises TrainingError where names or shapes are not those of the first step.
        """
        layout = self.layout
        if not layout.names:
            agree_on_names(layout, world, self.losses, self.recorded)
        if self.losses.keys() - layout.names:
            new = ", ".join(self.losses.keys() - layout.names)
            raise TrainingError(f"loss() returned {new} at a later step only: return all parts always")
        shapes = layout.recorded_shapes
        for name, value in self.recorded.items():
            if tuple(value.shape) != shapes.get(name):
                raise TrainingError(
                    f"loss() recorded {name} at a later step only, or in another shape: record the same"
                    " always"
                )
        zeros, flat = partial(torch.zeros, dtype=self.dtype, device=self.device), []
        for name in layout.names:
            own = self.losses.get(name)
            flat.append(zeros(1) if own is None else own.to(self.dtype).reshape(-1))
        for name, shape in shapes.items():
            own = self.recorded.get(name)
            flat.append(zeros(math.prod(shape)) if own is None else own.reshape(-1))
        host = torch.tensor(votes, dtype=self.dtype, pin_memory=self.device.type == "cuda")
        flat.append(host.to(self.device, non_blocking=True))
        return world.all_reduce_sum(torch.cat(flat))


def _see_gradients(state: Training, step: int, hooks: Hooks, figures: dict[str, Any]) -> None:
    """Let the task and the hooks look at whole gradients; what they find goes into `figures`."""
    if isinstance(state.task, SeesGradients):
        figures |= state.task.observe(state.model, state.context(step))
    figures |= hooks.gradients(state, step + 1)
