"""What the machine does during a step: its memory; of a GPU, FLOP utilisation and readings of its driver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from isobatch.core.plan import Plan
from isobatch.engine.loading.loader import StepWork
from isobatch.engine.machine.gpu_table import find_gpu_model
from isobatch.engine.runs.gpu_monitor import GpuMonitor
from isobatch.engine.runs.peak_memory import PeakMemory
from isobatch.engine.train.figures import StepFigures
from isobatch.engine.train.hooks import Hook
from isobatch.engine.train.state import Training
from isobatch.models.base import CHANGES_SHAPE, ModelSize
from isobatch.models.flops import flops_per_token

OBSERVED_EVERY = 8
"""Steps between two looks at the memory, which read and write files of the system."""


class Memory(Hook):
    """Adds `memory_bytes` to the row of a step: the largest peak that was seen so far of this process. Freed
    memory goes back to the system.
    """

    def __init__(self, peak: PeakMemory) -> None:
        self.peak = peak

    @contextlib.contextmanager
    def phase(self, state: Training) -> Iterator[None]:  # noqa: ARG002
        self.peak.observe()
        yield
        self.peak.observe()

    def on_figures(self, figures: StepFigures) -> None:
        if figures.step % OBSERVED_EVERY == 1:
            self.peak.observe()
        figures.row["memory_bytes"] = self.peak.bytes


class Machine(Hook):
    """Adds readings of the main rank's GPU, and its MFU, to the row of a step."""

    def __init__(self, state: Training) -> None:
        """For a rank with a GPU: a task may have to build its model for its size."""
        device = state.world.device
        size = state.task.model_size(state.facts)
        self.utilisation = flop_utilisation(size, state.plan, torch.cuda.get_device_name(device))
        self.monitor = GpuMonitor(device)

    def phase(self, state: Training) -> AbstractContextManager[Any]:  # noqa: ARG002
        return self.monitor

    def on_figures(self, figures: StepFigures) -> None:
        figures.row |= self.monitor.latest()
        if self.utilisation is not None:
            used = self.utilisation(figures.output.loaded.work, figures.output.seconds)
            figures.row["mfu"] = round(used, 4)


def flop_utilisation(
    size: ModelSize, plan: Plan, device_name: str
) -> Callable[[StepWork, float], float] | None:
    """Model FLOP utilisation (MFU) of a step and its seconds, 0.45 for 45 % (Chowdhery et al. 2022, "PaLM",
    appendix B).

        MFU = tokens/s x FLOPs a token / (dense peak of the GPU at the plan's precision x processes)

    Tokens are the samples', without padding. FLOPs a token are those of `models.flops.flops_per_token`, whose
    attention term takes the length of the token's own sample (the step's real lengths, neither padded nor
    averaged over the data). What activation checkpointing computes again does not count.

    None where the peak of the CUDA device of this name or the model's FLOPs are not known: outside of the GPU
    table, on a slice of a GPU, for a model that changes its shape as it trains, and for one that is no
    transformer.
    """
    known = find_gpu_model(device_name)
    peak = known.gpu.peak_flops[plan.precision] if known else None
    counted = size.layers > 0 and size.heads > 1 and not size.recurrent_layers
    if peak is None or not counted or size.why_unshardable == CHANGES_SHAPE:
        return None
    of_all = peak * plan.processes
    return lambda work, seconds: work.tokens * flops_per_token(size, work.token_length) / (seconds * of_all)
