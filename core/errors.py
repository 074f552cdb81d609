"""Exception types and the exit code of each. Any other exception is a bug and shows its traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import ClassVar

DONE = 0
BUG = 1
WRONG_INPUT = 2
FAILED = 3
STOPPED = 75
INTERRUPTED = 130
"""By Ctrl-C where nothing is saved: 128 + SIGINT, as shells say it."""

USER_MODULE = "isobatch_user_"
"""The name of a user's task file as a module begins so."""


class IsobatchError(Exception):
    """Base of all expected errors: one line for the user, and an exit code."""

    exit_code: ClassVar[int] = BUG
    cause: str = ""
    """Why a restart may succeed: `memory` (with a smaller budget), `job memory` (the same, once), `lost`
    (a process died), `spike` (without some steps) or `disk` (with more space); else empty. `planned`: a sweep
    had it stop there."""

    def __init__(self, message: str = "", what: str = "") -> None:
        """`what`: for whoever catches it, beside the line."""
        super().__init__(message)
        self.what = what


class UserError(IsobatchError, ValueError):
    """The user's input is wrong: one line on standard error with the way out, exit 2."""

    exit_code = WRONG_INPUT


class NotHereError(UserError):
    """A model or data that is not on this machine, nor to be had from it; a plan can do without."""


def refuse(wrong: Mapping[str, object]) -> None:
    """Raise UserError with the first message whose condition, its value, is true."""
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise UserError(message)


@contextlib.contextmanager
def explain_errors(
    place: str, *kinds: type[Exception], to: type[IsobatchError] = UserError, way_out: str = ""
) -> Iterator[None]:
    """Raise a line in place of an error of these kinds, of a library's: where, what it says, the way out."""
    try:
        yield
    except kinds as error:
        raise to(f"{place}: {first_line(error)}{way_out}") from None


def nearest_file(name: str | Path) -> str:
    """A hint at the file or folder that lies where `name` is looked for in vain and is called like it."""
    beside = [one.name for one in Path(name).expanduser().parent.glob("*")]
    found = get_close_matches(Path(name).name, sorted(beside), 1, 0.75)
    return f" (did you mean {Path(name).with_name(found[0])}?)" if found else ""


def first_line(error: BaseException) -> str:
    """What an error of a library says in its first line; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class DiskFullError(UserError):
    """A disk or a quota is full: another attempt may succeed once there is space, so exit 3."""

    exit_code = FAILED
    cause = "disk"


class UserCodeError(UserError):
    """The user's own task file fails: its traceback, `what`, is shown before the line.

    They are a note of the exception as well, for whoever catches none: a notebook shows notes.
    """

    def __init__(self, message: str, frames: str) -> None:
        super().__init__(message, frames)
        self.add_note(frames)


class TrainingError(IsobatchError, RuntimeError):
    """Training failed for a known reason (NaN, damaged data, a difference found by verify): exit 3."""

    exit_code = FAILED


class ExportError(TrainingError):
    """The exported model's outputs differ from those of the trained model."""


class OutOfMemoryError(TrainingError):
    """A device or the host is out of memory: another attempt may succeed with smaller micro-batches."""

    cause = "memory"


class JobMemoryError(TrainingError):
    """Slurm's memory limit was exceeded: one other attempt may succeed with smaller micro-batches."""

    cause = "job memory"


class WorkerLostError(TrainingError):
    """Another process died, or all processes hang: another attempt may succeed."""

    cause = "lost"


class SpikeError(TrainingError):
    """A step's loss or gradient jumped: another attempt goes back and leaves it out."""

    cause = "spike"


class StopRequestedError(IsobatchError):
    """A stop was asked for, and a checkpoint was saved: exit 75."""

    exit_code = STOPPED

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause
