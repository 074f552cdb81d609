"""`replay`: a step of a run again, on this machine, with what is in it: samples, modules, gradients."""

from __future__ import annotations

import bdb
import contextlib
import dataclasses
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.flags import nearest_hint
from isobatch.core.measures import printable
from isobatch.core.number_ranges import Count, Positive
from isobatch.core.plan import PlanOptions
from isobatch.core.terminal.status import doing
from isobatch.engine.forensics.seen_rows import shortened
from isobatch.engine.registry import workload_of
from isobatch.launch.local.arguments import command_options, split_words
from isobatch.launch.local.run_setup import TrustOptions, locate_data, open_run, plan_for_this_machine
from isobatch.launch.report.tables import text_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from isobatch.core.plan import Plan
    from isobatch.engine.forensics.observed_step import ObservedStep, StepParts
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.verification.replay import Replay, Window

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
    sample: Count | None = None
    """Only this sample of the step, by its number."""
    break_: str | None = None
    """Stop in Python's debugger where this module begins, by its name in the model."""
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
    """Usage: replay RUN [--step N] [--phase NAME] [--sample I] [--break MODULE] [--precision fp32] [--json]

    Goes from the nearest kept checkpoint to the step, with the batches, the noise and the rates of the run,
    in one process, and shows the losses by sample, the first module with a NaN, and the largest gradients.
    """
    positional, flags = split_words(words)
    if len(positional) != 1:
        raise UserError("replay: give the folder of one run, as in: replay RUN --step 120")
    options = command_options(flags, ReplayOptions, "replay")
    run = open_run(positional[0], options.trust)
    try:
        seen = replay_step(run, options)
    except bdb.BdbQuit:  # the user's own end of the debugger
        return 0
    print(
        atomic_files.json_text(as_json(seen))
        if options.json
        else printable(text_of(seen, run, options.sample))
    )
    return 0


def replay_step(run: RunFolder, options: ReplayOptions) -> ObservedStep:
    """Redo one step of a run as the flags say. Raises UserError."""
    from isobatch.engine.forensics.observed_step import observe_step

    replayed, window = _open(run, options)
    breaking = partial(_breaking, name=options.break_) if options.break_ else None
    seen = observe_step(replayed, window, around=breaking, only=options.sample)
    if options.sample is not None and options.sample not in seen.samples:
        raise UserError(
            f"--sample {options.sample}: is not in step {window.stop}; `isobatch seen {run.folder} --sample"
            f" {options.sample}` says which steps saw it"
        )
    return seen


def replay_parts(
    run: RunFolder, options: ReplayOptions, samples: Sequence[int]
) -> contextlib.AbstractContextManager[StepParts]:
    """The model, batch and context of a step, for Python. Raises UserError."""
    from isobatch.engine.forensics.observed_step import open_step

    return open_step(*_open(run, options), samples)


def _open(run: RunFolder, options: ReplayOptions) -> tuple[Replay, Window]:
    from isobatch.engine.forensics.observed_step import window_to
    from isobatch.engine.verification.replay import Replay

    phase, step = _place(run, options)
    locate_data(run, run.recipe, options.data)
    doing(f"replaying step {step} of {phase}")
    replayed = Replay(run, replay_plan(run, options))
    schedules = {schedule.name: schedule for schedule in replayed.session.schedules}
    if phase not in schedules:
        raise UserError(f"--phase {phase}: this recipe has {', '.join(schedules)}")
    if step > schedules[phase].steps:
        raise UserError(f"--step {step}: {phase} has {schedules[phase].steps:,} steps")
    return replayed, window_to(run, replayed.session.phases, phase, step)


def replay_plan(run: RunFolder, options: ReplayOptions) -> Plan:
    """One process here, with the run's own precision, attention and micro-batch where they can be had."""
    plan = run.plan
    wished = options.precision if options.precision != "auto" else plan.precision
    asked = PlanOptions(
        device=options.device,
        processes=1,
        strategy="single",
        micro_batch=options.micro_batch or min(plan.micro_batch_samples, run.recipe.batch_size),
        precision=wished,
        attention=plan.attention if plan.attention in ("sdpa", "eager") else "auto",
        compile="off",
        activation_checkpointing="off",
    )
    made = plan_for_this_machine(run.recipe, run.facts, asked)
    return dataclasses.replace(made, reduction="explicit")


