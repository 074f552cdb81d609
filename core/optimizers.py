"""Table of the optimizers: how each is made, how much state it keeps, where it can be used (optimizers.toml).

Torch is imported where an optimizer is made, so that the table can be listed without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.core.package import load, traits_beside

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer  # noqa: TC004  heavy, and no class here has flags

    from isobatch.core.recipe import Recipe

Groups = list[dict[str, Any]]
"""torch's parameter groups: {"params": [...], "names": [...], "weight_decay": x}, and `betas`, `eps` where it
takes them. `names` are the parameters', one for each."""
OWN = "own"
"""What a recipe calls the optimizer of a task that makes its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerTraits:
    """One optimizer: its factory, and what the planner needs to know about it."""

    make: Callable[[Groups, float, str], Optimizer] | str
    """(groups, learning rate, device type) -> the optimizer; or where such a function or class stands, as
    `module:name` within isobatch; or the class in the library's `optim`; empty for a task's own."""
    state_bytes: float
    """Bytes of state per trained parameter."""
    elementwise: bool
    """Whether the update treats each element alone, so that flat shards learn the same as whole matrices."""
    update_bytes: float = 4.0
    """Bytes of temporaries per trained parameter while it updates; a fused kernel needs none."""
    cpu_update: float = 1.0
    """Time of an update on a CPU over that of AdamW (measured)."""
    matrix_bytes: float | None = None
    """Bytes of state per element of the blocks' matrices, where these have an update of their own: they are
    parameter groups in which `matrices` is true."""
    takes_betas: bool = False
    """Whether its parameter groups may set `betas` and `eps`, as Adam's."""
    library: str = "torch"
    """What it needs to be installed."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """What the class takes besides groups and learning rate."""

    def build(self, groups: Groups, lr: float, device: str) -> Optimizer:
        """The optimizer over parameter groups, on a type of device."""
        if not self.make:
            raise UserError(f"--optimizer {OWN}: this task makes none: leave it out")
        if not isinstance(self.make, str) or ":" in self.make:
            make = load(self.make) if isinstance(self.make, str) else self.make
            return make(groups, lr, device)
        kind = getattr(importlib.import_module(f"{self.library}.optim"), self.make)
        fused = {"fused": device in ("cpu", "cuda")} if self.make == "AdamW" else {}
        return kind(groups, lr=lr, **self.options, **fused)


OPTIMIZERS = traits_beside(__file__, OptimizerTraits)
"""Name -> traits."""


def of_recipe(
    recipe: Recipe,
    named: Mapping[str, nn.Parameter],
    device: str,
    matrices: Collection[str],
    share: Callable[[str], float],
) -> Optimizer:
    """The optimizer that a recipe names, over parameters by name; `device` is the device type.

    Matrices decay; biases, norms and other vectors do not. `matrices`: names of those in the model's blocks.
    `share`: name -> the parameter's learning rate over the recipe's.
    """
    entry, found = OPTIMIZERS[recipe.optimizer], dict[tuple[bool, bool, float], list[str]]()
    for name, p in named.items():
        apart = entry.matrix_bytes is not None and name in matrices
        found.setdefault((not apart, p.ndim < 2, share(name)), []).append(name)
    adam = {"betas": (recipe.adam_beta1, recipe.adam_beta2), "eps": recipe.adam_eps}
    groups = Groups()
    for (together, flat, times), names in sorted(found.items()):
        group = {"params": [named[name] for name in names], "names": names}
        group["weight_decay"] = 0.0 if flat else recipe.weight_decay
        group |= {"lr": recipe.lr * times} if times != 1 else {}
        group |= {"matrices": not together} if entry.matrix_bytes is not None else {}
        groups.append(group | (adam if entry.takes_betas else {}))
    return entry.build(groups, recipe.lr, device)
