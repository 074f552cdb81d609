"""What slows a machine down while it works (heat, power, a battery, memory that spills), and a monitor."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

HEAT = 0x20 | 0x40
"""Bits of NVML's clock event reasons: slowed by software or hardware because of heat (nvml.h)."""
BRAKE = 0x80
"""The power supply asks for less."""
CAP = 0x4
"""At its power limit. Large GPUs are so whenever they work hard, with clocks a little lower."""
LOW_CLOCK = 0.7
"""A GPU at its power limit is called throttled where its clock is below this share of the highest."""
FULL_BYTES = 128 << 20
"""A GPU with less free memory is full: a driver that spills then moves memory to the host."""
SECONDS_BETWEEN_READINGS = 5.0
READINGS_IN_A_ROW = 2
"""A cause is told when it was there so often: a short peak is none."""
THROTTLE_COUNTS = "sys/devices/system/cpu/cpu*/thermal_throttle/package_throttle_count"
HEAT_ADVICE = "free its air, or let it draw less"


def throttled_by(nvml: Any, gpu: Any) -> str:
    """`heat`, `power` or nothing, by NVML's word. `gpu`: NVML's handle. Raises what NVML raises."""
    reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
    if reasons & HEAT:
        return "heat"
    if reasons & BRAKE or (reasons & CAP and _clock_share(nvml, gpu) < LOW_CLOCK):
        return "power"
    return ""


def _clock_share(nvml: Any, gpu: Any) -> float:
    """The clock of the multiprocessors over the highest that the GPU has."""
    kind = nvml.NVML_CLOCK_SM
    return float(nvml.nvmlDeviceGetClockInfo(gpu, kind) / nvml.nvmlDeviceGetMaxClockInfo(gpu, kind))


def gpu_handle(nvml: Any, uuid: str) -> Any:
    """NVML's handle of the GPU, or of the MIG slice, with torch's UUID."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def battery_percent(sensors: Callable[[], Any] | None = None) -> float | None:
    """The charge of the battery that this computer runs on; None where it is plugged in or has none."""
    import psutil

    ask = sensors or getattr(psutil, "sensors_battery", None)  # not on every system
    found = ask() if ask is not None else None
    return float(found.percent) if found is not None and found.power_plugged is False else None


def throttle_count(root: Path = Path("/")) -> int:
    """How often the kernel has seen a processor slowed down by heat; 0 where it does not say."""
    count = 0
    for path in root.glob(THROTTLE_COUNTS):
        with contextlib.suppress(OSError, ValueError):
            count = max(count, int(path.read_text()))
    return count


class SlowdownMonitor:
    """`with` runs a thread that looks every few seconds; `new()` tells each cause once.

    `uuid`: of this process's GPU, empty for none. `spills`: whether its driver goes on in host memory.
    `computer`: look at battery and processor as well; one process of a machine does.
    """

    def __init__(
        self, uuid: str, spills: bool = False, computer: bool = True, root: Path = Path("/")
    ) -> None:
        self._uuid, self._spills, self._computer, self._root = uuid, spills, computer, root
        self._in_a_row: dict[str, int] = {}
        self._told: set[str] = set()
        self._remarks: deque[tuple[str, str]] = deque()
        self._throttled = throttle_count(root)
        self._end = threading.Event()
        self.thread = threading.Thread(target=self._run, name="slowdowns", daemon=True)

    def __enter__(self) -> SlowdownMonitor:
        if self._uuid or self._computer:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()  # nobody waits: the thread may be in a slow call

    def new(self) -> list[tuple[str, str]]:
        """(cause, sentence) of what was noticed since the last call, without a wait."""
        return [self._remarks.popleft() for _ in range(len(self._remarks))]

    def _run(self) -> None:
        if not self._uuid:
            self._read_until_end(dict)
            return
        try:
            import pynvml as nvml

            nvml.nvmlInit()
            gpu = gpu_handle(nvml, self._uuid)
        except Exception:  # of NVML, or of its Python binding: nothing is known of the GPU then
            self._read_until_end(dict)
            return
        self._read_until_end(lambda: self._gpu_causes(nvml, gpu))
        nvml.nvmlShutdown()

    def _read_until_end(self, gpu_causes: Callable[[], dict[str, str]]) -> None:
        while True:
            self.observe({**self._computer_causes(), **gpu_causes()})
            if self._end.wait(SECONDS_BETWEEN_READINGS):
                return

    def observe(self, causes: dict[str, str]) -> None:
        """A reading: cause -> its sentence."""
        self._in_a_row = {cause: self._in_a_row.get(cause, 0) + 1 for cause in causes}
        for cause, count in self._in_a_row.items():
            if count >= READINGS_IN_A_ROW and cause not in self._told:
                self._told.add(cause)
                self._remarks.append((cause, causes[cause]))

    def _computer_causes(self) -> dict[str, str]:
        found: dict[str, str] = {}
        if not self._computer:
            return found
        with contextlib.suppress(Exception):  # what psutil raises differs from system to system
            if (percent := battery_percent()) is not None:
                found["battery"] = f"this computer runs on its battery ({percent:.0f} %), slower: plug it in"
        before, self._throttled = self._throttled, throttle_count(self._root)
        if self._throttled > before:
            found["processor heat"] = f"the processor is slowed down by heat: {HEAT_ADVICE}"
        return found

    def _gpu_causes(self, nvml: Any, gpu: Any) -> dict[str, str]:
        found = {}
        with contextlib.suppress(Exception):  # many calls fail on MIG slices, virtual GPUs and WSL
            if self._spills and nvml.nvmlDeviceGetMemoryInfo(gpu).free < FULL_BYTES:
                found["spill"] = (
                    "the GPU's memory is full, and its driver goes on in host memory, many times slower:"
                    " close what else uses it, or go on with a smaller --memory-limit"
                )
        with contextlib.suppress(Exception):
            cause = throttled_by(nvml, gpu)
            if cause == "heat":
                found["GPU heat"] = f"the GPU is slowed down by heat: {HEAT_ADVICE} (nvidia-smi -pl)"
            elif cause:
                found["GPU power"] = "the GPU is slowed down by its power supply: use its own charger"
        return found
