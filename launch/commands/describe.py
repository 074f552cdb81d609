"""`tasks` and `describe`: lists of workloads and of flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.flags import Flag, flags_of, to_json_value
from isobatch.core.plan import PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.engine.registry import CHAINS, TASKS, workload
from isobatch.engine.runs.run_options import RunOptions
from isobatch.launch.local.arguments import BatchScaling, FlagFiles, command_options, split_words

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class ListingOptions:
    """Flags of the listing commands."""

    json: bool = False
    """One JSON object on standard output."""


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


def describe(words: Sequence[str]) -> int:
    """Usage: describe TASK [--json]: every flag with type, default and meaning."""
    positional, flags = split_words(words)
    options = command_options(flags, ListingOptions, "describe")
    if len(positional) != 1:
        raise UserError("describe: name one task, as in: describe causal-lm (`tasks` lists them)")
    chosen = workload(positional[0])
    groups = {
        "recipe: what is learnt": flags_of(Recipe, "recipe")
        | flags_of(BatchScaling, "recipe")
        | flags_of(FlagFiles, "recipe"),
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
