"""Table of the optimizers: how each is made, how much state it keeps, where it can be used. One entry each.

Torch is imported by the functions that make an optimizer, so that the table can be listed without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.core.package import load

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
    `module:name` within isobatch."""
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

    def build(self, groups: Groups, lr: float, device: str) -> Optimizer:
        """The optimizer over parameter groups, on a type of device."""
        make = load(self.make) if isinstance(self.make, str) else self.make
        return make(groups, lr, device)


def _of(library: str, name: str, **more: Any) -> Callable[[Groups, float, str], Optimizer]:
    def make(groups: Groups, lr: float, device: str) -> Optimizer:
        kind = getattr(importlib.import_module(f"{library}.optim"), name)
        fused = {"fused": device in ("cpu", "cuda")} if name == "AdamW" else {}
        return kind(groups, lr=lr, **more, **fused)

    return make


def _made_by_task(groups: Groups, lr: float, device: str) -> Optimizer:
    raise UserError(f"--optimizer {OWN}: this task makes none: leave it out")


_EIGHT_BIT = OptimizerTraits(
    make=_of("bitsandbytes", "AdamW8bit"),
    state_bytes=2.0,
    elementwise=False,
    cpu_update=19.0,
    takes_betas=True,
    library="bitsandbytes",
)
OPTIMIZERS = {
    "adamw": OptimizerTraits(
        make=_of("torch", "AdamW"), state_bytes=8.0, elementwise=True, update_bytes=0.0, takes_betas=True
    ),
    "adamw8bit": _EIGHT_BIT,
    # Its moments move to host memory when a GPU's is full.
    "paged-adamw8bit": replace(_EIGHT_BIT, make=_of("bitsandbytes", "PagedAdamW8bit")),
    # Its state is one row and one column per matrix.
    "adafactor": OptimizerTraits(
        make=_of("torch", "Adafactor"), state_bytes=0.1, elementwise=False, cpu_update=6.0
    ),
    # Measured against AdamW in benchmarks/LOG.md.
    "muon": OptimizerTraits(
        make="engine.optimization.muon:make_muon",
        state_bytes=8.0,
        matrix_bytes=4.0,
        elementwise=False,
        update_bytes=1.0,
        cpu_update=40.0,
        takes_betas=True,
    ),
    "sgd": OptimizerTraits(make=_of("torch", "SGD", momentum=0.9), state_bytes=4.0, elementwise=True),
    # A task's `make_optimizer`, of which nothing is known: counted as AdamW, whole matrices as Muon's.
    OWN: OptimizerTraits(make=_made_by_task, state_bytes=8.0, elementwise=False, takes_betas=True),
}
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
