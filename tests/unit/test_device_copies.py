"""Tests of engine/loading/device_copies.py: page-locked memory, and figures read when they are there."""

from __future__ import annotations

import numpy as np
import torch

from isobatch.engine.loading.device_copies import HostCopy, array_to_device, numbers_to_device

CPU = torch.device("cpu")


def test_on_a_cpu_nothing_is_copied() -> None:
    values = torch.tensor([1.0, 2.0])
    assert HostCopy(values).read() == [1.0, 2.0]
    assert HostCopy(torch.tensor(3.0)).read() == [3.0]
    assert array_to_device(np.arange(3), CPU).tolist() == [0, 1, 2]
    assert numbers_to_device([1.0], torch.float64, CPU).dtype == torch.float64
