"""Activation checkpointing: blocks whose activations are computed again in the backward pass."""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_activations(model: nn.Module, keyed: bool) -> int:
    """Recompute each block of the outermost layer lists in the backward pass; returns how many blocks.

    Keyed noise needs no generator state: the same key gives the same mask again.
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
