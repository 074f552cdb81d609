"""The ways a command ends, and the exit code of each. Anything else is a bug and shows its traceback."""

from __future__ import annotations

from typing import ClassVar

DONE = 0
BUG = 1
WRONG_INPUT = 2
FAILED = 3
STOPPED = 75


class IsobatchError(Exception):
    """An error with a name: one line for the user, and an exit code."""

    exit_code: ClassVar[int] = BUG
    cause: str = ""
    """What may help another attempt: `memory` (a smaller budget) or `lost` (a restart); else empty."""


class UserError(IsobatchError, ValueError):
    """The user's input is wrong: one line on standard error with the way out, exit 2."""

    exit_code = WRONG_INPUT


class UserCodeError(UserError):
    """The user's own file fails: the frames of it are shown before the line."""

    def __init__(self, message: str, frames: str) -> None:
        super().__init__(message)
        self.frames = frames


class TrainingError(IsobatchError, RuntimeError):
    """The training failed for a reason that has a name (NaN, damaged data, a difference found): exit 3."""

    exit_code = FAILED


class ExportError(TrainingError):
    """What was exported does not answer as the trained model does."""


class OutOfMemoryError(TrainingError):
    """A device or the host has no more memory: another attempt may do with smaller micro-batches."""

    cause = "memory"


class WorkerLostError(TrainingError):
    """Another process died, or none of them moves: another attempt may fare better."""

    cause = "lost"


class StopRequestedError(IsobatchError):
    """A stop was asked for, and a checkpoint was saved: exit 75."""

    exit_code = STOPPED

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause
