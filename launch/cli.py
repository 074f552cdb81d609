"""The commands. Each is a function of the words after its name that returns an exit code."""

from __future__ import annotations

import importlib
import io
import itertools
import os
import platform
import sys
import time
import traceback
import warnings
from importlib.metadata import version
from typing import TYPE_CHECKING

from isobatch.core.errors import BUG, INTERRUPTED, STOPPED, WRONG_INPUT, UserCodeError
from isobatch.core.measures import printable
from isobatch.core.package import as_typed
from isobatch.core.terminal.status import doing, start_status, stopped_status
from isobatch.engine.distributed.device_memory import allocator_settings
from isobatch.engine.distributed.stop_signals import TerminatedError, end_early_on_signals
from isobatch.engine.runs.classify_errors import classify

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COMMANDS = {
    "auto": (
        "commands.auto:auto",
        "plan for this machine, train, evaluate, export (also spelt train)",
    ),
    "plan": (
        "commands.plan:plan",
        "show the plan and its reasons, for this machine or another; trains nothing",
    ),
    "profile": (
        "measuring.profile:profile",
        "where a step's time and memory go, and what is worth changing, tried here",
    ),
    "tune": (
        "measuring.tune:tune",
        "what each speed-up is worth on this machine, measured; keeps the plan's best choices",
    ),
    "prepare": ("commands.plan:prepare", "fetch, clean, tokenize and measure the data, once"),
    "resume": ("commands.auto:resume", "go on with a run on this machine, whatever it is"),
    "slurm": (
        "clusters.slurm.command:slurm",
        "print, or --submit, a Slurm job that trains until done",
    ),
    "k8s": (
        "clusters.kubernetes.command:k8s",
        "print, or --submit, the manifest of a Kubernetes job that trains until done",
    ),
    "ray": (
        "clusters.ray.command:ray",
        "print, or --submit, a script that trains on a Ray cluster until done",
    ),
    "verify": (
        "commands.verify:verify",
        "redo logged steps under another cut and compare; exit 3 on a difference",
    ),
    "replay": (
        "forensics.replay:replay",
        "one step of a run again: losses by sample, the first module with a NaN, gradients",
    ),
    "seen": (
        "forensics.seen:seen",
        "which steps of a run saw a row or a text of its data, or which rows a step saw",
    ),
    "receipt": (
        "forensics.receipt:receipt",
        "a small file about a finished run that somebody else can check; --sign signs it",
    ),
    "audit": ("forensics.audit:audit", "check a receipt against data, a run and steps made again; exit 3"),
    "evaluate": (
        "commands.evaluate:evaluate",
        "metrics of a finished run on its held-out data",
    ),
    "export": ("commands.export:export", "a finished model in other forms, each checked"),
    "inspect": (
        "commands.inspect:inspect",
        "what a run is that somebody sent, and what code it would execute; executes none",
    ),
    "report": (
        "report.command:report",
        "models side by side: accuracy, size and speed, measured here",
    ),
    "plots": ("report.plots:plots", "the figures of a run as PNG files, also while it trains"),
    "generate": (
        "commands.generate:generate",
        "continue a prompt with a trained language model",
    ),
    "chat": ("commands.chat:chat", "talk with a model that was trained on conversations"),
    "predict": (
        "predicting.command:predict",
        "what a finished model says of texts, or of the rows of a file",
    ),
    "serve": ("serving.command:serve", "try a finished model over HTTP; language models as OpenAI's API"),
    "recommend": (
        "predicting.recommend:recommend",
        "the best items for a user, or for all of them, by a trained recommender",
    ),
    "reconstruct": ("commands.latent:reconstruct", "a text through the latent vector of a VAE and back"),
    "interpolate": ("commands.latent:interpolate", "texts between two texts, by a VAE"),
    "sample": ("commands.latent:sample", "texts from the prior of a VAE"),
    "doctor": (
        "doctor.command:doctor",
        "what is wrong with this machine, or why a run failed or hangs; exit 3 where something is broken",
    ),
    "tasks": ("commands.describe:tasks", "the workloads there are"),
    "runs": ("control.runs:runs", "the runs in a folder: state, progress, Slurm jobs"),
    "compare": ("control.compare:compare", "runs side by side: what differs, and what they came to"),
    "diff": (
        "forensics.diff:diff",
        "where two runs part: samples, step, module; exit 3 unless only float sums differ",
    ),
    "rm": ("control.remove:remove", "remove runs that nobody trains"),
    "logs": ("control.logs:logs", "what a run says, or a node of its job; -f follows it"),
    "cancel": ("control.cancel:cancel", "end a run that trains or waits; it saves first"),
    "describe": (
        "commands.describe:describe",
        "every flag of a task or a command, and the names of machines (describe hardware)",
    ),
}
INTERNAL = {
    "job": "clusters.slurm.job:job",
    "node": "clusters.slurm.node:node",
    "pod": "clusters.kubernetes.pod:pod",
    "call": "report.child_process:call",
    "measure": "measuring.setup:measure_as_worker",
}
"""Commands that the sbatch script, its steps, pods, `report` and `profile` start."""
ALIASES = {"train": "auto"}
LEFT = {"forget": "train anew on data without the rows; `seen` says which step saw one first"}
"""Commands that were taken out -> what to use instead."""
TRAINS = ("auto", "resume")
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

USAGE = """isobatch: the recipe decides what is learnt, the plan decides how fast

  isobatch auto --task causal-lm                       train the demo on this machine
  isobatch plan --task causal-lm --hardware 8xh100     what would happen there
  accelerate launch launch/train.py --task causal-lm   in a world that accelerate formed

In a clone that is not installed: python -m launch auto ...

commands:
{commands}

`describe TASK` lists every flag. Exit codes: 0 done, 1 bug, 2 wrong input, 3 training failed, 75 stopped."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if words is None else words)
    if isinstance(sys.stdout, io.TextIOWrapper):  # where the locale is ASCII, as LC_ALL=C may be
        sys.stdout.reconfigure(errors="backslashreplace")
    if unread := next((word for word in arguments if not _is_text(word)), None):
        return _print_error(f"{unread}: this locale cannot read it; set LC_ALL=C.UTF-8")
    os.environ.setdefault("ISOBATCH_STARTED", str(time.time()))
    for name, value in {**BEFORE_TORCH, "TRANSFORMERS_VERBOSITY": "error"}.items():
        os.environ.setdefault(name, value)
    if "--debug" not in arguments:
        warnings.filterwarnings("ignore", category=FutureWarning)  # of libraries, about each other
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        return guarded(_print_usage)
    if arguments[0] in ("--version", "-V", "version"):
        return guarded(_print_version)
    name = ALIASES.get(arguments[0], arguments[0])
    if name in TRAINS:
        end_early_on_signals()
    if name in COMMANDS and "--quiet" not in arguments:
        start_status()
        doing(name)
    if name in INTERNAL:
        return guarded(lambda: load_function(INTERNAL[name])(arguments[1:]), debug="--debug" in arguments)
    if name in LEFT:
        return _print_error(f"{name} was taken out: {LEFT[name]}")
    if name not in COMMANDS:
        from isobatch.core.flags import nearest_hint
        from isobatch.engine.registry import CHAINS, TASKS

        if name in {*TASKS, *CHAINS}:
            return _print_error(f"{name} is a task: isobatch auto --task {name}")
        return _print_error(
            f"there is no command {name!r}{nearest_hint(name, [*COMMANDS, *ALIASES])}; see --help"
        )
    if any(word in ("-h", "--help") for word in arguments[1:]):
        return guarded(lambda: _help(name, arguments[1:]))
    return guarded(lambda: _command(name)(arguments[1:]), debug="--debug" in arguments)


def _is_text(word: str) -> bool:
    """Whether Python could decode a word's bytes."""
    return not any("\ud800" <= c <= "\udfff" for c in word)


def usage() -> str:
    """The text of --help."""
    return USAGE.format(commands="\n".join(f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items()))


def _print_usage() -> int:
    print(usage())
    return 0


def _print_version() -> int:
    libraries = " ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate"))
    print(f"isobatch {version('isobatch')} ({libraries}, Python {platform.python_version()})")
    return 0


def guarded(action: Callable[[], int], debug: bool = False) -> int:
    """The exit code of an action; prints a known error in one line, a bug with its traceback."""
    try:
        with stopped_status():
            return action()
    except TerminatedError:
        print("isobatch: stopped by a signal; what was saved before stands", file=sys.stderr)
        return STOPPED
    except KeyboardInterrupt:
        print("isobatch: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as caught:
        error = classify(caught)
        if error is None or debug:
            traceback.print_exc()
            return BUG if error is None else error.exit_code
        if isinstance(error, UserCodeError):
            sys.stderr.write(error.frames)
        return _print_error(str(error), error.exit_code)


def _command(name: str) -> Callable[[Sequence[str]], int]:
    return load_function(COMMANDS[name][0])


def load_function(target: str) -> Callable[[Sequence[str]], int]:
    """The function that `module:function` in launch/ names; imports the module."""
    module, _, function = target.partition(":")
    found: Callable[[Sequence[str]], int] = getattr(
        importlib.import_module(f"isobatch.launch.{module}"), function
    )
    return found


def _print_error(message: str, code: int = WRONG_INPUT) -> int:
    print(printable(as_typed(f"isobatch: {' '.join(message.split())}")), file=sys.stderr)
    return code


def _help(name: str, words: Sequence[str]) -> int:
    print(f"isobatch {name}: {COMMANDS[name][1]}\n")
    print((_command(name).__doc__ or "").strip())
    describe = _command("describe")
    described = importlib.import_module(describe.__module__).COMMAND_OPTIONS
    task = next((b for a, b in itertools.pairwise(words) if a == "--task"), None)
    about = task or (name if name in described else None)
    return describe([about]) if about else 0
