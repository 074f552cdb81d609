"""What doctor tries in child processes, all at once, because it may crash, hang or take long.

Each function really computes. It returns what is well, in a sentence, raises RuntimeWarning where something
is only slow, and anything else where it fails.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.measures import format_bytes
from isobatch.core.package import own_command
from isobatch.launch.doctor.check import Check, broken, ok, warning

if TYPE_CHECKING:
    from collections.abc import Mapping

MODULE = "launch.doctor.probes"
SLOW = "RuntimeWarning: "
GROUP_SECONDS, ROUNDS = 40, 3
ALL_REDUCE_BYTES = {"gloo": 16 << 20, "nccl": 256 << 20}
SLOW_NCCL = 1e9
"""Bytes/s between GPUs of a machine; PCIe without peer-to-peer copies has about 5e9."""
LARGEST_ERROR = {"float32": 1e-3, "bfloat16": 5e-2}
"""Relative error of a product of 64 numbers: about 3e-7 (with TF32 5e-4) and 5e-3 are usual."""
FREE_GPU_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Probe:
    """A function of this file that is tried, and how what it says is told."""

    name: str
    function: str
    remedy: str
    arguments: dict[str, Any] = field(default_factory=dict)
    _: KW_ONLY
    needed_by: str = ""
    """The flags that need it, if training goes without: its failure is a warning then."""
    seconds: float = 60.0
    patient: bool = True
    """Whether no answer in time is a failure, and not just a slow machine."""

    def check(self, answer: Answer) -> Check:
        """The line on an answer."""
        if answer.late and not self.patient:
            return ok(self.name, f"not waited for: {answer.error}, as others compute here")
        if not answer.error:
            return ok(self.name, answer.found)
        if answer.error.startswith(SLOW):
            return warning(self.name, answer.error.removeprefix(SLOW), self.remedy)
        if self.needed_by:
            return warning(self.name, f"fails: {answer.error}; {self.needed_by} need it", self.remedy)
        return broken(self.name, f"fails: {answer.error}", self.remedy)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a probe found, or why it found nothing."""

    found: Any = None
    error: str = ""
    """The last line of its error output, or the signal that ended it; empty where it succeeded."""
    late: bool = False
    """Whether its time was up."""


class Child:
    """A probe in a process of its own, which begins at once."""

    def __init__(self, probe: Probe, env: Mapping[str, str] | None = None) -> None:
        self.probe, self._began = probe, time.monotonic()
        # Files, because nobody reads pipes while others answer.
        self._out = tempfile.TemporaryFile()  # noqa: SIM115  it ends with this object
        self._err = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            own_command("call", f"{MODULE}:{probe.function}", json.dumps(probe.arguments)),
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )

    def check(self) -> Check:
        """Its line, when it ends or its time is up."""
        return self.probe.check(self.answer())

    def answer(self) -> Answer:
        """Wait for its end, or until its time is up."""
        left = self.probe.seconds - (time.monotonic() - self._began)
        try:
            code = self._process.wait(max(0.0, left))
        except subprocess.TimeoutExpired:
            return Answer(error=f"no answer within {self.probe.seconds:g} s", late=True)
        finally:
            self.stop()
        if code < 0:
            return Answer(error=f"its process was ended by {signal.Signals(-code).name}")
        if code:
            return Answer(error=_last_line(self._text(self._err)))
        return Answer(json.loads(self._text(self._out).splitlines()[-1]))

    def stop(self) -> None:
        """Kill it with all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @staticmethod
    def _text(stream: Any) -> str:
        stream.seek(0)
        return str(stream.read().decode(errors="replace"))


def _last_line(text: str) -> str:
    """The line that says what went wrong: the last one that does not continue another."""
    lines = [line for line in text.splitlines() if line.strip()]
    named = [line for line in lines if line[:1].isalpha() and ": " in line]
    return (named or lines or ["it said nothing"])[-1].strip()[:300]


def arithmetic() -> str:
    """A product of matrices and its gradient on the CPU, in fp32 and bf16."""
    import torch

    try_products("cpu")
    build = torch.version.cuda or torch.version.hip
    return (
        f"{torch.__version__}, made for {f'CUDA {build}' if build else 'CPUs'}, computes rightly on the CPU"
    )


def gpu_arithmetic(number: int) -> str:
    """The same on a GPU, and whether its memory is free."""
    import torch

    device = f"cuda:{number}"
    try_products(device)
    free, total = torch.cuda.mem_get_info(number)
    name, memory = torch.cuda.get_device_name(number), f"{format_bytes(free)} of {format_bytes(total)}"
    if free < FREE_GPU_SHARE * total:
        raise RuntimeWarning(f"{name}: {memory} are free, others use the rest")
    return f"{name}, {memory} free, computes rightly"


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


def compiled() -> str:
    """torch.compile of a few operations, on the GPU where there is one, with a cache of its own."""
    os.nice(10)  # it takes longest, and others are waited for
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = folder
        import torch
        import torch._inductor.config as settings

        from isobatch.engine.model_setup.compile_model import passed_by

        # The smallest compilation that there is: no headers made ready for later, no search for instructions.
        settings.cpp_cache_precompile_headers, settings.compile_threads = False, 1
        settings.cpp.simdlen = 1
        device = "cuda" if torch.cuda.is_available() else "cpu"
        x = torch.arange(-8.0, 8.0, device=device)
        began = time.perf_counter()
        if not torch.allclose(torch.compile(_kernel)(x), _kernel(x)):
            raise ArithmeticError("a compiled kernel computes wrongly")
        if problem := passed_by():
            raise RuntimeError(problem)
        return f"compiled for {device} in {time.perf_counter() - began:.1f} s"


def _kernel(x: Any) -> Any:
    return x.relu() * 2 + 1


def imported(module: str) -> str:
    """A library that reads CUDA's compiler and its own compiled parts while it is imported."""
    with contextlib.redirect_stdout(sys.stderr):
        found: Any = importlib.import_module(module)
    return f"{found.__version__} can be imported"


def all_reduce(backend: str, processes: int) -> str:
    """A sum over processes of this machine, and its bus bandwidth in bytes/s: bytes x 2(n - 1)/n / seconds,
    as NCCL's tests count it (nccl-tests, PERFORMANCE.md); the bytes alone where there is one process.
    """
    from torch import multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(
            _sum_over_processes, (backend, processes, folder), processes, start_method="fork"
        )
        seconds = float(Path(folder, "seconds").read_text())
    rate = ALL_REDUCE_BYTES[backend] * (2 * (processes - 1) / processes or 1.0) / seconds
    text = f"{processes} processes sum {format_bytes(rate)} a second"
    if backend == "nccl" and processes > 1 and rate < SLOW_NCCL:
        raise RuntimeWarning(f"{text}: too slow for the links of one machine")
    return text


def _sum_over_processes(rank: int, backend: str, processes: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    limit = datetime.timedelta(seconds=GROUP_SECONDS)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, f"file://{folder}/meeting", limit, rank=rank, world_size=processes)
    ones = torch.ones(ALL_REDUCE_BYTES[backend] // 4, device=device)
    dist.all_reduce(ones)  # connects the ranks
    if float(ones[0]) != processes:
        raise ArithmeticError(f"the sum of {processes} ones was {float(ones[0])}")
    began = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(ones)
    ones[0].item()  # waits for the device
    if rank == 0:
        Path(folder, "seconds").write_text(str((time.perf_counter() - began) / ROUNDS))
    dist.destroy_process_group()
