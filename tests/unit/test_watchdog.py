"""Tests of the watchdog (engine/distributed/liveness.py): the stuck rank is named, whatever clocks say."""

from __future__ import annotations

import inspect
import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from isobatch.core import atomic_files
from isobatch.core.errors import StopRequestedError
from isobatch.engine.distributed import communicator
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.distributed.liveness import Watchdog


class Store:
    """The process group's store, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def add(self, key: str, count: int) -> int:
        self.values[key] = self.values.get(key, 0) + count
        return int(self.values[key])

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> str:
        return str(self.values[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


class Clocks:
    """Every rank's own: they began at other times, and a wall clock that jumps is asked by nobody."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.offset = 0.0, 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.offset + self.seconds)
        jumps = itertools.count(0, 3600)
        monkeypatch.setattr(time, "time", lambda: float(next(jumps)))


def watch(rank: int, store: Store, **doing: Any) -> Any:
    position = {"position": f"step {rank}", "waiting": "", "moved_at": time.monotonic(), **doing}
    world: Any = SimpleNamespace(rank=rank, size=3, is_main=rank == 0, store=lambda: store, **position)
    world.is_finishing, world.mark_progress = False, lambda _: None
    stop: Any = SimpleNamespace(requested=False)
    return Watchdog(world, stop, 10.0, lambda _: None, doing.get("record", Path("ranks.json")))


@pytest.mark.parametrize(
    ("requested", "finishing", "waiting", "limit"),
    [
        (False, False, "", 1800),
        (True, False, "", 30),
        (True, False, "a barrier", 32),
        (True, True, "", 1800),
        (True, True, "a barrier", 1802),
    ],
)
def test_a_request_to_stop_does_not_end_an_export(
    requested: bool, finishing: bool, waiting: str, limit: float
) -> None:
    world: Any = SimpleNamespace(moved_at=0.0, waiting=waiting, is_finishing=finishing)
    stop: Any = SimpleNamespace(requested=requested)
    assert Watchdog(world, stop, 1800, lambda _: None, Path()).limit() == limit


