"""What is checked in the first step of a phase alone: the form and names of what loss() returns, and that its
parts are sums, not means.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isobatch.core.atomic_files import NOT_FINITE
from isobatch.core.errors import TrainingError
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.loading.device_copies import to_device
from isobatch.engine.loading.loader import LoadedStep
from isobatch.engine.model_setup.compile_model import uncompiled
from isobatch.engine.runs.gpu_monitor import READINGS
from isobatch.engine.train.figures import FIELDS
from isobatch.engine.train.state import StepLayout, Training, generator_states, has_drawn
from isobatch.models.base import Loss

EXPECTED = "return {name: Loss(sum, unit)}"
RESERVED = {*FIELDS, *READINGS, "memory_bytes", "mfu", "split", "final", "invariance", "seal"} - {"loss"}
RESERVED |= {"checkpoint", "digest", "exported", "summary", "log_every", "ledger", "data", "decisions"}
RESERVED |= {NOT_FINITE, "rounding"}
"""Fields of a row of metrics.jsonl, which a loss must not be named after."""
TOLERANCE = 1e-2
HALF_PRECISION_TOLERANCE = 1e-1
"""Largest relative difference of a sum; the means of two halves together are twice the mean of all."""
NEGLIGIBLE = 1e-6
"""Losses below this are not compared."""

LossValues = dict[str, float]
"""Name of a part -> its sum."""


def check_sums(state: Training, batch: LoadedStep) -> None:
    """Raise TrainingError unless the losses of halves of this rank's first micro-batch add up to its own.

    Nothing that trains changes. Not in a phase that rounds to levels: float noise moves some values of a few
    samples to the next one, and their losses by percents.
    """
    if any(phase.rounds for phase in state.task.phases() if phase.name == state.schedule.name):
        return
    micro, host = batch.work.micro_batches[0], batch.batches[0]
    middle = middle_row(micro.positions, state.task.cohort)
    if not middle or state.strategy.equal_counts:  # then no rank may compute more than others
        return
    device = state.world.device

    def compute(rows: slice) -> LossValues:
        part = {name: column[rows] for name, column in host.items()}
        state.binding.bind(batch.work.step, part, device)
        context = state.context(batch.work.step, positions=micro.positions[rows], host=part)
        with state.world.autocast():
            losses = state.task.loss(state.strategy.model, to_device(part, device), context)
        check_loss_form(losses)
        return {name: float(part.sum.detach()) for name, part in losses.items()}

    with state.binding.preserve_state(), preserve_state(state.strategy.model, device):
        before = generator_states(device)
        whole = compute(slice(None))
        if not has_drawn(before, device):  # else no two passes are the same
            half = state.world.plan.precision != "fp32"
            refuse_means(whole, compute, middle, len(micro.positions), half)


def agree_on_names(
    layout: StepLayout, world: Communicator, losses: Mapping[str, Tensor], recorded: Mapping[str, Tensor]
) -> None:
    """Gather the names of losses and the shapes of what is recorded from all ranks, and lay them out."""
    own = (sorted(losses), {name: tuple(value.shape) for name, value in recorded.items()})
    gathered = world.all_gather_objects(own)
    layout.names = sorted({name for names, _ in gathered for name in names})
    layout.recorded_shapes = dict(sorted({k: v for _, shapes in gathered for k, v in shapes.items()}.items()))
    refuse_names(layout.names)


def check_loss_form(losses: Any) -> None:
    """Raise TrainingError unless `losses` maps names to Loss with 0-d tensors."""
    if not isinstance(losses, Mapping):
        raise TrainingError(f"loss() returned a {type(losses).__name__}: {EXPECTED}")
    if not losses:
        raise TrainingError(f"loss() returned no part: {EXPECTED}")
    for name, part in losses.items():
        if not isinstance(part, Loss):
            raise TrainingError(f"loss() part {name} is a {type(part).__name__}, not a Loss: {EXPECTED}")
        if not isinstance(part.sum, Tensor) or part.sum.ndim:
            found = f"of shape {tuple(part.sum.shape)}" if isinstance(part.sum, Tensor) else repr(part.sum)
            raise TrainingError(f"loss() part {name} is {found}, not a tensor of one number: {EXPECTED}")
    if torch.is_grad_enabled() and not any(part.sum.requires_grad for part in losses.values()):
        raise TrainingError(
            "loss() has no gradient: no parameter that trains leads to it; are .detach(), .item() or"
            " torch.no_grad() in the way?"
        )


def refuse_names(names: list[str]) -> None:
    """Raise TrainingError where a part is named like another field of metrics.jsonl."""
    taken = RESERVED | {"loss"} if len(names) > 1 else RESERVED
    if clashing := [name for name in names if name in taken]:
        what = "the sum of all parts" if clashing[0] == "loss" else "another field of metrics.jsonl"
        part = f"a part called {clashing[0]}, the name of {what}"
        raise TrainingError(f"loss() has {part}: call it something else")


def middle_row(positions: np.ndarray, cohort: int) -> int:
    """The row that divides a micro-batch into two halves of whole cohorts; 0 where it is one cohort.

    `positions` (B,): of its samples in the global batch.
    """
    borders = np.flatnonzero(np.diff(positions // cohort)) + 1
    return int(borders[(len(borders) - 1) // 2]) if len(borders) else 0


def refuse_means(
    values: LossValues, compute: Callable[[slice], LossValues], middle: int, count: int, half_precision: bool
) -> None:
    """Raise TrainingError unless the losses of a micro-batch's two halves add up to `values`, those of all.

    `compute`: losses of some rows of the micro-batch of `count` samples; the second half begins at row
    `middle`. `half_precision`: the arithmetic is in 16 bits.
    """
    tolerance = HALF_PRECISION_TOLERANCE if half_precision else TOLERANCE
    halves = [compute(slice(middle)), compute(slice(middle, None))]
    name = _not_a_sum(values, halves, tolerance)
    # If the recomputed micro-batch differs too, the loss has unkeyed noise, and the halves prove nothing.
    if name is None or _not_a_sum(values, [compute(slice(None))], tolerance):
        return
    raise TrainingError(
        f"loss() part {name} is not a sum over samples: a micro-batch of {count} gives {values[name]:.6g},"
        f" its halves give {sum(half.get(name, 0.0) for half in halves):.6g} together; return the sum and"
        " name its unit, or declare cohort if samples need each other"
    )


def _not_a_sum(values: LossValues, pieces: list[LossValues], tolerance: float) -> str | None:
    """The name of a loss that is not the sum of its pieces; None where all are."""
    for name, value in values.items():
        parts = [piece.get(name, 0.0) for piece in pieces]
        # Terms of both signs may cancel: the difference is relative to the sum of their magnitudes.
        scale = max(abs(value), sum(map(abs, parts)))
        if scale > NEGLIGIBLE and abs(sum(parts) - value) > tolerance * scale:
            return name
    return None


@contextlib.contextmanager
def preserve_state(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Forward passes inside take no gradients; the model's buffers and torch's generators are restored.

    A loss that itself takes derivatives fails without gradients: that error ends the context silently.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    generators = torch.random.fork_rng([device] if device.type == "cuda" else [])
    try:
        with torch.no_grad(), generators, uncompiled(model):
            yield
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    finally:
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.detach().copy_(buffers[name])
