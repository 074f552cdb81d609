"""GPU figures of a run, read from NVIDIA's management library (NVML) in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections import deque
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
    virtual GPUs and WSL many fail. What cannot be read is left out of `latest()` and said once. `uuid` is the
    GPU's, as torch gives it; empty for no NVIDIA GPU, and then there is no thread and there are no figures.
    """

    def __init__(self, uuid: str, say: Callable[[str], None]) -> None:
        self._uuid, self._say = uuid, say
        self._figures: dict[str, float] = {}
        self._read_at = 0.0
        self._failed: dict[str, str] = {}
        self._remarks: deque[str] = deque()
        self._end = threading.Event()
        self.thread = threading.Thread(target=self._run, name="gpu monitor", daemon=True)

    def __enter__(self) -> GpuMonitor:
        if self._uuid:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()  # nobody waits: the thread may be in a slow call

    def latest(self) -> dict[str, float]:
        """The newest figures, without a wait; tells the user what could not be read."""
        while self._remarks:
            self._say(self._remarks.popleft())
        return self._figures if time.monotonic() - self._read_at < SECONDS_KEPT else {}

    def _run(self) -> None:
        """The thread. Whatever goes wrong ends these figures, and never the run."""
        try:
            import pynvml as nvml

            nvml.nvmlInit()
        except ImportError:
            return
        except Exception as error:
            if type(error).__name__ != "NVMLError_LibraryNotFound":  # some containers have no NVML
                self._remarks.append(f"metrics have no GPU utilisation or power: {error}")
            return
        try:
            self._read_until_end(nvml, gpu_handle(nvml, self._uuid))
        except Exception as error:
            self._remarks.append(f"metrics have no GPU utilisation or power: {error}")
        finally:
            nvml.nvmlShutdown()

    def _read_until_end(self, nvml: Any, gpu: Any) -> None:
        while True:
            figures = self._read(nvml, gpu)
            self._figures, self._read_at = figures, time.monotonic()
            if self._end.wait(SECONDS_BETWEEN_READINGS):
                return

    def _read(self, nvml: Any, gpu: Any) -> dict[str, float]:
        figures, failed = {}, {}
        for name, reading in READINGS.items():
            try:
                figures[name] = reading(nvml, gpu)
            except Exception as error:  # of NVML, or of its Python binding
                failed[name] = str(error)
        if new := failed.keys() - self._failed.keys():
            self._failed |= failed
            names = ", ".join(name for name in READINGS if name in new)
            why = "; ".join(sorted({failed[name] for name in new}))
            self._remarks.append(f"this GPU does not report {names} ({why}): metrics leave them out")
        return figures


def gpu_handle(nvml: Any, uuid: str) -> Any:
    """NVML's handle of the GPU, or of the MIG slice, with torch's UUID."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
