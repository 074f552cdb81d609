"""The order by groups: permutations of groups of neighbours and of the samples in a window of groups.

Reading one sample of a store costs as much as reading its group (a row group of a Parquet file, some
thousand lines of another). An epoch therefore permutes the groups, cuts them into windows of `window` groups,
and permutes the samples of each window: every group is read once an epoch, and no more than a window of them
is mixed at a time. Both permutations are those of permutation.py, so that the order is a function of (seed,
epoch, position) and of the sizes of the groups. Another order changes what recipes mean.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from isobatch.engine.loading.permutation import shuffle

_GROUP_SEED = 0x6A0F
_WINDOW_SEED = 0x51A2D


class GroupOrder:
    """The samples of every epoch, by position."""

    def __init__(self, sizes: np.ndarray, window: int, seed: int, fraction: float = 1.0) -> None:
        """`sizes` (groups,): samples of each group, in the order in which samples are numbered.

        Of a `fraction` below 1 whole groups are used, drawn at random until they hold as many samples.
        """
        sizes = np.asarray(sizes, np.int64)
        self.window, self.seed = window, seed
        self.firsts = np.concatenate([[0], np.cumsum(sizes)])
        self._chosen = np.arange(len(sizes))
        if fraction < 1:
            drawn = self._permuted(len(sizes), 0)
            enough = np.searchsorted(np.cumsum(sizes[drawn]), max(1, round(self.firsts[-1] * fraction)))
            self._chosen = np.sort(drawn[: enough + 1])
        self._sizes = sizes[self._chosen]
        self.used = int(self._sizes.sum())
        """Samples per epoch."""
        self._borders_of = lru_cache(maxsize=2)(self._compute_borders)

    def samples(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        """The samples at these positions of an epoch; int64, same shape."""
        groups, borders = self._borders_of(epoch)
        windows = np.searchsorted(borders[:: self.window], positions, "right") - 1
        mixed = np.empty_like(positions)
        for number in np.unique(windows).tolist():
            inside = windows == number
            first, last = number * self.window, min((number + 1) * self.window, len(borders) - 1)
            start, size = int(borders[first]), int(borders[last] - borders[first])
            seed = self.seed + _WINDOW_SEED * (number + 1)
            mixed[inside] = start + shuffle(positions[inside] - start, size, seed, epoch + 1)
        places = np.searchsorted(borders, mixed, "right") - 1
        return self.firsts[groups[places]] + mixed - borders[places]

    def _compute_borders(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(groups in the epoch's order, the positions at which they begin and the last one ends)."""
        order = self._permuted(len(self._chosen), epoch + 1)
        return self._chosen[order], np.concatenate([[0], np.cumsum(self._sizes[order])])

    def _permuted(self, count: int, epoch: int) -> np.ndarray:
        return shuffle(np.arange(count), count, self.seed + _GROUP_SEED, epoch)
