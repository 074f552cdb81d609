"""Tests of engine/loading/loader.py: a thread or worker processes, errors, and nothing left running."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from isobatch.core.errors import UserError
from isobatch.data.base import ArraySource, Ragged
from isobatch.engine.loading.device_copies import HostCopy, array_to_device
from isobatch.engine.loading.loader import BatchLoader, LoadedStep
from isobatch.engine.loading.sampler import Sampler
from isobatch.tests.unit.helpers import plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COUNT = 50


class Slow(ArraySource):
    """Rows that name their sample; may take its time, or fail at a sample."""

    def __init__(self, seconds: float = 0.0, broken: int = -1) -> None:
        rows = [
            np.full(n, i, np.uint16) for i, n in enumerate(np.random.default_rng(0).integers(1, 20, COUNT))
        ]
        tokens = Ragged.from_rows(rows)
        super().__init__({"tokens": tokens, "token.weight": tokens.lengths - 1})
        self.seconds, self.broken = seconds, broken

    def fetch(self, indices: np.ndarray, pad_to: int = 0) -> dict[str, np.ndarray]:
        time.sleep(self.seconds)
        if self.broken in indices:
            raise UserError(f"sample {self.broken} is damaged")
        return super().fetch(indices, pad_to)


def loader(source: ArraySource, rank: int = 0, **changes: Any) -> BatchLoader:
    return BatchLoader(source, Sampler(COUNT, 12, seed=0).batch, plan(**changes), rank)


def collected(steps: Iterator[LoadedStep]) -> list[Any]:
    return [
        (s.work.step, s.work.samples.tolist(), [{k: t.tolist() for k, t in b.items()} for b in s.batches])
        for s in steps
    ]


def running() -> set[Any]:
    """Threads and processes of this process."""
    return {*threading.enumerate(), *multiprocessing.active_children()}


@pytest.fixture
def wait_until_quiet() -> Callable[[], None]:
    """Wait for the end of every thread and process that the test has started; fail after 5 s."""
    before = running()

    def wait() -> None:
        deadline = time.monotonic() + 5
        while running() - before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not running() - before

    return wait


def test_a_thread_and_workers_give_the_same_batches() -> None:
    threaded = collected(loader(Slow()).steps(0, 6))
    assert [step for step, _, _ in threaded] == [0, 1, 2, 3, 4, 5]
    assert collected(loader(Slow(), workers=2).steps(0, 6)) == threaded


def test_every_sample_of_a_batch_is_fetched_by_some_rank_and_padded_as_cut() -> None:
    steps = [list(loader(Slow(), rank, processes=3).steps(0, 2)) for rank in range(3)]
    for same in zip(*steps, strict=True):
        fetched = np.concatenate([b["index"].numpy() for s in same for b in s.batches])
        assert sorted(fetched) == sorted(same[0].work.samples)
        for loaded in same:
            assert [b["tokens"].shape[1] for b in loaded.batches] == [
                m.width for m in loaded.work.micro_batches
            ]
            assert loaded.work.unit_weights == same[0].work.unit_weights


def test_the_totals_are_of_the_whole_batch() -> None:
    source = Slow()
    work = loader(source, processes=3).plan_step(0)
    tokens = int((source.lengths(work.samples) - 1).sum())
    assert work.unit_weights == {"sample": 12.0, "cohort": 12.0, "token": float(tokens)}
    assert work.tokens == tokens + 12  # each row has one token more than it predicts
    cohorts = BatchLoader(source, lambda step: np.arange(11), plan(), 0, cohort=4).plan_step(0)
    assert cohorts.unit_weights["cohort"] == 3.0  # 4 + 4 + 3 samples


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_while_fetching_is_raised_in_the_loop(
    workers: int, wait_until_quiet: Callable[[], None]
) -> None:
    source = Slow(broken=int(Sampler(COUNT, 12, seed=0).batch(2)[5]))
    steps = loader(source, workers=workers).steps(0, 4)
    assert [next(steps).work.step, next(steps).work.step] == [0, 1]  # the steps before are whole
    with pytest.raises(UserError, match=r"^sample \d+ is damaged$"):
        next(steps)
    wait_until_quiet()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_stops_early_leaves_nothing_running(
    workers: int, wait_until_quiet: Callable[[], None]
) -> None:
    steps = loader(Slow(), workers=workers).steps(0, 1000)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    wait_until_quiet()


def test_a_terminals_interrupt_is_for_the_process_that_trains() -> None:
    class Deaf(Slow):
        def fetch(self, indices: np.ndarray, pad_to: int = 0) -> dict[str, np.ndarray]:
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                raise UserError("a worker hears Ctrl-C")
            return super().fetch(indices, pad_to)

    steps = loader(Deaf(), workers=1).steps(0, 2)
    next(steps)
    steps.close()  # type: ignore[attr-defined]


def test_a_closed_loader_waits_for_the_fetch_that_it_is_in() -> None:
    """Else a process that ends then is aborted: its thread may be within torch."""
    before = running()
    steps = loader(Slow(seconds=0.3), prefetch=4).steps(0, 6)
    next(steps)
    steps.close()
    assert running() == before


def test_a_source_hears_of_samples_before_they_are_fetched_and_of_each_step_once() -> None:
    class Far(Slow):
        read_ahead = 30

        def __init__(self) -> None:
            super().__init__()
            self.heard: list[int] = []
            self.known: list[set[int]] = []

        def expect(self, indices: np.ndarray) -> None:
            self.heard += indices.tolist()

        def fetch(self, indices: np.ndarray, pad_to: int = 0) -> dict[str, np.ndarray]:
            self.known.append(set(self.heard))
            return super().fetch(indices, pad_to)

    source = Far()
    made = loader(source, prefetch=1)
    works = [step.work for step in made.steps(1, 8)]
    batches = [[n for m in work.micro_batches for n in work.samples[m.positions].tolist()] for work in works]
    assert source.heard == [sample for batch in batches for sample in batch]
    first = {sample for batch in batches[:4] for sample in batch}  # 30 samples are three steps of twelve
    assert source.known[0] == first


def test_on_a_cpu_nothing_is_copied() -> None:
    values = torch.tensor([1.0, 2.0])
    assert HostCopy(values).read() == [1.0, 2.0]
    assert HostCopy(torch.tensor(3.0)).read() == [3.0]
    assert array_to_device(np.arange(3), torch.device("cpu")).tolist() == [0, 1, 2]
