"""A user's own workload: ./file.py:Class, imported from its place and held against today's contract."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core.errors import IsobatchError, UserCodeError, UserError
from isobatch.core.flags import nearest_hint
from isobatch.models.base import Task

if TYPE_CHECKING:
    from types import ModuleType, TracebackType

    from isobatch.core.recipe import Recipe

FORMER_ROOTS = ("core", "data", "engine", "hub", "launch", "models")
"""What the first release installed as modules of their own."""
RENAMED_METHODS = {
    "begin": ("begin_phase", ("model", "phase", "first")),
    "cheaper": ("memory_saving_flags", ()),
    "lazy": ("sparse_parameters", ("model",)),
    "fit": ("match_shapes", ("model", "shapes")),
    "appraise": ("final_metrics", ("model", "final", "facts", "batches")),
    "shape": ("model_size", ("facts",)),
}
"""Methods of the first release's Task -> their names now, and what they took: unnoticed, one would never be
called. A user's own method of such a name takes something else."""


def is_task_file(name: str) -> bool:
    """Whether a task's name is the place of a user's own file."""
    return ".py:" in name or name.endswith(".py")


def task_file_hash(name: str) -> str | None:
    """The hash of a user's task file, part of its recipe and data; None for the project's own."""
    if not is_task_file(name):
        return None
    file = Path(name.rpartition(":")[0]).expanduser()
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.is_file() else None


def task_file_problem(recipe: Recipe) -> str | None:
    """What is wrong with the recipe's task file: it must be the one that was trained."""
    found, trained = task_file_hash(recipe.task), recipe.options.get("code")
    if found == trained:
        return None
    return f"{recipe.task} is not the code that was trained: {found or 'there is no file'}, {trained}"


def load_task_class(place: str) -> type[Task]:
    """The Task subclass at `./file.py:Class`. Raises UserError or UserCodeError."""
    path, _, name = place.rpartition(":") if ".py:" in place else (place, "", "")
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise UserError(f"--task {place}: there is no file {file}")
    module = _import_file(place, file)
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, Task)):
        own = [
            k
            for k, v in vars(module).items()
            if isinstance(v, type) and issubclass(v, Task) and v is not Task
        ]
        there = f"no Task called {name} there{nearest_hint(name, own)}"
        problem = there if name else f"which class? Write {path}:Class"
        raise UserError(f"--task {place}: {problem}; found: {', '.join(own) or 'none'}")
    _refuse_former_contract(place, found)
    return found


def _import_file(place: str, file: Path) -> ModuleType:
    """The module of a file. It may import its neighbours: its folder comes last on the path."""
    module_name = f"isobatch_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except IsobatchError:
        raise
    except Exception as error:
        del sys.modules[module_name]
        raise _import_error(place, file, error) from None
    return module


def _import_error(place: str, file: Path, error: Exception) -> UserError:
    frames = _user_frames(error.__traceback__, file)
    former = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    if former and former.partition(".")[0] in FORMER_ROOTS:
        return UserError(
            f"--task {place}: what it imports from {former} is in isobatch now: write `from isobatch import"
            " Task, Loss, Data, Ragged` (or whatever it takes from there)"
        )
    shown = "".join(traceback.format_exception(type(error), error, frames))
    return UserCodeError(f"--task {place}: cannot be imported: {type(error).__name__}: {error}", shown)


def _user_frames(frames: TracebackType | None, file: Path) -> TracebackType | None:
    """The traceback from the user's file on; frames of ours and of importlib stand before it."""
    while frames is not None and frames.tb_frame.f_code.co_filename != str(file):
        frames = frames.tb_next
    return frames


def _refuse_former_contract(place: str, task: type[Task]) -> None:
    """A method that was renamed, or that takes one argument more now, is named in one line."""
    for former, (name, took) in RENAMED_METHODS.items():
        method = getattr(task, former, None)
        if inspect.isfunction(method) and tuple(inspect.signature(method).parameters)[1:] == took:
            raise UserError(f"--task {place}: {task.__name__}.{former} is called {name} now: rename it")
    parameters = inspect.signature(task.evaluate).parameters.values()
    if len(parameters) < 4 and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
        raise UserError(
            f"--task {place}: {task.__name__}.evaluate takes (self, model, batch, step) now: add step"
        )
