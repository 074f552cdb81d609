"""Divide a global batch into micro-batches of the plan's size and assign them to ranks.

Only speed depends on how. The size is the planner's (engine/planning/parallel_layout.py). Every rank computes
the same cut, and takes its own part: no step may cost more because there are more ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isobatch.engine.loading.sampler import order_by_length


@dataclass(frozen=True, slots=True)
class MicroBatchBudget:
    """Limits of a micro-batch and its cost model; costs are in tokens."""

    samples: int
    """Largest number of samples."""
    tokens: int
    """Largest number of padded tokens: rows times the length of the longest."""
    fixed_cost: float = 0.0
    """Cost of a micro-batch apart from its tokens (kernel launches), in tokens."""
    pad_multiple: int = 1
    packed: bool = False
    """Samples are packed end to end: padding costs nothing and does not count."""

    def widths(self, lengths: np.ndarray) -> np.ndarray:
        """Lengths rounded up to the pad multiple."""
        return -(-np.maximum(1, lengths) // self.pad_multiple) * self.pad_multiple

    def rows(self, widths: np.ndarray, max_cost: float = np.inf) -> np.ndarray:
        """Largest number of rows of each width within the budget and `max_cost`; at least one."""
        by_cost = np.maximum(0.0, (max_cost - self.fixed_cost) / widths)
        most = np.minimum(self.samples, self.tokens // widths)
        return np.maximum(1, np.minimum(most, by_cost).astype(np.int64))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch of whole cohorts. An empty one is a dummy: weight zero, but its collectives run."""

    positions: np.ndarray
    """Positions in the global batch."""
    width: int
    """Padded length."""
    cost: float


@dataclass(frozen=True, slots=True, eq=False)
class BatchCut:
    """A global batch of N samples in micro-batches, each with a rank. S: their number."""

    budget: MicroBatchBudget
    order: np.ndarray
    """The numbers of all cohorts, those of a micro-batch side by side."""
    samples: int
    """N."""
    cohort: int
    starts: np.ndarray
    """(S,) place in `order` of the first cohort of each micro-batch, which ends where the next begins."""
    widths: np.ndarray
    """(S,)"""
    costs: np.ndarray
    """(S,)"""
    ranks: np.ndarray
    """(S,) the rank of each."""

    def of_rank(self, rank: int, at_least: int = 1) -> list[MicroBatch]:
        """A rank's micro-batches, the costliest first; dummies where it has fewer than `at_least`."""
        own = np.flatnonzero(self.ranks == rank)
        own = own[np.argsort(-self.costs[own], kind="stable")]
        found = [
            MicroBatch(self._positions(int(place)), int(self.widths[place]), float(self.costs[place]))
            for place in own
        ]
        # For a rank that must take part in the others' collectives.
        dummy = MicroBatch(np.empty(0, np.int64), int(self.budget.widths(np.array(1))), 0.0)
        return found + [dummy] * (at_least - len(found))

    @property
    def most(self) -> int:
        """The largest number of micro-batches of a rank."""
        return int(np.bincount(self.ranks).max())

    def padding(self, lengths: np.ndarray) -> float:
        """Share of padding in the padded tokens of all micro-batches; `lengths` (N,) as they were cut."""
        rows = np.diff(self.starts, append=len(self.order)) * self.cohort
        last = int(np.flatnonzero(self.order == len(self.order) - 1)[0])  # the last cohort may be short
        rows[np.searchsorted(self.starts, last, "right") - 1] -= len(self.order) * self.cohort - self.samples
        return 1 - float(lengths.sum()) / float(rows @ self.widths)

    def _positions(self, place: int) -> np.ndarray:
        stop = self.starts[place + 1] if place + 1 < len(self.starts) else len(self.order)
        cohorts = self.order[self.starts[place] : stop]
        if self.cohort == 1:
            return cohorts
        positions = (cohorts[:, None] * self.cohort + np.arange(self.cohort)).reshape(-1)
        return positions[positions < self.samples]


def cut_batch(lengths: np.ndarray, world: int, budget: MicroBatchBudget, cohort: int = 1) -> BatchCut:
    """Cut a global batch so that the slowest rank is as fast as possible.

    `lengths` (N,): of the samples of the global batch. Their order decides nothing but between equals.
    """
    longest = np.maximum.reduceat(lengths, np.arange(0, len(lengths), cohort)) if cohort > 1 else lengths
    order = order_by_length(longest.max() - longest)
    divide = _divide_packed if budget.packed else _divide_padded
    order, starts, costs, ranks = divide(longest[order], order, world, budget, cohort)
    widths = budget.widths(np.maximum.reduceat(longest[order], starts))
    return BatchCut(budget, order, len(lengths), cohort, starts, widths, costs, ranks)


