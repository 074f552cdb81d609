"""The batch loader: a rank's micro-batches of every step, fetched ahead of time in a thread or processes."""

from __future__ import annotations

import dataclasses
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from isobatch.core.errors import IsobatchError
from isobatch.core.measures import now
from isobatch.core.plan import Plan
from isobatch.data.base import Source
from isobatch.engine.loading.device_copies import to_tensors
from isobatch.engine.loading.microbatching import MicroBatch, MicroBatchBudget, cut_batch

LOADER_THREAD = "feed"
"""Name of the thread that fetches where there are no loader processes."""
CLOSING_SECONDS = 5.0
"""How long a loader that is closed waits for the fetch that its thread is in."""
Order = Callable[[int], np.ndarray]
"""Step -> sample numbers of its global batch, in the recipe's order."""


def micro_batch_budget(plan: Plan) -> MicroBatchBudget:
    """The plan's limits on a micro-batch of padded rows."""
    return MicroBatchBudget(
        plan.micro_batch_samples, plan.micro_batch_tokens, plan.micro_batch_cost, plan.pad_multiple
    )


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step as a rank sees it: the global batch, and this rank's micro-batches of it."""

    step: int
    samples: np.ndarray
    """The whole global batch, in the recipe's order."""
    unit_weights: dict[str, float]
    """Unit of a loss (sample, cohort, token) -> its weight in the whole global batch."""
    tokens: int
    """Tokens of the whole global batch, without padding."""
    micro_batches: list[MicroBatch]
    """This rank's micro-batches; at least one, perhaps a dummy."""
    padding: float
    """Share of padding in the micro-batches of all ranks."""
    token_length: float = 0.0
    """Length of the sample that a token of the global batch is part of, averaged over its tokens."""


@dataclass(slots=True)
class LoadedStep:
    """A step with its batches in host memory: `batches` has one entry for each of `work.micro_batches`."""

    work: StepWork
    batches: list[dict[str, Tensor]] = field(default_factory=list)
    wait_seconds: float = 0.0
    """Seconds that the training loop waited for this step's data."""
    left_out: bool = False
    """Whether the run leaves this step out: it has no batches."""


_Cut = tuple[int, list[MicroBatch], float, float]
"""The fields of StepWork that follow from the lengths alone."""


