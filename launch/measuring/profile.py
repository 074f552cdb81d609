"""`profile`: where a step's time and memory go on any task, and what is worth a trial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.number_ranges import Positive
from isobatch.engine.profiling.advice import profile_lines
from isobatch.engine.profiling.step_profiler import FILE, StepProfiler
from isobatch.engine.runs.peak_memory import peak_bytes
from isobatch.launch.local.run_setup import TrustOptions
from isobatch.launch.measuring.measures import settings
from isobatch.launch.measuring.trial import TrialSession, answer_in_world

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.launch.measuring.trial import Variant


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions(TrustOptions):
    """Flags of `profile` beside the recipe's, the plan's and the run's."""

    json: bool = False
    """One JSON object on standard output."""
    timed_steps: Positive = 12
    """Steps that are timed."""


def profile(words: Sequence[str]) -> int:
    """Usage: profile --task TASK [--timed-steps 12] [--json] [flags]

    Times the parts of some steps, traces one, says what is worth a trial, and writes the trace (trace.json,
    for Perfetto or chrome://tracing) and profile.json to OUT/profiles/.
    """
    return answer_in_world(words, "profile", "profiles", ProfileOptions, measure, _lines)


def measure(base: Variant, world: Communicator, options: ProfileOptions, folder: Path) -> dict[str, Any]:
    """The findings of a profile with the advice, in every process of the world. JSON."""
    target, plan, steps = base.target, base.plan, options.timed_steps
    with TrialSession(base, world) as session:
        session.warm_up()
        profiler = StepProfiler(session.active, 1, steps + 1)
        for number, loaded in enumerate(session.batches(steps + 2)):
            session.active.step(loaded)
            profiler.step_ended(number, loaded.work)
        hardware = target.hardware
        share = hardware.gpu.memory_bytes if plan.device == "cuda" else hardware.ram_bytes // plan.processes
        more = {"task": target.recipe.task, "recipe_hash": target.recipe.hash(), "plan": plan.to_dict()}
        if not world.is_main:
            return {}
        found = profiler.write(folder, {**more, "memory_share": peak_bytes(world.device) / share})
    for row in found["advice"]:
        row["flags"] = [one.flags for one in settings(base) if one.measure == row["measure"]]
    atomic_files.write_json(folder / FILE, found)
    return found


def _lines(found: dict[str, Any]) -> list[str]:
    where = f"{found['plan']['processes']} x {found['device']}"
    return [f"{found['task']}, phase {found['phase']}, on {where}", "", *profile_lines(found)]
