"""Activation checkpointing: activations of blocks are recomputed in the backward pass (Chen et al. 2016)."""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_activations(model: nn.Module, keyed: bool) -> int:
    """Recompute each block of the model's outermost nn.ModuleLists in the backward pass; returns how many.

    With keyed noise (`keyed`) no generator state is kept: the same key gives the same mask.
    """
    inside: set[int] = set()
    wrapped = 0
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside:
            inside.update(id(m) for m in module.modules())
            for block in module:
                block.forward = functools.partial(
                    checkpoint, block.forward, use_reentrant=False, preserve_rng_state=not keyed
                )
                wrapped += 1
    return wrapped
