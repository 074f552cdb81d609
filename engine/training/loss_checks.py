"""What loss() must return, held against what a task returns in its first step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isobatch.core.errors import TrainingError
from isobatch.models.base import Loss

FORM = "return {name: Loss(sum, unit)}"
RESERVED = {"phase", "step", "epoch", "lr", "grad_norm", "samples", "tokens", "padding", "memory_bytes"}
RESERVED |= {"step_seconds", "data_seconds", "samples_per_second", "tokens_per_second"}
RESERVED |= {"gpu_utilisation", "power_watts", "chain", "split", "final", "invariance", "seal"}
"""Fields of a row of metrics.jsonl that are not a loss's to write."""
TOLERANCE = 1e-2
HALF_PRECISION_TOLERANCE = 1e-1
"""A mean differs by a half."""
NEGLIGIBLE = 1e-6

LossValues = dict[str, float]


def refuse_other_forms(losses: Any) -> None:
    """`losses` must be named sums."""
    if not isinstance(losses, Mapping):
        raise TrainingError(f"loss() returned a {type(losses).__name__}: {FORM}")
    if not losses:
        raise TrainingError(f"loss() returned no part: {FORM}")
    for name, part in losses.items():
        if not isinstance(part, Loss):
            raise TrainingError(f"loss() part {name} is a {type(part).__name__}, not a Loss: {FORM}")
        if not isinstance(part.sum, Tensor) or part.sum.ndim:
            found = f"of shape {tuple(part.sum.shape)}" if isinstance(part.sum, Tensor) else repr(part.sum)
            raise TrainingError(f"loss() part {name} is {found}, not a tensor of one number: {FORM}")


def refuse_names(names: list[str]) -> None:
    """No part may stand where a row of metrics has something else."""
    taken = RESERVED | {"loss"} if len(names) > 1 else RESERVED
    if odd := [name for name in names if name in taken]:
        what = "the sum of all parts" if odd[0] == "loss" else "another field of metrics.jsonl"
        raise TrainingError(f"loss() has a part called {odd[0]}, the name of {what}: call it something else")


def middle_row(places: np.ndarray, cohort: int) -> int:
    """The row at which a micro-batch falls into two halves of whole cohorts; 0 where it is one cohort."""
    borders = np.flatnonzero(np.diff(places // cohort)) + 1
    return int(borders[(len(borders) - 1) // 2]) if len(borders) else 0


def loss_values(losses: Mapping[str, Loss]) -> LossValues:
    return {name: float(part.sum.detach()) for name, part in losses.items()}


def refuse_means(
    whole: LossValues, compute: Callable[[slice], LossValues], middle: int, count: int, halved: bool
) -> None:
    """`compute` gives the parts of some rows; those of two halves must add up to the `whole` of `count`.

    `halved`: the arithmetic is in 16 bits.
    """
    tolerance = HALF_PRECISION_TOLERANCE if halved else TOLERANCE
    halves = [compute(slice(middle)), compute(slice(middle, None))]
    name = _not_a_sum(whole, halves, tolerance)
    if name is None or _not_a_sum(whole, [compute(slice(None))], tolerance):
        return  # what is not even itself again has noise that nobody saw
    raise TrainingError(
        f"loss() part {name} is not a sum over samples: a micro-batch of {count} gives {whole[name]:.6g}, its"
        f" halves give {sum(half.get(name, 0.0) for half in halves):.6g} together; return the sum and name"
        " its unit, or declare cohort if samples need each other"
    )


def _not_a_sum(whole: LossValues, pieces: list[LossValues], tolerance: float) -> str | None:
    """The name of a part that is not what the pieces come to together; None where all are."""
    for name, value in whole.items():
        found = [piece.get(name, 0.0) for piece in pieces]
        # Parts of either sign may cancel: they are measured by what was added up.
        scale = max(abs(value), sum(map(abs, found)))
        if scale > NEGLIGIBLE and abs(sum(found) - value) > tolerance * scale:
            return name
    return None


@contextlib.contextmanager
def leaving_no_trace(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Forwards inside take no gradients, and change no buffer and no generator of torch's.

    A loss that takes derivatives itself cannot be computed so: it ends what is inside.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    generators = torch.random.fork_rng([device] if device.type == "cuda" else [])
    try:
        with torch.no_grad(), generators, _uncompiled(model):
            yield
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    finally:
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.detach().copy_(buffers[name])


def _uncompiled(model: nn.Module) -> AbstractContextManager[None]:
    """Another shape of batch is not worth another compilation."""
    if any(module._compiled_call_impl is not None for module in model.modules()):  # noqa: SLF001  no public way
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()
