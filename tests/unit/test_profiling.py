"""The recorder of a step's parts, the profiler of steps, and what a profile advises."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from isobatch.engine.distributed import recorder
from isobatch.engine.distributed.recorder import PARTS, Recorder
from isobatch.launch.measuring.profile import profile, worth_a_trial
from isobatch.tests.paths import RAGGED

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.tests.unit.conftest import Say

CPU = torch.device("cpu")


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def wait(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(recorder, "now", made.now)
    return made


def test_an_inner_part_is_not_the_outer_ones(clock: Clock) -> None:
    found = Recorder()
    found.start(CPU)
    clock.wait(1)
    with found.part("optimizer"):
        clock.wait(2)
        with found.part("communication"):
            clock.wait(4)
        clock.wait(8)
    clock.wait(16)
    with found.part("forward"):
        clock.wait(32)
    parts = found.stop()
    assert parts == {
        **dict.fromkeys(PARTS, 0.0),
        **{"host": 17.0, "optimizer": 10.0, "communication": 4.0, "forward": 32.0},
    }


HEALTHY: dict[str, Any] = {
    "parts": {**dict.fromkeys(PARTS, 0.0), "forward": 0.4, "backward": 0.5, "optimizer": 0.04},
    "device": "cpu",
    "device_use": 0.95,
    "cores": 4,
    "padding": 0.02,
    "micro_batches": 1.0,
    "samples_per_micro_batch": 32.0,
    "memory_share": 0.5,
}
PLAN = {
    **{"device": "cpu", "threads": 4, "processes": 1, "attention": "sdpa", "compile": "off"},
    **{"precision": "bf16", "activation_checkpointing": "off"},
}


@pytest.mark.parametrize(
    ("found", "plan", "measures"),
    [
        ({}, {}, []),
        ({"parts": {**HEALTHY["parts"], "data wait": 0.5}}, {}, ["loading"]),
        ({"padding": 0.4}, {}, ["micro-batch", "packing", "length grouping"]),
        ({"micro_batches": 32.0, "samples_per_micro_batch": 1.0}, {}, ["micro-batch"]),
        ({}, {"attention": "eager"}, ["attention kernel"]),
        ({}, {"precision": "fp32"}, ["mixed precision"]),
        ({"device_use": 0.5}, {"device": "cuda"}, ["compile"]),
        ({}, {"activation_checkpointing": "on"}, ["activation checkpointing"]),
    ],
)
def test_each_bottleneck_is_found(found: dict[str, Any], plan: dict[str, Any], measures: list[str]) -> None:
    advised = worth_a_trial(HEALTHY | found, PLAN | plan)
    assert [one["measure"] for one in advised] == measures
    assert all(one["text"] for one in advised)


@pytest.mark.parametrize("json_wanted", [True, False])
def test_profile_on_a_task(
    json_wanted: bool, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")  # threads that wait would take the cores from other tests
    words = ["--task", RAGGED, "--out", str(tmp_path), "--device", "cpu", "--quiet", "--timed-steps", "4"]
    code, out, _ = say(profile, *words, "--micro-batch", "2", *(["--json"] if json_wanted else []))
    assert code == 0
    if json_wanted:
        found = json.loads(out)
        assert sum(found["parts"].values()) == pytest.approx(found["step_seconds"], rel=0.05)
        flags = {row["measure"]: row["flags"] for row in found["advice"]}
        assert flags["micro-batch"] == ["no --micro-batch"]
        assert found["steps"] == 4
        trace = next(tmp_path.glob("profiles/*/trace.json")).read_text()
        assert "nn.Module: " in trace
        assert "aten::mm" in trace
    else:
        assert "a step takes" in out
        assert "target: above 90%" in out
        assert "no --micro-batch" in out
    for file in ("trace.json", "profile.json"):
        assert list(tmp_path.glob(f"profiles/*/{file}"))
