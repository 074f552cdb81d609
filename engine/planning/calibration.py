"""Constants of the memory and cost models: measured on CPUs, fitted to published figures for GPUs.

A card that was measured has constants of its own in MEASURED, which is the one place to fill: a benchmark's
result file has them as a row of the fields of `GpuConstants`.
"""

from __future__ import annotations

from dataclasses import dataclass

CORE_FLOPS = 40e9
"""fp32 FLOP/s of a CPU core in training (measured: 21 to 77, growing with the width of the model)."""
CPU_BF16_SPEEDUP = 2.0
"""Measured with AVX512_BF16: 1.8 to 2.5 times fp32; without it bf16 is 5 times slower than fp32."""
CPU_MEMORY_BANDWIDTH = 10e9
"""Bytes/s (measured on two cores)."""
HOST_CORE_BANDWIDTH, HOST_BANDWIDTH = 5e9, 100e9
"""Bytes/s of a host's memory for a core, and at most: for an update of offloaded state (uncalibrated)."""
HOST_LINK = 12e9
"""Bytes/s between host and GPU over PCIe, layer by layer (uncalibrated; 16 lanes of PCIe 4: 32e9)."""
GLOO_BANDWIDTH, GLOO_LATENCY, NCCL_LATENCY = 1e9, 2e-4, 2e-5
"""Bytes/s, seconds, seconds."""
HIDDEN = 0.6
"""Share of an overlapped exchange that runs beside the arithmetic as long as that lasts (uncalibrated)."""
MOBILE_SUSTAINED = 0.8
"""Share of its peak rate that a mobile GPU sustains when warm (uncalibrated)."""
RECURRENT_STEP_SECONDS = {"cpu": 4e-4, "cuda": 5e-5, "mps": 5e-5}
"""Forward and backward pass of one token of a recurrent layer, however many rows there are (CPU measured: 0.3
to 0.8 ms; GPUs uncalibrated)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuConstants:
    """What training reaches on a GPU.

    The defaults are fitted to nanoGPT's 250 ms an iteration without and 135 ms with torch.compile on an A100
    (12 rows of 1,024 tokens, attention by separate kernels): `python -m benchmarks published`.
    """

    matmul_share: float = 0.6
    """Of the dense peak, in matrix products."""
    traffic: float = 8.0
    """How often each byte that the backward pass needs is moved by kernels that are no matrix products."""
    compiled_traffic: float = 3.5
    launch_seconds: float = 3e-3
    """Of a micro-batch: the host's work apart from the layers."""
    layer_launch_seconds: float = 1e-3
    """Of a layer's kernels, forward and backward (BERT: 10 to 20 ms in all)."""
    compiled_launch: float = 0.4
    """Share of the launches that is left in a compiled model."""
    compile_seconds: float = 20.0
    """To compile one shape, apart from the layers."""
    layer_compile_seconds: float = 2.0


PUBLISHED = GpuConstants()
MEASURED: dict[str, GpuConstants] = {}
"""Card of the GPU table (`h100`) -> constants measured on it."""


def gpu_constants(card: str | None) -> GpuConstants:
    """The constants of a card of the GPU table, or those fitted to published figures."""
    return MEASURED.get(card or "", PUBLISHED)
