"""The GPU monitor reads torch's figures in a thread of its own, and no error or slow call reaches the run."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from isobatch.engine.runs import gpu_monitor
from isobatch.engine.runs.gpu_monitor import READINGS, GpuMonitor

if TYPE_CHECKING:
    from collections.abc import Callable

GPU = torch.device("cuda:0")


def wait_until(holds: Callable[[], Any]) -> None:
    until = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def answer(monkeypatch: pytest.MonkeyPatch, name: str, call: Callable[[], float]) -> None:
    monkeypatch.setattr(torch.cuda, name, lambda device: call() if device == GPU else 1 / 0)


@pytest.fixture(autouse=True)
def _figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_monitor, "SECONDS_BETWEEN_READINGS", 0.02)
    for name, _ in READINGS.values():
        answer(monkeypatch, name, lambda: 500)


def test_what_cannot_be_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    readers: set[str] = set()
    answer(monkeypatch, "temperature", lambda: 1 / 0)
    answer(monkeypatch, "utilization", lambda: readers.add(threading.current_thread().name) or 97)
    with GpuMonitor(GPU) as monitor:
        wait_until(monitor.latest)
        figures = monitor.latest()
    assert figures == {"gpu_utilisation": 97, "power_watts": 0.5, "gpu_memory_bytes": 500}
    assert readers == {"gpu monitor"}


def test_a_call_that_hangs_holds_up_nothing_and_its_figures_grow_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_monitor, "SECONDS_KEPT", 0.05)
    hangs, free = threading.Event(), threading.Event()
    answer(monkeypatch, "power_draw", lambda: 1 if not hangs.is_set() or free.wait(10) else 0)
    began = time.monotonic()
    with GpuMonitor(GPU) as monitor:
        wait_until(monitor.latest)
        hangs.set()
        wait_until(lambda: not monitor.latest())
    assert time.monotonic() - began < 5
    free.set()
