"""Profiles consecutive steps of a phase: most are timed, one is watched for its memory, the last is traced.

A loop calls `begin` before the first of them and `step_ended` after each step; the findings are JSON.
"""

from __future__ import annotations

import time
from statistics import fmean
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.core.measures import now
from isobatch.engine.machine.core_wait import CoreWait
from isobatch.engine.profiling.memory import MemoryWatch
from isobatch.engine.profiling.recorder import PARTS, Recorder
from isobatch.engine.profiling.trace import Trace

if TYPE_CHECKING:
    from pathlib import Path

    import torch

LEAST_STEPS = 3
"""One to time, one whose memory is watched, one to trace."""
MODULES = 10


def step_window(text: str) -> tuple[int, int]:
    """(first, last) of `20:24`, steps from 1. Raises UserError."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) >= 1):
        raise UserError(f"--profile {text}: is not a first and a last step, as in 20:24")
    if int(last) - int(first) + 1 < LEAST_STEPS:
        longer = f"{first}:{int(first) + 4}"
        raise UserError(f"--profile {text}: takes at least {LEAST_STEPS} steps, as in {longer}")
    return int(first), int(last)


class StepProfiler:
    """Profiles steps `first` to `last` (from 1) of a phase on this rank.

    `active`: the phase, with its `strategy` and its session's `plan`; `cores`: those this process may use.
    """

    def __init__(
        self, active: Any, recorder: Recorder, device: torch.device, first: int, last: int, cores: int
    ) -> None:
        self.active, self.recorder, self.device, self.cores = active, recorder, device, cores
        self.first, self.last = first, last
        self.findings: dict[str, Any] = {}
        self.trace: Trace | None = None
        self._watch: MemoryWatch | None = None
        self._works: list[Any] = []
        self._began = self._busy = 0.0
        self._core_wait = CoreWait()

    def begin(self) -> None:
        """The step before the first has ended, or none was before it."""
        self._synchronize()
        self.recorder.start(self.device)
        self._began, self._busy, self._core_wait = now(), time.process_time(), CoreWait()

    def step_ended(self, number: int, work: Any) -> bool:
        """Step `number` of the phase ended, whose work was `work`; True after the last, with all findings."""
        if number == self.first - 1:
            self.begin()
        if not self.first <= number <= self.last:
            return False
        if number <= self.last - 2:
            self.recorder.end_step()
            self._works.append(work)
        if number == self.last - 2:
            self._take_times()
            self._watch = MemoryWatch(self.active.strategy, self.recorder, self.device)
            self._watch.__enter__()
        elif number == self.last - 1:
            self._take_memory()
            model, compiled = self.active.strategy.unwrapped, self.active.session.plan.compile != "off"
            self.trace = Trace(model, self.recorder, self.device.type, named=not compiled)
            self.trace.__enter__()
        elif number == self.last:
            self._take_trace()
        return number == self.last

    def write(self, folder: Path) -> dict[str, str]:
        """Write the trace's files; what -> file."""
        assert self.trace is not None
        folder.mkdir(parents=True, exist_ok=True)
        return self.trace.write(folder)

    def _take_times(self) -> None:
        self._synchronize()
        wall, busy = now() - self._began, time.process_time() - self._busy
        steps, works = self.recorder.steps(), self._works
        micro_batches = fmean(len(work.micro_batches) for work in works)
        own_samples = fmean(sum(len(m.positions) for m in work.micro_batches) for work in works)
        self.findings |= {
            "steps": len(steps),
            "step_seconds": wall / len(steps),
            "parts": {name: fmean(step[name] for step in steps) for name in PARTS},
            "device": self.device.type,
            "device_use": min(1.0, busy / wall / self.cores),
            "core_wait": self._core_wait.share(),
            "padding": fmean(work.padding for work in works),
            "micro_batches": micro_batches,
            "samples_per_micro_batch": own_samples / micro_batches,
            "fused_optimizer": is_fused(getattr(self.active.strategy, "optimizer", None)),
        }

    def _take_memory(self) -> None:
        assert self._watch is not None
        self._watch.__exit__(None, None, None)
        # After the forward pass of the micro-batch that keeps most, and after the parts that follow it.
        rows = self._watch.rows
        most = max(range(len(rows)), key=lambda n: rows[n]["activations"], default=0)
        self.findings["memory"] = {"rows": [*rows[most : most + 2], *rows[-1:]], "in_use": rows[-1]["in use"]}

    def _take_trace(self) -> None:
        assert self.trace is not None
        self._synchronize()
        self.trace.__exit__(None, None, None)
        self.recorder.stop()
        self.trace.steps = 1
        if (busy := self.trace.gpu_busy()) is not None:
            self.findings["device_use"] = busy
        self.findings["idle_seconds"] = (1 - self.findings["device_use"]) * self.findings["step_seconds"]
        self.findings["modules"] = self.trace.modules(MODULES)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)


def is_fused(optimizer: Any) -> bool | None:
    """Whether torch's optimizer steps by its fused kernel; None for another library's."""
    groups = getattr(optimizer, "param_groups", [])
    known = [group["fused"] for group in groups if "fused" in group]
    return all(known) if known else None
