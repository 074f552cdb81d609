"""`auto` and `resume`: plan and train a run on this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from isobatch.core.errors import DONE, UserError
from isobatch.core.flags import flags_of
from isobatch.core.plan import PlanOptions
from isobatch.engine.registry import CHAINS
from isobatch.engine.runs.console import format_metrics
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.launch.local.arguments import command_options, parse_request, split_words, task_name
from isobatch.launch.local.launch_run import AutoOptions, find_or_train, launch_run, print_unless_quiet
from isobatch.launch.local.run_setup import locate_data, options_of_run, plan_for_this_machine, store_plan

if TYPE_CHECKING:
    from collections.abc import Sequence


def auto(words: Sequence[str]) -> int:
    """Usage: auto --task TASK [flags]. Without --data the task's demo runs. Try: auto --task causal-lm

    --task compress is a chain: classifier, pruning, qat, and the report.
    """
    if task_name(words) in CHAINS:
        from isobatch.launch.commands.compress import compress

        return compress(words)
    request = parse_request(words, "auto", AutoOptions)
    options = AutoOptions(**request.extra)
    if options.seeds > 1:
        from isobatch.launch.commands.seeds import train_seeds

        return train_seeds(request, options.seeds, options.json)
    run, verdict = find_or_train(request)
    return _print_result(run, verdict.code, options)


def resume(words: Sequence[str]) -> int:
    """Usage: resume RUN [plan flags, run flags, --data PATH]. The recipe stays, on any machine."""
    positional, flags = split_words(words)
    if len(positional) != 1:
        raise UserError("resume: give the folder of one run, as in: resume runs/causal-lm-0123456789ab")
    run = RunFolder.open(positional[0])
    data, known = flags.pop("data", None), flags_of(RunOptions, "run")
    options = command_options({k: flags.pop(k) for k in ("json",) if k in flags}, AutoOptions, "resume")
    plan = command_options({k: v for k, v in flags.items() if k not in known}, PlanOptions, "resume")
    run_options = options_of_run(run, {k: v for k, v in flags.items() if k in known})
    if run.status() == "done":
        print_unless_quiet(f"{run.folder} is done", run_options.quiet)
        return _print_result(run, DONE, options)
    with run.lock("launch"):
        run.refuse_if_training()
        recipe = run.recipe
        locate_data(run, recipe, data)
        store_plan(run, plan_for_this_machine(recipe, run.facts, plan))
        return _print_result(run, launch_run(run, run_options).code, options)


def _print_result(run: RunFolder, code: int, options: AutoOptions) -> int:
    if options.json:
        print(json.dumps(run.summary() or {"status": run.status()}, ensure_ascii=False))
    elif code == DONE:
        print_outcome(run)
    return code


def print_outcome(run: RunFolder) -> None:
    """One line: status, steps and metrics."""
    summary = run.summary() or {}
    figures = format_metrics(summary.get("metrics", {}), ".4g")
    status, steps, split = (summary.get(k) for k in ("status", "steps", "split"))
    print(f"{run.folder}: {status}, {steps} steps" + (f", {split}: {figures}" if split else ""))
