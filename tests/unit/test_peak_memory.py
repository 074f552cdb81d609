"""Tests of a process's peak of memory, of the memory of a GPU, and of what a rehearsal leaves of it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import isobatch
from isobatch.core import atomic_files, measures
from isobatch.core.errors import OutOfMemoryError
from isobatch.engine.checkpointing.writer import CheckpointWriter
from isobatch.engine.distributed.device_memory import forbid_spilling
from isobatch.engine.runs import peak_memory
from isobatch.engine.runs.peak_memory import PeakMemory
from isobatch.engine.train import memory_probe
from isobatch.tests.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
SIZE = 300 << 20
LINE = f"{ROOT}/tests/tasks/failing.py:Line"


def take() -> None:
    """SIZE bytes for a moment."""
    np.ones(SIZE, np.uint8).sum()


def test_what_was_taken_and_given_back_is_in_the_peak() -> None:
    peak = PeakMemory(CPU)
    peak.observe()
    before = peak.bytes
    take()
    peak.observe()
    assert peak.bytes >= before + 0.9 * SIZE
    if peak_memory.CLEAR.exists():
        again = PeakMemory(CPU)
        again.observe()
        assert again.bytes < peak.bytes - 0.5 * SIZE, "its own peak, not what was before it"


def test_where_the_system_cannot_reset_the_peak_of_the_process_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measures, "STATUS", tmp_path / "none")
    monkeypatch.setattr(peak_memory, "CLEAR", tmp_path / "no" / "none")
    peak = PeakMemory(CPU)
    peak.observe()
    assert peak.bytes > 50e6


def test_what_saving_takes_is_in_the_peak_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looked between two rows of metrics.jsonl: 1.1 to 1.3 GB more while saving were not seen."""
    start = CheckpointWriter.start

    def starving(self: CheckpointWriter, *given: object) -> None:
        take()
        start(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointWriter, "start", starving)
    recipe = isobatch.Recipe(LINE, steps=4)
    isobatch.train(recipe, out=str(tmp_path), name="run", quiet=True, device="cpu", processes=1)
    summary = atomic_files.read_json(tmp_path / "run" / "summary.json")
    rows = list(atomic_files.rows_in(tmp_path / "run" / "metrics.jsonl"))
    assert summary["peak_memory_bytes"] >= rows[0]["memory_bytes"] + 0.5 * SIZE


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
