"""How fast samples are read, and what the loader's settings change."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from isobatch.core.facts import Facts
from isobatch.data.base import ArraySource
from isobatch.engine.loading.data_rate import DataRate, measure_data_rate
from isobatch.engine.planning.alternatives import seconds_of_waiting
from isobatch.engine.registry import workload
from isobatch.launch.commands.plan import plan as plan_command
from isobatch.tests.paths import ROOT
from isobatch.tests.unit.helpers import plan

if TYPE_CHECKING:
    from isobatch.core.plan import Plan

RECIPE, _ = workload("causal-lm").complete({"batch_size": 10})
FACTS = Facts(fingerprint="", folder="", samples={"train": 100}, lengths=(10, 10))


class SlowSource(ArraySource):
    """Waits for each sample, as for a far disk, or computes as long."""

    def __init__(self, wait: float, compute: float = 0.0) -> None:
        super().__init__({"x": np.zeros((100, 8), np.int32)})
        self.wait, self.compute = wait, compute

    def fetch(self, indices: np.ndarray, pad_to: int = 0) -> dict[str, np.ndarray]:
        time.sleep(self.wait * len(indices))
        end = time.thread_time() + self.compute * len(indices)
        while time.thread_time() < end:
            pass
        return super().fetch(indices, pad_to)


def test_waiting_and_computing_are_told_apart() -> None:
    waits = measure_data_rate(SlowSource(wait=1e-3), 10)
    assert 1e-3 <= waits.sample_seconds < 4e-3
    assert waits.busy_seconds < 0.5e-3
    computes = measure_data_rate(SlowSource(wait=0.0, compute=1e-3), 10)
    assert 1e-3 <= computes.busy_seconds <= computes.sample_seconds
    # x, and the number and the length of each sample
    assert computes.sample_bytes == 8 * 4 + 8 + 8


def test_imports_are_not_counted() -> None:
    """In a fresh process: the first batch imports torch."""
    program = f"""
import runpy, sys
runpy.run_path({str(ROOT / "launch/_root.py")!r})
import numpy as np
from isobatch.data.base import ArraySource
from isobatch.engine.loading.data_rate import measure_data_rate
assert "torch" not in sys.modules
rate = measure_data_rate(ArraySource({{"x": np.zeros((100, 8), np.int32)}}), 10)
print(rate.sample_seconds)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-3


def test_a_very_slow_source_is_read_once() -> None:
    began = time.monotonic()
    assert measure_data_rate(SlowSource(wait=0.05), 10).sample_seconds >= 0.05
    assert time.monotonic() - began < 0.9


def _rate(seconds: float, busy: float = 0.0) -> DataRate:
    return DataRate(sample_seconds=seconds, busy_seconds=busy, sample_bytes=1e3)


def _gpu(**changes: object) -> Plan:
    return plan(**{"device": "cuda", "pin_memory": True, "predicted_step_seconds": 1.0, **changes})


@pytest.mark.parametrize(
    ("seconds", "workers", "step"),
    [(0.01, 0, 1.0), (0.2, 0, 2.0), (0.2, 2, 1.0), (0.4, 2, 2.0), (0.4, 8, 1.0)],
)
def test_reading_is_hidden_until_it_takes_longer_than_the_step(
    seconds: float, workers: int, step: float
) -> None:
    found = seconds_of_waiting(_gpu(workers=workers), RECIPE, FACTS, _rate(seconds))
    assert 1.0 + found == pytest.approx(step, rel=0.02)


def test_each_process_reads_its_share() -> None:
    assert seconds_of_waiting(_gpu(processes=2), RECIPE, FACTS, _rate(0.4)) == pytest.approx(1.0)


def test_reading_takes_a_processors_cores() -> None:
    on_cpu = plan(predicted_step_seconds=1.0, threads=2)
    assert seconds_of_waiting(on_cpu, RECIPE, FACTS, _rate(0.05)) == 0.0
    assert 0.1 < seconds_of_waiting(on_cpu, RECIPE, FACTS, _rate(0.05, busy=0.05)) < 0.6


def test_copies_from_ordinary_memory_are_waited_for() -> None:
    large = DataRate(sample_seconds=0.0, busy_seconds=0.0, sample_bytes=1e9)
    pinned, pageable = (seconds_of_waiting(_gpu(pin_memory=p), RECIPE, FACTS, large) for p in (True, False))
    assert pageable > pinned + 1


def test_plan_says_how_fast_samples_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--task", "sequence-vae", "--device", "cpu", "--quiet"]
    assert plan_command(words) == 0
    shown = capsys.readouterr().out
    assert "a second in one thread (measured now)" in shown
    assert plan_command([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"]["run_seconds_by_part"]["read"] >= 0


def test_nothing_is_said_of_a_machine_that_is_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(["--task", "sequence-vae", "--hardware", "8xh100", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["run_seconds_by_part"]["read"] == 0