def _place(run: RunFolder, options: ReplayOptions) -> tuple[str, int]:
    """The step that is asked for, else the last one that was logged."""
    from isobatch.engine.runs.log_reader import newest_rows

    last = next((row for row in reversed(newest_rows(run.metrics)) if "chain" in row), None)
    if options.step is not None and options.phase is not None:
        return options.phase, options.step
    if last is None:
        raise UserError(f"{run.folder}: no step is logged: say which one with --step and --phase")
    return options.phase or last["phase"], options.step or last["step"]


@contextlib.contextmanager
def _breaking(model: nn.Module, name: str) -> Iterator[None]:
    """Stop in the debugger before the module's forward passes."""
    modules = dict(model.named_modules())
    if name not in modules:
        known = [known for known in modules if known]
        raise UserError(f"--break {name}: the model has no such module{nearest_hint(name, known)}")

    if sys.stdin is None or sys.stdin.closed:
        raise UserError(
            f"--break {name}: the debugger reads its commands from standard input, and it is closed"
        )

    def stop(_module: nn.Module, _inputs: Any) -> None:
        breakpoint()  # _module and _inputs are here; `up` leads to who calls it

    handle = modules[name].register_forward_pre_hook(stop)
    try:
        yield
    finally:
        handle.remove()


def text_of(seen: ObservedStep, run: RunFolder, sample: int | None = None) -> str:
    """What a person reads of a step."""
    lines = [
        f"step {seen.step} of {seen.phase}, redone from {seen.start}",
        f"loss {seen.loss:.6g}{_beside(seen.logged, 'loss', seen.loss)},"
        f" gradient norm {seen.norm:.6g}{_beside(seen.logged, 'grad_norm', seen.norm)}, lr {seen.rate:.3g}",
    ]
    if (bad := seen.first_not_finite) is not None:
        samples = seen.samples[~np.isfinite(bad.norms)] if len(bad.norms) > 1 else ()
        which = f", in samples {', '.join(map(str, samples[:SHOWN]))}" if len(samples) else ""
        lines.append(f"the first output with a NaN or an infinity: {bad.module} ({bad.direction}){which}")
    lines += [
        "",
        *_module_lines(seen, sample),
        "",
        "losses of samples computed alone, as their share of the step:",
    ]
    lines.append(text_table([["sample", "loss", "text"], *_sample_rows(seen, run, sample)], 110))
    largest = sorted(seen.gradients.items(), key=lambda item: -item[1])[:SHOWN]
    lines += ["", "the largest gradients:"]
    lines.append(text_table([["parameter", "norm"], *([name, f"{norm:.4g}"] for name, norm in largest)], 110))
    return "\n".join(lines)


def _module_lines(seen: ObservedStep, sample: int | None) -> list[str]:
    """The norm of what each module computed, of the whole batch or of one sample, and of its gradient."""
    from isobatch.engine.forensics.module_record import BACKWARD, FORWARD

    whose = np.flatnonzero(seen.samples == sample) if sample is not None else slice(None)
    found: dict[str, dict[str, str]] = {}
    for output in seen.outputs:
        one = sample is None or len(output.norms) == len(seen.samples)
        norm = f"{np.linalg.norm(output.norms[whose]):.4g}" if one else ""
        found.setdefault(output.module, {})[output.direction] = norm
    rows = [[name, of.get(FORWARD, ""), of.get(BACKWARD, "")] for name, of in found.items()]
    more = [f"and {len(rows) - MODULES:,} more (--json)"] if len(rows) > MODULES else []
    of_whom = "the step" if sample is None else f"sample {sample}"
    head = ["module", "output", "its gradient"]
    return [
        f"norms in {of_whom}, in the order of the forward pass:",
        text_table([head, *rows[:MODULES]], 110),
        *more,
    ]


def _beside(logged: dict[str, Any], name: str, found: float) -> str:
    if name not in logged or logged[name] is None:
        return " (not logged)"
    return f" (logged {logged[name]:.6g}, differs by {abs(found - logged[name]):.1g})"


def _sample_rows(seen: ObservedStep, run: RunFolder, sample: int | None) -> list[list[str]]:
    """The samples with the largest losses, or the one asked for, each with the beginning of its text."""
    rows = [(seen.samples[places], sum(losses.values())) for places, losses in seen.alone]
    if sample is not None:
        rows = [(numbers, loss) for numbers, loss in rows if sample in numbers]
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
        **{"loss": seen.loss, "grad_norm": seen.norm, "lr": seen.rate, "logged": seen.logged},
        **{"alone": alone, "modules": outputs, "gradients": seen.gradients},
    }
