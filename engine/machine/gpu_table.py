"""The table of GPUs and their rates (gpus.csv), and the rows that a name means. Imports no torch.

Peak rates are dense figures of the manufacturers' data sheets as commonly quoted: tensor cores with fp32
accumulation, without sparsity; fp32 without tensor cores (TF32 stays off). GeForce cards accumulate in fp32
at half of the advertised rate, which is twice their fp32 rate, of RTX 20 four times. Link rates are those of
an all-reduce, not the advertised sum; networks between nodes are half of what a DGX's cards add up to.

Sources: NVIDIA's TU102, GA102, AD102 and GB202 white papers and product pages for GeForce, of laptops at the
usual boost clock (makers set the power); data sheets of T4, V100, A10, A30, A40, A100, L4, L40S, H100, H200,
DGX B200, RTX A4000 to A6000, RTX 6000 Ada; AWS's G5 page for the A10G; AMD's data
sheet of the MI300X.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
LAPTOP = r"laptop|mobile|max-q|apple"
PCIE = 10e9
"""Bytes/s between GPUs without NVLink and without peer-to-peer copies (with them, over PCIe 4: 20e9)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One accelerator. Rates are per second: FLOPs and bytes."""

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    """(major, minor); (0, 0) for other than NVIDIA GPUs."""
    supported: bool = True
    """Whether this torch can use it."""
    why_unusable: str = ""
    """Why it cannot, if it is for another reason than missing kernels."""
    peak_flops: Mapping[str, float | None]
    """Dense peak per precision; None where the format is not native."""
    memory_bandwidth: float
    link_bandwidth: float = PCIE
    """Bytes/s to the other GPUs of its node."""
    taken_bytes: int = 0
    """Of its memory, by other programs, when it was detected."""
    has_triton: bool = True
    """Whether torch can make kernels for it."""

    @property
    def card(self) -> str | None:
        """The name of its row in the table of GPUs, if it has one."""
        found = find_gpu_model(self.name)
        return found.gpu.name if found else None

    @property
    def mobile(self) -> bool:
        """Whether its name is that of a laptop's."""
        return re.search(LAPTOP, self.name, re.IGNORECASE) is not None

    @property
    def capability(self) -> str:
        """Its compute capability, in words."""
        return "compute capability {}.{}".format(*self.compute_capability)

    @property
    def native_bf16(self) -> bool:
        """Compute capability 8.0 or higher. (torch.cuda.is_bf16_supported also counts emulation.)"""
        return self.compute_capability >= (8, 0)


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A row of the table: a GPU and its share of the host that it is usually part of."""

    pattern: str
    """Regular expression for the name that the driver gives it."""
    gpu: Gpu
    cpus: int
    """Cores of the host per GPU."""
    ram_gib: int
    """RAM of the host per GPU."""
    node_bandwidth: float


def _model(row: Mapping[str, str]) -> GpuModel:
    """The columns' units: MiB; TFLOP/s in fp32, and in fp16 and (from 8.0 on) bf16; GB/s; GiB."""
    major, minor = map(int, row["capability"].split("."))
    half = float(row["half_tflops"]) * 1e12
    gpu = Gpu(
        name=row["name"],
        memory_bytes=int(row["mib"]) * MIB,
        compute_capability=(major, minor),
        peak_flops={
            "fp32": float(row["fp32_tflops"]) * 1e12,
            "fp16": half,
            "bf16": half if major >= 8 else None,
        },
        memory_bandwidth=float(row["memory_gb_s"]) * 1e9,
        link_bandwidth=float(row["link_gb_s"]) * 1e9,
    )
    host = int(row["host_cores"]), int(row["host_gib"]), float(row["network_gb_s"]) * 1e9
    return GpuModel(row["pattern"], gpu, *host)


with Path(__file__).with_name("gpus.csv").open(newline="") as _table:
    MACHINES = {row["name"]: _model(row) for row in csv.DictReader(_table)}
"""Name -> row. In the file a name that contains another's pattern stands before it."""


def find_gpu_model(name: str) -> GpuModel | None:
    """The row that a name of this table or of a driver belongs to; a MIG slice has none."""
    found = (m for m in MACHINES.values() if re.search(m.pattern, name, re.IGNORECASE))
    return None if " MIG " in name else MACHINES.get(name) or next(found, None)


def named_model(word: str) -> str | None:
    """The name of the row that `word` is, with or without spaces, dashes and the makers' words:
    `RTX 4090`, `4090`, `nvidia-h100-sxm5`.
    """
    plain = squeezed(word)
    return next((name for name in MACHINES if squeezed(name) in (plain, f"rtx{plain}")), None)


def squeezed(name: str) -> str:
    """A name without spaces, dashes and the makers' words."""
    return re.sub(r"nvidia|geforce|tesla|instinct|amd|sxm\d?|[\s_-]", "", name.lower())
