"""`replay`: a step of a run again, on this machine, with what is in it: samples, modules, gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.measures import printable
from isobatch.core.number_ranges import Positive
from isobatch.core.terminal.status import doing
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.log_reader import newest_rows
from isobatch.engine.runs.step_rows import is_step
from isobatch.launch.forensics.seen import shortened
from isobatch.launch.local.arguments import command_options, split_words
from isobatch.launch.local.run_setup import TrustOptions, locate_data, open_run
from isobatch.launch.report.tables import text_table

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Sequence

    from isobatch.engine.forensics.observed_step import ObservedStep, StepParts
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.verification.replay import Replay
    from isobatch.engine.verification.windows import Window

MODULES = 40
"""Modules whose norms are listed."""
SHOWN = 10
"""Samples of the largest losses, and parameters of the largest gradients, that are listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOptions(TrustOptions):
    """Flags of `replay`."""

    step: Positive | None = None
    """The step, from 1, as metrics.jsonl counts it; by default the last that was logged."""
    phase: str | None = None
    """Its phase, where the recipe has several; by default that of the last logged step."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """By default that of the run, where this machine has it."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """By default what this machine has."""
    micro_batch: Positive | None = None
    """Samples at a time; by default what the run took, as far as memory allows."""
    data: str | None = None
    """Where the data lies now, if it has moved."""
    json: bool = False
    """One JSON object on standard output: every module and every sample."""


def replay(words: Sequence[str]) -> int:
    """Usage: replay RUN [--step N] [--phase NAME] [--precision fp32] [--json]

    Goes from the nearest kept checkpoint to the step, with the batches, the noise and the rates of the run,
    in one process, and shows the losses by sample, the first module with a NaN, and the largest gradients.
    """
    positional, flags = split_words(words)
    if len(positional) != 1:
        raise UserError("replay: give the folder of one run, as in: replay RUN --step 120")
    options = command_options(flags, ReplayOptions, "replay")
    run = open_run(positional[0], options.trust)
    seen = replay_step(run, options)
    found = atomic_files.json_text(as_json(seen)) if options.json else text_of(seen, run)
    print(found if options.json else printable(found))
    return 0


def replay_step(run: RunFolder, options: ReplayOptions) -> ObservedStep:
    """Redo one step of a run as the flags say. Raises UserError."""
    from isobatch.engine.forensics.observed_step import observe_step

    return observe_step(*_open(run, options))


def replay_parts(
    run: RunFolder, options: ReplayOptions, samples: Sequence[int]
) -> contextlib.AbstractContextManager[StepParts]:
    """The model, batch and context of a step, for Python. Raises UserError."""
    from isobatch.engine.forensics.observed_step import open_step

    return open_step(*_open(run, options), samples)


def _open(run: RunFolder, options: ReplayOptions) -> tuple[Replay, Window]:
    from isobatch.engine.verification.replay import Replay
    from isobatch.engine.verification.windows import window_to
    from isobatch.launch.local.redo_steps import plan_to_redo

    logged = [row for row in newest_rows(run.metrics) if is_step(row)]
    last = logged[-1] if logged else {}
    phase, step = options.phase or last.get("phase"), options.step or last.get("step")
    if phase is None or step is None:
        raise UserError(f"{run.folder}: no step is logged: say which one with --step and --phase")
    locate_data(run, run.recipe, options.data)
    doing(f"replaying step {step} of {phase}")
    micro_batch = options.micro_batch or run.plan.micro_batch_samples
    wished = run.plan.precision if options.precision == "auto" else options.precision
    replayed = Replay(run, plan_to_redo(run, micro_batch, precision=wished, device=options.device))
    schedules = {schedule.name: schedule for schedule in replayed.session.schedules}
    if phase not in schedules:
        raise UserError(f"--phase {phase}: this recipe has {', '.join(schedules)}")
    if step > schedules[phase].steps:
        raise UserError(f"--step {step}: {phase} has {schedules[phase].steps:,} steps")
    return replayed, window_to(run, replayed.session.phases, phase, step)


def text_of(seen: ObservedStep, run: RunFolder) -> str:
    """What a person reads of a step."""
    logged: Sequence[float | None] = seen.logged.figures if seen.logged else (None, None)
    lines = [
        f"step {seen.step} of {seen.phase}, redone from {seen.start}",
        f"loss {_beside(logged[0], seen.loss)}, gradient norm {_beside(logged[1], seen.norm)},"
        f" lr {seen.rate:.3g}",
    ]
    if (bad := seen.first_not_finite) is not None:
        samples = seen.samples[~np.isfinite(bad.norms)] if len(bad.norms) > 1 else ()
        which = f", in samples {', '.join(map(str, samples[:SHOWN]))}" if len(samples) else ""
        lines.append(f"the first output with a NaN or an infinity: {bad.module} ({bad.direction}){which}")
    modules = _module_rows(seen)
    lines += ["", "norms in the step, in the order of the forward pass:"]
    lines.append(text_table([["module", "output", "its gradient"], *modules[:MODULES]], 110))
    lines += [f"and {len(modules) - MODULES:,} more (--json)"] if len(modules) > MODULES else []
    lines += ["", "losses of samples computed alone, as their share of the step:"]
    lines.append(text_table([["sample", "loss", "text"], *_sample_rows(seen, run)], 110))
    largest = sorted(seen.gradients.items(), key=lambda item: -item[1])[:SHOWN]
    lines += ["", "the largest gradients:"]
    lines.append(text_table([["parameter", "norm"], *([name, f"{norm:.4g}"] for name, norm in largest)], 110))
    return "\n".join(lines)


def _module_rows(seen: ObservedStep) -> list[list[str]]:
    """The norm of what each module computed, of the whole batch, and of its gradient."""
    found: dict[str, dict[str, str]] = {}
    for output in seen.outputs:
        found.setdefault(output.module, {})[output.direction] = f"{np.linalg.norm(output.norms):.4g}"
    return [[name, of.get("forward", ""), of.get("backward", "")] for name, of in found.items()]


def _beside(logged: float | None, found: float) -> str:
    if logged is None or math.isnan(logged):
        return f"{found:.6g} (not logged)"
    return f"{found:.6g} (logged {logged:.6g}, differs by {abs(found - logged):.1g})"


def _sample_rows(seen: ObservedStep, run: RunFolder) -> list[list[str]]:
    """The samples with the largest losses, each with the beginning of its text."""
    rows = [(seen.samples[places], sum(losses.values())) for places, losses in seen.alone]
    rows = sorted(rows, key=lambda row: -np.nan_to_num(row[1], nan=np.inf))[:SHOWN]
    _, data = workload_of(run.recipe).make(run.recipe)
    source = data.open(Path(run.facts.folder), "train")
    texts = [data.describe_rows(run.facts, source.fetch(numbers[:1]))[0] for numbers, _ in rows]
    return [
        [", ".join(map(str, numbers[:SHOWN])), f"{loss:.6g}", shortened(text)]
        for (numbers, loss), text in zip(rows, texts, strict=True)
    ]


def as_json(seen: ObservedStep) -> dict[str, Any]:
    """All of a step, as JSON."""
    alone = [{"samples": seen.samples[p].tolist(), "losses": losses} for p, losses in seen.alone]
    outputs = [
        {"module": o.module, "direction": o.direction, "norms": o.norms.tolist()} for o in seen.outputs
    ]
    return {
        **{"phase": seen.phase, "step": seen.step, "start": seen.start, "samples": seen.samples.tolist()},
        **{"loss": seen.loss, "grad_norm": seen.norm, "lr": seen.rate},
        "logged": seen.logged.to_dict() if seen.logged else {},
        **{"alone": alone, "modules": outputs, "gradients": seen.gradients},
    }
