"""Reads a checkpoint once for all ranks, where several nodes hold the same tensors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from torch import Tensor

    from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
    from isobatch.engine.checkpointing.portable_state import TensorEntry
    from isobatch.engine.distributed.communicator import Communicator


class SharedReader:
    """Whole tensors for every rank: all must read the same ones in the same order.

    Over several nodes each rank reads the parts that it has checked and sends them to the others, so that
    storage gives every byte once. On one node each reads what it needs: the machine keeps what it has read.
    """

    def __init__(self, saved: SavedCheckpoint, world: Communicator) -> None:
        self._saved, self._world = saved, world

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        return self._saved.entries

    def read(self, name: str) -> Tensor:
        """A whole tensor; on the device where it came from other ranks."""
        entry = self.entries[name]
        count = math.prod(entry.shape)
        if self._world.nodes == 1 or not count:
            return self._saved.read(name)
        found = torch.zeros(count, dtype=getattr(torch, entry.dtype))
        for first, last in self._own(self._saved.layout.pieces_of(name)):
            found[first:last] = self._saved.read_slice(name, first, last)
        found = found.to(self._world.device)
        # One rank has each element, the others zero: a sum of integers gives the same bits.
        self._world.all_reduce_sum(found.view(torch.int32 if found.element_size() % 4 == 0 else torch.uint8))
        return found.view(entry.shape)

    def _own(self, pieces: np.ndarray) -> list[list[int]]:
        """[first element, last + 1] of those pieces that this rank reads for all."""
        found: list[list[int]] = []
        for number in self._saved.own_parts(self._world.rank, self._world.size):
            part = self._saved.layout.parts[number]
            of_part = (pieces[:, 2] == part.file) & (pieces[:, 3] >= part.start) & (pieces[:, 3] < part.stop)
            found += pieces[of_part, :2].tolist()
        return found
