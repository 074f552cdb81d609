"""Detect the NVIDIA GPUs of this machine: by nvidia-smi, then by torch in another process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from isobatch.engine.planning.hardware import MIB, PCIE, Gpu, find_gpu_model, is_mobile

CommandRunner = Callable[[list[str]], str | None]
"""Command line -> its standard output, or None where it fails."""
QUERY = "index,uuid,name,memory.total,compute_cap,power.limit"
PROBE = """
import json, torch
n = torch.cuda.device_count() if torch.cuda.is_available() else 0
p = [torch.cuda.get_device_properties(i) for i in range(n)]
d = [[q.name, q.total_memory, q.major, q.minor] for q in p]
print(json.dumps({"architectures": torch.cuda.get_arch_list(), "devices": d}))
"""


def run_command(command: list[str]) -> str | None:
    """The standard output of a command, or None where it is missing, fails or takes over 60 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    """What torch sees, asked in another process because importing torch here would be slow."""

    architectures: list[str] = field(default_factory=list)
    devices: list[tuple[str, int, int, int]] = field(default_factory=list)
    """(name, memory in bytes, major, minor) of each visible device, MIG slices included."""


def detect_gpus(env: Mapping[str, str], execute: CommandRunner) -> tuple[Gpu, ...]:
    """The visible NVIDIA GPUs. torch is asked only where nvidia-smi lists one."""
    table = execute(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]) or ""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line.count(",") == 5]
    rows = visible_rows(rows, env.get("CUDA_VISIBLE_DEVICES"))
    if not rows:
        return ()
    answer = execute([sys.executable, "-c", PROBE])
    seen = VisibleDevices(**json.loads(answer.splitlines()[-1])) if answer else None
    if seen and seen.devices:  # torch's order differs from nvidia-smi's where GPUs differ
        watts = {row[2]: positive(row[5]) for row in rows}
        return tuple(make_gpu(n, m, (a, b), watts.get(n), seen.architectures) for n, m, a, b in seen.devices)
    return tuple(_from_row(row, seen.architectures if seen else None) for row in rows)


def visible_rows(rows: list[list[str]], asked: str | None) -> list[list[str]]:
    """The rows that CUDA_VISIBLE_DEVICES selects: indices or UUID prefixes, up to the first invalid one."""
    if asked is None:
        return rows
    chosen = []
    for word in (part.strip() for part in asked.split(",")):
        row = next((r for r in rows if word and (r[0] == word or r[1].startswith(word))), None)
        if row is None and word.startswith("MIG-"):
            row = rows[0] if rows else None
        if row is None:
            break
        chosen.append(row)
    return chosen


def _from_row(row: list[str], architectures: list[str] | None) -> Gpu:
    _, _, name, memory, capability, watts = row
    known = find_gpu_model(name)
    major, _, minor = capability.partition(".")
    pair = (
        (int(major), int(minor))
        if major.isdigit() and minor.isdigit()
        else known.capability
        if known
        else (0, 0)
    )
    return make_gpu(name, int((positive(memory) or 0) * MIB), pair, positive(watts), architectures)


def make_gpu(
    name: str, memory: int, capability: tuple[int, int], watts: float | None, architectures: list[str] | None
) -> Gpu:
    """A detected GPU with the rates of the GPU table, or low estimates where it is not in the table.

    `memory` in bytes.
    """
    known = find_gpu_model(name)
    return Gpu(
        name=name,
        memory_bytes=memory,
        compute_capability=capability,
        mobile=is_mobile(name),
        power_limit_watts=watts,
        supported=architectures is None or is_supported(capability, architectures),
        peak_flops=known.peaks() if known else _cautious_peaks(capability),
        memory_bandwidth=known.memory_bandwidth if known else 300e9,
        link_bandwidth=PCIE if known is None or "pcie" in name.lower() else known.link,
    )


def _cautious_peaks(capability: tuple[int, int]) -> dict[str, float | None]:
    half = 30e12 if capability >= (7, 0) else None
    return {"fp32": 8e12, "fp16": half, "bf16": half if capability >= (8, 0) else None}


def is_supported(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Whether a torch build with kernels for `architectures` runs on a GPU of this compute capability.

    Machine code (sm) runs within its major version, PTX (compute) on anything newer, `a` and `f` builds on
    that chip alone (CUDA C++ Programming Guide, "Application Compatibility").
    """
    for name in architectures:
        if match := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name):
            built = (int(match[2]), int(match[3]))
            if built == capability or (
                built < capability and not match[4] and _runs_on(match[1], built, capability)
            ):
                return True
    return False


def _runs_on(kind: str, built: tuple[int, int], capability: tuple[int, int]) -> bool:
    return kind == "compute" or built[0] == capability[0]


def positive(text: Any) -> float | None:
    """The number that `text` holds if it is positive; None for nothing, "max", -1, "[N/A]" and 0."""
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if value > 0 else None
