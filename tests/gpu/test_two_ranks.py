"""Two ranks on one device over gloo, whose losses are those of one; engines of several processes in one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from isobatch.benchmarks import child_process
from isobatch.benchmarks.gpu.runner import FOLDER
from isobatch.benchmarks.gpu.worlds import train_on_one_device
from isobatch.tests.gpu.helpers import DEVICE, gpu_only, on_device, ragged
from isobatch.tests.integration.helpers import RAGGED, furthest, losses, plan_of, resumed_from

if TYPE_CHECKING:
    from pathlib import Path

FLAGS = ("--precision", "fp32", "--micro-batch", "6")
NEEDS = dict.fromkeys(("zero2", "zero3", "zero3-offload"), "deepspeed")


@on_device
@pytest.mark.parametrize(
    ("strategy", "compiled"),
    [("ddp", "on"), *((name, "off") for name in ("ddp", "zero2", "zero3", "fsdp2", "fsdp2-offload"))],
)
def test_two_ranks_learn_what_one_does(strategy: str, compiled: str, tmp_path: Path) -> None:
    """Compiled after it is wrapped, the model's reduction still overlaps its backward pass."""
    if strategy in NEEDS:
        pytest.importorskip(NEEDS[strategy])
    one = ragged(tmp_path, "one", *FLAGS, "--compile", "off", steps=24)
    words = ("--task", RAGGED, "--steps", "24", *FLAGS, "--compile", compiled, "--device", DEVICE)
    two = tmp_path / "runs" / f"{strategy}-two-ranks"
    assert train_on_one_device(str(tmp_path / "runs"), strategy, *words) == str(two)
    assert plan_of(two)["processes"] == 2
    assert furthest(losses(one), losses(two)) < 1e-3


@on_device
@pytest.mark.parametrize("strategy", ["zero3-offload", "fsdp2-offload"])
def test_offloaded_state_resumes(strategy: str, tmp_path: Path) -> None:
    """The optimizer's step counter must lie where its fused kernel reads it."""
    if strategy in NEEDS:
        pytest.importorskip(NEEDS[strategy])
    words = ("--strategy", strategy, "--save-every", "8", "--keep", "9")
    run = ragged(tmp_path, "run", *FLAGS, "--compile", "off", *words, steps=24)
    assert furthest(losses(resumed_from(run, 8)), losses(run)) < 1e-4


@gpu_only
def test_nccl_takes_ddp_and_cpu_tensors_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert child_process.call("gpu.worlds:nccl", timeout=200)["gradient difference"] < 1e-2
