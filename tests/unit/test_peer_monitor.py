"""The peer monitor (engine/distributed/liveness.py): real processes that die, end and stop."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import socket
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.errors import StopRequestedError, TrainingError
from isobatch.engine.distributed import liveness
from isobatch.engine.distributed.liveness import PeerMonitor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOON = 5.0
"""A lost process is noticed long before, also on a busy machine."""
QUIET = 1.5
"""Longer than it takes to notice and to end."""
END_CODE = 3


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No collective of gloo reports an error here: nothing is to be waited for."""
    monkeypatch.setattr(liveness, "OWN_ERROR_SECONDS", 0.2)
    monkeypatch.setattr(liveness, "OTHER_RANKS_LATER_SECONDS", 0.0)


class Rank:
    """One rank: what it is told to do, in order, and where it says what it did."""

    def __init__(self, rank: int, size: int, offers: list[Any], say: Any) -> None:
        self.world: Any = SimpleNamespace(
            rank=rank,
            size=size,
            nodes=2,
            is_main=rank == 0,
            position="step 5",
            waiting="an all-reduce",
            broadcast_object=self._broadcast_object,
        )
        self.offers, self.say = offers, say

    def _broadcast_object(self, value: Any) -> Any:
        if self.world.is_main:
            for offer in self.offers[1:]:
                offer.put(value)
            return value
        return self.offers[self.world.rank].get(timeout=SOON)

    def run(self, orders: Any) -> None:
        def end(reason: str) -> None:
            self.say.put((self.world.rank, reason))
            self.say.close()
            self.say.join_thread()
            os._exit(END_CODE)

        with PeerMonitor(self.world, end):
            self.say.put((self.world.rank, "here"))
            orders.get()
        self.say.put((self.world.rank, "done"))
        orders.get()


def _process(rank: int, size: int, offers: list[Any], say: Any, orders: Any) -> None:
    Rank(rank, size, offers, say).run(orders)


class Ranks:
    """Processes that each wait for an order in their `with` block, and for another after it."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("fork")
        self.said = context.Queue()
        offers = [context.Queue() for _ in range(size)]
        self.orders = [context.Queue() for _ in range(size)]
        self.processes = [
            context.Process(target=_process, args=(rank, size, offers, self.said, self.orders[rank]))
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()
        assert {self.said.get(timeout=SOON)[1] for _ in self.processes} == {"here"}
        time.sleep(0.2)  # their connections are made in threads

    def told(self, rank: int) -> None:
        """The rank leaves its block, or after that its process."""
        self.orders[rank].put("go on")

    def hears(self, seconds: float) -> dict[int, str]:
        """Rank -> the last that it said within so many seconds; all that are left stop the wait."""
        found: dict[int, str] = {}
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                rank, text = self.said.get(timeout=left)
            except queue.Empty:
                break
            found[rank] = text
        return found


@pytest.fixture
def ranks() -> Iterator[Callable[[int], Ranks]]:
    made: list[Ranks] = []

    def make(size: int) -> Ranks:
        made.append(Ranks(size))
        return made[-1]

    yield make
    for process in (p for one in made for p in one.processes):
        process.kill()
        process.join()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_others_end_and_name_the_rank_that_was_killed(lost: int, ranks: Any) -> None:
    world = ranks(3)
    os.kill(world.processes[lost].pid, signal.SIGKILL)
    others = sorted({0, 1, 2} - {lost})
    for rank in others:
        world.processes[rank].join(SOON)
        assert world.processes[rank].exitcode == END_CODE
    place = "was at step 5, waiting in an all-reduce"
    assert world.hears(0.5) == {
        rank: f"rank {lost} is lost, its process has ended; rank {rank} {place}" for rank in others
    }


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_whose_work_is_done_is_no_loss(first: int, ranks: Any) -> None:
    world = ranks(2)
    for _ in range(2):  # out of its block, out of its process
        world.told(first)
    world.processes[first].join(SOON)
    assert world.hears(QUIET) == {first: "done"}
    assert world.processes[1 - first].is_alive()


def test_a_child_does_not_keep_the_connection_of_a_dead_rank_open(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_child(self: Rank, orders: Any) -> None:
        def fork(*_: Any) -> None:
            if self.world.rank == 1:
                time.sleep(0.1)
                multiprocessing.get_context("fork").Process(target=time.sleep, args=(SOON,)).start()

        self.say.put((self.world.rank, "here"))
        with PeerMonitor(self.world, lambda reason: self.say.put((self.world.rank, reason))):
            fork()
            orders.get()

    monkeypatch.setattr(Rank, "run", with_child)
    world = ranks(2)
    time.sleep(0.5)
    os.kill(world.processes[1].pid, signal.SIGKILL)
    assert "rank 1 is lost" in world.hears(QUIET)[0]


@pytest.mark.parametrize(
    ("error", "noticed"), [(TrainingError("NaN"), "lost"), (StopRequestedError("asked to"), "done")]
)
def test_an_error_is_a_loss_for_those_who_wait_and_a_stop_is_none(error: Exception, noticed: str) -> None:
    """Two ranks as threads: the second leaves by an error, its connection is closed, the first is told."""
    offers: list[Any] = [queue.Queue(), queue.Queue()]
    reasons: list[str] = []
    first, second = (Rank(rank, 2, offers, None) for rank in range(2))
    monitors = [PeerMonitor(rank.world, reasons.append) for rank in (first, second)]
    with monitors[0]:
        monitors[1].__enter__()
        time.sleep(0.2)
        monitors[1].__exit__(type(error))
        for connection in monitors[1]._connections:  # noqa: SLF001  as the end of its process would
            connection.shutdown(socket.SHUT_RDWR)
        found = monitors[0].reason(within=1.0)
    assert found.startswith("rank 1 is lost") == (noticed == "lost")
    assert reasons == []  # the main thread left by itself


def test_a_stranger_is_not_heard() -> None:
    offers: list[Any] = [queue.Queue(), queue.Queue()]
    with PeerMonitor(Rank(0, 2, offers, None).world, lambda _: None) as monitor:
        port, _ = offers[1].get()
        with socket.create_connection(("localhost", port), timeout=SOON) as stranger:
            stranger.sendall(b"let-me-in 1\n")
            assert stranger.recv(10) == b""  # shown the door
        assert monitor.reason(within=0.5) == ""
