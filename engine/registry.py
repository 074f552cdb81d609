"""Where a task's name meets its files. The one place to touch when a workload is added."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.core import flags as opt
from isobatch.core.errors import UserError
from isobatch.core.recipe import Recipe
from isobatch.data.base import Data
from isobatch.models.base import Task


@dataclass(frozen=True, slots=True)
class TaskEntry:
    """Where a workload lives, as `module:Class`, and what it is in a line."""

    task: str
    data: str
    summary: str


TASKS = {
    "causal-lm": TaskEntry(
        "models.causal_lm.task:CausalLM",
        "data.text.dataset:Text",
        "fine-tune or train a causal language model on text",
    ),
    "classifier": TaskEntry(
        "models.classification.task:Classifier",
        "data.labelled:Labelled",
        "fine-tune an encoder to classify texts or pairs",
    ),
    "pruning": TaskEntry(
        "models.compression.pruning:Pruning",
        "data.labelled:Labelled",
        "take heads and neurons out of a classifier for good",
    ),
    "qat": TaskEntry(
        "models.compression.qat:QAT",
        "data.labelled:Labelled",
        "train a classifier to run in 4-bit weights and 8-bit activations",
    ),
    "recommender": TaskEntry(
        "models.recommendation.task:Recommender",
        "data.interactions.dataset:Interactions",
        "recommend items from ids and texts, with LoRA in the text encoder",
    ),
}


CHAINS = {"compress": ("classifier", "pruning", "qat")}
"""Names that `auto` takes for several tasks, one after the other."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A task with its kind of data, ready to be asked for flags, models and samples."""

    name: str
    task: type[Task]
    data: type[Data]

    def option_flags(self) -> dict[str, opt.Flag]:
        return opt.flags_of(self.task.Options, self.name) | opt.flags_of(
            self.data.Options, f"{self.name} data"
        )

    def make(self, recipe: Recipe) -> tuple[Task, Data]:
        """The task and data of a recipe."""
        task_options = _options(self.task.Options, recipe.options, self.name)
        data_options = _options(self.data.Options, recipe.options, self.name)
        return self.task(recipe, task_options), self.data(recipe, data_options)


def _options(kind: type, values: dict[str, Any], group: str) -> Any:
    names = opt.flags_of(kind, group)
    return opt.build_options(kind, {k: v for k, v in values.items() if k in names}, group)


def workload(name: str) -> Workload:
    """The workload called `name`, or the user's own from ./file.py:Class."""
    if is_task_file(name):
        task = _user_class(name)
        data = task.data
        if not (isinstance(data, type) and issubclass(data, Data)):
            raise UserError(f"--task {name}: {task.__name__}.data must be a subclass of isobatch.Data")
        return Workload(name, task, data)
    key = name.replace("_", "-").lower()
    if key in CHAINS:
        raise UserError(
            f"--task {key}: only `auto` runs this chain; its stages are tasks: {', '.join(CHAINS[key])}"
        )
    if key not in TASKS:
        valid = [*TASKS, *CHAINS]
        hint = opt.nearest_hint(key, valid)
        raise UserError(
            f"--task {name}: there is no such task{hint}; valid: {', '.join(valid)}, or ./file.py:Class"
        )
    entry = TASKS[key]
    return Workload(key, _load(entry.task), _load(entry.data))


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"isobatch.{module}"), name)


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


def _user_class(place: str) -> type[Task]:
    path, _, name = place.rpartition(":") if ".py:" in place else (place, "", "")
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise UserError(f"--task {place}: there is no file {file}")
    module_name = f"isobatch_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    if str(file.parent) not in sys.path:
        sys.path.append(
            str(file.parent)
        )  # so that it may import its neighbours; last, so that none hides ours
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, Task)):
        own = [
            k
            for k, v in vars(module).items()
            if isinstance(v, type) and issubclass(v, Task) and v is not Task
        ]
        there = f"no Task called {name} there{opt.nearest_hint(name, own)}"
        problem = there if name else f"which class? Write {path}:Class"
        raise UserError(f"--task {place}: {problem}; found: {', '.join(own) or 'none'}")
    return found
