"""Detect this machine's hardware: cores and memory within cgroup and SLURM limits, GPUs; and the world
that a launcher formed. Imports no torch.

The root folder and the environment are arguments, so that tests can run every rule on fixture folders. GPUs
are found by device files, and by torch in another process: nvidia-smi is missing in containers without the
driver capability `utility`, under WSL's usual PATH and on AMD's machines, and what torch can use decides.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from isobatch.core.errors import UserError
from isobatch.engine.machine.gpu_table import MIB, PCIE, Gpu, find_gpu_model
from isobatch.engine.machine.hardware import Hardware, apple_machine

GRANTED_CPUS = "ISOBATCH_CPUS"
"""Environment variable with the cores that a launcher grants our processes on this machine."""
CommandRunner = Callable[[list[str]], str | None]
"""Command line -> its standard output, or None where it fails."""
# With CUDA, gcnArchName is the name of the card.
PROBE = """
import importlib.util, json, torch
failure, p, taken = "", [], []
try:
    torch.cuda.init()
    p = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
except Exception as error:
    failure = str(error)
try:  # as the vendor's library says, without a context on each card
    taken = [torch.cuda.device_memory_used(i) for i in range(len(p))]
except Exception:
    pass
print(json.dumps({
    "architectures": torch.cuda.get_arch_list(),
    "devices": [
        [q.name, q.total_memory, q.major, q.minor, q.gcnArchName.split(":")[0] if torch.version.hip else ""]
        for q in p
    ],
    "taken": taken,
    "triton": importlib.util.find_spec("triton") is not None,
    "failure": failure,
    "build": torch.version.cuda or torch.version.hip or "",
}))
"""
OWN_FILES = "dev/nvidia[0-9]*"
"""There is one for each NVIDIA GPU. The others may stand for a GPU that torch is not made for."""
SHARED_FILES = ("dev/dxg", "dev/kfd")
MODULE_FILE = "proc/driver/nvidia/version"
"""It is there where NVIDIA's module is loaded: after a start the device files come with the first use."""