@dataclass(eq=False)
class BatchLoader:
    """Loads one rank's micro-batches from `source` in the order of `order`."""

    source: Source
    order: Order
    plan: Plan
    rank: int
    cohort: int = 1
    """Samples that stay together."""
    equal_counts: bool = False
    """Whether dummies are added, so that all ranks have equally many."""
    left_out: Collection[int] = ()
    """Steps, from 1, that are not loaded."""

    def __post_init__(self) -> None:
        packed = self.plan.pack and self.plan.device == "cuda"  # no padding, where the kernel needs none
        self.budget = dataclasses.replace(micro_batch_budget(self.plan), packed=packed)
        self._last_cut: tuple[np.ndarray, _Cut] | None = None
        """Lengths and cut of the batch that was cut last: one of equal lengths is cut alike, which is most of
        a small step's planning. One tuple, because two threads plan."""

    def plan_step(self, step: int) -> StepWork:
        """Divide global batch `step` into micro-batches; all ranks compute the same and take their own."""
        samples = self.order(step)
        lengths = self.source.lengths(samples)
        last = self._last_cut
        if last is None or not np.array_equal(lengths, last[0]):
            self._last_cut = last = (lengths, self._cut_batch(lengths))
        weights = {"sample": float(len(samples)), "cohort": float(-(-len(samples) // self.cohort))}
        weights |= {unit: float(w[samples].sum(dtype=np.float64)) for unit, w in self.source.weights.items()}
        return StepWork(step, samples, weights, *last[1])

    def _cut_batch(self, lengths: np.ndarray) -> _Cut:
        cut = cut_batch(lengths, self.plan.processes, self.budget, self.cohort)
        own = cut.of_rank(self.rank, at_least=cut.most if self.equal_counts else 1)
        tokens = int(lengths.sum())
        padding = 0.0 if self.plan.pack else cut.padding(lengths)
        token_length = float(np.square(lengths, dtype=np.float64).sum()) / max(1, tokens)
        return tokens, own, padding, token_length

    def steps(self, start: int, stop: int) -> Iterator[LoadedStep]:
        """Steps start..stop-1 with their batches, loaded ahead of the training loop."""
        stream = self._in_workers(start, stop) if self.plan.workers else self._in_thread(start, stop)
        loaded: LoadedStep | None = None
        began, following = now(), start
        for work, batch in stream:
            if loaded is None or loaded.work is not work:
                if following < work.step:
                    yield from self._left_out(following, work.step)
                    began = now()
                loaded, following = LoadedStep(work), work.step + 1
            loaded.batches.append(batch)
            if len(loaded.batches) == len(work.micro_batches):
                loaded.wait_seconds = now() - began
                yield loaded
                began = now()
        yield from self._left_out(following, stop)

    def _left_out(self, start: int, stop: int) -> Iterator[LoadedStep]:
        """Steps start..stop-1, none of which is loaded."""
        yield from (LoadedStep(self.plan_step(step), left_out=True) for step in range(start, stop))

    def _planned_micro_batches(self, start: int, stop: int) -> Iterator[tuple[StepWork, MicroBatch]]:
        for work in self._announced(start, stop):
            if work.step + 1 not in self.left_out:
                yield from ((work, micro) for micro in work.micro_batches)

    def _announced(self, start: int, stop: int) -> Iterator[StepWork]:
        """The work of each step, of which the source hears earlier what this rank will fetch."""
        ahead: deque[StepWork] = deque()
        # Steps that the source should hear of before they are loaded.
        most = -(-self.source.read_ahead // max(1, len(self.order(0)))) if self.source.read_ahead else 0
        for step in range(start, stop):
            ahead.append(work := self.plan_step(step))
            if self.source.read_ahead:
                self.source.expect(np.concatenate([self._rows(work, micro) for micro in work.micro_batches]))
            if len(ahead) > most:
                yield ahead.popleft()
        yield from ahead

    def _rows(self, work: StepWork, micro: MicroBatch) -> np.ndarray:
        # A dummy micro-batch computes sample 0 with weight zero.
        return work.samples[micro.positions] if len(micro.positions) else np.zeros(1, np.int64)

    def _in_thread(self, start: int, stop: int) -> Iterator[tuple[StepWork, Any]]:
        """Each micro-batch of the steps, with the work of its step."""
        ready: queue.Queue[Any] = queue.Queue(maxsize=max(1, self.plan.prefetch))
        closed = threading.Event()

        def produce() -> None:
            try:
                for work, micro in self._planned_micro_batches(start, stop):
                    arrays = self.source.fetch(self._rows(work, micro), micro.width)
                    batch = to_tensors(arrays, self.plan.pin_memory)
                    if not _put_unless_closed(ready, (work, batch), closed):
                        return
                _put_unless_closed(ready, None, closed)
            except BaseException as error:  # raised again in the training loop's thread
                _put_unless_closed(ready, error, closed)

        thread = threading.Thread(target=produce, name=LOADER_THREAD, daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            closed.set()
            # The fetch would disturb who measures next, and a process that ends within torch is aborted.
            thread.join(CLOSING_SECONDS)

    def _in_workers(self, start: int, stop: int) -> Iterator[tuple[StepWork, Any]]:
        """The same as `_in_thread`, from the worker processes of a torch DataLoader."""
        planned: deque[StepWork] = deque()

        def rows() -> Iterator[tuple[np.ndarray, int]]:
            for work, micro in self._planned_micro_batches(start, stop):
                planned.append(work)
                numbers = self._rows(work, micro)
                self.source.check(numbers)  # here, because what a worker has checked is not known here
                yield numbers, micro.width

        loader: Iterable[Any] = DataLoader(
            _FetchDataset(self.source),  # type: ignore[arg-type]
            sampler=rows(),
            batch_size=None,
            num_workers=self.plan.workers,
            prefetch_factor=max(1, self.plan.prefetch),
            pin_memory=self.plan.pin_memory,
            worker_init_fn=_ignore_interrupts,
        )
        try:
            for batch in loader:
                if isinstance(batch, Exception):
                    raise batch
                yield planned.popleft(), batch
        except Exception as error:
            # Its traceback refers to the loader and keeps its processes alive until garbage is collected.
            raise error.with_traceback(None) from None


def _put_unless_closed(ready: queue.Queue[Any], item: Any, closed: threading.Event) -> bool:
    while not closed.is_set():
        try:
            ready.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False


def _ignore_interrupts(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the process that trains


class _FetchDataset:
    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, rows: tuple[np.ndarray, int]) -> dict[str, Tensor] | Exception:
        try:
            return to_tensors(self.source.fetch(*rows), pin=False)
        except IsobatchError as error:
            return error  # if raised, DataLoader wraps it in a traceback
