"""`completion`: what Tab completes in a shell, from the table of commands and the dataclasses of flags."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import get_args

from isobatch.core.errors import DONE, UserError
from isobatch.core.flags import NoOptions, choices_of, flags_of
from isobatch.core.package import table_beside
from isobatch.launch.cli import COMMANDS, GROUPS, find_command
from isobatch.launch.local.arguments import read_command

SCRIPTS: dict[str, str] = table_beside(__file__, "completion")
"""Shell -> the script that asks `isobatch complete` for the words that fit."""


def completion(words: Sequence[str]) -> int:
    """Usage: completion bash|zsh|fish: a script for the shell. To keep it, end ~/.bashrc or ~/.zshrc
    with eval "$(isobatch completion bash)"; fish: write it to ~/.config/fish/completions/isobatch.fish
    """
    named, _ = read_command(words, NoOptions, "completion")
    if len(named) != 1 or named[0] not in SCRIPTS:
        raise UserError(f"completion: give one shell: {', '.join(SCRIPTS)}")
    print(SCRIPTS[named[0]].strip())
    return DONE


def complete(words: Sequence[str]) -> int:
    """Print the words that fit: `words` are those behind `isobatch`, the last one begun or empty."""
    *before, begun = words or [""]
    print("\n".join(word for word in candidates(before, begun) if word.startswith(begun)))
    return DONE


def candidates(before: Sequence[str], begun: str) -> list[str]:
    """What may stand behind the words `before`; nothing where that is a file, a run or any text."""
    from isobatch.engine.registry import CHAINS, TASKS

    typed, tasks = " ".join(before), [*TASKS, *CHAINS]
    nexts = {n.removeprefix(typed).split()[0] for n in COMMANDS if n.startswith(f"{typed} ".lstrip())}
    if typed in ("help", "describe", "completion"):
        return list(SCRIPTS) if typed == "completion" else [*tasks, *COMMANDS, *GROUPS]
    if not typed or (nexts and not begun.startswith("-")) or nexts == {"--to"}:
        return sorted(nexts)
    from isobatch.launch.commands.describe import OF_A_RECIPE, task_flags

    name, rest = find_command(before)
    task = next((after for word, after in itertools.pairwise(rest) if word == "--task"), "")
    of_task = task_flags(task).values() if name.split()[0] in OF_A_RECIPE else ()
    flags = dict(itertools.chain(*(group.items() for group in (*of_task, flags_of(COMMANDS[name].options)))))
    flag = flags.get(before[-1].removeprefix("--").replace("-", "_"))
    if flag and not begun.startswith("-"):
        kinds = (flag.kind, *get_args(flag.kind))
        return tasks if flag.name == "task" else [str(word) for kind in kinds for word in choices_of(kind)]
    return [flag.spelling for flag in flags.values()] if begun.startswith("-") else []