def test_the_stuck_rank_is_named_whatever_the_clocks_say(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, store = Clocks(monkeypatch), Store()
    waiting, silent, busy = watch(0, store, waiting="an all-reduce"), watch(1, store), watch(2, store)
    for second in range(20):
        clocks.seconds = float(second)
        for offset, dog in ((1e6, waiting), (-5e5, silent), (7.0, busy)):
            clocks.offset = offset
            if dog is not silent or second < 5:
                dog._publish()  # noqa: SLF001
    clocks.offset = 1e6
    reason = waiting._reason(19.0)  # noqa: SLF001
    assert "waiting in an all-reduce for the others" in reason
    assert "rank 1 has said nothing for 14 s; it was at step 1" in reason  # its last beat came in second 4
    assert "rank 2 is at step 2, in " in reason


@pytest.mark.parametrize(("waits", "ends"), [([1.0, 600.0, 1.0, 1.0], 0), ([1.0] * 12, 1)])
def test_a_suspension_is_no_standstill(
    waits: list[float], ends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm may suspend a job for an hour: then all threads slept, and none stood still."""
    clocks, dog, ended = Clocks(monkeypatch), watch(0, Store()), []
    passing = iter(waits)

    def wait(_: float) -> bool:
        seconds = next(passing, 0.0)
        clocks.seconds += seconds
        return not seconds

    dog.end = lambda reason: ended.append(reason) or setattr(dog.world, "moved_at", clocks.seconds)
    dog._stopped = SimpleNamespace(wait=wait, is_set=lambda: False)  # noqa: SLF001
    monkeypatch.setattr("faulthandler.dump_traceback", lambda *_, **__: None)
    dog._watch()  # noqa: SLF001
    assert len(ended) == ends


def test_every_rank_is_recorded_with_its_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock = Store(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    here, waits = watch(0, store, record=tmp_path / "ranks.json"), watch(1, store, waiting="a barrier")
    for dog in (waits, here):
        dog._publish()  # noqa: SLF001
    clock[0] = 30.0
    here.write_record()
    said = atomic_files.read_json(tmp_path / "ranks.json")
    first, second, third = said["ranks"]
    assert (first["place"], first["waiting"], first["still_seconds"]) == ("step 0", "", 30.0)
    assert (second["place"], second["waiting"], second["silent_seconds"]) == ("step 1", "a barrier", 30.0)
    assert third == {"rank": 2}, "it was never heard of"


@pytest.mark.parametrize(("error", "stays"), [(None, False), (StopRequestedError, False), (ValueError, True)])
def test_it_stays_after_an_error_alone(error: type[Exception] | None, stays: bool, tmp_path: Path) -> None:
    path = tmp_path / "ranks.json"
    try:
        with watch(0, Store(), record=path):
            deadline = time.monotonic() + 5
            while not path.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert path.exists()
            if error:
                raise error("x")
    except (StopRequestedError, ValueError):
        pass
    assert path.exists() == stays


def test_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    with watch(0, Store(), record=tmp_path / "nowhere" / "ranks.json"):
        pass


class Recorded(Communicator):
    """Two ranks, of which only this one exists: what blocks is recorded with what the watchdog knows then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank, self.size, self.waiting, self.moved_at = 0, 2, "", 0.0
        self.device = torch.device("cpu")
        self.blocked: list[tuple[str, str]] = []
        self.accelerator: Any = SimpleNamespace(wait_for_everyone=self.record("wait_for_everyone"))
        for name in (
            "all_reduce",
            "broadcast",
            "all_gather_object",
            "broadcast_object_list",
            "gather_object",
        ):
            monkeypatch.setattr(torch.distributed, name, self.record(name))
        monkeypatch.setattr(torch.distributed, "all_gather", self.record("all_gather", self.fill))
        self._meshes: Any = {}
        self._hang_timeout = 60
        groups = self.record("new_subgroups_by_enumeration", lambda ranks, _: (ranks, None))
        monkeypatch.setattr(torch.distributed, "new_subgroups_by_enumeration", groups)
        monkeypatch.setattr(self, "form_group", lambda: None)
        monkeypatch.setattr(communicator, "DeviceMesh", SimpleNamespace(from_group=lambda *_, **__: None))
        monkeypatch.setattr(nn.parallel, "DistributedDataParallel", self.record("DistributedDataParallel"))
        for name in ("tolist", "item"):  # on a GPU the host waits here
            monkeypatch.setattr(torch.Tensor, name, self.record(name, getattr(torch.Tensor, name)))

    @staticmethod
    def fill(gathered: list[torch.Tensor], values: torch.Tensor) -> None:
        for part in gathered:
            part.copy_(values)

    def record(self, name: str, function: Any = lambda *_, **__: None) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            self.blocked.append((name, self.waiting))
            return function(*given, **named)

        return call


def used() -> nn.Parameter:
    p = nn.Parameter(torch.ones(3, 2))
    p.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (3, 2), check_invariants=False)
    return p


def dense() -> nn.Parameter:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    return p


COLLECTIVES: dict[str, Any] = {
    "wrap_in_ddp": lambda world: world.wrap_in_ddp(nn.Linear(1, 1)),
    "broadcast_model": lambda world: world.broadcast_model(nn.Linear(1, 1)),
    "broadcast_onto_device": lambda world: world.broadcast_onto_device([torch.ones(1)]),
    "all_reduce_sum": lambda world: world.all_reduce_sum(torch.ones(1)),
    "all_reduce_gradients": lambda world: world.all_reduce_gradients([dense()]),
    "all_reduce_sparse": lambda world: world.all_reduce_sparse(used()),
    "all_gather": lambda world: world.all_gather(torch.ones(1)),
    "all_gather_objects": lambda world: world.all_gather_objects(1),
    "gather_objects": lambda world: world.gather_objects(1),
    "broadcast_object": lambda world: world.broadcast_object(1),
    "barrier": lambda world: world.barrier(),
    "device_mesh": lambda world: world.device_mesh(2),
}
NO_COLLECTIVES = {
    *("mark_progress", "waiting_for", "waiting", "store", "is_main", "close", "exit_process", "recorder"),
    *("node", "nodes", "autocast", "barred", "form_group"),  # a group of one process
}


def test_every_collective_is_tried() -> None:
    public = {name for name, _ in inspect.getmembers(Communicator) if not name.startswith("_")}
    assert public == COLLECTIVES.keys() | NO_COLLECTIVES


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_watchdog_knows_of_every_collective(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Recorded(monkeypatch)
    COLLECTIVES[name](world)
    assert world.blocked, "nothing was recorded"
    assert all(waiting for _, waiting in world.blocked), world.blocked
    assert world.waiting == ""
