"""The constants that the planner rests on: measured on CPUs, fitted to published figures for GPUs.

A card that was measured has constants of its own in MEASURED, the one place to fill: a benchmark's result
file has them as a row of the fields of `GpuConstants`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from isobatch.core.package import table_beside
from isobatch.engine.machine.ceilings import Ceilings
from isobatch.engine.machine.gpu_table import Gpu

TYPICAL_CORE = Ceilings(**table_beside(__file__, "typical_core"))
"""Of a core, for machines that are only named (measured on two cores of an AMD EPYC with AVX512_BF16)."""
EMULATED_BF16 = 0.2
"""Of the fp32 rate, where a processor has no bf16 (measured)."""
CPU_MATMUL_SHARE = 0.85
"""Of the measured rate of products, which has its operands in the caches."""
CPU_TRAFFIC = 8.0
"""How often each byte that the backward pass needs is moved by operations that are no matrix products."""
HALF_CPU_TRAFFIC = 2.0
"""Traffic under autocast over that in fp32, on a CPU: casts cost more than narrow tensors save."""
ROUNDING = 3.0
"""Of a value that a layer rounds, forward and backward, over an element of GELU."""
SOFTMAX = 4.5
"""Of a logit, forward and backward, over an element of GELU."""
RECURRENT_PASSES = 3.0
"""How often a recurrent layer's weights are read for each token of a row, forward and backward."""
KEYED_DRAW = 10.0
"""A keyed draw for dropout, over an element of GELU."""
KEYED_MASK = 3.0
"""The same where attention draws none, so that its fused kernel stays (measured: 2.9)."""
LAYER_CALLS, MODEL_CALLS, STEP_CALLS = 60.0, 150.0, 700.0
"""Operations of a layer, of the rest of a model, forward and backward, and of a step beside them."""
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
LOGIT, WHOLE_LOGIT = 12.0, 30.0
"""Bytes moved for a logit on a GPU, by the head's own kernel and by torch's functions (counted)."""
ADAPTER_INPUT = 32.0
"""Bytes moved for a value that an adapter reads: dropout, a copy and the sum (counted by `make gpu-dry`)."""
RECURRENT_STEP_SECONDS = 5e-5
"""Forward and backward pass of one token of a recurrent layer on a GPU, however many rows (uncalibrated)."""


RUN_ERROR = (0.8, 1.2)
"""Measured over predicted time of a whole run, where this processor's rates are known: 25 of 27 runs lie
within (`python -m benchmarks predictions`; the others were 0.78 and 1.66)."""
UNMEASURED_ERROR, UNMEASURED_START = 2.5, 28.0
"""Where no rate of the device was measured: the largest miss of a step's part, and the seconds that a start
took longer, on an H200 whose constants were not its own (`make gpu`: 37.9 ms for 15.6; 33.3 s for 5.5)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuConstants:
    """What training reaches on a GPU.

    Shares of the peak are fitted to half of 20 published speeds (`python -m benchmarks published-gpus`),
    traffic is counted kernel by kernel (`make gpu-dry`).
    """

    matmul_share: float = 0.78
    """Of the dense peak, in matrix products, but for what they read and write."""
    traffic: float = 6.9
    """How often each byte that the backward pass needs is moved by kernels that are no matrix products."""
    compiled_traffic: float = 3.5
    launch_seconds: float = 3e-3
    """Of a micro-batch: the host's work apart from the layers."""
    layer_launch_seconds: float = 1e-3
    """Of a layer's kernels, forward and backward (BERT: 10 to 20 ms in all)."""
    compiled_launch: float = 0.4
    """Share of the launches that is left in a compiled model."""
    compile_seconds: float = 20.0
    """To compile one graph of a block."""


PUBLISHED = GpuConstants()
HOPPER = GpuConstants(matmul_share=0.65)
"""Of data centre cards from the H100 on, which their power limit slows in large products."""
MEASURED: dict[str, GpuConstants] = {}
"""Card of the GPU table (`h100`) -> constants measured on it."""


def gpu_constants(gpu: Gpu) -> GpuConstants:
    """The constants of a card of the GPU table, or those fitted to published figures."""
    return MEASURED.get(gpu.card or "", HOPPER if gpu.compute_capability[0] in (9, 10) else PUBLISHED)


def typical_ceilings(cores: int) -> Ceilings:
    """Ceilings of a processor that was not measured: those of a typical core times their number."""
    core = TYPICAL_CORE
    rates = {
        "matmul": tuple(cores * rate for rate in core.matmul),
        "matmul_bf16": tuple(cores * rate for rate in core.matmul_bf16),
        **{name: cores * getattr(core, name) for name in ("bandwidth", "cached_bandwidth", "gelu", "adamw")},
    }
    return dataclasses.replace(core, **rates)
