"""Recipe fields that change nothing for a task: refused where typed, left out where a preset sets them.

A field that nothing reads would give a run another hash and the same training. A task names its own in
`Task.unread`; those of a user's own task are found in its files.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.flags import to_json_value
from isobatch.core.optimizers import OPTIMIZERS
from isobatch.core.recipe import DEMO, Recipe
from isobatch.data.base import Data
from isobatch.engine.task_files import imported_files, is_task_file
from isobatch.models.base import Task

if TYPE_CHECKING:
    from collections.abc import Iterable

READ_BY_TASKS = frozenset(
    {"format", "model", "tokenizer", "revision", "max_length", "dropout", "label_smoothing"}
)
"""Fields of the recipe that the engine never reads: the task or its data do."""


def unread_values(recipe: Recipe, task: Task, data: Data) -> dict[str, str]:
    """Fields that change nothing and have another value than the common default -> why they do not."""
    defaults = {f.name: f.default for f in dataclasses.fields(Recipe)}
    unread = unread_fields(recipe, task, data)
    return {name: why for name, why in unread.items() if getattr(recipe, name) != defaults[name]}


def unread_fields(recipe: Recipe, task: Task, data: Data) -> dict[str, str]:
    """Field of the recipe -> why it changes nothing, whatever its value is."""
    found = dict(task.unread())
    if is_task_file(recipe.task):
        unread = READ_BY_TASKS - _fields_read_by(type(task), type(data))
        found |= dict.fromkeys(sorted(unread), "no file of this task reads it")
    elif recipe.data == DEMO:
        found["format"] = "the demo's data has one form"
    if not OPTIMIZERS[recipe.optimizer].takes_betas:
        found |= dict.fromkeys(("adam_beta1", "adam_beta2", "adam_eps"), f"{recipe.optimizer} has none")
    if recipe.schedule != "cosine":
        found["lr_floor"] = "it is the end of --schedule cosine"
    if not data.has_groups:
        found["order"] = "the data is prepared on this machine, where any row is as near as the next"
    if recipe.order != "shards":
        found["shuffle_window"] = "it is that of --order shards"
    if recipe.steps is not None:
        found["least_steps"] = "it lengthens --epochs, and --steps is given"
    if type(task).after_step is not Task.after_step:
        found["on_spike"] = "this task changes its model by the step's number, and leaves out no step"
    phases = task.phases()
    if [p.name for p in phases] == [recipe.phase]:
        found["phase"] = "this task has no other"
    if not any(p.early_stopping for p in phases if recipe.phase in (None, p.name)):
        found["patience"] = "no phase that trains here stops early"
    if not recipe.patience or "patience" in found:
        found["min_delta"] = "it counts with --patience"
    return found


def without(recipe: Recipe, names: Iterable[str]) -> Recipe:
    """The recipe with the common defaults in these fields."""
    defaults: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Recipe) if f.name in names}
    return dataclasses.replace(recipe, **defaults)


def as_typed(recipe: Recipe, name: str) -> str:
    """A field as the user types it: `--warmup 5%`."""
    value = to_json_value(getattr(recipe, name))
    text = ",".join(map(str, value)) if isinstance(value, list) else value
    return f"--{name.replace('_', '-')} {text}"


def _fields_read_by(*classes: type) -> frozenset[str]:
    """Fields that these classes may read: attributes by name in their files and in what those import."""
    names: set[str] = set()
    for cls in dict.fromkeys(c for one in classes for c in one.__mro__):
        if cls not in (Task, Data) and issubclass(cls, Task | Data):
            try:
                names |= _attributes_in(Path(inspect.getfile(cls)))
            except (TypeError, OSError, SyntaxError, ValueError):  # no file, or one that is not Python
                return READ_BY_TASKS
    return READ_BY_TASKS if "recipe" in names else READ_BY_TASKS & names


def _attributes_in(file: Path) -> set[str]:
    """Attributes read in a file and in those of its folder that it imports.

    `recipe` is among them only where the whole recipe is handed on, to code that may read any of it.
    """
    names: set[str] = set()
    for path in imported_files(file):
        found = [n for n in ast.walk(ast.parse(path.read_bytes())) if isinstance(n, ast.Attribute)]
        looked_into = {id(n.value) for n in found}
        names |= {n.attr for n in found if not (n.attr == "recipe" and id(n) in looked_into)}
    return names
