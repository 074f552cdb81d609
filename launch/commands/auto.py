"""`auto` and `resume`: plan and train a run on this machine, and say its end (`RUN: done, N steps`)."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from isobatch.core.errors import DONE, UserError
from isobatch.core.flags import flags_of, spelling
from isobatch.core.measures import printable
from isobatch.core.plan import PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.core.terminal import format_metrics, on_screen, print_answer, print_lines, table
from isobatch.data.base import Data
from isobatch.data.streaming.store import refuse_secrets
from isobatch.engine import consent
from isobatch.engine.optimization.left_out import ASKED, leave_out
from isobatch.engine.registry import CHAINS, workload_of
from isobatch.engine.runs.run_folder import RunFolder, refuse_links
from isobatch.engine.runs.run_options import RunOptions
from isobatch.engine.trainer.decay import decayed
from isobatch.launch.clusters.cluster import refuse_if_in_a_job
from isobatch.launch.local import launch_run, run_setup
from isobatch.launch.local import words as flag_words
from isobatch.launch.local.arguments import parse_sweep, request_text, sort_flags, split_words, task_name
from isobatch.launch.local.options import AutoOptions, ResumeOptions
from isobatch.launch.report.tables import table_beside
from isobatch.models.protocols import OpensItemLists, PredictsBatches


def auto(words: Sequence[str]) -> int:
    """Usage: auto --task TASK [flags]. Without --data the task's demo runs. Try: auto --task causal-lm

    --task compress is a chain: classifier, pruning, qat, and the report. Try: auto --task compress
    --data reviews/ --model distilbert/distilbert-base-uncased --fast
    """
    if task_name(words) in CHAINS:
        from isobatch.launch.commands.compress import compress

        return compress(words)
    points = parse_sweep(words, "auto", AutoOptions)
    request = points[0][0]
    options = AutoOptions(**request.extra)
    if len(points) > 1 and (options.dump_config or options.dry_run):
        raise UserError("--dump-config and --dry-run are about one run; give each flag one value")
    if options.dump_config:
        print(request_text(request))
        return DONE
    if options.dry_run:
        from isobatch.launch.commands.plan import PlanCommandOptions, show_plan

        return show_plan(request, PlanCommandOptions(json=options.json))
    if len(points) > 1 or options.halving:
        from isobatch.launch.sweeps.sweep import train_sweep

        return train_sweep(points, options)
    run, verdict = launch_run.find_or_train(request, trust=options.trust)
    return _print_result(run, verdict.code, options.json, request.run.quiet)


def resume(words: Sequence[str]) -> int:
    """Usage: resume RUN [plan flags, run flags, --data PATH] [--skip-step 1200-1203] [--decay]

    The recipe stays, on any machine. RUN may be the URL of a copy: resume s3://bucket/prefix/RUN
    """
    positional, flags = split_words(words)
    named = run_setup.one_run(positional, "resume")
    learnt = {*flags_of(Recipe), *({} if "://" in named else RunFolder.open(named).recipe.options)}
    learnt -= {"data", *flags_of(ResumeOptions)}
    typed = flag_words.translate(flags, learnt).flags.items()
    if other := " ".join(f"{spelling(name)} {value}" for name, value in typed if name in learnt):
        anew = f"`auto --like {named} {other}` trains a new run, --from in place of --like with its weights"
        raise UserError(f"resume: {other}: a run keeps its recipe: {anew}")
    kinds = {"resume": ResumeOptions, "plan": PlanOptions, "run": RunOptions}
    groups = {name: flags_of(kind) for name, kind in kinds.items()}
    groups["recipe"] = {"data": flags_of(Recipe)["data"]}
    values, notes = sort_flags(flags, groups, "resume")
    options = ResumeOptions(**values["resume"])
    run = _here(named, values["run"], options.trust)
    run_options = dataclasses.replace(run.options(), stop_at=None, **values["run"])
    print_lines(*notes, quiet=run_options.quiet)
    if options.decay:
        consent.require(run.recipe, run.folder, options.trust, run_options)
        run_setup.locate_data(run, values["recipe"].get("data"))
        run = decayed(run, values["run"].get("name"))
        consent.remember(run.recipe, run_options)
        run_options = dataclasses.replace(run_options, name=run.folder.name)
    if run.status() == "done":
        if options.skip_step is not None:
            launch_run.steps_to_skip(run, options.skip_step)
            raise UserError(f"--skip-step {options.skip_step}: {run.folder} is done: train it anew without")
        if (data := values["recipe"].get("data", run.recipe.data)) != run.recipe.data:
            way = f"`auto --from {named} --data {data}` trains on with its weights"
            raise UserError(f"resume: --data {data}: {run.folder} is done, and reads no more data: {way}")
        unread = (values["plan"] | values["run"]).keys() - {"out", "debug"}
        ignored = f": {', '.join(map(spelling, sorted(unread)))} had no effect" if unread else ""
        print_lines(f"{run.folder} is done{ignored}", quiet=run_options.quiet)
        return _print_result(run, DONE, options.json, run_options.quiet)
    refuse_if_in_a_job(run)
    consent.require(run.recipe, run.folder, options.trust, run_options)
    with run.lock("launch"):
        run.refuse_if_training()
        recipe = run.recipe
        if options.skip_step is not None:
            leave_out(run, *launch_run.steps_to_skip(run, options.skip_step), ASKED)
        run_setup.locate_data(run, values["recipe"].get("data"), mend=True)
        asked = workload_of(recipe).plan_options(recipe.preset, values["plan"])
        plan = run_setup.plan_for_training(recipe, run.facts, asked, run_options.quiet, run, None)
        run_setup.store_plan(run, plan)
        code = launch_run.launch_run(run, run_options).code
        return _print_result(run, code, options.json, run_options.quiet)


def _here(named: str, typed: Mapping[str, Any], trust: bool) -> RunFolder:
    """The run, fetched from its remote copy where it is named by URL, or has lost its checkpoints here.

    `typed`: flags of the run. Raises UserError where an address stands in the run's own file alone.
    """
    from isobatch.engine.checkpointing.remote_copy import fetch_run

    if "://" in named:
        refuse_secrets(named, "resume", "logs")
        url, folder = named, Path(typed.get("out", RunOptions().out)).expanduser() / PurePosixPath(named).name
        if folder.is_dir():
            refuse_links(folder)
    else:
        run = RunFolder.open(named)
        folder, options = run.folder.resolve(), dataclasses.replace(run.options(), **typed)
        is_here = any(run.checkpoints.glob("[!.]*/index.json"))
        _remember_typed(run, typed)
        if options.checkpoint_copy is None or is_here or run.status() == "done":
            return run
        consent.require(run.recipe, run.folder, trust, options)
        url = f"{options.checkpoint_copy.rstrip('/')}/{folder.name}"
    before = RunFolder(folder) if folder.is_dir() else None
    if before is not None and before.status() == "done":
        return before
    if before is not None:
        before.refuse_if_training()
    run = RunFolder.open(fetch_run(url, folder.parent, before.identity if before else None))
    copy = run.options().checkpoint_copy
    if copy and named.rstrip("/").rpartition("/")[0] == copy.rstrip("/"):
        typed = {"checkpoint_copy": copy, **typed}
    _remember_typed(run, typed)
    return run


def _remember_typed(run: RunFolder, typed: Mapping[str, Any]) -> None:
    """Its hooks and where it sends, as far as the user has typed that."""
    named = {name: typed[name] for name in ("checkpoint_copy", "tracker", "hook") if name in typed}
    consent.remember_options(run.recipe, RunOptions(**named))


def _print_result(run: RunFolder, code: int, as_json: bool, quiet: bool) -> int:
    if as_json:
        print_answer(run.summary() or {"status": run.status()}, "", as_json=True)
    elif code == DONE:
        print_outcome(run)
    if code == DONE:
        print_lines("next:", *next_lines(run), quiet=quiet)
    return code


def next_lines(run: RunFolder) -> list[str]:
    """Commands to type next, as the run's task names them; of new rows first where the task reads such."""
    task, data = workload_of(run.recipe).make(run.recipe)
    given, commands = run.recipe.data or "demo", [*task.follow_ups]
    reads = isinstance(task, PredictsBatches) and type(data).read_rows is not Data.read_rows
    if reads and Path(given).is_file():
        commands.insert(0, f"predict {{run}} --file {shlex.quote(given)}")
    metrics = (run.summary() or {}).get("metrics", {})
    named = {"run": shlex.quote(str(run.folder))}
    if isinstance(task, OpensItemLists):
        named["by"] = f" --by {better}" if (better := task.lists_by(metrics)) else ""
        named["live"] = task.live_flags(named["run"], metrics, run.exported.rpartition("-")[2])
    told = [words.format(**named) for words in commands[:3]]
    more = f" --data {shlex.quote(given)}"
    return [f"  isobatch {words}{more if words.startswith('auto') else ''}" for words in told]


def print_outcome(run: RunFolder) -> None:
    """Status, steps and metrics; those of other models, such as a baseline, in a table beside its own."""
    summary = run.summary() or {}
    metrics = summary.get("metrics", {})
    in_files_alone = ("word_perplexity", *(f"_{group}" for group in ("head", "middle", "tail", "warm")))
    shown = {name: value for name, value in metrics.items() if not name.endswith(in_files_alone)}
    beside, rest = table_beside(shown, str(summary.get("task")))
    figures = format_metrics(rest, ".4g")
    status, steps, split = (summary.get(k) for k in ("status", "steps", "split"))
    measured = f", {split}: {figures}" if split else ", nothing was measured" if status == "done" else ""
    print(on_screen(printable(f"{run.folder}: {status}, {steps} steps{measured}")))
    if beside:
        print(printable(table(beside)))
