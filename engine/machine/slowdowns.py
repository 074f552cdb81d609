"""What slows a machine down at this moment: heat, power, a battery."""

from __future__ import annotations

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
