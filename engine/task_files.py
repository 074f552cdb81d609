"""Task files: a user's own workload ./file.py:Class is imported and checked against the Task contract."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from isobatch.core.errors import USER_MODULE, IsobatchError, UserCodeError, UserError, nearest_file
from isobatch.core.flags import nearest, nearest_hint
from isobatch.core.recipe import TASK_CODE, Recipe
from isobatch.models.base import Task
from isobatch.models.capabilities import all_protocols


def is_task_file(name: str) -> bool:
    """Whether a task's name is the path of a user's own file."""
    return ".py:" in name or name.endswith(".py")


def task_file(name: str) -> Path:
    """The file of a task's name ./file.py:Class."""
    return Path(name.rpartition(":")[0] if ".py:" in name else name).expanduser()


def task_file_hash(name: str) -> str | None:
    """Hash of a user's task file and of the files beside it that it imports; None for built-in tasks.

    It is part of the recipe and of the data's cache key.
    """
    if not is_task_file(name) or not task_file(name).is_file():
        return None
    file = task_file(name).resolve()
    first, *others = imported_files(file)
    parts = (f"\0{other.relative_to(file.parent)}\0".encode() + other.read_bytes() for other in others)
    return hashlib.sha256(b"".join((first.read_bytes(), *parts))).hexdigest()[:12]


def imported_files(file: Path) -> list[Path]:
    """The file, then those in its folder that it imports, directly or through each other, in order of names.

    What is imported by a computed name is not found.
    """
    found, waiting = {file}, [file]
    while waiting:
        new = {p for p in _imports(waiting.pop(), file.parent) if p.is_file()} - found
        found |= new
        waiting += new
    return [file, *sorted(found - {file})]


def _imports(file: Path, home: Path) -> Iterator[Path]:
    """The places where the modules that a file imports may lie in the folder `home`."""
    for level, name in _imported_names(file.read_bytes()):
        module = file.parents[min(level, len(file.parents)) - 1] if level else home
        for part in name.split("."):
            module /= part
            if module.is_relative_to(home):
                yield from (module.with_name(f"{module.name}.py"), module / "__init__.py")


@functools.lru_cache(maxsize=256)  # a run asks some twenty times for what its task file imports
def _imported_names(code: bytes) -> set[tuple[int, str]]:
    """What a file imports: how many folders up (0: not relative), and the dotted name."""
    try:
        nodes = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Import | ast.ImportFrom)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # its import says so
        return set()
    return {
        (getattr(node, "level", 0), ".".join(filter(None, (getattr(node, "module", None), alias.name))))
        for node in nodes
        for alias in node.names
    }


def task_file_problem(recipe: Recipe) -> str | None:
    """The problem if the recipe's task file has changed since the run was created; else None."""
    found, trained = task_file_hash(recipe.task), recipe.options.get(TASK_CODE)
    if found == trained:
        return None
    changed = f"it or a file that it imports has changed, from {trained} to {found}"
    why = changed if found else "there is no file"
    way_out = "put that version back for this run, or train a new one"
    return f"{recipe.task} is not the code that was trained: {why}; {way_out}"


def load_task_class(location: str) -> type[Task]:
    """The Task subclass at `./file.py:Class`. Raises UserError or UserCodeError."""
    folder = task_file(location).resolve().parent
    _forget_neighbours_elsewhere(folder)
    _modules_before.setdefault(folder, set(sys.modules))
    found = load_class(f"--task {location}", location, Task)
    for contract in all_protocols():
        _refuse_other_parameters(f"--task {location}", found, contract)
    if problem := part_of_protocol(found):
        raise UserError(f"--task {location}: {problem}")
    if isinstance(found.data, type):
        from isobatch.data.base import Data  # imports numpy; with the class it is there

        _refuse_other_parameters(f"--task {location}", found.data, Data)
    return found


T = TypeVar("T")


