"""Divide a global batch into micro-batches of the plan's size and assign them to ranks.

Only speed depends on how. The size is the planner's (engine/planning/parallel_layout.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class MicroBatchBudget:
    """Limits of a micro-batch and its cost model; costs are in tokens."""

    samples: int
    """Largest number of samples."""
    tokens: int
    """Largest number of padded tokens: rows times the length of the longest."""
    fixed_cost: float = 0.0
    """Cost of a micro-batch apart from its tokens (kernel launches), in tokens."""
    square_cost: float = 0.0
    """Cost per squared length of a row (attention), in tokens."""
    pad_multiple: int = 1
    packed: bool = False
    """Samples are packed end to end: padding costs nothing and does not count."""

    def width(self, length: int) -> int:
        """A length rounded up to the pad multiple."""
        return -(-max(1, int(length)) // self.pad_multiple) * self.pad_multiple

    def cost(self, rows: int, length: int) -> float:
        """Cost, in tokens, of a micro-batch of padded rows of this length."""
        width = self.width(length)
        return self.fixed_cost + rows * (width + self.square_cost * width * width)

    def rows(self, length: int, max_cost: float = float("inf")) -> int:
        """Largest number of rows of this length within the budget and `max_cost`; at least one."""
        width = self.width(length)
        by_cost = (max_cost - self.fixed_cost) / (width + self.square_cost * width * width)
        return max(1, int(min(self.samples, self.tokens // width, by_cost)))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch of whole cohorts. An empty one is a dummy: weight zero, but its collectives run."""

    positions: np.ndarray
    """Positions in the global batch."""
    width: int
    """Padded length."""
    cost: float


def make_micro_batches(
    lengths: np.ndarray, world: int, budget: MicroBatchBudget, cohort: int = 1
) -> list[list[MicroBatch]]:
    """Micro-batches of every rank, chosen so that the slowest rank is as fast as possible.

    `lengths` (N,): of the samples of the global batch. Samples are sorted by length, so that a micro-batch
    has little padding; the number of micro-batches is chosen by cost. A rank without samples gets a dummy.
    """
    cohorts = -(-len(lengths) // cohort)
    longest = (
        np.array([lengths[c * cohort : (c + 1) * cohort].max() for c in range(cohorts)])
        if cohort > 1
        else lengths
    )
    order = np.argsort(-longest, kind="stable")
    packer = _SegmentPacker(longest[order], cohort, budget)
    best = min((assign_to_ranks(packer.pack(k), world) for k in packer.counts(world)), key=_slowest_rank)
    return [_to_micro_batches(rank, order, len(lengths), cohort, budget) for rank in best]


@dataclass(frozen=True, slots=True)
class _Segment:
    """Consecutive cohorts, start..stop-1 of the sorted list, that make one micro-batch."""

    start: int
    stop: int
    cost: float
    length: int
    """Of its longest sample."""


class _SegmentPacker:
    """Divides cohorts, sorted by descending length, into consecutive segments."""

    def __init__(self, lengths: np.ndarray, cohort: int, budget: MicroBatchBudget) -> None:
        self.lengths, self.cohort, self.budget = lengths, cohort, budget
        each = cohort * lengths.astype(np.float64)
        self.tokens = np.append(0.0, np.cumsum(each))
        """Tokens in all cohorts before each."""
        self.costs = np.append(0.0, np.cumsum(each + budget.square_cost * each * lengths))

    def counts(self, world: int) -> list[int]:
        """Numbers of segments to try: the fewest that fit, then more, which have less padding."""
        fewest = len(self._greedy(float("inf")))
        if self.lengths[0] == self.lengths[-1]:
            return [-(-fewest // world) * world]
        rounds = -(-fewest // world)
        return sorted(
            {world * r for r in (rounds, rounds + 1, rounds + 2, 2 * rounds, 3 * rounds, 4 * rounds)}
        )

    def pack(self, segments: int) -> list[_Segment]:
        """About `segments` segments at most, minimising the largest cost of one by bisection."""
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

    def _greedy(self, max_cost: float, limit: int | None = None) -> list[_Segment]:
        segments: list[_Segment] = []
        start = 0
        while start < len(self.lengths):
            length = int(self.lengths[start])
            stop = min(len(self.lengths), start + self._num_cohorts(start, max_cost))
            segments.append(_Segment(start, stop, self._cost(start, stop), length))
            if limit is not None and len(segments) > limit:
                break
            start = stop
        return segments

    def _num_cohorts(self, start: int, max_cost: float) -> int:
        """Number of cohorts from `start` on in a segment that costs at most `max_cost`; at least one."""
        budget = self.budget
        if not budget.packed:
            return max(1, budget.rows(int(self.lengths[start]), max_cost) // self.cohort)
        by_tokens = np.searchsorted(self.tokens, self.tokens[start] + budget.tokens, "right") - 1
        by_cost = np.searchsorted(self.costs, self.costs[start] + max_cost - budget.fixed_cost, "right") - 1
        return max(1, min(int(by_tokens), int(by_cost), start + budget.samples // self.cohort) - start)

    def _cost(self, start: int, stop: int) -> float:
        if self.budget.packed:
            return self.budget.fixed_cost + float(self.costs[stop] - self.costs[start])
        return self.budget.cost((stop - start) * self.cohort, int(self.lengths[start]))


def assign_to_ranks(segments: list[_Segment], world: int) -> list[list[_Segment]]:
    """Assign segments to ranks, the costliest first, each to the least loaded rank (Graham 1969)."""
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
    """A micro-batch without samples, for a rank that must take part in the others' collectives."""
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


def _positions_of(cohorts: np.ndarray, count: int, cohort: int) -> np.ndarray:
    """Positions of the samples of these cohorts; the last cohort of a batch of `count` may be short."""
    if cohort == 1:
        return cohorts
    positions = (cohorts[:, None] * cohort + np.arange(cohort)).reshape(-1)
    return positions[positions < count]


def padding_fraction(lengths: np.ndarray, ranks: list[list[MicroBatch]]) -> float:
    """Share of padding in the padded tokens of all micro-batches; `lengths`: of all their samples."""
    slots = sum(m.width * len(m.positions) for rank in ranks for m in rank)
    return 1 - float(lengths.sum()) / slots if slots else 0.0
