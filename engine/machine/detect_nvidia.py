"""Detect the GPUs of this machine: by nvidia-smi, or by device files, and by torch in another process.

nvidia-smi is missing in containers without the driver capability `utility`, under WSL's usual PATH and on
AMD's machines; what torch can use decides there.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isobatch.engine.machine.gpu_table import PCIE, find_gpu_model, is_mobile
from isobatch.engine.machine.hardware import MIB, Gpu

CommandRunner = Callable[[list[str]], str | None]
"""Command line -> its standard output, or None where it fails."""
QUERY = "index,uuid,name,memory.total,compute_cap,power.limit"
PROBE = """
import json, torch
failure, p = "", []
try:
    torch.cuda.init()
    p = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
except Exception as error:
    failure = str(error)
print(json.dumps({
    "architectures": torch.cuda.get_arch_list(),
    "devices": [[q.name, q.total_memory, q.major, q.minor] for q in p],
    "chips": [getattr(q, "gcnArchName", "").split(":")[0] for q in p],
    "failure": failure,
    "build": torch.version.cuda or torch.version.hip or "",
}))
"""
OWN_FILES = "dev/nvidia[0-9]*"
"""There is one for each NVIDIA GPU. The others may stand for a GPU that torch is not made for."""
SHARED_FILES = ("dev/dxg", "dev/kfd")


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
    chips: list[str] = field(default_factory=list)
    """AMD's name of each device's architecture; empty for NVIDIA's."""
    failure: str = ""
    """Why torch cannot use a GPU, in its own words."""
    build: str = ""
    """The CUDA or ROCm version that torch was built for; empty for a build for CPUs."""

    @property
    def why_unusable(self) -> str:
        """Why none is seen, as the end of a sentence; empty where torch gave no reason."""
        if not self.build and (self.failure or not self.architectures):
            return "this torch is a build for CPUs: install one for CUDA (pytorch.org)"
        if "too old" in self.failure:
            found = re.search(r"found version (\d+)", self.failure)
            old = f" (CUDA {int(found[1]) // 1000}.{int(found[1]) % 1000 // 10})" if found else ""
            return (
                f"the NVIDIA driver{old} is too old for this torch (CUDA {self.build}): install a newer"
                " driver, or a torch for an older CUDA"
            )
        return f"torch cannot use it: {self.failure.splitlines()[0]}" if self.failure else ""


def detect_gpus(env: Mapping[str, str], execute: CommandRunner, root: Path = Path("/")) -> tuple[Gpu, ...]:
    """The visible GPUs. torch is asked only where nvidia-smi lists one, or `root` has a GPU's device file."""
    table = execute(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]) or ""
    listed = [
        [cell.strip() for cell in line.split(",")] for line in table.splitlines() if line.count(",") == 5
    ]
    rows = visible_rows(listed, env.get("CUDA_VISIBLE_DEVICES"))
    own = len(list(root.glob(OWN_FILES)))
    if not rows and (listed or not (own or any((root / name).exists() for name in SHARED_FILES))):
        return ()
    answer = execute([sys.executable, "-c", PROBE])
    seen = VisibleDevices(**json.loads(answer.splitlines()[-1])) if answer else None
    if seen and seen.devices:  # torch's order differs from nvidia-smi's where GPUs differ
        return _as_torch_sees(seen, {row[2]: positive(row[5]) for row in rows})
    if rows:
        return tuple(_from_row(row, seen) for row in rows)
    hidden = env.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    return () if hidden or seen is None else _unlisted(own, seen)


def _as_torch_sees(seen: VisibleDevices, watts: Mapping[str, float | None]) -> tuple[Gpu, ...]:
    chips = seen.chips or [""] * len(seen.devices)
    return tuple(
        make_gpu(name, memory, (major, minor), watts.get(name), seen.architectures, chip)
        for (name, memory, major, minor), chip in zip(seen.devices, chips, strict=True)
    )


def _unlisted(count: int, seen: VisibleDevices) -> tuple[Gpu, ...]:
    """GPUs of which only their device files are known; torch cannot use them.

    Where there is none of NVIDIA's own files, the GPU may be one that torch is not made for: no GPU then,
    unless torch complains of its driver.
    """
    if not count and "driver" not in seen.why_unusable:
        return ()
    gpu = make_gpu("NVIDIA GPU", 0, (0, 0), None, [], why_unusable=seen.why_unusable)
    return (gpu,) * max(1, count)


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


def _from_row(row: list[str], seen: VisibleDevices | None) -> Gpu:
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
    architectures, why = (seen.architectures, seen.why_unusable) if seen else (None, "")
    return make_gpu(
        name, int((positive(memory) or 0) * MIB), pair, positive(watts), architectures, why_unusable=why
    )


def make_gpu(
    name: str,
    memory: int,
    capability: tuple[int, int],
    watts: float | None,
    architectures: list[str] | None,
    chip: str = "",
    why_unusable: str = "",
) -> Gpu:
    """A detected GPU with the rates of the GPU table, or low estimates where it is not in the table.

    `memory` in bytes; `architectures` that torch has kernels for, None where nothing is known of it; `chip`:
    AMD's name of the architecture.
    """
    known = find_gpu_model(name)
    runs = (
        architectures is None
        or chip in architectures
        or (not chip and is_supported(capability, architectures))
    )
    return Gpu(
        name=name,
        memory_bytes=memory,
        compute_capability=capability,
        mobile=is_mobile(name),
        power_limit_watts=watts,
        supported=runs and not why_unusable,
        why_unusable=why_unusable,
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
