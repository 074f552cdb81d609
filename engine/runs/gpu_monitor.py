"""GPU figures of a run, read from NVIDIA's management library (NVML) in a thread of its own."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

READINGS: Mapping[str, Callable[[Any, Any], float]] = {
    "gpu_utilisation": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "power_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "gpu_temperature": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "gpu_memory_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
}
"""Field of metrics.jsonl -> its reading by (pynvml, the GPU's handle)."""
SECONDS_BETWEEN_READINGS = 1.0
SECONDS_KEPT = 10.0
"""Older figures are left out: a call to NVML may hang."""


class GpuMonitor:
    """Utilisation (percent), power (watts), temperature (Celsius) and memory in use (bytes) of one GPU.

    `with` runs a thread that reads them once a second: a call to NVML may take long, and on MIG slices,
    virtual GPUs and WSL many fail. What cannot be read is left out of `latest()`. `uuid` is the GPU's, as
    torch gives it; empty for no NVIDIA GPU, and then there is no thread and there are no figures.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._figures: dict[str, float] = {}
        self._read_at = 0.0
        self._end = threading.Event()
        self.thread = threading.Thread(target=self._run, name="gpu monitor", daemon=True)

    def __enter__(self) -> GpuMonitor:
        if self._uuid:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()  # nobody waits: the thread may be in a slow call

    def latest(self) -> dict[str, float]:
        """The newest figures, without a wait."""
        return self._figures if time.monotonic() - self._read_at < SECONDS_KEPT else {}

    def _run(self) -> None:
        """The thread. Whatever goes wrong (of NVML, or of its Python binding) ends figures, never the run."""
        with contextlib.suppress(Exception):
            import pynvml as nvml

            nvml.nvmlInit()
            try:
                self._read_until_end(nvml, gpu_handle(nvml, self._uuid))
            finally:
                nvml.nvmlShutdown()

    def _read_until_end(self, nvml: Any, gpu: Any) -> None:
        while True:
            figures = {}
            for name, reading in READINGS.items():
                with contextlib.suppress(Exception):
                    figures[name] = reading(nvml, gpu)
            self._figures, self._read_at = figures, time.monotonic()
            if self._end.wait(SECONDS_BETWEEN_READINGS):
                return


def gpu_handle(nvml: Any, uuid: str) -> Any:
    """NVML's handle of the GPU, or of the MIG slice, with torch's UUID."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
