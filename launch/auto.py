"""`auto` and `resume`: plan, write the run folder, then run in place or start accelerate."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from engine import files
from engine import options as opt
from engine.console import shown
from engine.errors import DONE, UserError
from engine.plan import PlanOptions
from engine.registry import CHAINS
from engine.run import Run, RunOptions
from launch.attempts import in_children, in_place, train
from launch.flags import Request, own_flags, request, split, task_name
from launch.setting_up import facts_of, find_run, make_plan_here, relocate, set_up, stored_options, write_plan
from models import fields


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions:
    """Flags of `auto` and `resume` beside the recipe's, the plan's and the run's."""

    json: bool = False
    """At the end, summary.json on standard output."""
    seeds: fields.Positive = 1
    """Train so often, with --seed and the numbers after it, and give mean and deviation of the metrics."""


def auto(words: Sequence[str]) -> int:
    """Usage: auto --task TASK [flags]. Without --data the task's demo runs. Try: auto --task causal-lm

    --task compress is a chain: classifier, pruning, qat, and the report.
    """
    if task_name(words) in CHAINS:
        from launch.compress import compress

        return compress(words)
    asked = request(words, "auto", AnswerOptions)
    answer = AnswerOptions(**asked.extra)
    if answer.seeds > 1:
        from launch.seeds import several

        return several(asked, answer.seeds, answer.json)
    run, code = run_of(asked)
    return _answered(run, code, answer)


def run_of(asked: Request) -> tuple[Run, int]:
    """The run that a request comes to, found or made, trained to its end; and its exit code."""
    for note in asked.notes:
        _say(note, asked.run.quiet)
    facts = facts_of(asked)
    run = find_run(asked, facts)
    if run is not None and run.status() == "done":
        _say(f"{run.folder} has this recipe and is done (--again for a new run)", asked.run.quiet)
        return run, DONE
    if run is None:
        run = set_up(asked, facts, None)
        with run.held("launch"):
            return run, launch(run, asked.run)
    _say(f"going on with {run.folder} ({run.status()})", asked.run.quiet)
    with run.held("launch"):
        run.refuse_if_training()
        return run, launch(set_up(asked, facts, run), asked.run)


def resume(words: Sequence[str]) -> int:
    """Usage: resume RUN [plan flags, run flags, --data PATH]. The recipe stays, on any machine."""
    positional, flags = split(words)
    if len(positional) != 1:
        raise UserError("resume: give the folder of one run, as in: resume runs/causal-lm-0123456789ab")
    run = Run.open(positional[0])
    data, known = flags.pop("data", None), opt.flags_of(RunOptions, "run")
    answer = own_flags({k: flags.pop(k) for k in ("json",) if k in flags}, AnswerOptions, "resume")
    plan = own_flags({k: v for k, v in flags.items() if k not in known}, PlanOptions, "resume")
    options = stored_options(run, {k: v for k, v in flags.items() if k in known})
    if run.status() == "done":
        _say(f"{run.folder} is done", options.quiet)
        return _answered(run, DONE, answer)
    with run.held("launch"):
        run.refuse_if_training()
        recipe = run.recipe()
        relocate(run, recipe, data)
        write_plan(run, make_plan_here(recipe, run.facts(), plan))
        return _answered(run, launch(run, options), answer)


def launch(run: Run, options: RunOptions) -> int:
    """Train by the run's plan and answer with the run's own exit code."""
    files.write_json(run.folder / "run.json", opt.as_dict(options))
    return train(run, in_place if run.plan().processes == 1 else in_children)


def _answered(run: Run, code: int, answer: AnswerOptions) -> int:
    if answer.json:
        print(json.dumps(run.summary() or {"status": run.status()}, ensure_ascii=False))
    elif code == DONE:
        _print_outcome(run)
    return code


def _print_outcome(run: Run) -> None:
    summary = run.summary() or {}
    figures = shown(summary.get("metrics", {}), ".4g")
    status, steps, split = (summary.get(k) for k in ("status", "steps", "split"))
    print(f"{run.folder}: {status}, {steps} steps" + (f", {split}: {figures}" if split else ""))


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        print(text, file=sys.stderr)
