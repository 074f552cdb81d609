"""`profile`: where a step's time and memory go on any task, and what is worth a trial.

Some steps are timed, and the next is traced by torch.profiler. The trace names the parts of the step, and has
Python's stacks with the modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from isobatch.core.number_ranges import Positive
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.machine.detect import allowed_cpus
from isobatch.engine.runs.peak_memory import peak_bytes
from isobatch.launch.local.options import AnswerOptions
from isobatch.launch.measuring.trial import Variant, answer_in_world, trial
from isobatch.launch.measuring.tune import settings

TRACE_FILE = "trace.json"
DEVICE_USE, MEMORY, DATA_WAIT = 0.90, 0.80, 0.10
"""Targets: more of the device's time, less of its memory, less of a step."""
PADDING = 0.10
"""Share of a step's tokens above which something is worth a trial."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions(AnswerOptions):
    """Flags of `profile` beside the recipe's, the plan's and the run's."""

    timed_steps: Positive = 12
    """Steps that are timed."""


def profile(words: Sequence[str]) -> int:
    """Usage: profile --task TASK [--timed-steps 12] [--json] [flags]

    Times the parts of some steps, traces one, says what is worth a trial, and writes the trace (trace.json,
    for Perfetto or chrome://tracing) and profile.json to OUT/profiles/.
    """
    targets = {"use": DEVICE_USE, "memory": MEMORY}
    return answer_in_world(words, "profile", "profiles", ProfileOptions, measure, targets=targets)


def measure(base: Variant, world: Communicator, options: ProfileOptions, folder: Path) -> dict[str, Any]:
    """The findings with the advice, on rank 0, which writes the trace to `folder`. JSON."""
    recipe, plan, hardware = base.target.recipe, base.plan, base.target.hardware
    with trial(base, world) as session:
        watch = session.round(options.timed_steps, traces=True)
        phase = session.state.schedule.name
    if not world.is_main:
        return {}
    capacity = hardware.gpu.memory_bytes if plan.device == "cuda" else hardware.ram_bytes // plan.processes
    works, steps, cores = watch.works, options.timed_steps, allowed_cpus(Path("/"), {}) // world.size
    on_cpu = min(1.0, watch.busy / watch.wall / max(1, cores))
    micro_batches = fmean(len(work.micro_batches) for work in works)
    own_samples = fmean(sum(len(m.positions) for m in work.micro_batches) for work in works)
    found: dict[str, Any] = {
        "steps": steps,
        "step_seconds": watch.wall / steps,
        "parts": {name: seconds / steps for name, seconds in watch.parts.items()},
        "device": world.device.type,
        "device_use": gpu_busy(watch.trace.events()) if world.device.type == "cuda" else on_cpu,
        "padding": fmean(work.padding for work in works),
        "micro_batches": micro_batches,
        "samples_per_micro_batch": own_samples / micro_batches,
        "task": recipe.task,
        "recipe_hash": recipe.hash(),
        "phase": phase,
        "memory_share": peak_bytes(world.device) / capacity,
        "plan": plan.to_dict(),
        "files": {"trace": str(folder / TRACE_FILE)},
    }
    found["advice"] = worth_a_trial(found, found["plan"])
    for row in found["advice"]:
        row["flags"] = [one.flags for one in settings(base) if one.measure == row["measure"]]
    watch.trace.export_chrome_trace(str(folder / TRACE_FILE))
    return found


def gpu_busy(events: Any) -> float:
    """Share of the traced time that kernels take on the GPU; those side by side count twice, up to 1."""
    import torch

    cuda = torch.autograd.DeviceType.CUDA
    kernels = [e.time_range for e in events if e.device_type == cuda and not e.is_user_annotation]
    span = max((k.end for k in kernels), default=0) - min((k.start for k in kernels), default=0)
    return min(1.0, sum(k.elapsed_us() for k in kernels) / max(1e-9, span))


def worth_a_trial(found: dict[str, Any], plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The measures of `tune` that may help, each with the reason (`text`). `plan`: the plan's fields."""
    data_wait = found["parts"]["data wait"] / max(1e-12, sum(found["parts"].values()))
    use, memory, padding = found["device_use"], found["memory_share"], found["padding"]
    padded = f"{padding:.0%} of the computed tokens are padding"
    count, samples = found["micro_batches"], found["samples_per_micro_batch"]
    cut = f"a global batch is computed in {count:.0f} micro-batches of {samples:.0f} samples"
    recomputes = plan["activation_checkpointing"] != "off" and memory < MEMORY
    recomputed = f"activations are computed twice while memory is {memory:.0%} full"
    launches = plan["device"] == "cuda" and plan["compile"] == "off" and use < DEVICE_USE
    rows = (
        ("loading", data_wait > DATA_WAIT, f"a step waits {data_wait:.0%} of its time for data"),
        ("micro-batch", count > 1 or padding > PADDING, cut),
        ("packing", padding > PADDING, padded),
        ("length grouping", padding > PADDING, padded),
        ("attention kernel", plan["attention"] == "eager", "attention keeps its length-squared matrices"),
        ("compile", launches, f"the GPU computes {use:.0%} of the time: it waits for launches"),
        ("mixed precision", plan["precision"] == "fp32", "all arithmetic is in fp32"),
        ("activation checkpointing", recomputes, recomputed),
    )
    return [{"measure": measure, "text": text} for measure, applies, text in rows if applies]
