"""The commands. Each is a function of the words after its name that returns an exit code."""

from __future__ import annotations

import ast
import csv
import io
import itertools
import json
import os
import platform
import shlex
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from isobatch.core.errors import BUG, DONE, INTERRUPTED, STOPPED, UserCodeError, UserError
from isobatch.core.extras import has
from isobatch.core.package import ROOT, load
from isobatch.core.terminal import doing, fitted, print_lines, start_status, stopped_status
from isobatch.engine.distributed.device_memory import allocator_settings
from isobatch.engine.distributed.stop_signals import TerminatedError, end_early_on_signals
from isobatch.engine.runs.classify_errors import classify


class Command(NamedTuple):
    """A command: its module in launch/, its function there, the dataclass of its flags, what it is for."""

    module: str
    function: str
    options_name: str = ""
    """Without its ending `Options`; with another module before a colon where it is not the function's."""
    help: str = ""
    group: str = ""
    """Under which heading the help lists it: see GROUPS."""

    def load(self) -> Callable[[Sequence[str]], int]:
        """Its function of the words behind its name, which returns an exit code; imports the module."""
        return load(f"launch.{self.module}:{self.function}")

    @property
    def usage(self) -> str:
        """What its function says of itself; imports nothing."""
        file = ROOT / "launch" / f"{self.module.replace('.', '/')}.py"
        body = ast.parse(file.read_text(encoding="utf-8")).body
        functions = [node for node in body if isinstance(node, ast.FunctionDef)]
        return next(ast.get_docstring(node) or "" for node in functions if node.name == self.function)

    @property
    def options(self) -> type:
        """The dataclass of its own flags."""
        module, _, name = self.options_name.rpartition(":")
        return load(f"launch.{module or self.module}:{name}Options")


def _rows(name: str) -> list[list[str]]:
    return list(csv.reader(Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()[1:]))


