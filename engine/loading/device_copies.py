"""Copies between the host and the device that the training loop does not wait for.

A copy from ordinary host memory makes CUDA wait for all work that is queued; one from page-locked (pinned)
memory does not. A copy to the host is started where the result is made and read one step later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_tensors(arrays: dict[str, np.ndarray], pin: bool) -> dict[str, Tensor]:
    """Host tensors of the arrays, in page-locked memory if `pin`."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}
    return {name: t.pin_memory() for name, t in tensors.items()} if pin else tensors


def to_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy a batch to the device; integers become int64 there, so that fewer bytes are copied."""
    moved = {name: t.to(device, non_blocking=True) for name, t in batch.items()}
    narrow = (torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.int16, torch.int32)
    return {name: t.to(torch.int64) if t.dtype in narrow else t for name, t in moved.items()}


def array_to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A small array on the device, by way of page-locked memory."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class HostCopy:
    """A tensor on its way to the host: the copy starts here, and `read` waits only for this copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._copied: Any = None
        self._host = tensor.detach()
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[float]:
        """The values, flattened."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.flatten().tolist()