def load_class(typed: str, location: str, contract: type[T]) -> type[T]:
    """The class at `./file.py:Class`. `typed`: the flag with it."""
    path, _, name = location.rpartition(":") if ".py:" in location else (location, "", "")
    file = task_file(location).resolve()
    if not file.is_file():
        raise UserError(f"{typed}: there is no file {file}{nearest_file(file)}")
    module = _import_file(typed, file)
    own = {k: v for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, contract)}
    found = own.get(name)
    if found is None:
        known = [k for k, v in own.items() if v is not contract]
        there = f"no {contract.__name__} called {name} there{nearest_hint(name, known)}"
        problem = there if name else f"which class? Write {path}:Class"
        raise UserError(f"{typed}: {problem}; found: {', '.join(known) or 'none'}")
    _refuse_other_parameters(typed, found, contract)
    return found


def _import_file(typed: str, file: Path) -> ModuleType:
    """Import a file as a module. Its folder is put last on sys.path, so it can import its neighbours."""
    module_name = f"{USER_MODULE}{file.stem}"
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
        raise import_error(typed, file, error) from None
    return module


_modules_before: dict[Path, set[str]] = {}
"""Folder of a task file that was put on the path -> the modules that were there already."""


def _forget_neighbours_elsewhere(folder: Path) -> None:
    """Another project's `models` or `data` must not be found in place of this one's."""
    for other in _modules_before.keys() - {folder}:
        before = _modules_before.pop(other)
        sys.path[:] = [place for place in sys.path if place != str(other)]
        for name in sys.modules.keys() - before:
            place = getattr(sys.modules[name], "__file__", None)
            if place and Path(place).is_relative_to(other) and not name.startswith(USER_MODULE):
                del sys.modules[name]
                package, _, child = name.rpartition(".")
                if package in sys.modules:  # a folder without __init__.py, which would still have the module
                    vars(sys.modules[package]).pop(child, None)


def import_error(typed: str, file: Path, error: Exception) -> UserError:
    """With the traceback from the user's file on, without the frames of isobatch and importlib before it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != str(file):
        frames = frames.tb_next
    shown = "".join(traceback.format_exception(type(error), error, frames))
    return UserCodeError(f"{typed}: cannot be imported: {type(error).__name__}: {error}", shown)


def part_of_protocol(task: type[Task]) -> str:
    """What is wrong with a task that has part of what commands ask for together; empty if nothing is."""
    for protocol, names in all_protocols().items():
        has = [name for name in names if hasattr(task, name)]
        if has and (missing := [name for name in names if name not in has]):
            return (
                f"{task.__name__} has {has[0]} and no {missing[0]}, which belongs to it"
                f" ({protocol.__module__}.{protocol.__name__}): add it, or rename {has[0]}"
            )
    return ""


def misnamed_methods(task: type[Task]) -> list[str]:
    """Notes on methods of a user's class that nothing calls, and whose names are nearly a capability's."""
    mine = (one for one in task.__mro__ if not one.__module__.startswith("isobatch."))
    own = {n for one in mine for n, value in vars(one).items() if inspect.isfunction(value)}
    known = {n for names in all_protocols().values() for n in names}
    strange = sorted(own - set(dir(Task)) - known)
    meant = {name: nearest(name, known - set(dir(task))) for name in strange if name[0] != "_"}
    return [f"{task.__name__}.{n} is not {like}, which may be meant" for n, like in meant.items() if like]


def _refuse_other_parameters(typed: str, found: type, contract: type) -> None:
    """Raise UserError for a method that cannot be called as the contract says."""
    for name, method in vars(contract).items():
        own = getattr(found, name, None)
        if name.startswith("_") or own is None or not inspect.isfunction(method):
            continue
        if not callable(own):
            raise UserError(f"{typed}: {found.__name__}.{name} must be a method: rename it")
        if not inspect.isfunction(own):
            continue
        expected, has = inspect.signature(method).parameters, inspect.signature(own)
        try:
            has.bind(*expected)
        except TypeError:
            takes = f"takes ({', '.join(expected)}), not ({', '.join(has.parameters)})"
            raise UserError(f"{typed}: {found.__name__}.{name} {takes}") from None
