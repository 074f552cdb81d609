"""Where a task's name meets its classes: of a workload in models/, or of a user's own file."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from isobatch.core import flags
from isobatch.core.errors import UserError
from isobatch.core.flags import Flag, flags_of, nearest_hint
from isobatch.core.optimizers import OPTIMIZERS, OWN
from isobatch.core.package import ROOT, load, table_beside
from isobatch.core.plan import PlanOptions
from isobatch.core.recipe import DEMO, SHORT_MODEL_NAMES, TASK_CODE, Recipe
from isobatch.data.streaming.store import is_remote
from isobatch.engine import consent, task_files
from isobatch.engine.task_files import is_task_file
from isobatch.models.base import Task
from isobatch.models.capabilities import ChangesModel, LeavesUnread, MakesOptimizer

if TYPE_CHECKING:
    from isobatch.data.base import Data  # noqa: TC004  imports numpy, and no field of a LoadedWorkload is a flag


class Workload(NamedTuple):
    """A workload, as the workloads.toml of its folder in models/ lists it: listing them imports none."""

    task: str
    """The class, as `module:Class` within isobatch."""
    summary: str
    """What it does in a line."""


_LISTED = {
    name: {"folder": file.parent.name, **row}
    for file in (ROOT / "models").glob("*/workloads.toml")
    for name, row in table_beside(str(file)).items()
}
TASKS = {
    name: Workload(f"models.{row['folder']}.{row['class']}", row["summary"])
    for name, row in sorted(_LISTED.items(), key=lambda one: one[1].get("place", 0))
    if "class" in row
}
CHAINS: dict[str, list[str]] = {name: row["stages"] for name, row in _LISTED.items() if "stages" in row}
_WORDS = table_beside(__file__, "task_words")
TASK_WORDS = {word: name for name, words in _WORDS["meant"].items() for word in words.split()}
"""What other tools and newcomers call a task -> its name."""
NOT_A_TASK = {word: why for why, words in _WORDS["none"].items() for word in words.split()}
"""What other tools call a task -> why there is none of this name, and what to use."""
DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Recipe)}
"""Field of a recipe -> its common default."""
READ_BY_TASKS = ("format", "model", "tokenizer", "revision", "max_length", "dropout", "label_smoothing")
"""Fields of the recipe that the engine never reads: the task or its data do."""
READ_BY_OPTIMIZERS = ("weight_decay", "adam_beta1", "adam_beta2", "adam_eps")
"""Fields that a task's own optimizer may read, in place of those of the table."""


def _not_named(fields: Sequence[str], *classes: type) -> list[str]:
    """Those of `fields` that no file of a user's task names, unless the recipe is handed on whole, or to
    a class of ours or of a file that is not known: those may read any.
    """
    from isobatch.data.base import Data

    bases = {base for one in classes for base in one.__mro__ if issubclass(base, Task | Data)} - {Task, Data}
    homes = {base: getattr(sys.modules.get(base.__module__), "__file__", None) for base in bases}
    if any(base.__module__.startswith("isobatch.") or not homes[base] for base in bases):
        return []
    files = {file for home in homes.values() for file in task_files.imported_files(Path(str(home)))}
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    if re.search(r"\brecipe\s*[,)\]]|\.recipe\b(?!\s*\.)", text):
        return []
    return [name for name in fields if not re.search(rf"\.{name}\b", text)]


