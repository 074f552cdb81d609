"""The GPU monitor reads NVML in a thread of its own, and no error or slow call of NVML reaches the run."""

from __future__ import annotations

import sys
import threading
import time
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.engine.runs import gpu_monitor
from isobatch.engine.runs.gpu_monitor import READINGS, GpuMonitor

if TYPE_CHECKING:
    from collections.abc import Callable

UUID = "5b1a"


class FakeNvml(ModuleType):
    """pynvml with one GPU; `errors`: function -> what it raises, `seconds`: how long each call takes."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        """As pynvml's."""

    def __init__(self, errors: dict[str, Exception], seconds: float = 0.0) -> None:
        super().__init__("pynvml")
        self.errors, self.seconds = errors, seconds
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *arguments: self._answer(name, *arguments)

    def _answer(self, name: str, *arguments: Any) -> Any:
        self.calls.append((name, threading.get_ident()))
        time.sleep(self.seconds)
        if error := self.errors.get(name):
            raise error
        if name == "nvmlDeviceGetHandleByUUID" and arguments != (f"GPU-{UUID}",):
            raise self.NVMLError("Not Found")
        answer = ModuleType("answer")
        answer.__dict__.update(gpu=97, used=5 * 2**30)
        return 412_500 if name == "nvmlDeviceGetPowerUsage" else answer

    def count(self, name: str) -> int:
        return [called for called, _ in self.calls].count(name)


def monitored(
    fake: FakeNvml | None, monkeypatch: pytest.MonkeyPatch, until: Callable[[GpuMonitor], bool]
) -> tuple[dict[str, float], float]:
    """(last figures, longest seconds of a call) of a monitor that is asked `until`."""
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(gpu_monitor, "SECONDS_BETWEEN_READINGS", 0.02)
    longest, figures = 0.0, {}
    with GpuMonitor(UUID) as monitor:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            began = time.perf_counter()
            figures = monitor.latest()
            longest = max(longest, time.perf_counter() - began)
            if until(monitor):
                break
            time.sleep(0.005)
    monitor.thread.join(5)
    assert not monitor.thread.is_alive()
    return figures, longest


def test_figures_are_read_in_another_thread_and_what_is_not_there_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeNvml({"nvmlDeviceGetTemperature": FakeNvml.NVMLError("Not Supported")})
    figures, _ = monitored(fake, monkeypatch, lambda _: fake.count("nvmlDeviceGetPowerUsage") > 2)
    assert figures == {"gpu_utilisation": 97, "power_watts": 412.5, "gpu_memory_bytes": 5 * 2**30}
    assert (fake.count("nvmlInit"), fake.count("nvmlShutdown")) == (1, 1)
    assert threading.get_ident() not in {thread for _, thread in fake.calls}


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "import"])
def test_without_a_handle_there_are_no_figures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`None` in sys.modules makes the import fail."""
    fake = FakeNvml({name: OSError("no such file")})
    held = None if name == "import" else fake
    assert monitored(held, monkeypatch, lambda monitor: not monitor.thread.is_alive())[0] == {}
    assert fake.count("nvmlShutdown") == (name == "nvmlDeviceGetHandleByUUID")


def test_a_slow_call_makes_nobody_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml({}, seconds=0.3)
    began = time.perf_counter()
    figures, longest = monitored(fake, monkeypatch, lambda monitor: bool(monitor.latest()))
    assert figures == {} or figures.keys() == READINGS.keys()
    assert longest < 0.1
    assert time.perf_counter() - began > 6 * 0.3  # handle, four readings and the end: they were that slow


def test_old_figures_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that hangs must not leave the same power in every later row."""
    monkeypatch.setattr(gpu_monitor, "SECONDS_KEPT", 0.05)
    fake = FakeNvml({})
    seen: list[bool] = []

    def gone(monitor: GpuMonitor) -> bool:
        seen.append(bool(monitor.latest()))
        fake.seconds = 0.5 if any(seen) else 0.0
        return any(seen) and not seen[-1]

    assert monitored(fake, monkeypatch, gone)[0].keys() in (set(), READINGS.keys())
    assert seen[-1] is False


def test_no_gpu_no_thread() -> None:
    with GpuMonitor("") as monitor:
        assert monitor.latest() == {}
        assert not monitor.thread.is_alive()
