"""How a global batch is cut into micro-batches and dealt to ranks: only speed depends on it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class MicroBatchBudget:
    """What one micro-batch may hold, and what it costs."""

    samples: int
    tokens: int
    """Padded tokens: rows times the longest of them."""
    fixed_cost: float = 0.0
    """Cost of a micro-batch apart from its tokens, in tokens."""
    square_cost: float = 0.0
    """Cost of a row's length squared (attention), in tokens."""
    pad_multiple: int = 1
    packed: bool = False
    """Samples lie end to end: tokens that pad them cost nothing and fill nothing."""

    def width(self, length: int) -> int:
        return -(-max(1, int(length)) // self.pad_multiple) * self.pad_multiple

    def cost(self, rows: int, length: int) -> float:
        width = self.width(length)
        return self.fixed_cost + rows * (width + self.square_cost * width * width)

    def rows(self, length: int, most: float = float("inf")) -> int:
        """Largest number of rows of this length within the budget and a cost of `most`; at least one."""
        width = self.width(length)
        by_cost = (most - self.fixed_cost) / (width + self.square_cost * width * width)
        return max(1, int(min(self.samples, self.tokens // width, by_cost)))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch of whole cohorts. An empty one is a dummy: weight zero, but its collectives happen."""

    positions: np.ndarray
    """Positions in the global batch."""
    width: int
    """Padded length."""
    cost: float


def make_micro_batches(
    lengths: np.ndarray, world: int, budget: MicroBatchBudget, cohort: int = 1
) -> list[list[MicroBatch]]:
    """Micro-batches per rank, with the slowest rank as fast as this can make it.

    Samples are sorted by length, so that a micro-batch pads little; the number of micro-batches is chosen
    by cost. Every rank gets at least one, a dummy if need be.
    """
    groups = -(-len(lengths) // cohort)
    longest = (
        np.array([lengths[g * cohort : (g + 1) * cohort].max() for g in range(groups)])
        if cohort > 1
        else lengths
    )
    order = np.argsort(-longest, kind="stable")
    whole = _SegmentPacker(longest[order], cohort, budget)
    best = min((assign_to_ranks(whole.pack(k), world) for k in whole.counts(world)), key=_slowest_rank)
    return [_to_micro_batches(rank, order, len(lengths), cohort, budget) for rank in best]


@dataclass(frozen=True, slots=True)
class _Segment:
    start: int
    stop: int
    cost: float
    length: int


class _SegmentPacker:
    """Cuts a descending list of lengths into consecutive segments."""

    def __init__(self, lengths: np.ndarray, cohort: int, budget: MicroBatchBudget) -> None:
        self.lengths, self.cohort, self.budget = lengths, cohort, budget
        each = cohort * lengths.astype(np.float64)
        self.tokens = np.append(0.0, np.cumsum(each))
        """Real ones in all groups before each."""
        self.costs = np.append(0.0, np.cumsum(each + budget.square_cost * each * lengths))

    def counts(self, world: int) -> list[int]:
        """Numbers of segments worth trying: the fewest that fit, then more, which pad less."""
        fewest = len(self._greedy(float("inf")))
        if self.lengths[0] == self.lengths[-1]:
            return [-(-fewest // world) * world]
        rounds = -(-fewest // world)
        return sorted(
            {world * r for r in (rounds, rounds + 1, rounds + 2, 2 * rounds, 3 * rounds, 4 * rounds)}
        )

    def pack(self, segments: int) -> list[_Segment]:
        """At most about `segments` segments, the costliest as cheap as possible (bisection on its cost)."""
        greedy = self._greedy(float("inf"))
        low, high = 0.0, max(s.cost for s in greedy)
        best = greedy
        for _ in range(16):
            middle = (low + high) / 2
            tried = self._greedy(middle, limit=segments)
            if len(tried) > segments:
                low = middle
            else:
                best, high = tried, middle
        return best

    def _greedy(self, most: float, limit: int | None = None) -> list[_Segment]:
        segments: list[_Segment] = []
        start = 0
        while start < len(self.lengths):
            length = int(self.lengths[start])
            stop = min(len(self.lengths), start + self._groups(start, most))
            segments.append(_Segment(start, stop, self._cost(start, stop), length))
            if limit is not None and len(segments) > limit:
                break
            start = stop
        return segments

    def _groups(self, start: int, most: float) -> int:
        """How many of the groups from `start` on make a segment that costs at most `most`; at least one."""
        budget = self.budget
        if not budget.packed:
            return max(1, budget.rows(int(self.lengths[start]), most) // self.cohort)
        by_tokens = np.searchsorted(self.tokens, self.tokens[start] + budget.tokens, "right") - 1
        by_cost = np.searchsorted(self.costs, self.costs[start] + most - budget.fixed_cost, "right") - 1
        return max(1, min(int(by_tokens), int(by_cost), start + budget.samples // self.cohort) - start)

    def _cost(self, start: int, stop: int) -> float:
        if self.budget.packed:
            return self.budget.fixed_cost + float(self.costs[stop] - self.costs[start])
        return self.budget.cost((stop - start) * self.cohort, int(self.lengths[start]))


def assign_to_ranks(segments: list[_Segment], world: int) -> list[list[_Segment]]:
    """Longest work first, each to the rank that has the least (Graham 1969)."""
    ranks: list[list[_Segment]] = [[] for _ in range(world)]
    loads = [0.0] * world
    for segment in sorted(segments, key=lambda s: -s.cost):
        rank = loads.index(min(loads))
        ranks[rank].append(segment)
        loads[rank] += segment.cost
    return ranks


def _slowest_rank(ranks: list[list[_Segment]]) -> float:
    return max(sum(s.cost for s in rank) for rank in ranks)


def dummy_micro_batch(budget: MicroBatchBudget) -> MicroBatch:
    """A micro-batch without samples: a rank's part in collectives that others need."""
    return MicroBatch(np.empty(0, np.int64), budget.width(1), 0.0)


def _to_micro_batches(
    rank: list[_Segment], order: np.ndarray, count: int, cohort: int, budget: MicroBatchBudget
) -> list[MicroBatch]:
    if not rank:
        return [dummy_micro_batch(budget)]
    return [
        MicroBatch(_positions_of(order[s.start : s.stop], count, cohort), budget.width(s.length), s.cost)
        for s in rank
    ]


def _positions_of(groups: np.ndarray, count: int, cohort: int) -> np.ndarray:
    if cohort == 1:
        return groups
    places = (groups[:, None] * cohort + np.arange(cohort)).reshape(-1)
    return places[places < count]


def padding_fraction(lengths: np.ndarray, ranks: list[list[MicroBatch]]) -> float:
    """Share of the padded tokens that are no tokens, were every micro-batch padded."""
    slots = sum(m.width * len(m.positions) for rank in ranks for m in rank)
    return 1 - float(lengths.sum()) / slots if slots else 0.0
