"""Tests of engine/distributed/device_memory.py and of the memory that a rehearsal leaves behind."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from isobatch.core.errors import OutOfMemoryError
from isobatch.engine.distributed.device_memory import forbid_spilling
from isobatch.engine.train import memory_probe

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


def machine(root: Path, dxg: bool) -> Path:
    """The files of a machine by which it is known."""
    (root / "dev").mkdir()
    if dxg:
        (root / "dev" / "dxg").touch()
    return root


@pytest.mark.parametrize(
    ("device", "dxg", "share"),
    [
        ("cuda", True, (6 - 0.5) / 8),  # 6 of 8 GiB are free, and 0.5 stay for libraries
        ("cuda", False, None),
        ("cpu", True, None),
    ],
)
def test_torch_stays_within_free_memory_where_the_driver_spills(
    device: str, dxg: bool, share: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (6 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda s, _: set_to.append(s))
    forbid_spilling(torch.device(device), machine(tmp_path, dxg))
    assert set_to == ([] if share is None else [share])


@pytest.mark.parametrize("fits", [True, False])
def test_a_rehearsal_is_not_the_peak_of_the_run(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is given back first: what stays reserved would be the new peak."""
    events: list[str] = []

    def run_largest(*_: Any) -> None:
        events.append("rehearsal")
        if not fits:
            raise OutOfMemoryError("out of memory")

    monkeypatch.setattr(memory_probe, "_run_largest", run_largest)
    monkeypatch.setattr(torch.random, "fork_rng", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("give back"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: events.append("reset"))
    state: Any = SimpleNamespace(model=nn.Linear(1, 1), world=SimpleNamespace(device=torch.device("cuda")))
    assert memory_probe.largest_micro_batch_fits(state) == fits
    assert events == ["rehearsal", "give back", "reset"]
