"""`profile`: where a step's time and memory go on any task, and what is worth changing, tried here."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.measures import now, printable
from isobatch.core.number_ranges import Positive
from isobatch.core.plan import INVARIANCES
from isobatch.engine.profiling.advice import PADDING, profile_lines, targets, worth_a_trial
from isobatch.engine.profiling.step_profiler import LEAST_STEPS, StepProfiler
from isobatch.engine.runs.gpu_monitor import GpuMonitor
from isobatch.engine.runs.run_folder import run_name
from isobatch.engine.training.step_metrics import gpu_uuid
from isobatch.launch.local.run_setup import TrustOptions
from isobatch.launch.measuring.compare import LEAST_GAIN, compare
from isobatch.launch.measuring.measures import Setting, measure_named, usable_cores
from isobatch.launch.measuring.setup import Setup, measure_in_world, read_setup
from isobatch.launch.measuring.trial import TrialSession, Variant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.engine.distributed.communicator import Communicator

TIMED_SECONDS = 15.0
"""Fewer steps are timed where they take longer than this together, but never fewer than 3."""
FOLDER, FILE = "profiles", "profile.json"


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
    chrome://tracing or Perfetto), folded stacks and profile.json to OUT/profiles/.
    In a run: auto ... --profile 20:24.
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
        found = world.broadcast_object(_profile_steps(setup, base, options))
        if options.trials:
            found["advice"] = _advice(setup, base, found, options.trial_seconds)
        else:
            found["advice"] = [
                {"measure": name, "text": sentence} for name, sentence in worth_a_trial(found, found["plan"])
            ]
    if world.is_main:
        atomic_files.write_json(Path(found["folder"]) / FILE, found)
    return found


def _profile_steps(setup: Setup, base: TrialSession, options: ProfileOptions) -> dict[str, Any]:
    """The findings, with the targets and the files that were written."""
    step = base.round(1).step_seconds
    count = max(LEAST_STEPS, min(options.timed_steps, int(TIMED_SECONDS / max(step, 1e-9)))) + 2
    count = int(base.world.broadcast_object(count))
    profiler = StepProfiler(base.active, base.world.recorder, base.world.device, 1, count, _cores(setup))
    with GpuMonitor(gpu_uuid(base.world.device), lambda _: None) as monitor:
        for number, loaded in enumerate(base.batches(count + 1)):
            base.active.step(loaded)
            profiler.step_ended(number, loaded.work)
        readings = dict(monitor.latest())
    found, capacity = profiler.findings, _capacity(setup)
    found["memory"] |= {
        "capacity": capacity,
        "share": found["memory"]["in_use"] / capacity,
        "step_peak": base.peak_of_step(),
    }
    folder = Path(setup.request.run.out).expanduser() / FOLDER / _name(setup)
    if base.world.is_main:
        with atomic_files.explain_write_errors(folder):
            found["files"] = profiler.write(folder)
    return {
        "task": setup.recipe.task,
        "recipe_hash": setup.recipe.hash(),
        "phase": base.phase,
        **found,
        "cores": usable_cores(),
        "power_watts": readings.get("power_watts"),
        "targets": targets(found),
        "plan": setup.plan.to_dict(),
        "folder": str(folder),
    }


def _name(setup: Setup) -> str:
    return setup.request.run.name or run_name(setup.recipe)


def _cores(setup: Setup) -> int:
    """Cores that this process computes on where it trains on the CPU."""
    return max(1, usable_cores() // setup.plan.processes)


def _capacity(setup: Setup) -> int:
    """Bytes of memory of a process."""
    if setup.plan.device == "cuda":
        return setup.hardware.gpu.memory_bytes
    return setup.hardware.ram_bytes // setup.plan.processes


def _advice(setup: Setup, base: TrialSession, found: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
    """What may help, tried, with the gain of each; the largest first, and what helps not at the end."""
    rows = []
    for name, sentence in worth_a_trial(found, found["plan"]):
        measure, best = measure_named(name), None
        for setting in measure.changes(setup):
            if setting.takes_away or _makes_more_micro_batches(setting, found):
                continue
            try:
                variant = setup.variant(setting.plan, setting.recipe, fused=setting.fused)
            except UserError as error:
                print(printable(f"{setting.flags}: {error}"), file=sys.stderr)
                continue
            print(printable(f"trying {setting.flags}"), file=sys.stderr)
            end = now() + seconds
            tried = compare(base, variant, end, measure.unit, limit=end + 2 * seconds)
            if tried.problem:
                print(printable(f"{setting.flags}: {tried.problem}"), file=sys.stderr)
            elif tried.ratios and (best is None or tried.ratio > best["ratio"]):
                best = {"flags": setting.flags, **_kind(setup.base, variant), **tried.to_dict()}
        if best is not None:
            rows.append({"measure": name, **best, "text": _sentence(sentence, best)})
    return sorted(rows, key=lambda row: (not row["helps"], -row["ratio"]))


def _makes_more_micro_batches(setting: Setting, found: dict[str, Any]) -> bool:
    """Smaller micro-batches may help where padding is what costs; else they only add launches."""
    samples = setting.plan.get("micro_batch")
    return samples is not None and found["padding"] <= PADDING and samples < found["samples_per_micro_batch"]


def _kind(base: Variant, variant: Variant) -> dict[str, Any]:
    """Whether a variant is another recipe, and its invariance where that is weaker than the base's."""
    found, before = variant.plan.invariance, base.plan.invariance
    return {
        "new_recipe": variant.recipe != base.recipe,
        "invariance": "" if INVARIANCES.index(found) <= INVARIANCES.index(before) else found,
    }


def _sentence(why: str, best: dict[str, Any]) -> str:
    what = f"{best['ratio']:.2f} times as fast here (+-{best['spread']:.0%}, {best['rounds']} rounds)"
    if not best["helps"] and best["ratio"] > 1 + LEAST_GAIN:
        return f"{why}; {best['flags']} may help: {what}, which the noise forbids to promise"
    if not best["helps"]:
        return f"{why}, but {best['flags']} does not help: {what}"
    remark = "; it is another recipe" if best["new_recipe"] else ""
    if best["invariance"]:
        remark = f"; it rounds differently ({best['invariance']})"
    return f"{why}: {best['flags']} makes it {what}{remark}"


def lines_of(found: dict[str, Any]) -> list[str]:
    """A profile for a person."""
    where = f"{found['plan']['processes']} x {found['device']}"
    lines = [f"{found['task']}, phase {found['phase']}, on {where}", "", *profile_lines(found)]
    lines += ["", "advice, the largest gain first"]
    lines += [f"  {number}. {row['text']}" for number, row in enumerate(found["advice"], 1)]
    if not found["advice"]:
        lines.append("  nothing of what is known to help applies here")
    return [*lines, "", *(f"{what.replace('_', ' ')}: {file}" for what, file in found["files"].items())]