@dataclass(frozen=True, slots=True)
class LoadedWorkload:
    """The task class and data class of a workload."""

    name: str
    task: type[Task]
    data: type[Data]
    streamed: type[Data] | None = None
    """The data class for data that stays in a store; its options are those of `data`."""

    @property
    def makes_optimizer(self) -> bool:
        """Whether the task has an optimizer of its own, in place of --optimizer's."""
        return issubclass(self.task, MakesOptimizer)

    def option_flags(self) -> dict[str, Flag]:
        """The flags of the task's and the data's own options."""
        return flags_of(self.task.Options) | flags_of(self.data.Options)

    def make(self, recipe: Recipe) -> tuple[Task, Data]:
        """The task and data objects of a recipe. Raises UserError where its code may not run."""
        consent.check(recipe)
        flags.convert(flags_of(Recipe)["optimizer"], recipe.optimizer)  # the task's file may register it
        if (recipe.optimizer == OWN) != self.makes_optimizer:
            why = "its own optimizer" if self.makes_optimizer else "none"
            raise UserError(f"--optimizer {recipe.optimizer}: {self.name} makes {why}: leave it out")
        task, data = self._options(self.task.Options, recipe), self._options(self.data.Options, recipe)
        made = self.task(recipe, task), self._data_class(recipe.data)(recipe, data)
        for one in made:
            if not hasattr(one, "recipe"):
                how = "must call super().__init__(recipe, options)"
                raise UserError(f"--task {self.name}: {type(one).__name__}.__init__ {how}")
        return made

    def _options(self, kind: type, recipe: Recipe) -> Any:
        known = flags_of(kind)
        return flags.build_options(kind, {k: v for k, v in recipe.options.items() if k in known})

    def _data_class(self, data: str) -> type[Data]:
        """Raises UserError where the data is in a store and this task reads local data only."""
        if not is_remote(data) or is_task_file(self.name):
            return self.data
        if self.streamed is None:
            raise UserError(f"--data {data}: {self.name} reads files on this machine: copy it here")
        return self.streamed

    def complete(self, asked: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
        """See the function `complete`."""
        recipe_flags, own_flags = flags_of(Recipe), self.option_flags()
        if unknown := [name for name in asked if name not in recipe_flags | own_flags]:
            hint = nearest_hint(unknown[0], recipe_flags | own_flags)
            raise UserError(f"{unknown[0]}: {self.name} has no such recipe field{hint}")
        if taken := sorted(recipe_flags.keys() & own_flags.keys()):
            raise UserError(f"{self.name}: its Options have {taken[0]}, which every recipe has: rename it")
        layers, notes = self._layers({k: v for k, v in asked.items() if k in recipe_flags})
        notes += task_files.misnamed_methods(self.task) if is_task_file(self.name) else []
        merged = _merge([*layers, asked])
        found = self.task.complete(asked)
        merged |= {k: v for k, v in found.items() if k not in asked or k not in recipe_flags}
        if (most := found.get("max_length")) and "max_length" not in asked:
            notes.append(f"--max-length {most}: {merged['model']} reads no more")
        common = {k: v for k, v in merged.items() if k in recipe_flags}
        for name in ("model", "tokenizer"):
            common[name] = SHORT_MODEL_NAMES.get(str(common.get(name)), common.get(name))
        options = {name: flags.to_json_value(_value(flag, merged)) for name, flag in own_flags.items()}
        if code := task_files.task_file_hash(self.name):
            options[TASK_CODE] = code
        recipe = Recipe(**{**common, "task": self.name, "options": options})
        consent.allow_typed(recipe)
        unread = self.unread(recipe, *self.make(recipe))
        for name in unread.keys() & asked.keys():
            typed = f"{flags.spelling(name)} {flags.value_text(getattr(recipe, name))}"
            raise UserError(f"{typed}: {unread[name]}; leave it out")
        if asked.get("mode") == "fast":
            chosen = _merge([self.task.fast, asked])  # in which --steps leaves out the mode's --epochs
            others = {*asked, *unread, *found}
            named = [f"{k} {v}" for k, v in chosen.items() if k not in others]
            notes.append(f"fast mode changes the recipe: {', '.join(named) or 'nothing for this task'}")
        return dataclasses.replace(recipe, **{name: DEFAULTS[name] for name in unread}), notes

    def unread(self, recipe: Recipe, task: Task, data: Data) -> dict[str, str]:
        """Fields that change nothing and have another value than the common default -> why they do not.

        A field that nothing reads would give a run another hash and the same training. A task names its own
        in `unread`; of a user's own task they are those that its files do not name.
        """
        phases = task.phases()
        stops_early = any(p.early_stopping for p in phases if recipe.phase in (None, p.name))
        betas, takes_none = "adam_beta1 adam_beta2 adam_eps", not OPTIMIZERS[recipe.optimizer].takes_betas
        rules = (
            (recipe.data == DEMO and not is_task_file(recipe.task), "format", "the demo's data has one form"),
            (takes_none, betas, f"{recipe.optimizer} has none"),
            (recipe.schedule != "cosine", "lr_floor", "it is the end of --schedule cosine"),
            (recipe.schedule != "wsd", "decay decay_shape", "it is the end of --schedule wsd"),
            (not data.has_groups, "order", "all of the data is on this machine, one row as near as the next"),
            (recipe.order != "shards", "shuffle_window", "it is that of --order shards"),
            (recipe.steps is not None, "least_steps", "it lengthens --epochs, and --steps is given"),
            (isinstance(task, ChangesModel), "on_spike", "this task can leave out no step"),
            ([p.name for p in phases] == [recipe.phase], "phase", "this task has no other"),
            (not stops_early, "patience", "no phase that trains here stops early"),
            (not recipe.patience or not stops_early, "min_delta", "it counts with --patience"),
        )
        said = {name: why for applies, names, why in rules if applies for name in names.split()}
        fields = (*READ_BY_TASKS, *(READ_BY_OPTIMIZERS if self.makes_optimizer else ()))
        own = _not_named(fields, type(task), type(data)) if is_task_file(recipe.task) else ()
        named = task.unread() if isinstance(task, LeavesUnread) else {}
        found = {**named, **dict.fromkeys(own, "no file of this task names it"), **said}
        return {name: why for name, why in found.items() if getattr(recipe, name) != DEFAULTS[name]}

    def plan_options(self, preset: str | None, asked: Mapping[str, Any]) -> PlanOptions:
        """What is asked of the plan: by the user (`asked`), and below it by the recipe's preset."""
        names = flags_of(PlanOptions).keys() - self.option_flags().keys() - asked.keys()
        added = {k: v for k, v in self.task.presets.get(preset or "", {}).items() if k in names}
        return PlanOptions(**{**added, **asked}, preset_options=dict.fromkeys(added, preset or ""))

    def _preset(self, name: str) -> Mapping[str, Any]:
        """The values of a preset, those for the plan among them. Raises UserError."""
        presets = self.task.presets
        if name not in presets:
            hint = nearest_hint(name, presets)
            raise UserError(f"--preset {name}: valid for {self.name}: {', '.join(presets)}{hint}")
        known = flags_of(Recipe) | self.option_flags() | flags_of(PlanOptions)
        if wrong := [field for field in presets[name] if field not in known]:
            raise UserError(f"--preset {name}: sets {wrong[0]}, which no recipe or plan has")
        return presets[name]

    def _layers(self, asked: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], list[str]]:
        """Values that the ones asked for override, lowest priority first; and notes for the user."""
        task, notes = self.task, []
        layers = [task.defaults, *([{"optimizer": OWN}] if self.makes_optimizer else [])]
        if self.streamed and is_remote(str(asked.get("data", ""))):
            layers.append({"order": "shards"})
        if asked.get("data", task.defaults.get("data", DEMO)) == DEMO:
            layers.append(task.demo)
            if not is_task_file(self.name):  # whose data may have no other source
                given = "--data demo" if "data" in asked else "no --data given"
                notes.append(f"{given}: {self.name} runs its embedded demo")
        if asked.get("preset"):
            layers.append(self._preset(str(asked["preset"])))
        if asked.get("mode") == "fast":
            layers.append(task.fast)
        return layers, notes


