"""What other ways of training would take on this machine, before anybody asks for one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from isobatch.core.optimizers import OPTIMIZERS
from isobatch.engine.planning.memory_model import ExecutionChoices, memory_footprint

if TYPE_CHECKING:
    from collections.abc import Callable

    from isobatch.core.facts import Facts
    from isobatch.core.plan import Plan
    from isobatch.core.recipe import Recipe
    from isobatch.models.base import ModelSize, Task


def memory_alternatives(
    make: Callable[[Recipe], Task], recipe: Recipe, facts: Facts, shape: ModelSize, plan: Plan
) -> list[dict[str, Any]]:
    """Peak bytes per process of the plan's own micro-batch under each measure that is not taken yet.

    The first row is the plan as it is. All but activation checkpointing are other recipes.
    """
    choices = ExecutionChoices(
        **{f.name: getattr(plan, f.name) for f in dataclasses.fields(ExecutionChoices)}
    )
    tokens, longest = plan.micro_batch_tokens, facts.longest

    def row(flags: str, remark: str, one: Recipe, its: ModelSize, made: ExecutionChoices) -> dict[str, Any]:
        peak = memory_footprint(one, its, made, tokens, longest).peak
        return {"flags": flags, "peak_memory_bytes": peak, "remark": remark}

    rows = [row("", "as planned", recipe, shape, choices)]
    whole = row("", "", recipe, dataclasses.replace(shape, head_bytes=0), choices)["peak_memory_bytes"]
    if (saved := whole - rows[0]["peak_memory_bytes"]) > 0:
        rows[0]["remark"] += f"; {saved / 1e9:.2f} GB less for logits made in chunks"
    if not plan.activation_checkpointing and shape.layers:
        recomputed = dataclasses.replace(choices, activation_checkpointing=True)
        said = "the same recipe, a third more arithmetic"
        rows.append(row("--activation-checkpointing on", said, recipe, shape, recomputed))
    whole_matrices = not choices.traits.flat_shards
    lighter = OPTIMIZERS if recipe.optimizer == "adamw" and whole_matrices else {}
    for name, remark in ((name, of.remark) for name, of in lighter.items() if of.remark):
        other = dataclasses.replace(recipe, optimizer=name)
        rows.append(row(f"--optimizer {name}", remark, other, shape, choices))
    for flags, values in make(recipe).memory_saving_flags().items():
        other = dataclasses.replace(recipe, options={**recipe.options, **values})
        rows.append(row(flags, "", other, make(other).model_size(facts), choices))
    return rows
