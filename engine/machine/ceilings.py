"""Measured ceilings of this machine's processor: seconds of measuring, kept in a file for later plans.

The planner divides a model's arithmetic, traffic and kernel calls by these rates. Each is the best of several
trials shorter than a turn of the scheduler, so that other programs disturb it little.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from timeit import timeit

from isobatch.core import atomic_files
from isobatch.core.terminal import doing
from isobatch.engine.machine.hardware import Hardware

WIDTHS = (64, 128, 256, 512, 1024)
"""Widths of the square weights whose products are timed."""
ROWS = 1024
"""Tokens that they multiply."""
TRIAL_SECONDS, ROUNDS = 0.003, 30
LARGE, SMALL = 16 * 2**20, 2**18
"""fp32 elements beyond the processor's caches, and within them."""
CALLS, RECURRENT_STEPS, UPDATED = 20, 16, 2**22
"""Operations in a chain, tokens of a row, parameters of an update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """Rates that this machine's processor reaches with all of its cores, in fp32 unless it says bf16."""

    matmul: Sequence[float]
    """FLOP/s of a product of ROWS tokens with a square weight of each of WIDTHS."""
    matmul_bf16: Sequence[float]
    bandwidth: float
    """Bytes/s read and written by an addition of large tensors."""
    cached_bandwidth: float
    """The same of tensors that fit into the caches."""
    gelu: float
    """Elements/s of GELU, forward and backward."""
    call_seconds: float
    """Of a small operation with its backward pass, apart from its arithmetic."""
    recurrent_seconds: float
    """Of one token of a GRU layer, forward and backward, apart from its arithmetic."""
    adamw: float
    """Parameters/s of a fused AdamW update."""

    def matmul_rate(self, width: float, bf16: bool = False) -> float:
        """FLOP/s of a product with weights of this width, between the measured ones."""
        import numpy as np

        rates = self.matmul_bf16 if bf16 else self.matmul
        return float(np.interp(np.log(max(width, 1.0)), np.log(WIDTHS), rates))


def ceilings_of(hardware: Hardware, folder: Path) -> Ceilings | None:
    """The ceilings of this machine, measured on first use and then read from `folder`; None elsewhere.

    A machine that is only named has none. Each number of cores has a file of its own.
    """
    if hardware.source != "detected":
        return None
    file = folder / f"ceilings-{machine_key(hardware)}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):  # none yet, or a damaged file
        kept = Ceilings(**json.loads(file.read_text()))
        if len(kept.matmul) == len(kept.matmul_bf16) == len(WIDTHS):
            return kept
    doing("measuring this machine")
    found = measure(hardware)
    # A folder that cannot be written: measured again next time.
    with contextlib.suppress(OSError), atomic_files.shared_folder(folder):
        atomic_files.write_json(file, dataclasses.asdict(found))
    return found


def machine_key(hardware: Hardware) -> str:
    """A name for what measured figures depend on: processor, cores, GPUs, the version of torch."""
    from importlib.metadata import version

    gpus = sorted(gpu.name for gpu in hardware.gpus)
    parts = [_processor_name(), hardware.cpus, gpus, version("torch")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _processor_name() -> str:
    """The processor's name and features; no host name."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        wanted = ("model name", "flags", "Features", "CPU part")
        return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip() in wanted}))
    return platform.processor() or platform.machine()


def measure(hardware: Hardware) -> Ceilings:
    """Time every ceiling with all cores of this machine: about two seconds."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(hardware.cpus)
    try:
        seconds = _fastest(_kernels())
    finally:
        torch.set_num_threads(threads)
    return Ceilings(
        matmul=tuple(2.0 * ROWS * width**2 / seconds[f"fp32 {width}"] for width in WIDTHS),
        matmul_bf16=tuple(2.0 * ROWS * width**2 / seconds[f"bf16 {width}"] for width in WIDTHS),
        bandwidth=12.0 * LARGE / seconds["addition"],
        cached_bandwidth=12.0 * SMALL / seconds["cached addition"],
        gelu=SMALL / seconds["gelu"],
        call_seconds=seconds["calls"] / CALLS,
        recurrent_seconds=seconds["recurrent"] / RECURRENT_STEPS,
        adamw=UPDATED / seconds["adamw"],
    )


def _fastest(kernels: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each kernel: the best of several rounds over all, as other load comes and goes."""
    repeats = {}
    for name, kernel in kernels.items():
        kernel()
        repeats[name] = max(1, round(TRIAL_SECONDS / max(timeit(kernel, number=1), 1e-7)))
    rounds = [{n: timeit(kernel, number=repeats[n]) for n, kernel in kernels.items()} for _ in range(ROUNDS)]
    return {name: min(one[name] for one in rounds) / repeats[name] for name in kernels}


def _kernels() -> dict[str, Callable[[], object]]:
    import torch

    def calls() -> None:
        result = one
        for _ in range(CALLS):
            result = result * 1.0
        result.sum().backward()

    kernels: dict[str, Callable[[], object]] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for width in WIDTHS:
            tokens, square = torch.randn(ROWS, width, dtype=dtype), torch.randn(width, width, dtype=dtype)
            kernels[f"{name} {width}"] = partial(torch.nn.functional.linear, tokens, square)
    for name, elements in (("addition", LARGE), ("cached addition", SMALL)):
        left, right, out = torch.ones(elements), torch.ones(elements), torch.empty(elements)
        kernels[name] = partial(torch.add, left, right, out=out)
    values, ones = torch.randn(SMALL, requires_grad=True), torch.ones(SMALL)
    one = torch.ones(8, requires_grad=True)
    layer, row = torch.nn.GRU(64, 64, batch_first=True), torch.randn(4, RECURRENT_STEPS, 64)
    weight = torch.nn.Parameter(torch.ones(UPDATED))
    weight.grad = torch.ones_like(weight)
    return kernels | {
        "gelu": lambda: torch.nn.functional.gelu(values).backward(ones),
        "calls": calls,
        "recurrent": lambda: layer(row)[0].sum().backward(),
        "adamw": torch.optim.AdamW([weight], fused=True).step,
    }
