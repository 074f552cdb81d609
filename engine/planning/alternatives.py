"""Predicted peak memory of other settings that use less memory, listed beside a plan."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from isobatch.core.measures import format_bytes
from isobatch.core.optimizers import OPTIMIZERS
from isobatch.engine.planning.memory_model import ExecutionChoices, memory_footprint

if TYPE_CHECKING:
    from collections.abc import Callable

    from isobatch.core.facts import Facts
    from isobatch.core.plan import Plan, StrategyName
    from isobatch.core.recipe import Recipe
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
    tokens, longest = plan.micro_batch_tokens, facts.longest
    # The plan's own figure is of a typical micro-batch, and corrected by what ran here.
    full = memory_footprint(recipe, model_size, choices, tokens, longest).peak
    offset = plan.predicted_peak_memory_bytes - full

    def row(
        flags: str, remark: str, recipe: Recipe, size: ModelSize, choices: ExecutionChoices
    ) -> dict[str, Any]:
        peak = offset + memory_footprint(recipe, size, choices, tokens, longest).peak
        return {"flags": flags, "peak_memory_bytes": peak, "remark": remark}

    rows = [row("", "as planned", recipe, model_size, choices)]
    unchunked = row("", "", recipe, dataclasses.replace(model_size, head_bytes=0), choices)
    if (saved := unchunked["peak_memory_bytes"] - rows[0]["peak_memory_bytes"]) > 0:
        rows[0]["remark"] += f"; {format_bytes(saved)} less for logits made in chunks"
    if not plan.activation_checkpointing and model_size.layers:
        recomputed = dataclasses.replace(choices, activation_checkpointing=True)
        remark = "the same recipe, a third more arithmetic"
        less = row("--activation-checkpointing on", remark, recipe, model_size, recomputed)
        rows += [less] if less["peak_memory_bytes"] < rows[0]["peak_memory_bytes"] else []
    sees_matrices = not choices.traits.flat_shards
    lighter = OPTIMIZERS if recipe.optimizer == "adamw" and sees_matrices else {}
    for name, remark in ((name, traits.remark) for name, traits in lighter.items() if traits.remark):
        other = dataclasses.replace(recipe, optimizer=name)
        rows.append(row(f"--optimizer {name}", remark, other, model_size, choices))
    for flags, values in make(recipe).memory_saving_flags().items():
        other = dataclasses.replace(recipe, options={**recipe.options, **values})
        size = make(other).model_size(facts)
        whole = bool(size.why_unshardable) and choices.traits.shards
        strategy: StrategyName = "single" if choices.processes == 1 else "ddp"
        held = dataclasses.replace(choices, strategy=strategy) if whole else choices
        remark = f"the whole model in each process (--strategy {strategy})" if whole else ""
        rows.append(row(flags, remark, other, size, held))
    return rows
