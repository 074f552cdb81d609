"""What a command line comes to: a run, found or made, trained to its end."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial

from isobatch.core import number_ranges
from isobatch.core.errors import DONE
from isobatch.core.strategies import traits_of
from isobatch.engine.runs.run_folder import RunFolder, Verdict
from isobatch.engine.runs.run_options import RunOptions
from isobatch.launch.local.arguments import Request
from isobatch.launch.local.restarts import train_in_children, train_in_process, train_with_restarts
from isobatch.launch.local.run_setup import find_run, plan_run, prepare_facts


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions:
    """Flags of `auto` and `resume` beside the recipe's, the plan's and the run's."""

    json: bool = False
    """At the end, summary.json on standard output."""
    seeds: number_ranges.Positive = 1
    """Train so often, with --seed and the numbers after it, and give mean and deviation of the metrics."""


def find_or_train(asked: Request, owns_process: bool = True) -> tuple[RunFolder, Verdict]:
    """The run that a request comes to, found or made, trained to its end; and how that ended.

    Where the process is another program's (`owns_process` False), nothing ends it and it keeps its signals.
    """
    for note in asked.notes:
        print_unless_quiet(note, asked.run.quiet)
    facts = prepare_facts(asked)
    run = find_run(asked, facts)
    if run is not None and run.status() == "done":
        print_unless_quiet(
            f"{run.folder} has this recipe and is done (--again for a new run)", asked.run.quiet
        )
        return run, Verdict(DONE, "")
    if run is None:
        run = plan_run(asked, facts, None)
        with run.lock("launch"):
            return run, launch_run(run, asked.run, owns_process)
    print_unless_quiet(f"going on with {run.folder} ({run.status()})", asked.run.quiet)
    with run.lock("launch"):
        run.refuse_if_training()
        return run, launch_run(plan_run(asked, facts, run), asked.run, owns_process)


def launch_run(run: RunFolder, options: RunOptions, owns_process: bool = True) -> Verdict:
    """Train by the run's plan; how the last attempt ended."""
    run.write_options(options)
    # DeepSpeed forms a process group even of one process, and that would stay.
    in_process = run.plan.processes == 1 and (owns_process or not traits_of(run.plan.strategy).shards)
    start = train_in_process if in_process else train_in_children
    return train_with_restarts(run, partial(start, owns_process=owns_process))


def print_unless_quiet(text: str, quiet: bool) -> None:
    if not quiet:
        print(text, file=sys.stderr)
