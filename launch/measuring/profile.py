"""`profile`: where a step's time and memory go on any task, and what is worth a trial."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.measures import printable
from isobatch.core.number_ranges import Positive
from isobatch.engine.machine.detect import allowed_cpus
from isobatch.engine.profiling.advice import profile_lines, worth_a_trial
from isobatch.engine.profiling.step_profiler import FILE, StepProfiler
from isobatch.engine.runs.peak_memory import peak_bytes
from isobatch.launch.local.run_setup import TrustOptions
from isobatch.launch.measuring.measures import measure_named
from isobatch.launch.measuring.setup import Setup, measure_in_world, read_setup
from isobatch.launch.measuring.trial import TrialSession

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.engine.distributed.communicator import Communicator

FOLDER = "profiles"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions(TrustOptions):
    """Flags of `profile` beside the recipe's, the plan's and the run's."""

    json: bool = False
    """One JSON object on standard output."""
    timed_steps: Positive = 12
    """Steps that are timed."""


OPTIONS = ProfileOptions
"""What a worker of this command reads its words with."""


def profile(words: Sequence[str]) -> int:
    """Usage: profile --task TASK [--timed-steps 12] [--json] [flags]

    Times the parts of some steps, traces one, says what is worth a trial, and writes the trace (trace.json,
    for Perfetto or chrome://tracing) and profile.json to OUT/profiles/.
    """
    setup = read_setup(words, "profile", ProfileOptions)
    found = measure_in_world(words, "profile", setup, measure)
    if setup.request.extra.get("json"):
        print(atomic_files.json_text(found, ensure_ascii=False))
    else:
        where = f"{found['plan']['processes']} x {found['device']}"
        lines = [f"{found['task']}, phase {found['phase']}, on {where}", "", *profile_lines(found)]
        print(printable("\n".join(lines)))
    return 0


def measure(setup: Setup, world: Communicator) -> dict[str, Any]:
    """The findings of a profile with the advice, in every process of the world. JSON."""
    steps, device = ProfileOptions(**setup.request.extra).timed_steps, world.device
    cores = allowed_cpus(Path("/"), {})
    with TrialSession(setup.base, world) as base:
        base.warm_up()
        profiler = StepProfiler(base.active, 1, steps + 1, max(1, cores // setup.plan.processes))
        for number, loaded in enumerate(base.batches(steps + 2)):
            base.active.step(loaded)
            profiler.step_ended(number, loaded.work)
        phase = base.active.schedule.name
    hardware, on_gpu = setup.hardware, setup.plan.device == "cuda"
    capacity = hardware.gpu.memory_bytes if on_gpu else hardware.ram_bytes // setup.plan.processes
    found = {
        "task": setup.recipe.task,
        "recipe_hash": setup.recipe.hash(),
        "phase": phase,
        **profiler.findings,
        "memory_share": peak_bytes(device) / capacity,
        "plan": setup.plan.to_dict(),
    }
    found["advice"] = worth_a_trial(found, found["plan"])
    for row in found["advice"]:
        row["flags"] = [setting.flags for setting in measure_named(row["measure"]).changes(setup)]
    if world.is_main:
        with atomic_files.explain_write_errors(setup.folder(FOLDER)):
            found["files"] = profiler.write(setup.folder(FOLDER))
            atomic_files.write_json(setup.folder(FOLDER) / FILE, found)
    return found
