"""Tests of engine/machine/slowdowns.py: heat, power, a battery, spilled memory are told once they last."""

from __future__ import annotations

import sys
import time
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.engine.machine import slowdowns
from isobatch.engine.machine.slowdowns import SlowdownMonitor, throttle_count
from isobatch.engine.training.run_context import RunContext

if TYPE_CHECKING:
    from pathlib import Path


class FakeNvml(ModuleType):
    """pynvml of one GPU that is slowed down for `reasons` and has `free` bytes."""

    NVML_CLOCK_SM = 1
    NVMLError = OSError

    def __init__(self, reasons: int = 0, free: int = 1 << 30, fails: str = "") -> None:
        super().__init__("pynvml")
        self.nvmlInit = self.nvmlShutdown = lambda: None
        self.nvmlDeviceGetHandleByUUID = lambda _: "handle"
        self.nvmlDeviceGetMemoryInfo = lambda _: SimpleNamespace(free=free)
        self.nvmlDeviceGetCurrentClocksThrottleReasons = lambda _: reasons
        self.nvmlDeviceGetClockInfo, self.nvmlDeviceGetMaxClockInfo = lambda *_: 600, lambda *_: 2000
        if fails:
            setattr(self, fails, lambda *_: (_ for _ in ()).throw(OSError("Not Supported")))


def noticed(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None = None, percent: float | None = None, **given: Any
) -> dict[str, str]:
    """Cause -> sentence of a monitor that has read a few times."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(slowdowns, "battery_percent", lambda: percent)
    monkeypatch.setattr(slowdowns, "SECONDS_BETWEEN_READINGS", 0.01)
    reads: list[int] = []
    observe = SlowdownMonitor.observe
    monkeypatch.setattr(
        SlowdownMonitor, "observe", lambda self, causes: (reads.append(1), observe(self, causes))
    )
    with SlowdownMonitor("5b1a" if nvml else "", **given) as monitor:
        end = time.monotonic() + 5
        while len(reads) < 4 and time.monotonic() < end:
            time.sleep(0.005)
    monitor.thread.join(5)
    found = monitor.new()
    assert len(found) == len(dict(found)), "each is told once"
    return dict(found)


@pytest.mark.parametrize(
    ("nvml", "cause"),
    [
        (FakeNvml(0x20), {"GPU heat"}),
        (FakeNvml(0x40), {"GPU heat"}),
        (FakeNvml(0x80), {"GPU power"}),
        (FakeNvml(0x4), {"GPU power"}),
        (FakeNvml(0x1), set()),
        (FakeNvml(0x40, fails="nvmlDeviceGetMemoryInfo"), {"GPU heat"}),
        (FakeNvml(0x40, fails="nvmlDeviceGetCurrentClocksThrottleReasons"), set()),
        (FakeNvml(0x40, fails="nvmlInit"), set()),
        (FakeNvml(free=1 << 20), {"spill"}),
    ],
)
def test_a_gpu_that_is_slowed_down(nvml: FakeNvml, cause: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert noticed(monkeypatch, nvml, spills=True).keys() == cause


def test_a_full_gpu_whose_driver_does_not_spill_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert noticed(monkeypatch, FakeNvml(free=0), spills=False) == {}


def test_a_battery_is_told_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "on its battery (41 %)" in noticed(monkeypatch, percent=41.0)["battery"]
    assert noticed(monkeypatch, FakeNvml(), percent=41.0, computer=False) == {}
    assert noticed(monkeypatch) == {}


def test_a_short_peak_is_none() -> None:
    monitor = SlowdownMonitor("", computer=False)
    for causes in ({"GPU heat": "hot"}, {}, {"GPU heat": "hot"}, {}):
        monitor.observe(causes)
    assert monitor.new() == []
    for _ in range(3):
        monitor.observe({"GPU heat": "hot"})
    assert monitor.new() == [("GPU heat", "hot")]
    assert monitor.new() == []


def test_a_processor_that_is_slowed_down_by_heat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = tmp_path / "sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count"
    assert throttle_count(tmp_path) == 0
    counter.parent.mkdir(parents=True)
    counter.write_text("7\n")
    monkeypatch.setattr(slowdowns, "battery_percent", lambda: None)
    monitor = SlowdownMonitor("", root=tmp_path)
    for count in (7, 9, 12, 15):
        counter.write_text(f"{count}\n")
        monitor.observe(monitor._computer_causes())  # noqa: SLF001
    assert [cause for cause, _ in monitor.new()] == ["processor heat"]


def test_without_a_gpu_or_a_computer_there_is_no_thread() -> None:
    with SlowdownMonitor("", computer=False) as monitor:
        assert not monitor.thread.is_alive()


@pytest.mark.parametrize("rank", [0, 3])
def test_a_slowdown_is_said_and_recorded(rank: int) -> None:
    said: list[Any] = []
    context: Any = SimpleNamespace(
        slowdowns=SlowdownMonitor("", computer=False),
        world=SimpleNamespace(rank=rank, is_main=rank == 0),
        console=SimpleNamespace(say=lambda text, always: said.append((text, always))),
        progress=SimpleNamespace(phase="train", step=4),
        run=SimpleNamespace(log_decision=lambda *given, **facts: said.append((given, facts))),
    )
    for _ in range(2):
        context.slowdowns.observe({"GPU heat": "hot"})
    RunContext.tell_slowdowns(context)
    facts = {"cause": "GPU heat", "reason": "hot", "at_phase": "train", "at_step": 4}
    others = [("rank 3: hot", True)]
    assert said == ([("hot", False), (("slowed down",), facts)] if rank == 0 else others)
