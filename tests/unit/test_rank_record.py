"""Tests of engine/distributed/rank_record.py: where every rank is, while it trains and after errors."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core import atomic_files
from isobatch.core.errors import StopRequestedError
from isobatch.engine.distributed.rank_record import RankRecord
from isobatch.tests.unit.test_watchdog import Store, watch

if TYPE_CHECKING:
    from pathlib import Path


def main_rank(store: Store, **doing: Any) -> Any:
    dog = watch(0, store, **doing)
    dog.world.is_main = True
    return dog


def test_every_rank_is_recorded_with_its_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock = Store(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    here, waits = main_rank(store), watch(1, store, waiting="a barrier")
    record = RankRecord(here, tmp_path / "ranks.json")
    waits._publish_position()  # noqa: SLF001
    record.write()
    clock[0] = 30.0
    record.write()
    said = atomic_files.read_json(tmp_path / "ranks.json")
    first, second, third = said["ranks"]
    assert (first["place"], first["waiting"], first["still_seconds"]) == ("step 0", "", 30.0)
    assert (second["place"], second["waiting"], second["silent_seconds"]) == ("step 1", "a barrier", 30.0)
    assert third == {"rank": 2}, "it was never heard of"


@pytest.mark.parametrize(("error", "stays"), [(None, False), (StopRequestedError, False), (ValueError, True)])
def test_it_stays_after_an_error_alone(error: type[Exception] | None, stays: bool, tmp_path: Path) -> None:
    path = tmp_path / "ranks.json"
    record = RankRecord(main_rank(Store()), path)
    try:
        with record:
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
    with RankRecord(main_rank(Store()), tmp_path / "nowhere" / "ranks.json"):
        pass
