"""`tasks`, `runs` and `describe`: lists of workloads, runs and flags."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.flags import Flag, flags_of, to_json_value
from isobatch.core.measures import printable
from isobatch.core.plan import PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.engine.registry import CHAINS, TASKS, workload
from isobatch.engine.runs.run_folder import RunFolder, list_runs
from isobatch.engine.runs.run_options import RunOptions
from isobatch.launch.local.arguments import BatchScaling, command_options, split_words
from isobatch.launch.slurm import client
from isobatch.launch.slurm.job_record import last_job_of

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class ListingOptions:
    """Flags of the listing commands."""

    json: bool = False
    """One JSON object on standard output."""
    out: str = "runs"
    """Folder that holds the runs."""


def tasks(words: Sequence[str]) -> int:
    """Usage: tasks [--json]"""
    options = command_options(split_words(words)[1], ListingOptions, "tasks")
    if options.json:
        print(atomic_files.json_text({name: entry.summary for name, entry in TASKS.items()}))
    else:
        print("\n".join(f"{name:<14}{entry.summary}" for name, entry in TASKS.items()))
        print("\n".join(f"{name:<14}{', '.join(stages)}, report" for name, stages in CHAINS.items()))
        print(f"{'./file.py:Class':<14} your own (see the README)")
    return 0


def runs(words: Sequence[str]) -> int:
    """Usage: runs [FOLDER] [--json]"""
    positional, flags = split_words(words)
    options = command_options(flags, ListingOptions, "runs")
    folder = Path(positional[0] if positional else options.out).expanduser()
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    rows = _with_job_states([_row_or_unreadable(run) for run in list_runs(folder)])
    if options.json:
        print(atomic_files.json_text({"runs": rows}))
        return 0
    for row in rows:
        loss = row["metrics"].get("loss")
        loss_text = f"  loss {loss:.4f}" if isinstance(loss, float | int) else ""
        job = f"  job {row['job']} {row['job_state']}".rstrip() if row["job"] else ""
        steps = str(row["steps"] or "-")
        print(printable(f"{row['folder']:<44}{row['status']:<12}{steps:>8} steps{loss_text}{job}"))
    if not rows:
        print(f"no runs in {folder}")
    return 0


def _row_or_unreadable(run: RunFolder) -> dict[str, Any]:
    """A run's row; one with status "unreadable" where its files are damaged, so that others are shown."""
    try:
        return _row(RunFolder.open(run.folder))
    except UserError as error:
        print(printable(f"isobatch: {error}"), file=sys.stderr)
        nothing: dict[str, Any] = {"task": None, "steps": None, "metrics": {}, "job": ""}
        return {"folder": str(run.folder), "status": "unreadable", **nothing}


def _row(run: RunFolder) -> dict[str, Any]:
    summary = run.summary() or {}
    metrics = summary.get("metrics")
    return {
        "folder": str(run.folder),
        "task": run.recipe.task,
        "status": run.status(),
        "steps": summary.get("steps"),
        "metrics": metrics if isinstance(metrics, dict) else {},
        "job": last_job_of(run),
    }


def _with_job_states(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the state of each run's last Slurm job; empty where Slurm does not know it."""
    states = client.job_states([row["job"] for row in rows if row["job"]])
    return [{**row, "job_state": states.get(row["job"], "")} for row in rows]


def describe(words: Sequence[str]) -> int:
    """Usage: describe TASK [--json]: every flag with type, default and meaning."""
    positional, flags = split_words(words)
    options = command_options(flags, ListingOptions, "describe")
    if len(positional) != 1:
        raise UserError("describe: name one task, as in: describe causal-lm (`tasks` lists them)")
    chosen = workload(positional[0])
    groups = {
        "recipe: what is learnt": flags_of(Recipe, "recipe") | flags_of(BatchScaling, "recipe"),
        f"recipe of {chosen.name}": chosen.option_flags(),
        "plan: how fast": flags_of(PlanOptions, "plan"),
        "run: where it is kept": flags_of(RunOptions, "run"),
    }
    defaults = dict(chosen.task.defaults)
    rows = {title: [_flag(f, defaults) for f in found.values()] for title, found in groups.items()}
    if options.json:
        print(atomic_files.json_text({"task": chosen.name, "flags": rows}, ensure_ascii=False))
        return 0
    for title, found in rows.items():
        print(f"\n{title}")
        for row in found:
            print(f"  {row['flag']:<28}{row['type']}, default {row['default']}\n{'':<30}{row['help']}")
    return 0


def _flag(flag: Flag, defaults: dict[str, Any]) -> dict[str, Any]:
    import dataclasses

    value = defaults.get(flag.name, flag.default)
    value = "required" if value is dataclasses.MISSING else to_json_value(value)
    value = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    return {"flag": flag.spelling, "type": flag.type_name, "default": value, "help": flag.help}
