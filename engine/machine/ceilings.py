"""Measured ceilings of this machine's processor: seconds of measuring, kept in a file for later plans.

The planner divides a model's arithmetic, traffic and kernel calls by these rates. Each is the best of several
short trials, so that other programs on the machine disturb it little.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.terminal.status import doing
from isobatch.engine.machine.core_wait import DISTURBED, CoreWait

if TYPE_CHECKING:
    from collections.abc import Callable

    from isobatch.engine.machine.hardware import Hardware

WIDTHS = (64, 128, 256, 512, 1024)
"""Widths of the square weights whose products are timed."""
ROWS = 1024
"""Tokens that they multiply."""
TRIAL_SECONDS, ROUNDS = 0.015, 6
LARGE, SMALL = 16 * 2**20, 2**18
"""fp32 elements beyond the processor's caches, and within them."""
CALLS, RECURRENT_STEPS, UPDATED = 20, 16, 2**22
"""Operations in a chain, tokens of a row, parameters of an update."""
DISTURBED_SECONDS = 600.0
"""How long disturbed rates are used before they are measured once more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """Rates that this machine's processor reaches with all of its cores, in fp32 unless it says bf16."""

    matmul: tuple[float, ...]
    """FLOP/s of a product of ROWS tokens with a square weight of each of WIDTHS."""
    matmul_bf16: tuple[float, ...]
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
    waited: float
    """Share of the measuring that its threads waited for a core, because other programs ran there."""

    @property
    def disturbed(self) -> bool:
        """Whether other programs made the rates too low."""
        return self.waited > DISTURBED

    def matmul_rate(self, width: float, bf16: bool = False) -> float:
        """FLOP/s of a product with weights of this width, between the measured ones."""
        import numpy as np

        rates = self.matmul_bf16 if bf16 else self.matmul
        return float(np.interp(np.log(max(width, 1.0)), np.log(WIDTHS), rates))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def ceilings_of(hardware: Hardware, folder: Path) -> Ceilings | None:
    """The ceilings of this machine, measured on first use and then read from `folder`; None elsewhere.

    A machine that is only named has none, and neither has one of another number of cores. Rates that other
    programs disturbed are measured again after a while, and the best of both kept.
    """
    if hardware.source != "detected":
        return None
    file = folder / f"ceilings-{machine_key(hardware)}.json"
    kept = None
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        kept = _from_dict(json.loads(file.read_text()))
        if not kept.disturbed or time.time() - file.stat().st_mtime < DISTURBED_SECONDS:
            return kept
    doing("measuring this machine")
    found = measure(hardware)
    if kept is not None:
        found = _best(found, kept)
    with contextlib.suppress(OSError):  # a folder that cannot be written: measured again next time
        folder.mkdir(parents=True, exist_ok=True)
        atomic_files.write_json(file, found.to_dict())
    return found


def _best(left: Ceilings, right: Ceilings) -> Ceilings:
    """The higher of each rate and the shorter of each time: other programs can only slow them down."""
    values: dict[str, Any] = {}
    for name in (f.name for f in dataclasses.fields(Ceilings)):
        pair = getattr(left, name), getattr(right, name)
        if name.startswith("matmul"):
            values[name] = tuple(map(max, zip(*pair, strict=True)))
        else:
            values[name] = min(pair) if name.endswith("seconds") or name == "waited" else max(pair)
    return Ceilings(**values)


def _from_dict(values: Any) -> Ceilings:
    if not isinstance(values, dict):
        raise TypeError("is no object")
    lists: dict[str, Any] = {name: tuple(map(float, values.pop(name))) for name in ("matmul", "matmul_bf16")}
    if any(len(rates) != len(WIDTHS) for rates in lists.values()):
        raise ValueError("measured at other widths")
    rates: dict[str, Any] = {name: float(value) for name, value in values.items()}
    return Ceilings(**lists, **rates)


def machine_key(hardware: Hardware) -> str:
    """A name for what measured figures depend on: processor, cores, GPUs, the version of torch."""
    gpus = sorted(gpu.name for gpu in hardware.gpus)
    parts = [processor_name(), hardware.cpus, gpus, importlib.metadata.version("torch")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def processor_name() -> str:
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
    wait = CoreWait()
    try:
        seconds = _fastest({name: make() for name, make in _kernels().items()})
    finally:
        torch.set_num_threads(threads)
    waited = wait.share()
    flops = [2.0 * ROWS * width**2 for width in WIDTHS]
    return Ceilings(
        matmul=tuple(n / seconds[f"fp32 {width}"] for n, width in zip(flops, WIDTHS, strict=True)),
        matmul_bf16=tuple(n / seconds[f"bf16 {width}"] for n, width in zip(flops, WIDTHS, strict=True)),
        bandwidth=12.0 * LARGE / seconds["addition"],
        cached_bandwidth=12.0 * SMALL / seconds["cached addition"],
        gelu=SMALL / seconds["gelu"],
        call_seconds=seconds["calls"] / CALLS,
        recurrent_seconds=seconds["recurrent"] / RECURRENT_STEPS,
        adamw=UPDATED / seconds["adamw"],
        waited=waited,
    )


def _fastest(kernels: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each kernel: the best of several rounds over all, as other load comes and goes."""
    repeats = {}
    for name, kernel in kernels.items():
        kernel()
        repeats[name] = max(1, round(TRIAL_SECONDS / max(_seconds(kernel, 1), 1e-7)))
    rounds = [{n: _seconds(kernel, repeats[n]) for n, kernel in kernels.items()} for _ in range(ROUNDS)]
    return {name: min(one[name] for one in rounds) for name in kernels}


def _seconds(kernel: Callable[[], object], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        kernel()
    return (time.perf_counter() - began) / repeats


def _kernels() -> dict[str, Callable[[], Callable[[], object]]]:
    """Name -> a function that makes the kernel."""
    import torch

    products = {
        f"{name} {width}": partial(_product, width, dtype)
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        for width in WIDTHS
    }
    additions = {"addition": partial(_addition, LARGE), "cached addition": partial(_addition, SMALL)}
    return {
        **products, **additions, "gelu": _gelu, "calls": _calls, "recurrent": _recurrent, "adamw": _adamw,
    }  # fmt: skip


def _product(width: int, dtype: Any) -> Callable[[], object]:
    import torch

    tokens, weight = torch.randn(ROWS, width, dtype=dtype), torch.randn(width, width, dtype=dtype)
    return lambda: torch.nn.functional.linear(tokens, weight)


def _addition(elements: int) -> Callable[[], object]:
    import torch

    left, right, out = torch.ones(elements), torch.ones(elements), torch.empty(elements)
    return lambda: torch.add(left, right, out=out)


def _gelu() -> Callable[[], object]:
    import torch

    values = torch.randn(SMALL, requires_grad=True)
    ones = torch.ones_like(values)
    return lambda: torch.nn.functional.gelu(values).backward(ones)


def _calls() -> Callable[[], object]:
    import torch

    value = torch.ones(8, requires_grad=True)

    def chain() -> None:
        result = value
        for _ in range(CALLS):
            result = result * 1.0
        result.sum().backward()

    return chain


def _recurrent() -> Callable[[], object]:
    import torch

    layer = torch.nn.GRU(64, 64, batch_first=True)
    tokens = torch.randn(4, RECURRENT_STEPS, 64)
    return lambda: layer(tokens)[0].sum().backward()


def _adamw() -> Callable[[], object]:
    import torch

    weight = torch.nn.Parameter(torch.ones(UPDATED))
    weight.grad = torch.ones_like(weight)
    return torch.optim.AdamW([weight], fused=True).step
