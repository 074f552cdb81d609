"""What the loader's settings change: seconds of a step, and memory for the batches that are ready."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from isobatch.engine.planning.calibration import HOST_LINK, PAGEABLE_SHARE, WORKER_BATCH_SECONDS

if TYPE_CHECKING:
    from isobatch.core.facts import Facts
    from isobatch.core.plan import Plan
    from isobatch.core.recipe import Recipe
    from isobatch.engine.loading.data_rate import DataRate

PREFETCHES = (2, 8)
"""Micro-batches kept ready that are compared."""


def step_with_reading(
    plan: Plan, recipe: Recipe, facts: Facts, rate: DataRate, workers: int, pinned: bool
) -> float:
    """Seconds of a step with what is not hidden of the reading of its samples.

    One thread or `workers` processes read while the step before computes. On a CPU whose cores all compute, a
    step takes longer by as long as reading keeps a core busy: the other threads wait for the one that lost
    its core (measured: 1.13, 1.33 and 2.04 times at 0.1, 0.3 and 1.0 of a step).
    """
    samples = math.ceil(recipe.batch_size / plan.processes)
    compute, reading = plan.predicted_step_seconds, samples * rate.sample_seconds
    if plan.device == "cpu":
        compute += samples * rate.busy_seconds
    elif not pinned:
        compute += samples * rate.sample_bytes / (PAGEABLE_SHARE * HOST_LINK)
    if workers:
        batches = math.ceil(samples * facts.mean_length / plan.micro_batch_tokens)
        reading = reading / workers + batches * WORKER_BATCH_SECONDS
    return max(compute, reading)


def seconds_of_waiting(plan: Plan, recipe: Recipe, facts: Facts, rate: DataRate) -> float:
    """Seconds that the plan's own way of reading adds to a step."""
    seconds = step_with_reading(plan, recipe, facts, rate, plan.workers, plan.pin_memory)
    return seconds - plan.predicted_step_seconds


def reading_alternatives(plan: Plan, recipe: Recipe, facts: Facts, rate: DataRate) -> list[dict[str, Any]]:
    """Rows of (flags, step_seconds, ready_bytes, remark); the first is the plan itself."""
    batch = plan.micro_batch_tokens / max(1.0, facts.mean_length) * rate.sample_bytes
    batch = min(batch, recipe.batch_size * rate.sample_bytes)

    def row(flags: str, remark: str, workers: int, prefetch: int, pinned: bool) -> dict[str, Any]:
        return {
            "flags": flags,
            "step_seconds": step_with_reading(plan, recipe, facts, rate, workers, pinned),
            "ready_bytes": math.ceil(prefetch * max(1, workers) * batch),
            "remark": remark,
        }

    workers, prefetch, pinned = plan.workers, plan.prefetch, plan.pin_memory
    rows = [row("", "as planned", workers, prefetch, pinned)]
    for count in sorted({0, 1, 2, min(8, os.cpu_count() or 1)} - {workers}):
        rows.append(row(f"--workers {count}", "" if count else "read in a thread", count, prefetch, pinned))
    for count in (count for count in PREFETCHES if count != prefetch):
        rows.append(row(f"--prefetch {count}", "helps where reading is uneven", workers, count, pinned))
    flags = f"--pin-memory {'off' if pinned else 'on'}"
    remark = "uncalibrated" if plan.device == "cuda" else "nothing is copied to a device"
    return [*rows, row(flags, remark, workers, prefetch, not pinned)]
