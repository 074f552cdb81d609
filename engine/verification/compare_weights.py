"""Compares redone weights with those of a checkpoint."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from isobatch.engine.checkpointing.portable_state import WEIGHT

if TYPE_CHECKING:
    from torch import Tensor

    from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
    from isobatch.engine.checkpointing.portable_state import TensorPiece
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.strategies.base import Strategy

FAR = 0.1
"""Share of what is allowed that few elements differ by: those whose gradient is rounding alone."""
ROUNDING = 1e-5
"""Difference allowed beside the bound, as a share of a tensor's largest element."""


def compare_weights(
    strategy: Strategy,
    saved: SavedCheckpoint,
    bound: float | None,
    origin: SavedCheckpoint | None,
    world: Communicator,
) -> dict[str, float]:
    """How a strategy's trainable weights and buffers differ from a checkpoint's, over all ranks.

    `bound`: largest difference that rounding may come to; twice the sum of the redone steps' learning rates
    for Adam, which moves an element by about its rate a step at most (Kingma and Ba 2015, section 2.1),
    whatever the rounding of its gradient. Without it (None) a tensor may differ by half of the largest step
    that an element of it took from `origin`, where the redone steps began.

    Returns `largest` (difference of an element), `beyond` (elements that differ by more than is allowed, or
    are not finite), `far` (that differ by more than FAR of it), `different` (elements that are not the same
    bit for bit) and `elements`.
    """
    import torch

    state = strategy.collect_state()
    largest, beyond, far, different, elements = 0.0, 0, 0, 0, 0
    for piece in state.pieces:
        if not piece.name.startswith(WEIGHT) or piece.name not in saved.entries:
            continue
        wanted = saved.read_slice(piece.name, piece.start, piece.start + piece.values.numel())
        found = piece.values.detach().to("cpu", wanted.dtype)
        elements += found.numel()
        if torch.equal(found, wanted):
            continue
        difference = (found.double() - wanted.double()).abs()
        allowed = _allowed(piece, found, bound, origin) + ROUNDING * float(wanted.double().abs().max())
        different += int((difference != 0).sum())
        if piece.name not in state.buffers:  # a buffer moves by no rate; the losses show what it does
            beyond += int((~(difference <= allowed)).sum())
            far += int((~(difference <= FAR * allowed)).sum())
            largest = max(largest, float(difference.max()))
    shares = world.all_gather_objects((largest, beyond, far, different, elements))
    worst = max((share[0] for share in shares), key=lambda x: math.inf if math.isnan(x) else x)
    names = ("beyond", "far", "different", "elements")
    return {"largest": worst, **{n: sum(share[k] for share in shares) for k, n in enumerate(names, 1)}}


def _allowed(piece: TensorPiece, found: Tensor, bound: float | None, origin: SavedCheckpoint | None) -> float:
    if bound is not None:
        return bound
    if origin is None or piece.name not in origin.entries:
        return math.inf
    before = origin.read_slice(piece.name, piece.start, piece.start + found.numel())
    return 0.5 * float((found.double() - before.double()).abs().max())
