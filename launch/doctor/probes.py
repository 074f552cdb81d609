"""The result of a check of `doctor`, and what it tries in processes of their own, all at once, because it may
crash, hang or take long.

The functions at the end really compute. Each returns what is well, in a sentence, and raises where it fails.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from isobatch.core.measures import format_bytes
from isobatch.core.package import call_in_child

MODULE = "launch.doctor.probes"
SECONDS, MOST_TIMES, GROUP_SECONDS = 60.0, 5.0, 20
"""How long all probes may take on an idle machine, how many times as long at most beside other work, by its
load, and the processes of a sum.
"""
NOT_KNOWN = "not known"
"""So begins the text of a check that was not tried to its end."""
LARGEST_ERROR = {"float32": 1e-3, "bfloat16": 5e-2}
"""Relative error of a product of 64 numbers: about 3e-7 (with TF32 5e-4) and 5e-3 are usual."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `doctor`."""

    state: Literal["ok", "warning", "broken"]
    """warning: it works, and slower or less safely than it could. broken: something does not work."""
    name: str
    text: str
    remedy: str = ""
    """The command, or the change, that mends it; empty where all is well."""


ok = partial(Check, "ok")
warning, broken = partial(Check, "warning"), partial(Check, "broken")


def ok_if(is_well: bool, name: str, text: str, remedy: str) -> Check:
    """The line, with the remedy and as a warning unless all is well."""
    return ok(name, text) if is_well else warning(name, text, remedy)


@dataclass(frozen=True, slots=True)
class Probe:
    """A function of this file that is tried."""

    name: str
    function: str
    remedy: str
    arguments: dict[str, Any] = field(default_factory=dict)
    needed_by: str = ""
    """The flags that need it, if training goes without: its failure is a warning then."""

    def failed(self, error: str) -> Check:
        """The line on the end of what it said."""
        lines = [line.strip() for line in error.splitlines() if line[:1].isalpha() and ": " in line]
        said = (lines or [error.strip()])[-1][:300]
        if self.needed_by:
            return warning(self.name, f"fails: {said}; {self.needed_by} need it", self.remedy)
        return broken(self.name, f"fails: {said}", self.remedy)


def try_out(probe: Probe, load: float = 0.0) -> Check:
    """The line on a probe, once its process has ended or its time is up. `load`: what ran before on a core;
    above 1 a late answer says nothing of what is tried.
    """
    seconds = SECONDS * min(max(1.0, load), MOST_TIMES)
    try:
        return ok(probe.name, call_in_child(f"{MODULE}:{probe.function}", seconds, **probe.arguments))
    except subprocess.TimeoutExpired:
        if load > 1:
            text = (
                f"{NOT_KNOWN}: it took longer than {seconds:.0f} s on a busy machine (load {load:.1f} a core)"
            )
            return warning(probe.name, text, "isobatch doctor, once uptime shows less load")
        return probe.failed(f"no answer within {seconds:g} s")
    except RuntimeError as error:
        return probe.failed(str(error))


def arithmetic(device: str) -> str:
    """A product of matrices and its gradient, in fp32 and bf16."""
    import torch

    try_products(device)
    if device == "cpu":
        return f"{torch.__version__} computes rightly on the CPU"
    free, total = map(format_bytes, torch.cuda.mem_get_info(device))
    return f"{torch.cuda.get_device_name(device)} computes rightly; {free} of {total} are free"


def try_products(device: str) -> None:
    """Raises ArithmeticError where a (64, 64) product or its gradient is not that in fp64 on the CPU."""
    import torch

    draws = torch.Generator().manual_seed(0)
    left, right = (torch.randn(64, 64, generator=draws, dtype=torch.float64) for _ in range(2))
    exact = left @ right
    for name, largest in LARGEST_ERROR.items():
        a = left.to(device, getattr(torch, name)).requires_grad_()
        product = a @ right.to(a)
        product.square().sum().backward()
        assert a.grad is not None
        for found, true in ((product, exact), (a.grad, 2 * exact @ right.T)):
            error = float((found.detach().cpu().double() - true).abs().max() / true.abs().max())
            if not error < largest:  # NaN neither
                raise ArithmeticError(f"a product in {name} is off by {error:.1e}")


def imported(module: str) -> str:
    """A library by its name."""
    with contextlib.redirect_stdout(sys.stderr):
        return f"{importlib.import_module(module).__version__} can be imported"


def all_reduce(backend: str, processes: int) -> str:
    """A sum over processes of this machine."""
    from torch import multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        shared = backend, processes, f"file://{folder}/meeting"
        multiprocessing.start_processes(_sum_ones, shared, processes, start_method="fork")
    return f"{processes} processes sum rightly"


def _sum_ones(rank: int, backend: str, processes: int, meeting: str) -> None:
    import torch

    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    limit = datetime.timedelta(seconds=GROUP_SECONDS)
    torch.distributed.init_process_group(backend, meeting, limit, rank=rank, world_size=processes)
    ones = torch.ones(1 << 22, device=device)
    torch.distributed.all_reduce(ones)
    if float(ones[0]) != processes:
        raise ArithmeticError(f"the sum of {processes} ones was {float(ones[0])}")
    torch.distributed.destroy_process_group()
