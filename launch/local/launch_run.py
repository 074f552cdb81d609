"""From a request to a finished run: find or create it, plan it, and train it to its end."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from isobatch.core import number_ranges
from isobatch.core.errors import DONE, WRONG_INPUT, UserError
from isobatch.core.strategies import traits_of
from isobatch.core.terminal.status import begins_now
from isobatch.engine import consent
from isobatch.engine.optimization.left_out import ASKED, leave_out, refuse_where_steps_matter
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.run_folder import RunFolder, Verdict
from isobatch.engine.runs.slurm_queue import refuse_if_in_a_job
from isobatch.launch.local.restarts import train_in_children, train_in_process, train_with_restarts
from isobatch.launch.local.run_setup import (
    TrustOptions,
    as_begun,
    create_run,
    find_run,
    plan_with_remarks,
    prepare_facts,
    print_unless_quiet,
    store_plan,
)

if TYPE_CHECKING:
    from isobatch.engine.runs.run_options import RunOptions
    from isobatch.launch.local.arguments import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoOptions(TrustOptions):
    """Flags of `auto` beside the recipe's, the plan's and the run's."""

    json: bool = False
    """At the end, summary.json on standard output."""
    seeds: number_ranges.Positive = 1
    """Train so often, with --seed and the numbers after it, and give mean and deviation of the metrics."""
    parallel: number_ranges.Positive = 1
    """Of a sweep: so many runs at once, each on its share of the GPUs, or of the cores."""
    dry_run: bool = False
    """Train nothing: show the plan, as `plan` does."""
    dump_config: bool = False
    """Train nothing: print all flags with their values, as a file for --config."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeOptions(TrustOptions):
    """Flags of `resume` beside the plan's and the run's."""

    json: bool = False
    """At the end, summary.json on standard output."""
    skip_step: str | None = None
    """Leave out these steps, from 1, and go back to the checkpoint before them: 1200-1203, or lora:1200-1203
    where there are several phases. The decision stands in the log, so that `verify` knows it."""


def skip_steps(run: RunFolder, asked: str) -> None:
    """Decide that a run leaves out the steps that --skip-step names. Raises UserError."""
    phase, start, stop = steps_to_skip(run, asked)
    leave_out(run, phase, start, stop, ASKED)


def steps_to_skip(run: RunFolder, asked: str) -> tuple[str, int, int]:
    """(phase, first step, last step) that --skip-step names. Raises UserError."""
    task, _ = workload_of(run.recipe).make(run.recipe)
    refuse_where_steps_matter(task)
    names = [phase.name for phase in task.phases() if run.recipe.phase in (None, phase.name)]
    phase, colon, steps = asked.rpartition(":")
    first, dash, last = steps.partition("-")
    example = f"1200-1203 or {names[-1]}:1200-1203"
    if not first.isdecimal() or (dash and not last.isdecimal()) or (colon and phase not in names):
        raise UserError(f"--skip-step {asked}: give a step or a range, as in {example}")
    if not colon and len(names) > 1:
        raise UserError(f"--skip-step {asked}: of which phase? As in {names[0]}:{asked}")
    start, stop = int(first), int(last or first)
    if not 0 < start <= stop:
        raise UserError(f"--skip-step {asked}: the first step is 1, and a range ascends")
    return phase or names[0], start, stop


def find_or_train(
    request: Request, owns_process: bool = True, trust: bool = False
) -> tuple[RunFolder, Verdict]:
    """Find the request's run or create it, and train it to its end; the run and its verdict.

    With `owns_process` False, as in a notebook, the process is never ended and its signal handlers stay.
    Raises UserError, for example where the run is being trained already, here or by a Slurm job.
    """
    begins_now()
    for note in request.notes:
        print_unless_quiet(note, request.run.quiet)
    facts = prepare_facts(request)
    consent.remember(request.recipe, request.run.sends())
    run = find_run(request, facts)
    if run is not None and run.status() == "done":
        print_unless_quiet(
            f"{run.folder} has this recipe and is done (--again for a new run)", request.run.quiet
        )
        if remark := (run.summary() or {}).get("remark"):
            print_unless_quiet(str(remark), request.run.quiet)
        return run, Verdict(DONE, "")
    if run is not None:
        refuse_if_in_a_job(run)
        print_unless_quiet(f"going on with {run.folder} ({run.status()})", request.run.quiet)
    plan = plan_with_remarks(request.recipe, facts, as_begun(run, request.plan), request.run.quiet)
    is_new, run = run is None, run or create_run(request, facts)
    consent.require(run.recipe, run.folder, trust)
    with run.lock("launch"):  # another process may have made and begun the same run meanwhile
        run.refuse_if_training()
        store_plan(run, plan)
        verdict = launch_run(run, request.run, owns_process)
    if is_new and verdict.code == WRONG_INPUT and run.status() == "unfinished" and not run.metrics.exists():
        shutil.rmtree(run.folder)  # refused before a step: its name is free again
    return run, verdict


def launch_run(run: RunFolder, options: RunOptions, owns_process: bool = True) -> Verdict:
    """Train by the run's plan, with restarts; the verdict of the last attempt."""
    consent.require(run.recipe, run.folder, sends=options.sends())
    run.write_options(options)
    # DeepSpeed forms a process group even for one process, which would stay in a process that is not ours.
    in_process = run.plan.processes == 1 and (owns_process or not traits_of(run.plan.strategy).shards)
    start = train_in_process if in_process else train_in_children
    return train_with_restarts(run, partial(start, owns_process=owns_process))
