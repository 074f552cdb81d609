"""The table of GPUs and their rates, and the rows that a name means. Imports no torch.

Peak rates are dense figures of the manufacturers' data sheets as commonly quoted: tensor cores with fp32
accumulation, without sparsity. GeForce cards accumulate in fp32 at half of the advertised rate, which is
twice their fp32 rate. Link rates are those of an all-reduce, not the advertised sum.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass

MIB = 2**20
LAPTOP = r"laptop|mobile|max-q"
PCIE = 10e9
"""Bytes/s between GPUs without NVLink and without peer-to-peer copies."""
PEER = 20e9
"""Bytes/s between datacentre cards over PCIe 4, with peer-to-peer copies."""
MIG_COMPUTE_SLICES = 7
"""Into how many compute slices MIG divides an A100, H100, H200 or B200."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One accelerator. Rates are per second: FLOPs and bytes."""

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    """(major, minor); (0, 0) for other than NVIDIA GPUs."""
    mobile: bool = False
    supported: bool = True
    """Whether this torch can use it."""
    why_unusable: str = ""
    """Why it cannot, if it is for another reason than missing kernels."""
    peak_flops: Mapping[str, float | None]
    """Dense peak per precision; None where the format is not native."""
    memory_bandwidth: float
    link_bandwidth: float = PCIE
    """Bytes/s to the other GPUs of its node."""

    @property
    def card(self) -> str | None:
        """The name of its row in the table of GPUs, if it has one."""
        found = find_gpu_model(self.name)
        return found.gpu.name if found else None

    @property
    def native_bf16(self) -> bool:
        """Compute capability 8.0 or higher. (torch.cuda.is_bf16_supported also counts emulation.)"""
        return self.compute_capability >= (8, 0)


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A row of the table: a GPU and its share of the host that it is usually part of."""

    pattern: str
    """Regular expression for its name in nvidia-smi."""
    gpu: Gpu
    cpus: int
    """Cores of the host per GPU."""
    ram_gib: int
    """RAM of the host per GPU."""
    node_bandwidth: float


def is_mobile(name: str) -> bool:
    """Whether a GPU's name is that of a laptop version."""
    return re.search(LAPTOP, name, re.IGNORECASE) is not None


def _gpu(
    name: str,
    mib: int,
    capability: tuple[int, int],
    rates: tuple[float, float, float],
    link: float,
) -> Gpu:
    """`rates`: dense peaks in fp32 and in bf16 and fp16, TFLOP/s, where tensor cores are not used for fp32
    (TF32 stays off); and GB/s of memory.
    """
    fp32, half, memory = (rate * scale for rate, scale in zip(rates, (1e12, 1e12, 1e9), strict=True))
    return Gpu(
        name=name,
        memory_bytes=mib * MIB,
        compute_capability=capability,
        mobile=is_mobile(name),
        peak_flops={"fp32": fp32, "fp16": half, "bf16": half if capability >= (8, 0) else None},
        memory_bandwidth=memory,
        link_bandwidth=link,
    )


def _geforce(
    name: str, pattern: str, mib: int, capability: tuple[int, int], tflops: float, gb_s: float
) -> GpuModel:
    """A desktop card: `tflops` in fp32, `gb_s` of memory."""
    gpu = _gpu(name, mib, capability, (tflops, 2 * tflops, gb_s), PCIE)
    return GpuModel(pattern, gpu, 16, 64 if mib > 16000 else 32, 1.25e8)


def _server(
    name: str,
    pattern: str,
    mib: int,
    capability: tuple[int, int],
    rates: tuple[float, float, float],
    link: float,
    host: tuple[int, int, float],
) -> GpuModel:
    """A card with its `host`: cores, GiB, and bytes/s between nodes."""
    return GpuModel(pattern, _gpu(name, mib, capability, rates, link), *host)


