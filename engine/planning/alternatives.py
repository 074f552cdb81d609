"""What stands beside a plan: settings that use less memory, and what a step waits for its samples."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from isobatch.core.measures import format_bytes
from isobatch.core.optimizers import OPTIMIZERS
from isobatch.engine.planning.calibration import HOST_LINK, PAGEABLE_SHARE, WORKER_BATCH_SECONDS
from isobatch.engine.planning.memory_model import ExecutionChoices, memory_footprint

if TYPE_CHECKING:
    from collections.abc import Callable

    from isobatch.core.facts import Facts
    from isobatch.core.plan import Plan
    from isobatch.core.recipe import Recipe
    from isobatch.engine.loading.data_rate import DataRate
    from isobatch.models.base import ModelSize, Task


def memory_alternatives(
    make: Callable[[Recipe], Task], recipe: Recipe, facts: Facts, model_size: ModelSize, plan: Plan
) -> list[dict[str, Any]]:
    """Predicted peak bytes per process under the plan, and under each memory-saving setting it does not use.

    All rows are for the plan's own micro-batch; the first is the plan itself. Each row but activation
    checkpointing is another recipe, which learns something else. `make`: recipe -> its task.
    """
    choices = ExecutionChoices(
        **{f.name: getattr(plan, f.name) for f in dataclasses.fields(ExecutionChoices)}
    )

    def peak(recipe: Recipe, size: ModelSize, choices: ExecutionChoices) -> int:
        return memory_footprint(recipe, size, choices, plan.micro_batch_tokens, facts.longest).peak

    # The plan's own figure is of a typical micro-batch.
    full = peak(recipe, model_size, choices)
    offset = plan.predicted_peak_memory_bytes - full
    unchunked = peak(recipe, dataclasses.replace(model_size, head_bytes=0), choices)
    chunks = f"; {format_bytes(unchunked - full)} less for logits made in chunks" if unchunked > full else ""
    rows = [("", f"as planned{chunks}", full)]
    if not plan.activation_checkpointing and model_size.layers:
        recomputed = dataclasses.replace(choices, activation_checkpointing=True)
        if (less := peak(recipe, model_size, recomputed)) < full:
            rows.append(("--activation-checkpointing on", "the same recipe, a third more arithmetic", less))
    if recipe.optimizer == "adamw" and not choices.traits.flat_shards:
        for name, traits in ((name, traits) for name, traits in OPTIMIZERS.items() if traits.remark):
            other = dataclasses.replace(recipe, optimizer=name)
            rows.append((f"--optimizer {name}", traits.remark, peak(other, model_size, choices)))
    for flags, values in make(recipe).memory_saving_flags().items():
        other = dataclasses.replace(recipe, options={**recipe.options, **values})
        size, held, remark = make(other).model_size(facts), choices, ""
        if size.why_unshardable and choices.traits.shards:
            held = dataclasses.replace(choices, strategy="single" if choices.processes == 1 else "ddp")
            remark = f"the whole model in each process (--strategy {held.strategy})"
        rows.append((flags, remark, peak(other, size, held)))
    return [{"flags": f, "peak_memory_bytes": offset + found, "remark": why} for f, why, found in rows]


def seconds_of_waiting(plan: Plan, recipe: Recipe, facts: Facts, rate: DataRate) -> float:
    """Seconds that a step is longer by what is not hidden of the reading of its samples.

    One thread or `workers` processes read while the step before computes. On a CPU whose cores all compute, a
    step takes longer by as long as reading keeps a core busy: the other threads wait for the one that lost
    its core (measured: 1.13, 1.33 and 2.04 times at 0.1, 0.3 and 1.0 of a step).
    """
    samples = math.ceil(recipe.batch_size / plan.processes)
    compute, reading = plan.predicted_step_seconds, samples * rate.sample_seconds
    if plan.device == "cpu":
        compute += samples * rate.busy_seconds
    elif not plan.pin_memory:
        compute += samples * rate.sample_bytes / (PAGEABLE_SHARE * HOST_LINK)
    if plan.workers:
        batches = math.ceil(samples * facts.mean_length / plan.micro_batch_tokens)
        reading = reading / plan.workers + batches * WORKER_BATCH_SECONDS
    return max(compute, reading) - plan.predicted_step_seconds
