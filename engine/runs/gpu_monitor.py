"""GPU figures of a run, as torch reads them from the vendor's management library, in a thread of its own."""

from __future__ import annotations

import contextlib
import threading
import time

import torch

READINGS = {
    "gpu_utilisation": ("utilization", 1.0),
    "power_watts": ("power_draw", 0.001),
    "gpu_temperature": ("temperature", 1.0),
    "gpu_memory_bytes": ("device_memory_used", 1.0),
}
"""Field of metrics.jsonl -> (function of torch.cuda, its unit in ours)."""
SECONDS_BETWEEN_READINGS = 1.0
SECONDS_KEPT = 10.0
"""Older figures are left out: a call may hang."""


class GpuMonitor:
    """Utilisation (percent), power (watts), temperature (Celsius) and memory in use (bytes) of one GPU.

    `with` runs a thread that reads them once a second: a call may take long, and on MIG slices, virtual GPUs
    and WSL many fail. What cannot be read is left out of `latest()`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._figures: dict[str, float] = {}
        self._read_at = 0.0
        self._end = threading.Event()

    def __enter__(self) -> GpuMonitor:
        self._end.clear()
        threading.Thread(target=self._run, name="gpu monitor", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()  # nobody waits: the thread may be in a slow call

    def latest(self) -> dict[str, float]:
        """The newest figures, without a wait."""
        return self._figures if time.monotonic() - self._read_at < SECONDS_KEPT else {}

    def _run(self) -> None:
        while True:
            figures = {}
            for name, (reading, unit) in READINGS.items():
                with contextlib.suppress(Exception):  # whatever goes wrong ends figures, never the run
                    figures[name] = getattr(torch.cuda, reading)(self._device) * unit
            self._figures, self._read_at = figures, time.monotonic()
            if self._end.wait(SECONDS_BETWEEN_READINGS):
                return
