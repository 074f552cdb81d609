"""Part 7, worlds: NCCL with one process, ZeRO-offload, engines alone, two ranks on one GPU over gloo.

NCCL refuses two ranks on one GPU. Gloo takes CUDA tensors and moves them through the host, so that the
engine's own paths of several processes run, slowly. Losses must be those of one process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from isobatch.benchmarks.gpu.runner import COMMAND_LINE, GPU, Part, Trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.benchmarks.report import Row

ZERO = (*COMMAND_LINE, "deepspeed")
LIMIT = 1e-3
"""Largest difference of losses in fp32."""
STEPS = 12
MODEL = ("--model", "tiny", "--max-length", "64", "--batch-size", "16", "--steps", str(STEPS))
FLAGS = (*MODEL, "--precision", "fp32", "--compile", "off", "--micro-batch", "4")


def trials(quick: bool) -> Sequence[Trial]:
    shared = [
        Trial(f"{s}, two ranks, gloo", "gpu.worlds:shared_device", (s,), 120, needs)
        for s, needs in (("ddp", COMMAND_LINE), ("zero2", ZERO), ("zero3", ZERO), ("fsdp2", COMMAND_LINE))
    ]
    if quick:
        return [Trial("zero2 alone", "gpu.worlds:alone", ("zero2",), 60, ZERO), shared[0]]
    return [
        Trial("DDP over NCCL, compiled", "gpu.worlds:nccl", (), 120, (GPU,)),
        Trial("zero3-offload", "gpu.worlds:offload", (), 120, (*ZERO, GPU)),
        *(Trial(f"{s} alone", "gpu.worlds:alone", (s,), 90, (*ZERO, GPU)) for s in ("zero2", "zero3")),
        Trial("fsdp2 alone", "gpu.worlds:alone", ("fsdp2",), 90, (*COMMAND_LINE, GPU)),
        *shared,
    ]


def headline(rows: Sequence[Row]) -> str:
    worst = max((r["loss difference"] for r in rows if "loss difference" in r), default=0.0)
    return f"largest difference of losses {worst:.1g}"


PART = Part("NCCL, ZeRO, FSDP2; two ranks on a GPU", trials, headline, 110)


def nccl() -> Row:
    """DDP in an NCCL group of one, its model compiled inside; CPU tensors beside, over gloo."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from isobatch.engine.distributed.communicator import process_group_arguments

    os.environ |= world(0, 1)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group(**process_group_arguments(cpu=False, hang_timeout=60))
    for place in ("cpu", "cuda"):
        values = torch.ones(3, device=place)
        dist.broadcast(values, src=0)
        dist.all_reduce(values)
        assert values.tolist() == [1.0, 1.0, 1.0]
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to(device)
    x = torch.randn(32, 256, device=device)
    expected = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    wrapped = nn.parallel.DistributedDataParallel(plain, device_ids=[device], broadcast_buffers=False)
    plain.compile()
    wrapped(x).square().sum().backward()
    found = [p.grad for p in plain.parameters()]
    worst = max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True) if b is not None)
    version = ".".join(map(str, torch.cuda.nccl.version()))
    dist.destroy_process_group()
    assert worst < 1e-2, f"gradients differ by {worst}"
    return {"NCCL": version, "gradient difference": worst}


def offload() -> Row:
    """ZeRO-3 with its state in host memory, against one process without."""
    from isobatch.benchmarks.gpu import runs

    plain = runs.train_on_tokens("plain", *FLAGS, vocabulary=512, rows=256)
    ours = runs.train_on_tokens("offloaded", *FLAGS, "--strategy", "zero3-offload", vocabulary=512, rows=256)
    return {"loss difference": runs.furthest(plain, ours, LIMIT), **runs.speed(ours), **runs.memory(ours)}


def alone(strategy: str) -> Row:
    """An engine of several processes in a world of one, where the planner would refuse it."""
    os.environ |= world(0, 1)
    plain = _losses_here("single")
    found = _losses_here(strategy)
    worst = max(abs(a - b) for a, b in zip(plain, found, strict=True))
    if worst > LIMIT:
        raise RuntimeError(f"losses of {strategy} differ by {worst:.2g} from those of one process")
    return {"loss difference": worst}


def _losses_here(strategy: str) -> list[float]:
    from isobatch.benchmarks.gpu import runs
    from isobatch.benchmarks.sessions import make_builder
    from isobatch.core.plan import PlanOptions
    from isobatch.engine.train.hooks import Hooks, Seen
    from isobatch.engine.train.loop import run_phase

    os.environ |= {"BENCHMARK_VOCABULARY": "512", "BENCHMARK_ROWS": "256"}
    values = {"model": "tiny", "max_length": 64, "batch_size": 16, "steps": STEPS, "dropout": 0.0}
    options = PlanOptions(processes=1, compile="off", precision="fp32", micro_batch=4)
    with (
        make_builder(runs.TOKENS, values, options, strategy=strategy) as builder,
        builder.phase(builder.schedules[0]) as state,
    ):
        run_phase(state, Hooks([seen := Seen()]), 0, STEPS)
    return [figures.loss for figures in seen.figures]


def shared_device(strategy: str) -> Row:
    """Two ranks on one GPU (or this CPU), against one process."""
    from isobatch.benchmarks.gpu import runs
    from isobatch.engine.runs.run_folder import RunFolder

    plain = runs.train_on_tokens("one", *FLAGS, vocabulary=512, rows=256)
    run = RunFolder.open(train_on_one_device(str(runs.runs_folder()), strategy, *runs.token_flags(*FLAGS)))
    return {"loss difference": runs.furthest(plain, run, LIMIT), "ranks": run.plan.processes}


def train_on_one_device(folder: str, strategy: str, *words: str) -> str:
    """Train with two ranks on device 0 over gloo; returns the run's folder. Raises RuntimeError."""
    from isobatch.benchmarks import child_process

    name = f"{strategy}-two-ranks"
    flags = (*words, "--strategy", strategy, "--name", name, "--out", folder, "--quiet", "--again")
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", *child_process.command("gpu.worlds:rank", *flags)],
            env={**os.environ, **world(number, 2, port)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    said = [child.communicate()[1] for child in ranks]
    if any(child.returncode for child in ranks):
        codes = [child.returncode for child in ranks]
        raise RuntimeError(f"two ranks of {strategy} ended with {codes}: {said[0][-1500:]} {said[1][-500:]}")
    return f"{folder}/{name}"


def rank(*words: str) -> int:
    """One of the ranks: a gloo group first, which accelerate then takes as it is."""
    import torch.distributed as dist

    from isobatch.launch.local.worker import main

    dist.init_process_group("gloo")
    code = main(words)
    sys.stdout.flush()
    os._exit(code)


def world(number: int, size: int, port: int | None = None) -> dict[str, str]:
    """The environment of a rank; all ranks have device 0."""
    return {
        "RANK": str(number),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or free_port()),
    }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
