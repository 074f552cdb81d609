"""The optimizer of a phase, the recipe's or the task's own, and embedding tables that have another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from isobatch.core.errors import UserError
from isobatch.core.optimizers import of_recipe
from isobatch.engine.model_setup.layer_blocks import layer_blocks
from isobatch.models.base import Task
from isobatch.models.capabilities import MakesOptimizer, ScalesRates


def make_optimizer(
    task: Task, model: nn.Module, device: str, sparse: Sequence[nn.Parameter] = ()
) -> Optimizer:
    """The optimizer over the model's trainable parameters; `device` is the device type.

    `sparse`: embedding tables that SparseAdam updates, only in the rows that a step read. Raises UserError
    where nothing is trainable, or where the task's optimizer holds other parameters.
    """
    recipe, excluded = task.recipe, {id(p) for p in sparse}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    named = {name: p for name, p in trained.items() if id(p) not in excluded}
    if not trained:
        raise UserError("nothing to train: every parameter of the model is frozen")
    parts: list[Optimizer] = []
    if named and isinstance(task, MakesOptimizer):
        parts = _checked(task.make_optimizer(named, recipe.lr, device), named)
    elif named:
        share = task.rate_share if isinstance(task, ScalesRates) else lambda _: 1.0
        parts = [of_recipe(recipe, named, device, block_matrices(model), share)]
    if tables := [p for p in sparse if p.requires_grad]:
        adam = {"betas": (recipe.adam_beta1, recipe.adam_beta2), "eps": recipe.adam_eps}
        parts.append(torch.optim.SparseAdam([{"params": tables, **adam}], lr=recipe.lr))
    for group in (group for part in parts for group in part.param_groups):
        if recipe.lr and group["lr"] != recipe.lr:
            group[SHARE] = group["lr"] / recipe.lr
    return parts[0] if len(parts) == 1 else cast("Optimizer", OptimizerGroup(parts))


def block_matrices(model: nn.Module) -> set[str]:
    """Names of the matrices in the model's blocks (lists of layers): neither embeddings nor the head."""
    inside = {id(p) for block in layer_blocks(model) for p in block.parameters() if p.ndim == 2}
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return {name for name, p in model.named_parameters() if id(p) in inside - tables}


SHARE = "share_of_lr"
"""In a parameter group: its learning rate over the recipe's, where it has one of its own."""


def _checked(made: Any, named: Mapping[str, nn.Parameter]) -> list[Optimizer]:
    """Raises UserError where a task returned no optimizers of the parameters that it was given."""
    parts = [*made] if isinstance(made, list | tuple) else [made]
    for part in parts:
        if not isinstance(part, torch.optim.Optimizer):
            kind = type(part).__name__
            raise UserError(f"make_optimizer() returned a {kind}: return a torch.optim.Optimizer, or a list")
    held = {id(p) for part in parts for group in part.param_groups for p in group["params"]}
    if left := [name for name, p in named.items() if id(p) not in held]:
        raise UserError(
            f"make_optimizer() leaves out {left[0]}: put it into a group, or freeze it in build_model"
            " (requires_grad_(False))"
        )
    if len(held) > len(named):
        raise UserError("make_optimizer() holds a parameter that it was not given: it gets all that train")
    return parts


class OptimizerGroup:
    """Several optimizers of different parameters with the interface of one."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        self.state = _GroupState({p: part for part in parts for g in part.param_groups for p in g["params"]})

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)


class _GroupState:
    """Parameter -> its state in the optimizer that owns it."""

    def __init__(self, owner: Mapping[nn.Parameter, Optimizer]) -> None:
        self.owner = owner

    def get(self, p: nn.Parameter, default: Any = None) -> Any:
        return self.owner[p].state.get(p, default) if p in self.owner else default

    def __getitem__(self, p: nn.Parameter) -> Any:
        return self.owner[p].state[p]

    def __setitem__(self, p: nn.Parameter, state: Any) -> None:
        self.owner[p].state[p] = state
