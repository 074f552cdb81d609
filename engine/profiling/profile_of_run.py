"""`--profile 20:24` in a run: rank 0 profiles these steps of each phase, into the run's folder profile/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isobatch.core import atomic_files
from isobatch.engine.machine.detect import allowed_cpus
from isobatch.engine.profiling.advice import profile_lines, targets, worth_a_trial
from isobatch.engine.profiling.step_profiler import StepProfiler, step_window

FOLDER, FILE = "profile", "profile.json"


class ProfileOfRun:
    """The profile of one phase of a run. `context` and `phase`: the RunContext and the ActivePhase."""

    def __init__(self, context: Any, phase: Any, first: int, last: int) -> None:
        self.context, self.phase = context, phase
        world = context.world
        self.cores = max(1, allowed_cpus(Path("/"), {}) // world.size)
        self.profiler = StepProfiler(phase, world.recorder, world.device, first, last, self.cores)

    @classmethod
    def of(cls, context: Any, phase: Any, start: int, stop: int) -> ProfileOfRun | None:
        """The profile where this rank profiles steps of start + 1 to stop; else None."""
        if context.options.profile is None or not context.world.is_main:
            return None
        first, last = step_window(context.options.profile)
        if not start < first <= last <= stop:
            context.console.say(
                f"--profile {first}:{last}: phase {phase.schedule.name} is not profiled: it has the steps"
                f" {start + 1} to {stop} here"
            )
            return None
        profile = cls(context, phase, first, last)
        if first == start + 1:
            profile.profiler.begin()
        return profile

    def step_ended(self, work: Any) -> None:
        """After each step of the phase."""
        if self.profiler.step_ended(work.step + 1, work):
            self._write()

    def _write(self) -> None:
        context, found = self.context, self.profiler.findings
        plan, phase = self.phase.session.plan.to_dict(), self.phase.schedule.name
        folder = context.run.folder / FOLDER / phase
        found["files"] = self.profiler.write(folder)
        found |= {"cores": self.cores * context.world.size, **context.gpu_monitor.latest()}
        found |= {"targets": targets(found), "phase": phase}
        found["advice"] = [{"measure": name, "text": text} for name, text in worth_a_trial(found, plan)]
        atomic_files.write_json(folder / FILE, found)
        for line in profile_lines(found):
            context.console.say(line)
        for row in found["advice"]:
            context.console.say(f"  advice  {row['text']} ({row['measure']}: `profile` tries what applies)")
        context.console.say(f"profile of {found['steps']} steps: {folder}")
