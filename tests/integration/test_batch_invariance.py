"""Losses and gradients are the same for any micro-batches and any number of processes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from isobatch.tests.integration.helpers import RAGGED, ROOT, warm_python

STEPS = 40


class Measured(NamedTuple):
    losses: list[float]
    samples: list[list[int]]
    micros: list[list[list[int]]]
    """[rank][step][micro-batch] -> samples in it."""
    gradient: torch.Tensor


def run(
    folder: Path,
    world: int,
    steps: int = STEPS,
    flags: dict[str, Any] | None = None,
    task: str = RAGGED,
    **plan: Any,
) -> Measured:
    """Steps of a task, by default the test task, in a world of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "task": task,
        "flags": {"steps": [steps], **(flags or {})},
        "plan": plan,
        "steps": steps,
        "out": str(folder / "out.json"),
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    script = [str(ROOT / "tests" / "tasks" / "measure.py"), str(folder / "settings.json")]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command = [warm_python(), *(torchrun if world > 1 else []), *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((folder / "out.json").read_text())
    return Measured(**report, gradient=torch.load(folder / "out.json.pt", weights_only=True))


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def assert_same(found: Measured, reference: Measured) -> None:
    assert found.samples == reference.samples
    assert difference(found.gradient, reference.gradient) < 1e-5
    gaps = [abs(a - b) for a, b in zip(found.losses, reference.losses, strict=True)]
    assert max(gaps) < 1e-4, f"losses part at step {gaps.index(max(gaps))}: {max(gaps)}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """One process, every global batch in one micro-batch."""
    found = run(
        tmp_path_factory.mktemp("whole"),
        1,
        micro_batch_samples=24,
        micro_batch_tokens=10**6,
        micro_batch_cost=1e9,
    )
    assert all(len(step) == 1 for step in found.micros[0])
    # 93 samples in batches of 24: the last batch of an epoch has 21, and is kept.
    assert [len(s) for s in found.samples[:4]] == [24, 24, 24, 21]
    return found


CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process, many micro-batches": (1, {"micro_batch_samples": 5, "micro_batch_tokens": 130}),
    "one process, recomputed activations": (1, {"micro_batch_samples": 7, "activation_checkpointing": "on"}),
    "two processes": (2, {"micro_batch_samples": 5}),
    "three processes": (3, {"micro_batch_tokens": 100}),
    "five processes, overlapped": (5, {"micro_batch_samples": 3, "reduction": "overlapped"}),
}


SOAKED = ("three processes", "five processes, overlapped")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SOAKED else n for n in CUTS]
)
def test_any_cut_learns_the_same(name: str, whole: Measured, tmp_path: Path) -> None:
    world, plan = CUTS[name]
    found = run(tmp_path, world, **plan)
    assert_same(found, whole)


@pytest.mark.parametrize("reduction", ["explicit", pytest.param("overlapped", marks=pytest.mark.slow)])
def test_ranks_with_nothing_to_do(reduction: str, tmp_path: Path) -> None:
    """Batches of 2, at the end of an epoch of 1, on three processes: some ranks hold a dummy or nothing."""
    flags = {"batch_size": 2}
    alone = run(tmp_path / "alone", 1, steps=50, flags=flags)
    found = run(tmp_path / "three", 3, steps=50, flags=flags, reduction=reduction, micro_batch_samples=1)
    counts = [[sum(step) for step in rank] for rank in found.micros]
    assert sorted(rank[0] for rank in counts) == [0, 1, 1]
    assert sorted(rank[46] for rank in counts) == [0, 0, 1]  # 93 = 46 * 2 + 1
    assert_same(found, alone)


def test_noise_by_the_cut_would_be_seen(whole: Measured, tmp_path: Path) -> None:
    """The control: torch's own dropout noise, whose draws follow the micro-batches, does part."""
    native = run(tmp_path, 1, steps=5, flags={"noise": "native"}, micro_batch_samples=5)
    assert native.samples == whole.samples[:5]
    assert difference(native.gradient, whole.gradient) > 1e-2
