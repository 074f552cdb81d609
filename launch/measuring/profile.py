"""`profile`: where a step's time and memory go on any task, and what is worth changing, tried here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.measures import now, printable
from isobatch.core.number_ranges import Positive
from isobatch.engine.profiling.advice import PADDING, profile_lines, targets, worth_a_trial
from isobatch.engine.profiling.step_profiler import FILE, StepProfiler
from isobatch.engine.runs.gpu_monitor import GpuMonitor
from isobatch.engine.runs.peak_memory import peak_bytes
from isobatch.engine.training.step_metrics import gpu_uuid
from isobatch.launch.local.run_setup import TrustOptions
from isobatch.launch.measuring.measures import Setting, measure_named, usable_cores
from isobatch.launch.measuring.setup import Setup, measure_in_world, read_setup
from isobatch.launch.measuring.trial import LEAST_GAIN, TrialSession
from isobatch.launch.measuring.tune import Candidate, try_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.engine.distributed.communicator import Communicator

TIMED_SECONDS = 15.0
"""Fewer steps are timed where they take longer than this together, but never fewer than 3."""
FOLDER = "profiles"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions(TrustOptions):
    """Flags of `profile` beside the recipe's, the plan's and the run's."""

    json: bool = False
    """One JSON object on standard output."""
    timed_steps: Positive = 12
    """Steps that are timed, at most."""
    trials: bool = True
    """Try what may help, in rounds that alternate with the recipe as it is."""
    trial_seconds: Positive = 4
    """About how long a trial's rounds take, with those of the recipe as it is."""


OPTIONS = ProfileOptions
"""What a worker of this command reads its words with."""


def profile(words: Sequence[str]) -> int:
    """Usage: profile --task TASK [--trials off] [--timed-steps 12] [--json] [flags]

    Times the parts of some steps, traces one, tries what may help, and writes the trace (trace.json, for
    Perfetto or chrome://tracing) and profile.json to OUT/profiles/. In a run: auto ... --profile 20:24.
    """
    setup = read_setup(words, "profile", ProfileOptions)
    found = measure_in_world(words, "profile", setup, measure)
    if setup.request.extra.get("json"):
        print(atomic_files.json_text(found, ensure_ascii=False))
    else:
        print(printable("\n".join(lines_of(found))))
    return 0


def measure(setup: Setup, world: Communicator) -> dict[str, Any]:
    """The findings of a profile with the advice, in every process of the world. JSON."""
    options = ProfileOptions(**setup.request.extra)
    with TrialSession(setup.base, world) as base:
        base.warm_up()
        found = world.broadcast_object(_profile_steps(setup, base, options.timed_steps))
        advice: list[dict[str, Any]] = [*worth_a_trial(found, found["plan"])]
        if options.trials:
            advice = [one | _tried(setup, base, found, one, options.trial_seconds) for one in advice]
            advice = [one for one in advice if "ratio" in one]
            advice.sort(key=lambda one: (not one["helps"], -one["ratio"]))
        found["advice"] = advice
    if world.is_main:
        atomic_files.write_json(setup.folder(FOLDER) / FILE, found)
    return found


def _profile_steps(setup: Setup, base: TrialSession, most: int) -> dict[str, Any]:
    """The findings, with the targets and the files that were written."""
    step = base.round(1).seconds
    count = max(3, min(most, int(TIMED_SECONDS / max(step, 1e-9)))) + 1
    count = int(base.world.broadcast_object(count))
    profiler = StepProfiler(base.active, 1, count, max(1, usable_cores() // setup.plan.processes))
    with GpuMonitor(gpu_uuid(base.world.device), lambda _: None) as monitor:
        for number, loaded in enumerate(base.batches(count + 1)):
            base.active.step(loaded)
            profiler.step_ended(number, loaded.work)
        readings = dict(monitor.latest())
    hardware, on_gpu = setup.hardware, setup.plan.device == "cuda"
    capacity = hardware.gpu.memory_bytes if on_gpu else hardware.ram_bytes // setup.plan.processes
    found = {
        "task": setup.recipe.task,
        "recipe_hash": setup.recipe.hash(),
        "phase": base.active.schedule.name,
        **profiler.findings,
        "memory_share": peak_bytes(base.world.device) / capacity,
        "cores": usable_cores(),
        "power_watts": readings.get("power_watts"),
        "plan": setup.plan.to_dict(),
    }
    if base.world.is_main:
        with atomic_files.explain_write_errors(setup.folder(FOLDER)):
            found["files"] = profiler.write(setup.folder(FOLDER))
    return found | {"targets": targets(found)}


def _tried(
    setup: Setup, base: TrialSession, found: dict[str, Any], advice: dict[str, str], seconds: float
) -> dict[str, Any]:
    """The fastest way to take the measure, as a row with its text; empty where there is none."""
    one = measure_named(advice["measure"])
    tried = [
        try_settings(setup, base, [setting], now() + seconds, now() + 3 * seconds, one)
        for setting in one.changes(setup)
        if not setting.takes_away and not _makes_more_micro_batches(setting, found)
    ]
    best = max((trial for trial in tried if trial.rounds.ratios), key=lambda t: t.rounds.ratio, default=None)
    if best is None or best.rounds.problem:
        return {}
    new_recipe = bool(best.settings[0].recipe)
    text = _sentence(advice["text"], best, new_recipe)
    return {
        "flags": best.settings[0].flags,
        "new_recipe": new_recipe,
        "invariance": best.invariance,
        **best.rounds.to_dict(),
        "text": text,
    }


def _makes_more_micro_batches(setting: Setting, found: dict[str, Any]) -> bool:
    """Smaller micro-batches may help where padding is what costs; else they only add launches."""
    samples = setting.plan.get("micro_batch")
    return samples is not None and found["padding"] <= PADDING and samples < found["samples_per_micro_batch"]


def _sentence(why: str, best: Candidate, new_recipe: bool) -> str:
    rounds, flags = best.rounds, best.settings[0].flags
    what = f"{rounds.ratio:.2f} times as fast here (+-{rounds.spread:.0%}, {len(rounds.ratios)} rounds)"
    if not rounds.helps and rounds.ratio > 1 + LEAST_GAIN:
        return f"{why}; {flags} may help: {what}, which the noise forbids to promise"
    if not rounds.helps:
        return f"{why}, but {flags} does not help: {what}"
    remark = "; it is another recipe" if new_recipe else ""
    if best.invariance:
        remark = f"; it rounds differently ({best.invariance})"
    return f"{why}: {flags} makes it {what}{remark}"


def lines_of(found: dict[str, Any]) -> list[str]:
    """A profile for a person."""
    where = f"{found['plan']['processes']} x {found['device']}"
    lines = [f"{found['task']}, phase {found['phase']}, on {where}", "", *profile_lines(found)]
    lines += ["", "advice, the largest gain first"]
    lines += [f"  {number}. {row['text']}" for number, row in enumerate(found["advice"], 1)]
    if not found["advice"]:
        lines.append("  nothing of what is known to help applies here")
    return [*lines, "", *(f"{what}: {file}" for what, file in found["files"].items())]
