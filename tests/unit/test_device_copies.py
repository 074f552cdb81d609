"""Tests of engine/loading/device_copies.py: page-locked memory, and figures read when they are there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from isobatch.engine.loading.device_copies import HostCopy, array_to_device, numbers_to_device

if TYPE_CHECKING:
    import pytest

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_on_a_cpu_nothing_is_copied() -> None:
    values = torch.tensor([1.0, 2.0])
    assert HostCopy(values).read() == [1.0, 2.0]
    assert HostCopy(torch.tensor(3.0)).read() == [3.0]
    assert array_to_device(np.arange(3), CPU).tolist() == [0, 1, 2]
    assert numbers_to_device([1.0], torch.float64, CPU).dtype == torch.float64


def test_a_figure_is_read_once_its_copy_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy starts at once, asynchronously, into page-locked memory; reading waits for its event alone."""
    log: list[str] = []
    made = torch.empty

    class OnGpu(torch.Tensor):
        is_cuda = True

    def empty(*shape: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        log.append(f"pinned {pin_memory}")
        found = made(*shape, **named)
        found.copy_ = lambda source, non_blocking=False: log.append(f"copy {non_blocking}")  # type: ignore[method-assign]
        return found

    event = SimpleNamespace(record=lambda: log.append("record"), synchronize=lambda: log.append("wait"))
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    copy = HostCopy(torch.zeros(2).as_subclass(OnGpu))
    assert log == ["pinned True", "copy True", "record"]
    copy.read()
    assert log[3:] == ["wait"]
