"""`describe`: lists of workloads, of their flags and of those of commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isobatch.core.errors import UserError
from isobatch.core.flags import Flag, describe_type, flags_of, spelling, to_json_value, value_text
from isobatch.core.package import table_beside
from isobatch.core.plan import PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.core.terminal import fitted, print_answer, rendered
from isobatch.engine.registry import CHAINS, TASKS, LoadedWorkload, task_word, workload
from isobatch.engine.runs.run_options import RunOptions
from isobatch.engine.task_files import is_task_file
from isobatch.launch.cli import ALIASES, COMMANDS, find_command, no_command
from isobatch.launch.local.arguments import BatchScaling, FlagFiles, read_command
from isobatch.launch.local.options import ListingOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class DescribeOptions(ListingOptions):
    """Flags of `describe`."""

    all: bool = False
    """Every flag of a task, not only those that people set."""


USUAL = table_beside(__file__, "usual_flags")
"""Task -> the names of those of its own flags that people set; `every`: of the flags that all tasks have."""
OF_A_RECIPE = ("auto", "plan", "profile", "tune", "prepare", "submit")
"""Commands that take the flags of a task as well."""


def describe(words: Sequence[str]) -> int:
    """Usage: describe [TASK | COMMAND] [--all] [--json]: flags with type, default, meaning; of a task
    those that people set, or --all. Without a name, the tasks there are.
    """
    # `describe --task X`, as it is typed elsewhere, is `describe X`.
    named = [word for word in words if word != "--task"]
    positional, options = read_command(named, DescribeOptions, "describe")
    name = " ".join(positional)
    shown: list[str] = []
    if name in ALIASES:
        name, meant = find_command([name])
        name = meant[1] if meant[:1] == ["--task"] else name
    if not name:
        lines = [f"{name:<14}{entry.summary}" for name, entry in TASKS.items()]
        lines += [f"{name:<14}{', '.join(stages)}, report" for name, stages in CHAINS.items()]
        lines.append(f"{'./file.py:Class':<14} your own (see the README)")
        summaries = {name: entry.summary for name, entry in TASKS.items()}
        return print_answer(summaries, "\n".join(lines), options.json)
    if name in COMMANDS:
        groups = {name: [_flag(flag, {}) for flag in flags_of(COMMANDS[name].options).values()]}
        of_task = f"and the flags of its task: describe TASK (`{name} --task TASK`)"
        notes = [of_task] if name.split()[0] in OF_A_RECIPE else []
    elif name in CHAINS:
        from isobatch.launch.commands.compress import CompressOptions

        groups = {f"the chain {name}": [_flag(flag, {}) for flag in flags_of(CompressOptions).values()]}
        notes = [f"auto --task {name} --data FOLDER|FILE --model MODEL --fast takes those of its stages too:"]
        notes.append(", ".join(f"describe {stage}" for stage in CHAINS[name]))
    elif task_word(name) not in TASKS and not is_task_file(name):
        raise UserError(no_command(name))
    else:
        chosen, notes = workload(name), []
        defaults = dict(chosen.task.defaults)
        groups = {t: [_flag(f, defaults) for f in found.values()] for t, found in task_flags(name).items()}
        for preset, values in chosen.task.presets.items():
            said = (f"{flag.replace('_', '-')} {value_text(value)}" for flag, value in values.items())
            notes.append(f"--preset {preset}: {', '.join(said)}")
        shown = [] if options.all else usual_flags(chosen)
    told = f"{len(shown)} of {sum(map(len, groups.values()))} flags; all of them: describe {name} --all"
    rows = {title: [r for r in own if not shown or r["flag"] in shown] for title, own in groups.items()}
    notes_shown = [told] if shown else notes
    text = fitted(rendered(__file__, "describe", groups=rows, notes=notes_shown, text=value_text))
    return print_answer({"task": name, "flags": groups, "notes": notes}, text, options.json)


def usual_flags(chosen: LoadedWorkload) -> list[str]:
    """The flags of a task that people set, as they are typed; of a user's own task, its first ten."""
    own = USUAL[chosen.name].split() if chosen.name in USUAL else [*chosen.option_flags()][:10]
    return [spelling(name) for name in [*USUAL["every"].split(), *own]]


def task_flags(name: str) -> dict[str, dict[str, Flag]]:
    """Title -> the flags that `auto --task NAME` takes; without a name those that all tasks have."""
    own = workload(name) if name else None
    return {
        "recipe: what is learnt": flags_of(Recipe) | flags_of(BatchScaling) | flags_of(FlagFiles),
        **({f"recipe of {own.name}": own.option_flags()} if own else {}),
        "plan: how fast": flags_of(PlanOptions),
        "run: where it is kept": flags_of(RunOptions),
    }


def _flag(flag: Flag, defaults: dict[str, Any]) -> dict[str, Any]:
    value = defaults.get(flag.name, flag.default)
    value = "required" if value is dataclasses.MISSING else to_json_value(value)
    value = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    return {"flag": flag.spelling, "type": describe_type(flag.kind), "default": value, "help": flag.help}
