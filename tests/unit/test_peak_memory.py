"""Tests of engine/runs/peak_memory.py: the peak of the process, not of the moments when somebody looked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

import isobatch
from isobatch.core import atomic_files, measures
from isobatch.engine.checkpointing.writer import CheckpointWriter
from isobatch.engine.runs import peak_memory
from isobatch.engine.runs.peak_memory import PeakMemory
from isobatch.tests.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

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
