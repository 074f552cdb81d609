"""Profiles consecutive steps of a phase: all but the last are timed, the last is traced by torch.profiler.

The trace names the parts of the step, and has Python's stacks with the modules.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean
from typing import Any

from isobatch.core import atomic_files
from isobatch.core.measures import now
from isobatch.engine.machine.detect import allowed_cpus
from isobatch.engine.profiling.advice import profile_lines, worth_a_trial
from isobatch.engine.runs.run_options import step_window

FOLDER, FILE, TRACE_FILE = "profile", "profile.json", "trace.json"
OPERATORS = 10
"""Those of the trace that are shown."""


class StepProfiler:
    """Profiles steps `first` to `last` (from 1) of a phase on this rank; the findings are JSON.

    `active`: the phase, with its session's `plan` and `world`. `begin` is called before step `first`, or by
    `step_ended` after the step before it.
    """

    def __init__(self, active: Any, first: int, last: int) -> None:
        self.active, self.first, self.last = active, first, last
        world = active.session.world
        self.recorder, self.device = world.recorder, world.device
        self.cores = max(1, allowed_cpus(Path("/"), {}) // world.size)
        self.findings: dict[str, Any] = {}
        self._works: list[Any] = []
        self._began = self._busy = 0.0
        self._trace: Any = None

    def begin(self) -> None:
        """The step before the first has ended, or none was before it."""
        self._synchronize()
        self.recorder.start(self.device)
        self._began, self._busy = now(), time.process_time()

    def step_ended(self, number: int, work: Any) -> bool:
        """Step `number` of the phase ended, whose work was `work`; True after the last, with all findings."""
        if number == self.first - 1:
            self.begin()
        elif self.first <= number < self.last:
            self._works.append(work)
            if number == self.last - 1:
                self._take_times()
                self._begin_trace()
        elif number == self.last:
            self._take_trace()
        return number == self.last

    def write(self, folder: Path, more: dict[str, Any]) -> dict[str, Any]:
        """All findings, `more` and the advice, written with the trace (Chrome's format, for Perfetto)."""
        folder.mkdir(parents=True, exist_ok=True)
        self._trace.export_chrome_trace(str(folder / TRACE_FILE))
        found = {"phase": self.active.schedule.name, **self.findings, **more}
        plan = self.active.session.plan.to_dict()
        found |= {"advice": worth_a_trial(found, plan), "files": {"trace": str(folder / TRACE_FILE)}}
        atomic_files.write_json(folder / FILE, found)
        return found

    def _take_times(self) -> None:
        parts = self.recorder.stop()  # waits for the device
        wall, busy = now() - self._began, time.process_time() - self._busy
        steps, works = len(self._works), self._works
        micro_batches = fmean(len(work.micro_batches) for work in works)
        own_samples = fmean(sum(len(m.positions) for m in work.micro_batches) for work in works)
        self.findings |= {
            "steps": steps,
            "step_seconds": wall / steps,
            "parts": {name: seconds / steps for name, seconds in parts.items()},
            "device": self.device.type,
            "device_use": min(1.0, busy / wall / self.cores),
            "padding": fmean(work.padding for work in works),
            "micro_batches": micro_batches,
            "samples_per_micro_batch": own_samples / micro_batches,
        }

    def _begin_trace(self) -> None:
        import torch

        kinds = torch.profiler.ProfilerActivity
        activities = [kinds.CPU, *([kinds.CUDA] if self.device.type == "cuda" else [])]
        self._trace = torch.profiler.profile(activities=activities, acc_events=True, with_stack=True)
        self.recorder.start(self.device, annotate=True)
        self._trace.__enter__()

    def _take_trace(self) -> None:
        self._synchronize()
        self._trace.__exit__(None, None, None)
        self.recorder.stop()
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            self.findings["device_use"] = gpu_busy(self._trace.events())
        own = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        rows = [
            {"operator": row.key, "seconds": getattr(row, own) * 1e-6, "calls": row.count}
            for row in self._trace.key_averages()
            if row.key.startswith("aten::")  # and not the parts, modules and Python's functions beside them
        ]
        self.findings["operators"] = sorted(rows, key=lambda row: -float(row["seconds"]))[:OPERATORS]

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)


def gpu_busy(events: Any) -> float:
    """Share of the traced time that kernels take on the GPU; those side by side count twice, up to 1."""
    import torch

    cuda = torch.autograd.DeviceType.CUDA
    kernels = [e.time_range for e in events if e.device_type == cuda and not e.is_user_annotation]
    span = max((k.end for k in kernels), default=0) - min((k.start for k in kernels), default=0)
    return min(1.0, sum(k.elapsed_us() for k in kernels) / max(1e-9, span))


def profiler_of_run(context: Any, phase: Any, start: int, stop: int) -> StepProfiler | None:
    """For `--profile 20:24`, on rank 0, where the phase has those steps among start + 1 to stop; else None.

    `context` and `phase`: the RunContext and the ActivePhase.
    """
    if context.options.profile is None or not context.world.is_main:
        return None
    first, last = step_window(context.options.profile)
    if not start < first <= last <= stop:
        context.console.say(
            f"--profile {first}:{last}: phase {phase.schedule.name} is not profiled: it has the steps"
            f" {start + 1} to {stop} here"
        )
        return None
    profiler = StepProfiler(phase, first, last)
    if first == start + 1:
        profiler.begin()
    return profiler


def write_profile_of_run(context: Any, profiler: StepProfiler) -> None:
    """Write a finished profile into the run's folder profile/, and say it."""
    folder = context.run.folder / FOLDER / profiler.active.schedule.name
    found = profiler.write(folder, context.gpu_monitor.latest())
    for line in profile_lines(found):
        context.console.say(line)