AMPERE, ADA, BLACKWELL = (8, 6), (8, 9), (12, 0)
CLOUD, DGX_A, DGX_H = (8, 32, 3e9), (12, 144, 100e9), (24, 256, 200e9)
"""Hosts: (cores, GiB) per GPU, and bytes/s between nodes: half of what a DGX's network cards add up to."""
# A name that contains another's pattern stands before it. Sources: NVIDIA's GA102, AD102 and GB202 white
# papers and product pages for GeForce; data sheets of T4, V100, A10, A100, L4, L40S, H100, H200, DGX B200,
# RTX A6000, RTX 6000 Ada; AWS's G5 page for the A10G; AMD's data sheet of the MI300X.
MODELS = (
    _server("rtx3050-laptop", "3050.*Laptop", 4096, AMPERE, (5.5, 11, 192), PCIE, (8, 16, 1.25e8)),
    _geforce("rtx3060ti", r"3060 Ti", 8192, AMPERE, 16.2, 448),
    _geforce("rtx3060", r"3060", 12288, AMPERE, 12.7, 360),
    _geforce("rtx3070ti", r"3070 Ti", 8192, AMPERE, 21.7, 608),
    _geforce("rtx3070", r"3070", 8192, AMPERE, 20.3, 448),
    _geforce("rtx3080ti", r"3080 Ti", 12288, AMPERE, 34.1, 912),
    _geforce("rtx3080", r"3080", 10240, AMPERE, 29.8, 760),
    _geforce("rtx3090ti", r"3090 Ti", 24564, AMPERE, 40.0, 1008),
    _geforce("rtx3090", r"3090", 24576, AMPERE, 35.6, 936),
    _geforce("rtx4060ti-16gb", r"4060 Ti.*16", 16380, ADA, 22.1, 288),
    _geforce("rtx4060ti", r"4060 Ti", 8188, ADA, 22.1, 288),
    _geforce("rtx4060", r"4060", 8188, ADA, 15.1, 272),
    _geforce("rtx4070ti-super", r"4070 Ti SUPER", 16376, ADA, 44.1, 672),
    _geforce("rtx4070ti", r"4070 Ti", 12282, ADA, 40.1, 504),
    _geforce("rtx4070-super", r"4070 SUPER", 12282, ADA, 35.5, 504),
    _geforce("rtx4070", r"4070", 12282, ADA, 29.1, 504),
    _server("rtx4080-laptop", "4080.*Laptop", 12282, ADA, (24.7, 49, 432), PCIE, (16, 32, 1.25e8)),
    _geforce("rtx4080-super", r"4080 SUPER", 16376, ADA, 52.2, 736),
    _geforce("rtx4080", r"4080", 16376, ADA, 48.7, 717),
    _geforce("rtx4090", r"4090", 24564, ADA, 82.6, 1008),
    _geforce("rtx5070ti", r"5070 Ti", 16303, BLACKWELL, 43.9, 896),
    _geforce("rtx5070", r"5070", 12227, BLACKWELL, 30.9, 672),
    _geforce("rtx5080", r"5080", 16303, BLACKWELL, 56.3, 960),
    _geforce("rtx5090", r"5090", 32607, BLACKWELL, 104.8, 1792),
    _server("t4", r"\bT4\b", 15360, (7, 5), (8.1, 65, 300), 6e9, (4, 16, 3e9)),
    _server("v100-32gb", r"V100.*32GB", 32768, (7, 0), (15.7, 125, 900), 130e9, (8, 61, 3e9)),
    _server("v100", r"V100", 16160, (7, 0), (15.7, 125, 900), 130e9, (8, 61, 3e9)),
    _server("a10g", r"\bA10G\b", 23028, AMPERE, (31.5, 70, 600), PCIE, CLOUD),
    _server("a10", r"\bA10\b", 23028, AMPERE, (31.2, 125, 600), PCIE, CLOUD),
    _server("l40s", r"\bL40S\b", 46068, ADA, (91.6, 362, 864), PEER, (16, 128, 12.5e9)),
    _server("l4", r"\bL4\b", 23034, ADA, (30.3, 121, 300), PCIE, CLOUD),
    _server("rtx-a6000", r"RTX A6000", 49140, AMPERE, (38.7, 155, 768), PEER, (16, 64, 1.25e9)),
    _server("rtx6000-ada", r"RTX 6000 Ada", 49140, ADA, (91.1, 364, 960), PEER, (16, 64, 1.25e9)),
    _server("a100-40gb", r"A100.*40GB", 40536, (8, 0), (19.5, 312, 1555), 230e9, DGX_A),
    _server("a100-80gb", r"A100", 81920, (8, 0), (19.5, 312, 2039), 230e9, DGX_A),
    _server("h200", r"H200", 143771, (9, 0), (67, 989, 4800), 370e9, DGX_H),
    _server("h100-pcie", r"H100.*PCIe", 81559, (9, 0), (51, 756, 2000), PEER, (16, 128, 12.5e9)),
    _server("h100", r"H100", 81559, (9, 0), (67, 989, 3350), 370e9, DGX_H),
    _server("b200", r"B200", 183359, (10, 0), (75, 2250, 8000), 700e9, (28, 256, 200e9)),
    _server("mi300x", r"MI300X", 196592, (9, 4), (163.4, 1307, 5300), 300e9, (24, 256, 200e9)),
)
MACHINES = {model.gpu.name: model for model in MODELS}
SLICE = r"[ -]mig[ -](\d)g\.(\d+)gb\b.*"


def find_gpu_model(name: str) -> GpuModel | None:
    """The row that a name of this table or of nvidia-smi belongs to; a MIG slice's has its share of rates."""
    if slice_ := re.search(SLICE, name, re.IGNORECASE):
        whole = find_gpu_model(name[: slice_.start()])
        return whole and mig_slice(whole, int(slice_[1]), int(slice_[2]))
    if name in MACHINES:
        return MACHINES[name]
    return next((m for m in MODELS if re.search(m.pattern, name, re.IGNORECASE)), None)


def mig_slice(whole: GpuModel, compute: int, memory_gb: int) -> GpuModel:
    """A MIG slice `1g.10gb`: its share of the compute slices, and of the memory and its bandwidth.

    Slices exchange over PCIe alone.
    """
    share, card = compute / MIG_COMPUTE_SLICES, whole.gpu
    part = dataclasses.replace(
        card,
        name=f"{card.name}-mig-{compute}g.{memory_gb}gb",
        memory_bytes=memory_gb * 1024 * MIB,
        peak_flops={name: peak and share * peak for name, peak in card.peak_flops.items()},
        memory_bandwidth=card.memory_bandwidth * min(1.0, memory_gb * 1024 * MIB / card.memory_bytes),
        link_bandwidth=PCIE,
    )
    return dataclasses.replace(whole, gpu=part)


def named_model(word: str) -> str | None:
    """The name of the row that `word` is, with or without spaces, dashes and the makers' words:
    `RTX 4090`, `4090`, `nvidia-h100-sxm5`.
    """
    plain = _squeezed(word)
    return next((name for name in MACHINES if _squeezed(name) in (plain, f"rtx{plain}")), None)


def names_beginning(word: str) -> list[str]:
    """The names of rows that begin with `word`, in the order of the alphabet."""
    plain = _squeezed(word)
    return sorted(name for name in MACHINES if plain and _squeezed(name).startswith(plain))


def _squeezed(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|instinct|amd|sxm\d?|[\s_-]", "", name.lower())