def _value(flag: Flag, merged: Mapping[str, Any]) -> Any:
    if flag.name in merged:
        return flags.convert(flag, merged[flag.name])
    if flag.default is dataclasses.MISSING:
        raise UserError(f"{flag.spelling}: this task needs it")
    return flag.default


def _merge(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge, later layers first. --epochs and --steps exclude each other: the later layer's wins, and leaves
    out the least steps of an earlier one.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        if {"epochs", "steps"} & layer.keys():
            merged.pop("least_steps", None)
        for given, other in (("epochs", "steps"), ("steps", "epochs")):
            if given in layer and other not in layer:
                merged.pop(other, None)
        merged.update(layer)
    return merged


def workload_of(recipe: Recipe) -> LoadedWorkload:
    """The workload of a recipe that may come from anywhere. Raises UserError where its code may not run."""
    consent.check(recipe)
    return workload(recipe.task)


def task_word(name: str) -> str:
    """A task as it is called here: `SFTTrainer` is causal-lm."""
    key = re.sub("-?trainer$", "", re.sub("[_ ]", "-", name.lower()))
    return TASK_WORDS.get(key, key)


def workload(name: str) -> LoadedWorkload:
    """The workload that the user calls `name`, or the user's own from ./file.py:Class. Raises UserError."""
    if is_task_file(name):
        consent.allow_task_file(name)
        task = task_files.load_task_class(name)
        from isobatch.data.base import Data

        if not (isinstance(task.data, type) and issubclass(task.data, Data)):
            raise UserError(f"--task {name}: {task.__name__}.data must be a subclass of isobatch.Data")
        return LoadedWorkload(name, task, task.data)
    key = task_word(name)
    if key in CHAINS:
        stages = ", ".join(CHAINS[key])
        raise UserError(f"--task {key}: only `auto` runs this chain; each stage has its plan: {stages}")
    if key not in TASKS:
        valid = [*TASKS, *CHAINS]
        if why := NOT_A_TASK.get(key):
            raise UserError(f"--task {name}: {why}")
        known = f"{nearest_hint(key, valid)}; valid: {', '.join(valid)}, or ./file.py:Class"
        raise UserError(f"--task {name}: there is no such task{known}")
    task = load(TASKS[key].task)
    data = load(task.data) if isinstance(task.data, str) else task.data
    return LoadedWorkload(key, task, data, load(task.streamed) if task.streamed else None)


def complete(task: str, values: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    """A new recipe with a value for every field, and notes for the user on what was chosen.

    `values`: those the user asked for, fields of the recipe and of the task. They override, in this order,
    fast mode, the preset, the demo, the task's defaults and the common defaults. Raises UserError.
    """
    return workload(task).complete(values)
