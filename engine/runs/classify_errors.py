"""Classify exceptions: out of memory, another process lost, no disk space, the user's code, or a bug."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from pathlib import Path
from types import FrameType

from isobatch.core import errors
from isobatch.core.atomic_files import disk_full, nearest_place
from isobatch.core.extras import has, lacking
from isobatch.core.package import table_beside

_SAID = table_beside(__file__, "error_words")
"""What libraries say of each kind of error."""
SHOWN_FRAMES = 2
FOLDERS = ("HF_HUB_CACHE", "HF_HOME", "ISOBATCH_CACHE", "XDG_CACHE_HOME", "TMPDIR", "HOME", "PWD")
"""Environment variables with folders, the nearer first."""


def classify(error: BaseException) -> errors.IsobatchError | None:
    """The isobatch error that an exception stands for, or None for a bug of ours."""
    if isinstance(error, errors.IsobatchError):
        return error
    if full := disk_full(getattr(error, "filename", None) or "a file", error):
        return full
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return errors.UserError(
            f"{str(error.filename)[:80]}...: is too long for a file's name: take a shorter one"
        )
    if isinstance(error, FileNotFoundError | PermissionError):
        # safetensors has no file's name, and says of what may not be read that it is not there
        file = str(error.filename or str(error).removeprefix("No such file or directory: "))
        if os.path.lexists(file) and not os.access(file, os.R_OK):
            return errors.UserError(f"{file}: Permission denied: it must be readable (chmod a+r)")
        place = nearest_place(Path(file).absolute())
        if error.errno == errno.EACCES and not os.access(place, os.R_OK | os.X_OK):
            way = next((f"set {n} to" for n in FOLDERS if file.startswith(os.environ.get(n) or "\n")), "name")
            return errors.UserError(f"{file}: {place} is closed to this user: {way} a folder of yours")
    if any(words in str(error) for words in _SAID["weights"]):
        frames = (frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__))
        model = next(filter(None, (f.get("pretrained_model_name_or_path") for f in frames)), "the model")
        why = "damaged, or a pickle of more than tensors, which is never opened"
        return errors.UserError(f"{model}: its weights are {why}: copy them anew, or as safetensors")
    text, said = str(error).lower() if isinstance(error, RuntimeError) else "", errors.first_line(error)[:200]
    if isinstance(error, MemoryError) or any(phrase in text for phrase in _SAID["memory"]):
        return errors.OutOfMemoryError(f"out of memory: {said}")
    if any(phrase in text for phrase in _SAID["connection"]):
        return errors.WorkerLostError(f"the connection to another process broke: {said}")
    if (own := user_code_error(error)) or not isinstance(error, ModuleNotFoundError):
        return own
    library = str(error.name).partition(".")[0]
    more = " (`isobatch doctor` says what brings all that training needs)"
    return None if has(library) else errors.UserError(lacking(library, "this command") + more)


def user_code_error(error: BaseException) -> errors.UserCodeError | None:
    """The error with the last lines of the user's file that led to it; None where none of them did."""
    imported = [m for name, m in list(sys.modules.items()) if name.startswith(errors.USER_MODULE)]
    folders = {Path(str(module.__file__)).parent for module in imported}
    walked = traceback.walk_tb(error.__traceback__)
    own = [(frame, line) for frame, line in walked if _is_users(frame, folders)]
    if not own:
        return None
    frame, line = own[-1]
    place = f"{Path(frame.f_code.co_filename).name}, line {line}, in {frame.f_code.co_name}"
    summary = traceback.StackSummary.extract(iter(own[-SHOWN_FRAMES:]), capture_locals=False)
    shown = "".join(f"  {entry.filename}, line {entry.lineno}\n    {entry.line}\n" for entry in summary)
    text, batch = (str(error).splitlines() or [""])[0], frame.f_locals.get("batch")
    if isinstance(error, KeyError) and isinstance(batch, dict) and error.args[0] not in batch:
        text += f"; the batch has {', '.join(map(str, batch))}"
    return errors.UserCodeError(f"{place}: {type(error).__name__}: {text} (--debug shows all frames)", shown)


def _is_users(frame: FrameType, folders: set[Path]) -> bool:
    """Whether a frame is of a file beside a task file: libraries may lie further down in its folder."""
    module = str(frame.f_globals.get("__name__"))
    is_ours = module == "__main__" or module.partition(".")[0] == "isobatch"
    return Path(frame.f_code.co_filename).parent in folders and not is_ours
