"""Errors inside a user's own task file, told by the user's own lines."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import USER_MODULE, UserCodeError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

SHOWN_FRAMES = 2


def user_code_error(error: BaseException) -> UserCodeError | None:
    """The error with the last lines of the user's file that led to it; None where none of them did."""
    folders = {
        Path(str(module.__file__)).parent
        for name, module in list(sys.modules.items())
        if name.startswith(USER_MODULE)
    }
    walked = traceback.walk_tb(error.__traceback__)
    own = [(frame, line) for frame, line in walked if _is_users(frame, folders)]
    if not own:
        return None
    frame, line = own[-1]
    place = f"{Path(frame.f_code.co_filename).name}, line {line}, in {frame.f_code.co_name}"
    summary = traceback.StackSummary.extract(iter(own[-SHOWN_FRAMES:]), capture_locals=False)
    shown = "".join(f"  {entry.filename}, line {entry.lineno}\n    {entry.line}\n" for entry in summary)
    text = (str(error).splitlines() or [""])[0]
    return UserCodeError(
        f"{place}: {type(error).__name__}: {text}{_what_there_is(error, frame.f_locals)}"
        " (--debug shows all frames)",
        shown,
    )


def _is_users(frame: FrameType, folders: set[Path]) -> bool:
    """Whether a frame is of a file beside a task file: libraries may lie further down in its folder."""
    return Path(frame.f_code.co_filename).parent in folders and not _is_ours(frame.f_globals)


def _is_ours(names: Mapping[str, Any]) -> bool:
    module = str(names.get("__name__"))
    return module == "__main__" or module.partition(".")[0] == "isobatch"


def _what_there_is(error: BaseException, names: Mapping[str, Any]) -> str:
    """The columns of the batch, where a missing one was asked for."""
    batch = names.get("batch")
    if not isinstance(error, KeyError) or not isinstance(batch, dict) or error.args[0] in batch:
        return ""
    return f"; the batch has {', '.join(map(str, batch))}"
