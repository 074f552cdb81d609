"""`auto` and `resume`: plan, write the run folder, then run in place or start accelerate."""

from __future__ import annotations

import json
from collections.abc import Sequence

from isobatch.core.errors import DONE, UserError
from isobatch.core.flags import flags_of
from isobatch.core.plan import PlanOptions
from isobatch.engine.registry import CHAINS
from isobatch.engine.runs.console import format_metrics
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.launch.local.arguments import command_options, parse_request, split_words, task_name
from isobatch.launch.local.launch_run import AnswerOptions, find_or_train, launch_run, print_unless_quiet
from isobatch.launch.local.run_setup import locate_data, options_of_run, plan_for_this_machine, store_plan


def auto(words: Sequence[str]) -> int:
    """Usage: auto --task TASK [flags]. Without --data the task's demo runs. Try: auto --task causal-lm

    --task compress is a chain: classifier, pruning, qat, and the report.
    """
    if task_name(words) in CHAINS:
        from isobatch.launch.commands.compress import compress

        return compress(words)
    asked = parse_request(words, "auto", AnswerOptions)
    answer = AnswerOptions(**asked.extra)
    if answer.seeds > 1:
        from isobatch.launch.commands.seeds import train_seeds

        return train_seeds(asked, answer.seeds, answer.json)
    run, verdict = find_or_train(asked)
    return _answered(run, verdict.code, answer)


def resume(words: Sequence[str]) -> int:
    """Usage: resume RUN [plan flags, run flags, --data PATH]. The recipe stays, on any machine."""
    positional, flags = split_words(words)
    if len(positional) != 1:
        raise UserError("resume: give the folder of one run, as in: resume runs/causal-lm-0123456789ab")
    run = RunFolder.open(positional[0])
    data, known = flags.pop("data", None), flags_of(RunOptions, "run")
    answer = command_options({k: flags.pop(k) for k in ("json",) if k in flags}, AnswerOptions, "resume")
    plan = command_options({k: v for k, v in flags.items() if k not in known}, PlanOptions, "resume")
    options = options_of_run(run, {k: v for k, v in flags.items() if k in known})
    if run.status() == "done":
        print_unless_quiet(f"{run.folder} is done", options.quiet)
        return _answered(run, DONE, answer)
    with run.lock("launch"):
        run.refuse_if_training()
        recipe = run.recipe
        locate_data(run, recipe, data)
        store_plan(run, plan_for_this_machine(recipe, run.facts, plan))
        return _answered(run, launch_run(run, options).code, answer)


def _answered(run: RunFolder, code: int, answer: AnswerOptions) -> int:
    if answer.json:
        print(json.dumps(run.summary() or {"status": run.status()}, ensure_ascii=False))
    elif code == DONE:
        _print_outcome(run)
    return code


def _print_outcome(run: RunFolder) -> None:
    summary = run.summary() or {}
    figures = format_metrics(summary.get("metrics", {}), ".4g")
    status, steps, split = (summary.get(k) for k in ("status", "steps", "split"))
    print(f"{run.folder}: {status}, {steps} steps" + (f", {split}: {figures}" if split else ""))
