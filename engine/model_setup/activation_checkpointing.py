"""Activation checkpointing: activations of blocks are recomputed in the backward pass (Chen et al. 2016)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torch.utils.checkpoint import checkpoint

from isobatch.engine.model_setup.layer_blocks import layer_blocks

if TYPE_CHECKING:
    from torch import nn


def checkpoint_activations(model: nn.Module, keyed: bool) -> int:
    """Recompute each block of the model's outermost nn.ModuleLists in the backward pass; returns how many.

    With keyed noise (`keyed`) no generator state is kept: the same key gives the same mask.
    """
    blocks = layer_blocks(model)
    for block in blocks:
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=not keyed
        )
    return len(blocks)
