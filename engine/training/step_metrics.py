"""Metrics of a step: its row of metrics.jsonl, memory, GPU utilisation and power."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from isobatch.engine.optimization.schedule import PhaseSchedule
    from isobatch.engine.runs.summary import Progress
    from isobatch.engine.training.train_step import StepResult


def step_row(
    result: StepResult, losses: dict[str, float], norm: float, progress: Progress, schedule: PhaseSchedule
) -> dict[str, Any]:
    """A step's row of metrics.jsonl. Of several losses each has a field, besides `loss`, their sum."""
    seconds, work = max(1e-9, result.seconds), result.loaded.work
    row = {
        "phase": schedule.name,
        "step": progress.step,
        "epoch": round(progress.step / schedule.steps_per_epoch, 6),
        "loss": sum(losses.values()),
        "lr": result.rate,
        "grad_norm": norm,
        "samples": progress.samples,
        "tokens": progress.tokens,
        "step_seconds": round(seconds, 6),
        "data_seconds": round(result.loaded.wait_seconds, 6),
        "samples_per_second": round(len(work.samples) / seconds, 3),
        "tokens_per_second": round(work.tokens / seconds, 3),
        "padding": round(work.padding, 4),
        "chain": progress.chain,
    }
    return {**losses, **row} if len(losses) > 1 else row


def tracked_values(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row that a tracker draws: floats, and each of a list of floats under NAME/NUMBER."""
    found = {name: value for name, value in row.items() if isinstance(value, float)}
    for name, value in row.items():
        if isinstance(value, list) and all(isinstance(one, float) for one in value):
            found |= {f"{name}/{number}": one for number, one in enumerate(value)}
    return found


def memory_bytes(device: torch.device) -> int:
    """Peak bytes so far: reserved by the allocator on a GPU, resident memory of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def gpu_reading(device: torch.device) -> dict[str, float]:
    """GPU utilisation (percent) and power (watts); empty without a CUDA GPU or its management library."""
    if device.type != "cuda":
        return {}
    try:
        return {
            "gpu_utilisation": torch.cuda.utilization(device),
            "power_watts": torch.cuda.power_draw(device) / 1000,
        }
    except (ModuleNotFoundError, RuntimeError):
        return {}
