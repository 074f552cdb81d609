"""The blocks of a model: what is recomputed, or gathered from shards, one at a time."""

from __future__ import annotations

from torch import nn


def layer_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules in the model's outermost nn.ModuleLists, in order."""
    inside: set[int] = set()
    found: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside:
            inside.update(id(m) for m in module.modules())
            found += list(module)
    return found