_LISTED = {name: Command(*values) for name, *values in _rows("commands.csv")}
COMMANDS = {name: command for name, command in _LISTED.items() if command.help}
"""Name -> command; the help lists them in this order."""
INTERNAL = {name: command for name, command in _LISTED.items() if not command.help}
"""Commands that the sbatch script, its steps, pods, `report` and shells start."""
GROUPS = list(dict.fromkeys(command.group for command in COMMANDS.values()))
"""Headings of commands; those that usage.jinja does not show have a page of the help to themselves."""
_WORDS = [(word, command, said) for command, words, said in _rows("aliases.csv") for word in words.split()]
ALIASES = {word: command for word, command, _ in _WORDS}
"""Another word for a command -> the command."""
MEANT = {word: said for word, _, said in _WORDS if said}
"""Those of newcomers and other tools -> what is said before that which was understood."""
BEFORE_TORCH = {
    **{"GOMP_SPINCOUNT": "1000", "THP_MEM_ALLOC_ENABLE": "1", "KINETO_LOG_LEVEL": "6"},
    **allocator_settings(os.environ),
}
"""Environment variables that must be set before torch is imported; the user's own values stay.

OpenMP threads that wait soon sleep: with small operations 1.5 times faster than spinning beside another busy
program, and 1.3 times faster than sleeping at once without one. Large tensors lie in huge pages: with GPT-2's
vocabulary 1.6 times faster on a CPU, in less memory. On a GPU the allocator's segments grow.
torch's profiler says nothing on the terminal.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if words is None else words)
    if isinstance(sys.stdout, io.TextIOWrapper):  # where the locale is ASCII, as LC_ALL=C may be
        sys.stdout.reconfigure(errors="backslashreplace")
    os.environ.setdefault("ISOBATCH_STARTED", str(time.time()))
    os.environ.update({**BEFORE_TORCH, "TRANSFORMERS_VERBOSITY": "error", **os.environ})
    debug = "--debug" in arguments
    if not debug:
        warnings.filterwarnings("ignore", category=FutureWarning)  # of libraries, about each other
    return guarded(lambda: _run(arguments or ["--help"]), debug)


def _run(words: Sequence[str]) -> int:
    if words[0] in INTERNAL:
        return INTERNAL[words[0]].load()(words[1:])
    if words[0] in ("-h", "--help", "help"):
        return show_help(words[1:])
    if words[0] in ("-V", "-v", "--version", "version"):
        from importlib.metadata import version

        names = ("torch", "transformers", "accelerate")
        libraries = ", ".join(f"{one} {version(one)}" if has(one) else f"no {one}" for one in names)
        print(f"isobatch {version('isobatch')} ({libraries}, Python {platform.python_version()})")
        return DONE
    if unread := next((word for word in words if any("\ud800" <= c <= "\udfff" for c in word)), None):
        raise UserError(f"{unread}: this locale cannot read it; set LC_ALL=C.UTF-8")
    if any(word in ("-h", "--help") for word in words) or words[1:] == ["help"]:
        return show_help(words)
    name, rest = find_command(words)
    if words[0] in MEANT:
        print_lines(f"{words[0]}: {MEANT[words[0]]} isobatch {name} {shlex.join(rest)}")
    if name in ("auto", "resume"):
        end_early_on_signals()
    if "--quiet" not in words:
        start_status()
        doing(name)
    return COMMANDS[name].load()(rest)


def call(words: Sequence[str]) -> int:
    """Usage: call MODULE:FUNCTION JSON, in a process that `report` or `doctor` starts."""
    target, arguments = words
    print(json.dumps(load(target)(**json.loads(arguments))))
    return DONE


def show_help(topic: Sequence[str]) -> int:
    """The first page, the page of a group of commands, or the help of a command or a task."""
    asked = [word for word in topic if word not in ("-h", "--help", "help")]
    if not asked:
        page = Path(__file__).with_name("usage.jinja").read_text(encoding="utf-8")
        for group in GROUPS:
            page = page.replace(f"{{{{ {group} }}}}", _listed(group))
        print(fitted(page))
        return DONE
    name = " ".join(asked)
    if (parts := _listed(name)) and name not in (*COMMANDS, *ALIASES):
        print(fitted(f"{name}\n{parts}"))
        return DONE
    if asked[0] not in (*ALIASES, *(command.split()[0] for command in COMMANDS)):
        return COMMANDS["describe"].load()(asked)  # of a task
    name, rest = find_command(asked)
    about = f"isobatch {name}: {COMMANDS[name].help}\n\n{COMMANDS[name].usage}"
    print(fitted(f"{about}\n\n{parts}".strip()))
    task = next((b for a, b in itertools.pairwise(rest) if a == "--task"), None)
    return COMMANDS["describe"].load()([task or name, *({"--all", "--json"} & {*rest})])


def _listed(topic: str) -> str:
    """The commands of a group, and those that begin with a word."""
    found = {n: c for n, c in COMMANDS.items() if c.group == topic or n.startswith(f"{topic} ")}
    return "\n".join(f"  {name:<19}{command.help}" for name, command in found.items())


def find_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """(the command's name, the words behind it): `logs RUN` and `runs logs RUN` are one. Raises UserError."""
    first, rest = words[0], list(words[1:])
    if first == "submit":  # its --to may stand anywhere
        rest = [part for word in rest for part in (word.split("=") if word.startswith("--to=") else [word])]
        at = rest.index("--to") if "--to" in rest else 0
        rest = [*rest[at : at + 2], *rest[:at], *rest[at + 2 :]]
    found = [first, *rest]
    for length in (3, 2, 1):
        if (name := " ".join(found[:length])) in COMMANDS:
            return name, found[length:]
    if first in ALIASES:
        command, *flags = ALIASES[first].split(" --")
        typed = {word.partition("=")[0] for word in rest}  # the user's own flags come before
        meant = [f"--{flag}".split() for flag in flags if f"--{flag.split()[0]}" not in typed]
        return find_command([*command.split(), *itertools.chain(*meant), *rest])
    raise UserError(no_command(first))


def no_command(word: str) -> str:
    """Why a word is no command, with what may be meant."""
    from isobatch.core.flags import nearest_hint
    from isobatch.engine.registry import CHAINS, NOT_A_TASK, TASKS, task_word

    if parts := [name for name in COMMANDS if name.startswith(f"{word} ")]:
        return f"{word}: give one of {', '.join(parts)}"
    if word in NOT_A_TASK:
        return f"{word} {NOT_A_TASK[word]}"
    if (task := task_word(word)) in {*TASKS, *CHAINS}:
        return f"{word} is a task: isobatch auto --task {task}"
    if word.startswith("-") or Path(word).exists():
        return f"{word}: a command comes first, as in `isobatch auto --task TASK` or `isobatch report RUN`"
    return f"there is no command {word!r}{nearest_hint(word, [*COMMANDS, *ALIASES, *TASKS])}; see --help"


def guarded(action: Callable[[], int], debug: bool = False) -> int:
    """The exit code of an action; prints a known error in one line, a bug with its traceback."""
    try:
        with stopped_status():
            return action()
    except TerminatedError:
        print_lines("isobatch: stopped by a signal; what was saved before stands")
        return STOPPED
    except KeyboardInterrupt:
        print_lines("isobatch: interrupted; the same command goes on, or begins anew")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as caught:
        error = classify(caught)
        if error is None or debug:
            traceback.print_exc()
            return BUG if error is None else error.exit_code
        if isinstance(error, UserCodeError):
            sys.stderr.write(error.what)
        print_lines(f"isobatch: {' '.join(str(error).split())}")
        return error.exit_code
