"""What doctor tries in child processes: each function really computes, and raises where that fails."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import tempfile
import time
import traceback
from typing import Any, NoReturn

GROUP_SECONDS = 40
ROUNDS = 3
AS_WRITTEN = {"zero_allow_untested_optimizer": True, "gradient_clipping": 1e30}
"""torch's SGD without clipping: it says at once whether a step was right."""
ALL_REDUCE_BYTES = {"gloo": 16 << 20, "nccl": 256 << 20}


def arithmetic() -> dict[str, Any]:
    """A product of matrices and its gradient on the CPU and on every GPU, in fp32 and bf16, against fp64."""
    import torch

    gpus = []
    for number in range(torch.cuda.device_count()):
        try:
            gpus.append(_try_gpu(number))
        except Exception as error:  # whatever this GPU says
            gpus.append({"error": (str(error).splitlines() or [type(error).__name__])[0]})
    return {
        "version": torch.__version__,
        "build": torch.version.cuda or torch.version.hip or "",
        "threads": torch.get_num_threads(),
        "error": product_error("cpu", torch.float32),
        "bf16_error": product_error("cpu", torch.bfloat16),
        "gpus": gpus,
    }


def _try_gpu(number: int) -> dict[str, Any]:
    import torch

    device = f"cuda:{number}"
    free, total = torch.cuda.mem_get_info(number)
    return {
        "name": torch.cuda.get_device_name(number),
        "capability": torch.cuda.get_device_capability(number),
        "free_bytes": free,
        "total_bytes": total,
        "error_of_product": product_error(device, torch.float32),
        "bf16_error": product_error(device, torch.bfloat16),
    }


def product_error(device: str, dtype: Any) -> float:
    """The largest relative error of a (64, 64) product and of its gradient, against fp64 on the CPU."""
    import torch

    draws = torch.Generator().manual_seed(0)
    left, right = (torch.randn(64, 64, generator=draws, dtype=torch.float64) for _ in range(2))
    a = left.to(device, dtype).requires_grad_()
    product = a @ right.to(device, dtype)
    product.square().sum().backward()
    assert a.grad is not None
    exact = left @ right
    pairs = ((product, exact), (a.grad, 2 * exact @ right.T))
    return max(
        float((found.detach().cpu().double() - true).abs().max() / true.abs().max()) for found, true in pairs
    )


def ceilings() -> dict[str, Any]:
    """The measured rates of this processor, which plans reckon with; measured now where they are not kept."""
    from isobatch.core.package import cache_folder
    from isobatch.engine.machine.ceilings import ceilings_of
    from isobatch.engine.machine.detect import detect

    hardware = detect()
    found = ceilings_of(hardware, cache_folder())
    assert found is not None, "a machine that is here has rates"
    return {**found.to_dict(), "cores": hardware.cpus}


def compiled() -> dict[str, Any]:
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
        difference = (torch.compile(_kernel)(x) - _kernel(x)).abs().max()
        return {
            "device": device,
            "seconds": time.perf_counter() - began,
            "difference": float(difference),
            "passed_by": passed_by(),
        }


def _kernel(x: Any) -> Any:
    return x.relu() * 2 + 1


def quantised() -> dict[str, Any]:
    """bitsandbytes' 4 bits there and back; the mean error of normal numbers (about 0.07 for nf4)."""
    import logging

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    packed, state = bitsandbytes.functional.quantize_4bit(x, quant_type="nf4")
    back = bitsandbytes.functional.dequantize_4bit(packed, state)
    return {
        "version": bitsandbytes.__version__,
        "device": device,
        "error": float((back - x).abs().mean()),
    }


def deepspeed_step() -> dict[str, Any]:
    """A step of DeepSpeed's ZeRO-1 engine in a world of one; the weights before minus those after."""
    import torch
    import torch.distributed as dist

    has_gpu = torch.cuda.is_available()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    if not has_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    store = dist.HashStore()
    dist.init_process_group("nccl" if has_gpu else "gloo", store=store, rank=0, world_size=1)
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed
        from deepspeed import ops

        # Its all-reduce for CPUs takes a minute to build, and is not what is asked here.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
        layer = torch.nn.Linear(4, 4).to("cuda" if has_gpu else "cpu")
        before = layer.weight.detach().clone()
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, **AS_WRITTEN}
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(model=layer, optimizer=optimizer, config=config)
        engine.backward(engine(torch.ones(1, 4, device=before.device)).sum())
        engine.step()
    moved = float((before - layer.weight.detach()).mean())  # lr x gradient: 0.1 x 1
    dist.destroy_process_group()
    return {"version": deepspeed.__version__, "moved": moved}


def all_reduce(backend: str, processes: int) -> dict[str, Any]:
    """A sum over processes of this machine, and its bus bandwidth in bytes/s: bytes x 2(n - 1)/n / seconds,
    as NCCL's tests count it (nccl-tests, PERFORMANCE.md); the bytes alone where there is one process.
    """
    import torch  # noqa: F401  before the fork, so that it is imported once

    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        for rank in range(1, processes):
            if os.fork() == 0:
                _end_after_sum(backend, rank, processes, meeting)
        seconds = _seconds_of_sum(backend, 0, processes, meeting)
    share = 2 * (processes - 1) / processes or 1.0
    return {"processes": processes, "bytes_per_second": ALL_REDUCE_BYTES[backend] * share / seconds}


def _end_after_sum(backend: str, rank: int, processes: int, meeting: str) -> NoReturn:
    """The life of a forked rank."""
    try:
        _seconds_of_sum(backend, rank, processes, meeting)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _seconds_of_sum(backend: str, rank: int, processes: int, meeting: str) -> float:
    import torch
    import torch.distributed as dist

    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    limit = datetime.timedelta(seconds=GROUP_SECONDS)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, meeting, limit, rank=rank, world_size=processes)
    ones = torch.ones(ALL_REDUCE_BYTES[backend] // 4, device=device)
    dist.all_reduce(ones)  # connects the ranks
    if float(ones[0]) != processes:
        raise RuntimeError(f"the sum of {processes} ones was {float(ones[0])}")
    began = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(ones)
    ones[0].item()  # waits for the device
    seconds = (time.perf_counter() - began) / ROUNDS
    dist.destroy_process_group()
    return seconds
