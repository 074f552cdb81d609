"""Out of memory on a GPU of which a part alone may be used: in the rehearsal, and later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from isobatch.tests.gpu.helpers import decisions, finished, gpu_only
from isobatch.tests.integration.helpers import ROOT, furthest, losses, plan_of, summary
from isobatch.tests.tasks.limited import LIMIT, ROWS

if TYPE_CHECKING:
    from pathlib import Path

TASK = f"{ROOT}/tests/tasks/limited.py:LimitedLM"


def limited(folder: Path, name: str, micro: int, *words: str, **environment: str) -> Path:
    flags = ["--task", TASK, "--precision", "fp32", "--compile", "off", "--micro-batch", str(micro)]
    return finished(folder, name, *flags, "--name", name, *words, **environment)


@gpu_only
def test_the_rehearsal_finds_what_fits(tmp_path: Path) -> None:
    whole = limited(tmp_path, "whole", ROWS)
    smaller = [d for d in decisions(whole) if d["decision"] == "smaller micro-batches"]
    assert {d["reason"] for d in smaller} == {"rehearsal"}
    assert plan_of(whole)["micro_batch_samples"] < ROWS
    assert summary(whole)["peak_memory_bytes"] <= LIMIT
    parts = limited(tmp_path, "parts", ROWS // 8)
    assert decisions(parts) == []
    assert furthest(losses(whole), losses(parts)) < 1e-3


@gpu_only
def test_memory_that_runs_out_later_halves_the_micro_batches(tmp_path: Path) -> None:
    """The run goes on from its last checkpoint, and learns what it would have learnt."""
    later = limited(tmp_path, "later", ROWS // 4, "--save-every", "2", LATER="1")
    smaller = [d for d in decisions(later) if d["decision"] == "smaller micro-batches"]
    assert len(smaller) == 1
    assert smaller[0]["reason"] != "rehearsal"
    assert plan_of(later)["micro_batch_samples"] == ROWS // 8
    parts = limited(tmp_path, "parts", ROWS // 8)
    assert furthest(losses(later), losses(parts)) < 1e-3


@gpu_only
@pytest.mark.parametrize("limit", ["3GB", "6GB"])
def test_a_memory_limit_is_kept(limit: str, tmp_path: Path) -> None:
    words = ["--task", "causal-lm", "--model", "gpt2-124m", "--max-length", "256", "--batch-size", "256"]
    words += ["--steps", "6", "--compile", "off", "--precision", "bf16", "--memory-limit", limit]
    run = finished(tmp_path, "run", *words, "--name", "run")
    assert summary(run)["peak_memory_bytes"] <= int(limit[0]) * 2**30
