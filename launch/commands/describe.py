"""`describe`: lists of workloads, of their flags and of those of commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isobatch.core.errors import UserError
from isobatch.core.flags import Flag, describe_type, flags_of, to_json_value, value_text
from isobatch.core.plan import PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.core.terminal import print_answer
from isobatch.engine.registry import CHAINS, TASKS, workload
from isobatch.engine.runs.run_options import RunOptions
from isobatch.launch.cli import ALIASES, COMMANDS, no_command
from isobatch.launch.local.arguments import BatchScaling, FlagFiles, read_command


@dataclass(frozen=True, kw_only=True, slots=True)
class ListingOptions:
    """The flag of commands that answer, and read no run's code."""

    json: bool = False
    """One JSON object on standard output."""


OF_A_RECIPE = ("auto", "plan", "profile", "tune", "prepare", "submit")
"""Commands that take the flags of a task as well."""


def describe(words: Sequence[str]) -> int:
    """Usage: describe [TASK | COMMAND] [--json]: every flag with type, default, meaning;
    without a name, the tasks there are.
    """
    positional, options = read_command(words, ListingOptions, "describe")
    name = " ".join(positional)
    name = ALIASES.get(name, name).removesuffix(" --png")
    if not name:
        return _print_tasks(options.json)
    if name in COMMANDS:
        groups = {name: [_flag(flag, {}) for flag in flags_of(COMMANDS[name].options).values()]}
        of_task = f"and the flags of its task: describe TASK (`{name} --task TASK`)"
        notes = [of_task] if name.split()[0] in OF_A_RECIPE else []
    elif name in CHAINS:
        from isobatch.launch.commands.compress import CompressOptions

        groups = {f"the chain {name}": [_flag(flag, {}) for flag in flags_of(CompressOptions).values()]}
        notes = [f"the flags of its stages: {', '.join(f'describe {s}' for s in CHAINS[name])}"]
    elif any(command.startswith(f"{name} ") for command in COMMANDS):
        raise UserError(no_command(name))
    else:
        groups, notes = _task_groups(name)
    lines = []
    for title, found in groups.items():
        lines += ["", title]
        for row in found:
            default = "" if row["default"] is None else f", default {row['default']}"
            lines.append(f"  {row['flag']:<28} {row['type']}{default}\n{'':<31}{row['help']}")
    text = "\n".join([*lines, "", *notes])
    return print_answer({"task": name, "flags": groups, "notes": notes}, text, options.json)


Groups = dict[str, list[dict[str, Any]]]


def _task_groups(name: str) -> tuple[Groups, list[str]]:
    """Title -> rows of a task's flags, and its presets in words."""
    chosen = workload(name)
    groups = {
        "recipe: what is learnt": flags_of(Recipe) | flags_of(BatchScaling) | flags_of(FlagFiles),
        f"recipe of {chosen.name}": chosen.option_flags(),
        "plan: how fast": flags_of(PlanOptions),
        "run: where it is kept": flags_of(RunOptions),
    }
    defaults = dict(chosen.task.defaults)
    rows = {title: [_flag(f, defaults) for f in found.values()] for title, found in groups.items()}
    notes = []
    for preset, values in chosen.task.presets.items():
        said = (f"{flag.replace('_', '-')} {value_text(value)}" for flag, value in values.items())
        notes.append(f"--preset {preset}: {', '.join(said)}")
    return rows, notes


def _print_tasks(as_json: bool) -> int:
    lines = [f"{name:<14}{entry.summary}" for name, entry in TASKS.items()]
    lines += [f"{name:<14}{', '.join(stages)}, report" for name, stages in CHAINS.items()]
    lines.append(f"{'./file.py:Class':<14} your own (see the README)")
    return print_answer({name: entry.summary for name, entry in TASKS.items()}, "\n".join(lines), as_json)


def _flag(flag: Flag, defaults: dict[str, Any]) -> dict[str, Any]:
    value = defaults.get(flag.name, flag.default)
    value = "required" if value is dataclasses.MISSING else to_json_value(value)
    value = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    return {"flag": flag.spelling, "type": describe_type(flag.kind), "default": value, "help": flag.help}
