"""Hardware records, the table of GPUs, and the parser of `--hardware 4x8xh100`. Imports no torch.

Peak rates are dense figures from the manufacturers' data sheets (tensor cores with fp32 accumulation, which
on GeForce cards is half of the advertised rate). Link rates are those of an all-reduce, not the advertised
sum.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from isobatch.core.errors import UserError
from isobatch.core.flags import nearest_hint

Kind = Literal["cuda", "mps", "cpu"]
MIB, GIB = 2**20, 2**30
PCIE = 10e9
"""Bytes/s between GPUs without NVLink and without peer-to-peer copies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One accelerator. Rates are per second: FLOPs and bytes."""

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    """(major, minor); (0, 0) for other than NVIDIA GPUs."""
    mobile: bool = False
    power_limit_watts: float | None = None
    supported: bool = True
    """Whether this torch build has kernels for it."""
    peak_flops: Mapping[str, float | None]
    """Dense peak per precision; None where the format is not native."""
    memory_bandwidth: float
    link_bandwidth: float = PCIE
    """Bytes/s to the other GPUs of its node."""

    @property
    def native_bf16(self) -> bool:
        """Compute capability 8.0 or higher. (torch.cuda.is_bf16_supported also counts emulation.)"""
        return self.compute_capability >= (8, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A machine, or several equal ones; every figure is per node."""

    kind: Kind
    gpus: tuple[Gpu, ...] = ()
    nodes: int = 1
    cpus: int
    """Cores this process may use."""
    ram_bytes: int
    """Memory this process may use."""
    shm_bytes: int = 0
    """Free space of /dev/shm."""
    node_bandwidth: float = 1.25e8
    """Bytes/s between nodes."""
    cpu_bf16: bool = False
    """Native bf16 arithmetic: AMX or AVX512_BF16."""
    cpu_amx: bool = False
    """A matrix unit for bf16 (AMX)."""
    wsl: bool = False
    """Windows Subsystem for Linux."""
    source: Literal["detected", "asked"] = "asked"

    @property
    def devices(self) -> int:
        """Accelerators over all nodes; a node without any counts as one device."""
        return self.nodes * max(1, len(self.gpus))

    @property
    def gpu(self) -> Gpu:
        """The GPU with the least memory: what fits on it fits on all."""
        assert self.gpus, "a machine without GPUs was asked for one"
        return min(self.gpus, key=lambda gpu: gpu.memory_bytes)

    def describe(self) -> str:
        """The machine in one phrase, for messages."""
        if not self.gpus:
            return f"{self.cpus} CPU cores, {self.ram_bytes / GIB:.0f} GiB RAM"
        per_node = f"{len(self.gpus)} x {self.gpu.name}" if len(self.gpus) > 1 else self.gpu.name
        where = f"{self.nodes} nodes of {per_node}" if self.nodes > 1 else per_node
        return f"{where} ({self.gpu.memory_bytes / GIB:.0f} GiB each)"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A row of the GPU table: a GPU and its share of the host that it is usually part of."""

    name: str
    pattern: str
    """Regular expression for its name in nvidia-smi."""
    memory_mib: int
    capability: tuple[int, int]
    fp32: float
    half: float
    memory_bandwidth: float
    link: float
    watts: float
    cpus: int
    """Cores of the host per GPU."""
    ram_gib: int
    """RAM of the host per GPU."""
    node_bandwidth: float

    def gpu(self, **changes: Any) -> Gpu:
        """One GPU of this model, with `changes` to its fields."""
        values: dict[str, Any] = {
            "name": self.name,
            "memory_bytes": self.memory_mib * MIB,
            "compute_capability": self.capability,
            "mobile": is_mobile(self.name),
            "power_limit_watts": self.watts,
            "peak_flops": self.peaks(),
            "memory_bandwidth": self.memory_bandwidth,
            "link_bandwidth": self.link,
        }
        return Gpu(**{**values, **changes})

    def peaks(self) -> dict[str, float | None]:
        """Dense peak rate per precision, in FLOP/s."""
        return {
            "fp32": self.fp32,
            "fp16": self.half,
            "bf16": self.half if self.capability >= (8, 0) else None,
        }


# name, pattern, MiB, capability, fp32, half, memory, links, W, host cores and GiB per GPU, network
MODELS = (
    GpuModel("rtx3050-laptop", "3050.*Laptop", 4096, (8, 6), 5.5e12, 11e12, 192e9, PCIE, 60, 8, 16, 1.25e8),
    GpuModel("rtx4060", "4060", 8188, (8, 9), 15.1e12, 30.2e12, 272e9, PCIE, 115, 12, 32, 1.25e8),
    GpuModel(
        "rtx4080-laptop", "4080.*Laptop", 12282, (8, 9), 24.7e12, 49e12, 432e9, PCIE, 150, 16, 32, 1.25e8
    ),
    GpuModel("rtx4080", "4080", 16376, (8, 9), 48.7e12, 97.5e12, 717e9, PCIE, 320, 16, 64, 1.25e8),
    GpuModel("rtx4090", "4090", 24564, (8, 9), 82.6e12, 165e12, 1008e9, PCIE, 450, 16, 64, 1.25e8),
    GpuModel("t4", r"\bT4\b", 15360, (7, 5), 8.1e12, 65e12, 300e9, 6e9, 70, 4, 16, 3e9),
    GpuModel("v100", "V100", 16160, (7, 0), 15.7e12, 125e12, 900e9, 130e9, 300, 8, 61, 3e9),
    GpuModel("a100-40gb", "A100.*40GB", 40536, (8, 0), 19.5e12, 312e12, 1555e9, 230e9, 400, 12, 144, 25e9),
    GpuModel("a100-80gb", "A100", 81920, (8, 0), 19.5e12, 312e12, 2039e9, 230e9, 400, 12, 144, 25e9),
    GpuModel("h200", "H200", 143771, (9, 0), 67e12, 989e12, 4800e9, 370e9, 700, 24, 256, 25e9),
    GpuModel("h100", "H100", 81559, (9, 0), 67e12, 989e12, 3350e9, 370e9, 700, 24, 256, 25e9),
)
MACHINES = {model.name: model for model in MODELS}
UNITS = {"gb": GIB, "tb": 1024 * GIB}
SIZE = r"(\d+(?:\.\d+)?)(gb|tb)"
SPELLINGS = [*MACHINES, "8xh100", "4x8xa100-80gb", "cpu:2x24gb", "mps"]


def parse_hardware(text: str) -> Hardware:
    """The machine that `--hardware` names: [NODESx][GPUSx]NAME, cpu:CORESxRAMgb, mps or mps:RAMgb.

    Raises UserError.
    """
    word = text.strip().lower()
    if match := re.fullmatch(r"cpu:(\d+)x" + SIZE, word):
        return Hardware(kind="cpu", cpus=_count(text, match[1]), ram_bytes=_ram(text, match[2], match[3]))
    if match := re.fullmatch(rf"mps(?::{SIZE})?", word):
        return apple_machine(_ram(text, match[1] or "16", match[2] or "gb"), cpus=8)
    match = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?(.+)", word)
    if match is None or match[3] not in MACHINES:
        raise UserError(_unknown(text, match[3] if match else word))
    first, second, name = match.groups()
    nodes, gpus = (first, second) if second else ("1", first or "1")
    return make_machine(MACHINES[name], _count(text, nodes), _count(text, gpus))


def make_machine(model: GpuModel, nodes: int, gpus: int) -> Hardware:
    """Nodes of equal GPUs, with the host that they are usually part of."""
    return Hardware(
        kind="cuda",
        gpus=(model.gpu(),) * gpus,
        nodes=nodes,
        cpus=model.cpus * gpus,
        ram_bytes=model.ram_gib * gpus * GIB,
        shm_bytes=model.ram_gib * gpus * GIB // 2,
        node_bandwidth=model.node_bandwidth,
    )


def apple_machine(ram_bytes: int, cpus: int, source: Literal["detected", "asked"] = "asked") -> Hardware:
    """An Apple machine: the GPU shares the RAM and may use about three quarters of it (rates: a base M2)."""
    gpu = Gpu(
        name="Apple GPU",
        memory_bytes=ram_bytes * 3 // 4,
        compute_capability=(0, 0),
        mobile=True,
        peak_flops={"fp32": 3.6e12, "fp16": 3.6e12, "bf16": None},
        memory_bandwidth=100e9,
    )
    return Hardware(kind="mps", gpus=(gpu,), cpus=cpus, ram_bytes=ram_bytes, source=source)


def is_mobile(name: str) -> bool:
    """Whether a GPU's name is that of a laptop version."""
    return re.search(r"laptop|mobile|max-q", name, re.IGNORECASE) is not None


def find_gpu_model(name: str) -> GpuModel | None:
    """The row of the table that an nvidia-smi name belongs to."""
    return next((m for m in MODELS if re.search(m.pattern, name, re.IGNORECASE)), None)


def _count(text: str, digits: str) -> int:
    if int(digits) < 1:
        raise UserError(f"--hardware {text}: counts start at 1")
    return int(digits)


def _ram(text: str, digits: str, unit: str) -> int:
    if float(digits) <= 0:
        raise UserError(f"--hardware {text}: the RAM must be above 0 GB")
    return int(float(digits) * UNITS[unit])


def _unknown(text: str, name: str) -> str:
    longer = next((valid for valid in MACHINES if valid.startswith(name)), None)
    hint = (
        f" (did you mean {longer}?)"
        if longer
        else nearest_hint(name, MACHINES) or nearest_hint(text.lower(), SPELLINGS)
    )
    return f"--hardware {text}: is not one of {', '.join(SPELLINGS)}{hint}"
