"""`replay`: a step of a run again, on this machine, with what is in it: samples, modules, gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from isobatch.core.errors import UserError
from isobatch.core.number_ranges import Positive
from isobatch.core.terminal import doing, print_answer, rendered, table
from isobatch.engine.runs.log_reader import newest_rows
from isobatch.engine.train.figures import is_step
from isobatch.engine.verification.run_order import require_step
from isobatch.engine.verification.windows import Window, window_to
from isobatch.launch.local.options import RedoOptions
from isobatch.launch.local.redo_steps import plan_to_redo
from isobatch.launch.local.run_setup import locate_data, open_single_run

if TYPE_CHECKING:
    from isobatch.engine.forensics.observed_step import ObservedStep
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.verification.replay import Replay

SHOWN = 20
"""Modules, samples of the largest losses, and parameters of the largest gradients, that are listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOptions(RedoOptions):
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


def replay(words: Sequence[str]) -> int:
    """Usage: replay RUN [--step N] [--phase NAME] [--precision fp32] [--base PLACE] [--json]

    Goes from the nearest kept checkpoint to the step, with the batches, the noise and the rates of the run,
    in one process, and shows the losses by sample, the first module with a NaN, and the largest gradients.
    """
    from isobatch.engine.forensics.observed_step import observe_step

    run, options = open_single_run(words, "replay", ReplayOptions)
    seen = observe_step(*open_replay(run, options))
    return print_answer(as_json(seen), text_of(seen), options.json)


def open_replay(run: RunFolder, options: ReplayOptions) -> tuple[Replay, Window]:
    """What redoes a step of one run as the flags say, and the steps that lead to it. Raises UserError."""
    from isobatch.engine.verification.replay import Replay

    last: dict[str, Any] = next((row for row in reversed(newest_rows(run.metrics)) if is_step(row)), {})
    phase, step = options.phase or last.get("phase"), options.step or last.get("step")
    if phase is None or step is None:
        raise UserError(f"{run.folder}: no step is logged: say which one with --step and --phase")
    locate_data(run, options.data)
    doing(f"replaying step {step} of {phase}")
    micro_batch = options.micro_batch or run.plan.micro_batch_samples
    wished = run.plan.precision if options.precision == "auto" else options.precision
    replayed = Replay(run, plan_to_redo(run, micro_batch, precision=wished, device=options.device))
    require_step(replayed.builder.schedules, phase, step)
    return replayed, window_to(run, replayed.builder.phases, phase, step)


def text_of(seen: ObservedStep) -> str:
    """What a person reads of a step."""
    infinite = ((key, ~np.isfinite(norms)) for key, (norms, _) in seen.outputs.items())
    bad = [(*key, which) for key, which in infinite if which.any()]
    norms_of: dict[str, dict[str, str]] = defaultdict(dict)
    for (module, direction), (norms, _) in seen.outputs.items():
        norms_of[module][direction] = f"{np.linalg.norm(norms):.4g}"
    modules = [[name, of.get("forward", ""), of.get("backward", "")] for name, of in norms_of.items()]
    alone = [(sum(losses.values()), seen.samples[places].tolist()) for places, losses in seen.alone]
    alone.sort(key=lambda row: -np.nan_to_num(row[0], nan=np.inf))
    losses = [[f"{loss:.6g}", ", ".join(map(str, numbers))] for loss, numbers in alone]
    largest = sorted(seen.gradients.items(), key=lambda item: -item[1])
    gradients = [[f"{norm:.4g}", name] for name, norm in largest]
    found = (modules, losses, gradients)
    return rendered(__file__, "replay", seen=seen, bad=bad, found=found, table=table, most=SHOWN)


def as_json(seen: ObservedStep) -> dict[str, Any]:
    """All of a step, as JSON."""
    window, (loss, norm) = seen.window, seen.figures
    return {
        **{"phase": window.phase, "step": window.stop, "start": window.checkpoint},
        **{"samples": seen.samples.tolist(), "loss": loss, "grad_norm": norm, "lr": seen.rate},
        "logged": seen.logged.to_dict() if seen.logged else {},
        "alone": [{"samples": seen.samples[p].tolist(), "losses": losses} for p, losses in seen.alone],
        "modules": [
            {"module": module, "direction": direction, "norms": norms.tolist()}
            for (module, direction), (norms, _) in seen.outputs.items()
        ],
        "gradients": seen.gradients,
    }
