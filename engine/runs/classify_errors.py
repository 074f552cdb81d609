"""Classify exceptions: out of memory, another process lost, no disk space, the user's code, or a bug."""

from __future__ import annotations

import errno

from isobatch.core.errors import IsobatchError, OutOfMemoryError, UserError, WorkerLostError
from isobatch.engine.runs.user_code import user_code_error

_MEMORY = (
    *("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc", "alloc_failed"),
    "start new thread",
)
_CONNECTION = (
    *("gloo/transport", "connection reset by peer", "connection closed by peer", "nccl", "broken pipe"),
    *("remote process exited", "timed out waiting", "tcpstore"),
)


def classify(error: BaseException) -> IsobatchError | None:
    """The isobatch error that an exception stands for, or None for a bug of ours."""
    if isinstance(error, IsobatchError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" to write {error.filename}" if error.filename else ""
        return UserError(f"no space left on device{where}: make some, then go on with `resume`")
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UserError(f"{str(error.filename)[:80]}...: is too long for a file's name: take a shorter one")
    text = str(error).lower()
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _any(_MEMORY, text)):
        return OutOfMemoryError(f"out of memory: {_first_line(error)}")
    if isinstance(error, RuntimeError) and _any(_CONNECTION, text):
        return WorkerLostError(f"the connection to another process broke: {_first_line(error)}")
    return user_code_error(error)


def _any(phrases: tuple[str, ...], text: str) -> bool:
    return any(phrase in text for phrase in phrases)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
