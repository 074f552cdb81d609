"""Part 6, the profiler: attention's kernel, where the GPU idles, and who waits for it.

Figures come from torch.profiler's trace of three steady steps of GPT-2 124M, and from torch's warnings of
synchronisation over twenty (torch.cuda.set_sync_debug_mode).
"""

from __future__ import annotations

import itertools
import json
import re
import traceback
import warnings
from collections import Counter
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

from isobatch.benchmarks.gpu.runner import COMMAND_LINE, FOLDER, GPU, Part, Trial

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

    from isobatch.benchmarks.report import Row
    from isobatch.engine.loading.loader import LoadedStep
    from isobatch.engine.train.figures import StepOutput
    from isobatch.engine.train.hooks import Hooks
    from isobatch.engine.train.state import Training

ATTENTION = re.compile(r"flash|fmha|attention|attn|sdpa|cudnn.*(fprop|bprop)", re.IGNORECASE)
"""Names of attention's kernels: FlashAttention, CUTLASS's memory-efficient one, cuDNN's."""
STEP = "optimizer step"
"""The profiled range of a step."""
TRACED = 3
SETTLED = 8
"""Steps before the traced ones."""
Event = dict[str, Any]
"""An event of a trace in Chrome's format; times in microseconds."""


def trials(_quick: bool) -> Sequence[Trial]:
    needs = (*COMMAND_LINE, GPU)
    modes = ("on", "off")
    return [
        *(Trial(f"kernels, compile {m}", "gpu.profiler:kernels", (m,), 150, needs) for m in modes),
        *(Trial(f"waits, compile {m}", "gpu.profiler:waits", (m,), 120, needs) for m in modes),
    ]


def headline(rows: Sequence[Row]) -> str:
    found = next((r for r in rows if "attention" in r), None)
    waits = [r["waits a step"] for r in rows if "waits a step" in r]
    told = f"{found['attention']}, idle {found['idle']:.0%}" if found else ""
    return "; ".join(filter(None, [told, f"waits a step: {max(waits)}" if waits else ""]))


PART = Part("profiler: kernels, idle, waits", trials, headline, 160)


def kernels(compiled: str, model: str = "gpt2-124m", length: str = "1024") -> Row:
    """Kernels of steady steps of 32 rows in micro-batches of 16."""
    import os
    from pathlib import Path

    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from isobatch.benchmarks.gpu import runs
    from isobatch.benchmarks.sessions import make_builder
    from isobatch.core.plan import PlanOptions
    from isobatch.engine.train.hooks import Hook, Hooks
    from isobatch.engine.train.loop import run_phase

    class Traced(Hook):
        def around(self, state: Training, step: int) -> AbstractContextManager[Any]:  # noqa: ARG002
            if step == SETTLED + 1:
                torch.cuda.synchronize()
                profiled.start()
            return record_function(STEP) if step > SETTLED else nullcontext()

    os.environ |= {"BENCHMARK_VOCABULARY": "50257", "BENCHMARK_ROWS": "1024"}
    values = {"model": model, "max_length": int(length), "batch_size": 32, "steps": 30, "dropout": 0.0}
    options: Any = PlanOptions(precision="bf16", compile=compiled, processes=1, micro_batch=16)  # type: ignore[arg-type]
    profiled = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    builder = make_builder(runs.TOKENS, values, options)
    with builder, builder.phase(builder.schedules[0]) as state:
        run_phase(state, Hooks([Traced()]), 0, SETTLED + TRACED)
        torch.cuda.synchronize()
        profiled.stop()
    file = Path(os.environ[FOLDER]) / f"trace-{compiled}.json"
    profiled.export_chrome_trace(str(file))
    return trace_figures(json.loads(file.read_text())["traceEvents"])


def trace_figures(events: Iterable[Event]) -> Row:
    """Attention's kernel and share, and how long the GPU had nothing to do, altogether and between steps."""
    events = list(events)
    work = sorted(
        (e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")), key=lambda e: e["ts"]
    )
    busy = sum(e["dur"] for e in work)
    seconds: Counter[str] = Counter()
    for event in work:
        seconds[event["name"]] += event["dur"]
    attention = {name: spent for name, spent in seconds.items() if ATTENTION.search(name)}
    steps = list(_by_step(events, work))
    gaps = [max(0.0, after[0]["ts"] - _end(before)) for before, after in itertools.pairwise(steps)]
    span = _end(work) - work[0]["ts"]
    return {
        "attention": _short(max(attention, key=attention.__getitem__)) if attention else "none found",
        "its share": round(sum(attention.values()) / busy, 3),
        "idle": round(1 - _covered(work) / span, 3),
        "idle between steps ms": round(sum(gaps) / max(1, len(gaps)) / 1e3, 3),
        "kernels a step": round(len(work) / max(1, len(steps))),
        "longest kernel": _short(max(seconds, key=seconds.__getitem__)),
    }


def _by_step(events: Sequence[Event], work: Sequence[Event]) -> Iterable[list[Event]]:
    """The GPU's work in order, divided by the step in which the host launched it."""
    ranges = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("name") == STEP and e.get("cat") == "user_annotation"
    )
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    for begin, end in ranges:
        found = [e for e in work if begin <= launched.get(e["args"].get("correlation"), -1) <= end]
        if found:
            yield found


def _end(work: Sequence[Event]) -> float:
    return max(float(e["ts"] + e["dur"]) for e in work)


def _covered(work: Sequence[Event]) -> float:
    """Microseconds in which at least one stream was busy; `work` is sorted by its start."""
    total, until = 0.0, float("-inf")
    for event in work:
        begin, end = event["ts"], event["ts"] + event["dur"]
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _short(name: str) -> str:
    """A kernel's name without template arguments."""
    return re.sub(r"<.*|\(.*", "", name.removeprefix("void "))[:60]


def waits(compiled: str) -> Row:
    """Waits of the host for the GPU in a steady step of the whole loop, and where they are."""
    import torch

    from isobatch.benchmarks.gpu import runs
    from isobatch.engine.train import loop

    words = ("--model", "gpt2-124m", "--max-length", "512", "--batch-size", "16", "--micro-batch", "8")
    more = ("--steps", "30", "--precision", "bf16", "--compile", compiled)
    places: Counter[str] = Counter()
    first, last = 6, 26
    step = loop.train_step

    def watched(state: Training, batch: LoadedStep, hooks: Hooks) -> StepOutput:
        torch.cuda.set_sync_debug_mode("warn" if first <= batch.work.step < last else "default")
        return step(state, batch, hooks)

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            places[_place()] += 1

    with warnings.catch_warnings(), mock.patch.object(loop, "train_step", watched):
        warnings.simplefilter("always")
        warnings.showwarning = note
        runs.train_here(f"waits-{compiled}", *words, *more)
    found = {place: round(count / (last - first), 2) for place, count in places.most_common(4)}
    return {"waits a step": round(sum(places.values()) / (last - first), 2), "where": str(found or "-")}


def _place() -> str:
    """The innermost line of this package that is on the stack."""
    frames = [f for f in traceback.extract_stack() if "/engine/" in f.filename or "/models/" in f.filename]
    ours = [f for f in frames if "site-packages" not in f.filename]
    return f"{'/'.join(ours[-1].filename.split('/')[-2:])}:{ours[-1].lineno}" if ours else "elsewhere"