def run_command(command: list[str]) -> str | None:
    """The standard output of a command, or None where it is missing, fails or takes over 3 minutes."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def detect(
    *,
    root: Path = Path("/"),
    env: Mapping[str, str] = os.environ,
    execute: CommandRunner = run_command,
    nodes: int | None = None,
) -> Hardware:
    """The machine under `root`. `nodes`: their number, if the launcher knows it; else the environment's."""
    cpus, ram = allowed_cpus(root, env), allowed_ram(root, env)
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return apple_machine(ram, cpus, "detected")
    gpus = detect_gpus(env, execute, root)
    flags = re.search(r"^flags\s*:(.*)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    features = set(flags[1].split()) if flags else set()
    limit = env.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()  # what oneDNN may not use counts as absent
    if limit != "DEFAULT" and "AMX" not in limit:
        features -= {"amx_bf16"} if "16" in limit.replace("AVX512_CORE", "") else {"amx_bf16", "avx512_bf16"}
    return Hardware(
        kind="cuda" if any(gpu.supported for gpu in gpus) else "cpu",
        gpus=gpus,
        nodes=nodes or world_nodes(env),
        cpus=cpus,
        ram_bytes=ram,
        cpu_bf16=bool(features & {"amx_bf16", "avx512_bf16"}),
        cpu_amx="amx_bf16" in features,
        wsl="microsoft" in _read(root / "proc/version").lower(),
        source="detected",
    )


def cpu_model(root: Path = Path("/")) -> str:
    """The processor's name; its kind where Linux names none, as on most ARM machines."""
    named = re.search(r"^model name\s*: *(.+)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()


def world_nodes(env: Mapping[str, str]) -> int:
    """Number of nodes that torchrun, accelerate or srun started processes on; 1 where none did."""
    world, local = positive(env.get("WORLD_SIZE")), positive(env.get("LOCAL_WORLD_SIZE"))
    if world and local:
        return max(1, int(world // local))
    return int(positive(env.get("SLURM_STEP_NUM_NODES")) or 1)


def rank_and_world_size(environment: Mapping[str, str]) -> tuple[int, int]:
    """(rank, world size) that torchrun or accelerate set in the environment, before torch is imported.

    Raises UserError where a scheduler started several processes without these: each would train alone.
    """
    if "WORLD_SIZE" in environment and "RANK" in environment:
        return int(environment["RANK"]), int(environment["WORLD_SIZE"])
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        started = int(environment.get(name, 1) or 1)
        if started > 1:
            raise UserError(
                f"{started} processes were started ({name}={started}) but no world was formed: each would"
                " train alone. Start one launcher per node (torchrun or accelerate launch), or use `slurm`"
            )
    return 0, 1


def node_and_nodes(environment: Mapping[str, str], rank: int, size: int) -> tuple[int, int]:
    """(number of this rank's node, nodes), as torchrun or another launcher says; else a node per rank."""
    local_size = int(environment.get("LOCAL_WORLD_SIZE", 1) or 1)
    node = environment.get("GROUP_RANK", environment.get("NODE_RANK", ""))
    nodes = environment.get("GROUP_WORLD_SIZE", "")
    return int(node or rank // local_size), int(nodes or -(-size // local_size))


def check_world(planned: int, actual: int) -> None:
    """Raise UserError where the world size is not the planned one."""
    if planned != actual:
        raise UserError(
            f"the plan is for {planned} process{'es' if planned > 1 else ''} and this world has {actual}:"
            f" start it with {planned}, or plan anew with `resume RUN --processes {actual}`"
        )


def allowed_cpus(root: Path, env: Mapping[str, str]) -> int:
    """Usable cores: the least of CPU affinity, cgroup quota and the allocation of SLURM or a launcher."""
    granted = [positive(env.get(name)) for name in ("SLURM_CPUS_PER_TASK", GRANTED_CPUS)]
    limits: list[float | None] = [_affinity(), _cpu_quota(root), *granted]
    return max(1, int(min(limit for limit in limits if limit)))


def allowed_ram(root: Path, env: Mapping[str, str]) -> int:
    """Usable memory in bytes: the least of physical memory, cgroup limit and SLURM's allocation."""
    cgroups = map(positive, cgroup_values(root, "memory.max", "memory", "memory.limit_in_bytes"))
    known = re.search(r"MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"))
    physical = int(known[1]) * 1024 if known else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(min(limit for limit in [physical, _slurm_ram(env), *cgroups] if limit))


def _affinity() -> int:
    here = hasattr(os, "sched_getaffinity")  # absent on macOS
    return len(os.sched_getaffinity(0)) if here else os.cpu_count() or 1


def _cpu_quota(root: Path) -> float | None:
    """Cores from quotas over their periods in microseconds; "max" and -1 mean no limit."""
    version2 = [line.split() for line in cgroup_values(root, "cpu.max")]
    periods = cgroup_values(root, "", "cpu", "cpu.cfs_period_us")
    version1 = zip(cgroup_values(root, "", "cpu", "cpu.cfs_quota_us"), periods, strict=False)
    limits = [(positive(pair[0]), positive(pair[1])) for pair in [*version2, *version1] if len(pair) == 2]
    return min((quota / period for quota, period in limits if quota and period), default=None)


def cgroup_values(root: Path, unified: str, controller: str = "", legacy: str = "") -> list[str]:
    """The text of a limit in this process's cgroup and every cgroup above it.

    `unified` is the file's name in cgroup v2; `legacy` that in cgroup v1, under `controller`.
    """
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        name = unified if not controllers else legacy if controller in controllers.split(",") else ""
        base, inside = root / "sys/fs/cgroup" / controllers, [p for p in path.split("/") if p.strip(".")]
        folders = (base.joinpath(*inside[:count]) for count in range(len(inside), -1, -1))
        found += [text for folder in folders if name and (text := _read(folder / name).strip())]
    return found


def _slurm_ram(env: Mapping[str, str]) -> float | None:
    """SLURM grants MB per node, or per core of this node; 0 means the whole node."""
    per_core = positive(env.get("SLURM_MEM_PER_CPU"))
    cores = positive(env.get("SLURM_CPUS_ON_NODE")) or positive(env.get("SLURM_CPUS_PER_TASK"))
    granted = positive(env.get("SLURM_MEM_PER_NODE")) or (per_core * cores if per_core and cores else None)
    return granted * MIB if granted else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    """What torch sees, asked in another process because importing torch here would be slow."""

    architectures: list[str] = field(default_factory=list)
    devices: list[tuple[str, int, int, int, str]] = field(default_factory=list)
    """(name, memory in bytes, major, minor, chip) of each visible device, MIG slices included. `chip`: AMD's
    name of the architecture; empty for NVIDIA's."""
    taken: list[int] = field(default_factory=list)
    """Bytes in use of each device; empty where the vendor's library does not say."""
    triton: bool = True
    """Whether it is installed, so that torch can make kernels."""
    failure: str = ""
    """Why torch cannot use a GPU, in its own words."""
    build: str = ""
    """The CUDA or ROCm version that torch was built for; empty for a build for CPUs."""

    @property
    def why_unusable(self) -> str:
        """Why none is seen, as the end of a sentence; empty where torch gave no reason."""
        if not self.build and (self.failure or not self.architectures):
            return "this torch is a build for CPUs: install one for CUDA (pytorch.org)"
        return f"torch cannot use it: {self.failure.splitlines()[0]}" if self.failure else ""


def detect_gpus(env: Mapping[str, str], execute: CommandRunner, root: Path = Path("/")) -> tuple[Gpu, ...]:
    """The visible GPUs. torch is asked only where a file of `root` speaks for one."""
    own = len(list(root.glob(OWN_FILES)))
    shared = any((root / name).exists() for name in SHARED_FILES)
    hidden = env.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    if hidden or not (own or shared or (root / MODULE_FILE).exists()):
        return ()
    answer = execute([sys.executable, "-c", PROBE]) or '{"failure": "it did not answer", "build": "unknown"}'
    seen = VisibleDevices(**json.loads(answer.splitlines()[-1]))
    if not seen.devices and (own or (shared and "driver" in seen.why_unusable)):
        # Only the device files are known. Where none is NVIDIA's own, the GPU may be one that torch is not
        # made for: no GPU then, unless torch complains of its driver.
        return (replace(make_gpu("NVIDIA GPU", 0, (0, 0), []), why_unusable=seen.why_unusable),) * max(1, own)
    built, taken = seen.architectures, seen.taken or [0] * len(seen.devices)
    gpus = (make_gpu(name, memory, (a, b), built, chip) for name, memory, a, b, chip in seen.devices)
    pairs = zip(gpus, taken, strict=True)
    return tuple(replace(gpu, taken_bytes=used, has_triton=seen.triton) for gpu, used in pairs)


def make_gpu(
    name: str, memory: int, capability: tuple[int, int], architectures: list[str], chip: str = ""
) -> Gpu:
    """A detected GPU with the rates of the GPU table, or low estimates where it is not in the table.

    `memory` in bytes; `architectures` that torch has kernels for; `chip`: AMD's name of the architecture.
    """
    known, half = find_gpu_model(name), 30e12 if capability >= (7, 0) else None
    cautious = {"fp32": 8e12, "fp16": half, "bf16": half if capability >= (8, 0) else None}
    return Gpu(
        name=name,
        memory_bytes=memory,
        compute_capability=capability,
        supported=chip in architectures if chip else is_supported(capability, architectures),
        peak_flops=known.gpu.peak_flops if known else cautious,
        memory_bandwidth=known.gpu.memory_bandwidth if known else 300e9,
        link_bandwidth=PCIE if known is None or "pcie" in name.lower() else known.gpu.link_bandwidth,
    )


def is_supported(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Whether a torch build with kernels for `architectures` runs on a GPU of this compute capability.

    Machine code (sm) runs within its major version, PTX (compute) on anything newer, `a` and `f` builds on
    that chip alone (CUDA C++ Programming Guide, "Application Compatibility").
    """
    for kind, major, minor, only in re.findall(r"\b(sm|compute)_(\d+)(\d)([af]?)\b", " ".join(architectures)):
        built = (int(major), int(minor))
        newer = built < capability and not only and (kind == "compute" or built[0] == capability[0])
        if built == capability or newer:
            return True
    return False


def positive(text: Any) -> float | None:
    """The number that `text` holds if it is positive; None for nothing, "max", -1, "[N/A]" and 0."""
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if value > 0 else None
