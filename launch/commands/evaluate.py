"""`evaluate`: metrics of a finished run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from isobatch.core.errors import UserError
from isobatch.core.measures import printable
from isobatch.core.plan import PlanOptions
from isobatch.core.terminal.console import format_metrics, print_answer
from isobatch.engine.registry import workload_of
from isobatch.launch.local.run_setup import DataOptions, locate_data, open_single_run, plan_for_this_machine
from isobatch.models.protocols import KeepsBaselines

if TYPE_CHECKING:
    from isobatch.engine.runs.run_folder import RunFolder

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateOptions(DataOptions):
    """Flags of `evaluate`."""

    split: str | None = None
    """Only this split; by default every held-out one."""


def evaluate(words: Sequence[str]) -> int:
    """Usage: evaluate RUN [--split valid] [--json]: the newest checkpoint on the held-out data."""
    from isobatch.engine.train.evaluate import host_batches
    from isobatch.engine.verification.replay import Replay

    run, options = open_single_run(words, "evaluate", EvaluateOptions)
    locate_data(run, run.recipe, options.data)
    plan = plan_for_this_machine(run.recipe, run.facts, PlanOptions(processes=1, compile="off"))
    replay = Replay(run, plan)
    checkpoint = replay.trained()
    if checkpoint is None or not replay.load_trained():
        raise UserError(f"{run.folder} has no checkpoint to evaluate: train it first")
    if options.split and options.split not in run.facts.samples:
        raise UserError(f"--split {options.split}: the data has {', '.join(run.facts.samples)}")
    task, model = replay.state.task, replay.state.model
    splits = [options.split] if options.split else [s for s in run.facts.samples if s != "train"]
    metrics = {name: replay.evaluate(name) for name in splits}
    for name, found in metrics.items():
        if isinstance(task, KeepsBaselines) and run.final.is_dir():
            found |= task.kept_metrics(model, run.final, partial(host_batches, replay.state.splits[name]))
    unfinished = "" if run.status() == "done" else f"; the run is not finished ({run.status()})"
    print(printable(f"{run.folder}: checkpoint {checkpoint.name}{unfinished}"), file=sys.stderr)
    lines = (f"{name}: {format_metrics(found, '.6g')}" for name, found in metrics.items())
    return print_answer(metrics, "\n".join(lines), options.json)


def require_capability(run: RunFolder, capability: type[T], command: str, refusal: str) -> T:
    """A finished run's task. Raises UserError without the protocol `capability`, or without final/."""
    task, _ = workload_of(run.recipe).make(run.recipe)
    if not isinstance(task, capability):
        raise UserError(f"{command}: {run.folder} trained {run.recipe.task}, which {refusal}")
    require_final(run)
    return task


def require_final(run: RunFolder) -> None:
    """Raises UserError for a run that is not finished."""
    if not run.final.is_dir():
        raise UserError(f"{run.folder} has no final/ yet: {run.why_unfinished()}")
