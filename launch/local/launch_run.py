"""What a command line comes to: a run, found or made, trained to its end."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from isobatch.core import atomic_files, number_ranges
from isobatch.core import flags as opt
from isobatch.core.errors import DONE
from isobatch.engine.runs.run_folder import RunFolder, RunOptions
from isobatch.launch.local.arguments import Request
from isobatch.launch.local.restarts import in_children, in_place, train
from isobatch.launch.local.run_setup import facts_of, find_run, set_up


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions:
    """Flags of `auto` and `resume` beside the recipe's, the plan's and the run's."""

    json: bool = False
    """At the end, summary.json on standard output."""
    seeds: number_ranges.Positive = 1
    """Train so often, with --seed and the numbers after it, and give mean and deviation of the metrics."""


def run_of(asked: Request) -> tuple[RunFolder, int]:
    """The run that a request comes to, found or made, trained to its end; and its exit code."""
    for note in asked.notes:
        say(note, asked.run.quiet)
    facts = facts_of(asked)
    run = find_run(asked, facts)
    if run is not None and run.status() == "done":
        say(f"{run.folder} has this recipe and is done (--again for a new run)", asked.run.quiet)
        return run, DONE
    if run is None:
        run = set_up(asked, facts, None)
        with run.lock("launch"):
            return run, launch(run, asked.run)
    say(f"going on with {run.folder} ({run.status()})", asked.run.quiet)
    with run.lock("launch"):
        run.refuse_if_training()
        return run, launch(set_up(asked, facts, run), asked.run)


def launch(run: RunFolder, options: RunOptions) -> int:
    """Train by the run's plan and answer with the run's own exit code."""
    atomic_files.write_json(run.folder / "run.json", opt.options_to_dict(options))
    return train(run, in_place if run.plan().processes == 1 else in_children)


def say(text: str, quiet: bool) -> None:
    if not quiet:
        print(text, file=sys.stderr)
