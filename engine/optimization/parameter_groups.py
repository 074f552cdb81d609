"""Parameter groups, and the optimizer over them; core/optimizers.py lists the optimizers there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from isobatch.core.errors import UserError
from isobatch.core.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from isobatch.core.recipe import Recipe


def parameter_groups(
    model: nn.Module, weight_decay: float, sparse: Sequence[nn.Parameter] = ()
) -> list[dict[str, Any]]:
    """torch's parameter groups: matrices decay; biases, norms and other vectors do not.

    `sparse` parameters are left out: they have an optimizer of their own.
    """
    excluded = {id(p) for p in sparse}
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in excluded]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def make_optimizer(
    model: nn.Module, recipe: Recipe, device: str, sparse: Sequence[nn.Parameter] = ()
) -> Optimizer:
    """The recipe's optimizer over the trainable parameters; `device` is the device type.

    `sparse`: embedding tables that SparseAdam updates, only in the rows that a step read. Raises UserError
    where nothing is trainable.
    """
    import torch

    entry = OPTIMIZERS[recipe.optimizer]
    adam = {"betas": (recipe.adam_beta1, recipe.adam_beta2), "eps": recipe.adam_eps}
    more = adam if entry.takes_betas else {}
    groups = [g | more for g in parameter_groups(model, recipe.weight_decay, sparse) if g["params"]]
    sparse = [p for p in sparse if p.requires_grad]
    if not groups and not sparse:
        raise UserError("nothing to train: every parameter of the model is frozen")
    if sparse:
        sparse_adam = torch.optim.SparseAdam([{"params": sparse, **adam}], lr=recipe.lr)
        dense = [entry.build(groups, recipe.lr, device)] if groups else []
        return cast("Optimizer", OptimizerGroup([*dense, sparse_adam]))
    return entry.build(groups, recipe.lr, device)


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