Division = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Order of cohorts (C,); start, cost and rank of each micro-batch (S,)."""


def _divide_packed(
    lengths: np.ndarray, order: np.ndarray, world: int, budget: MicroBatchBudget, cohort: int
) -> Division:
    """The fewest micro-batches that fit, of equal cost: long and short rows lie end to end."""
    tokens = cohort * lengths.astype(np.float64)
    fewest = max(tokens.sum() / budget.tokens, len(order) * cohort / budget.samples)
    number = world * max(1, int(np.ceil(fewest / world)))
    while True:
        bins, _ = deal(tokens, number)
        rows = np.bincount(bins, minlength=number)
        fits = np.bincount(bins, tokens, number) <= budget.tokens
        if ((fits & (rows * cohort <= budget.samples)) | (rows <= 1)).all():
            break
        number += world
    by_bin, starts = np.argsort(bins, kind="stable"), np.cumsum(rows[rows > 0]) - rows[rows > 0]
    of_bins = budget.fixed_cost + np.bincount(bins, tokens, number)[rows > 0]
    return order[by_bin], starts, of_bins, deal(of_bins, world)[0]


def _divide_padded(
    lengths: np.ndarray, order: np.ndarray, world: int, budget: MicroBatchBudget, cohort: int
) -> Division:
    """Consecutive rows of like length; their number is chosen by the cost of the slowest rank."""
    divider = _PaddedRows(lengths, budget, cohort)
    best: tuple[float, Division] | None = None
    for number in divider.numbers(world):
        starts = divider.divide(number)
        costs = budget.fixed_cost + np.diff(starts, append=len(order)) * cohort * divider.widths[starts]
        ranks, slowest = deal(costs, world)
        if best is None or slowest < best[0]:
            best = slowest, (order, starts, costs, ranks)
        if slowest <= GOOD * divider.least / world:
            break
    assert best is not None
    return best[1]


GOOD = 1.01
"""A cut that costs so many times the least possible is taken."""
PRECISION = 0.003
"""To which the largest cost of a micro-batch is minimised."""


class _PaddedRows:
    """Cohorts, sorted by descending length, that are divided into micro-batches of consecutive ones.

    Works on runs of one width, of which there are few, however large the batch is.
    """

    def __init__(self, lengths: np.ndarray, budget: MicroBatchBudget, cohort: int) -> None:
        self.budget, self.cohort, self.count = budget, cohort, len(lengths)
        self.widths = budget.widths(lengths)
        changes = np.flatnonzero(np.diff(self.widths)) + 1
        self.ends: list[int] = [*changes.tolist(), self.count]
        """Where each run ends."""
        self.run_widths = self.widths[np.array([0, *changes])]
        costs = cohort * self.run_widths
        self.dearest = budget.fixed_cost + float(costs[0])
        """Of the micro-batches of one cohort."""
        self.ceiling = budget.fixed_cost + float((costs * self._cohorts(np.inf)).max())
        """The largest cost that a micro-batch within the budget may have."""
        self.least = budget.fixed_cost + float(np.diff([0, *self.ends]) @ costs)
        """Cost of all rows in one micro-batch without padding."""

    def numbers(self, world: int) -> list[int]:
        """Numbers of micro-batches to try: the fewest that fit, then more, which have less padding."""
        rounds = -(-self._number(np.inf) // world)
        more = () if len(self.ends) == 1 else (rounds + 1, rounds + 2, 2 * rounds, 3 * rounds, 4 * rounds)
        return [world * r for r in sorted({rounds, *more})]

    def divide(self, number: int) -> np.ndarray:
        """Starts of at most `number` micro-batches, minimising the largest cost of one by bisection; of
        those that fit where that takes more.
        """
        if len(self.ends) == 1:  # rows of one width are dealt evenly
            return np.arange(min(number, self.count)) * self.count // min(number, self.count)
        fixed = self.budget.fixed_cost
        low = max(self.dearest, fixed + (self.least - fixed) / number)
        high = low
        while self._number(high, number) > number:
            if high > self.ceiling:
                return np.array(self._starts(np.inf))
            low, high = high, GROWTH * high
        while high - low > PRECISION * low:
            middle = (low + high) / 2
            low, high = (middle, high) if self._number(middle, number) > number else (low, middle)
        return np.array(self._starts(high))

    def _cohorts(self, max_cost: float) -> np.ndarray:
        """Cohorts of a micro-batch that begins in each run."""
        return np.maximum(1, self.budget.rows(self.run_widths, max_cost) // self.cohort)

    def _number(self, max_cost: float, limit: float = np.inf) -> int:
        """How many micro-batches of at most this cost there are; counts no further than above `limit`."""
        place = number = 0
        for end, cohorts in zip(self.ends, self._cohorts(max_cost).tolist(), strict=True):
            if place < end:
                more = -(-(end - place) // cohorts)
                number += more
                place += more * cohorts
                if number > limit:
                    break
        return number

    def _starts(self, max_cost: float) -> list[int]:
        place, starts = 0, list[int]()
        for end, cohorts in zip(self.ends, self._cohorts(max_cost).tolist(), strict=True):
            if place < end:
                starts.extend(range(place, end, cohorts))
                place = starts[-1] + cohorts
        return starts


GROWTH = 1.2
"""From one guess of the largest cost to the next, until one suffices."""


def deal(costs: np.ndarray, world: int) -> tuple[np.ndarray, float]:
    """(rank of each micro-batch, cost of the slowest rank): the costliest first, each to the least loaded
    rank (Graham 1969). As many are dealt at once as that rule deals to different ranks.
    """
    order, loads = np.argsort(-costs, kind="stable"), np.zeros(world)
    ranks, done = np.zeros(len(costs), np.int64), 0
    if world == 1:
        return ranks, float(costs.sum())
    while done < len(costs):
        least = np.argsort(loads, kind="stable")[: len(costs) - done]
        next_costs = costs[order[done : done + len(least)]]
        after = np.minimum.accumulate(loads[least] + next_costs)
        count = 1 + int(np.argmin(np.append(loads[least][1:] <= after[:-1], False)))
        ranks[order[done : done + count]] = least[:count]
        loads[least[:count]] += next_costs[:count]
        done += count
    return ranks, float(loads.max())
