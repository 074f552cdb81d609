"""Consent: a run's code is executed, a place that it names is read, and an address that it names is sent to,
only where this user has agreed to it.

Who types a recipe agrees, and who says --trust. A launch remembers it in the user's state folder, by hashes
of the recipe with its code or with the address, never in the run: so a run that was trained here is opened
again without a question, and one that somebody sent is not. Processes that a launch starts get it in an
environment variable.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from isobatch.core import atomic_files, hub_cache
from isobatch.core.errors import UserError
from isobatch.core.recipe import DEMO, Recipe
from isobatch.engine import task_files
from isobatch.engine.runs.run_options import RunOptions
from isobatch.engine.task_files import is_task_file, task_file, task_file_hash

VARIABLE = "ISOBATCH_TRUST"
"""Environment variable with what a launch has agreed to, for the processes that it starts."""
STATE = "ISOBATCH_STATE"
"""Environment variable with the folder where this user's consent is kept."""
MOST_FILES = 1000
"""More files of Python code are no model's."""
MOST_CARRIED = 1000
"""Digests in VARIABLE, the newest: a variable has 128 KiB at most."""
CODE = "execute code that this user has not trained here"
BASE = "open a base model that this user has not named here"
SENDING = "send to places that this user has not named here"
READING = "read places that this user has not named here"

PLACES = ("data", "tokenizer", "valid", "model", "teacher", "pruned")
"""Fields of recipes that name places without a slash too."""
NAMED_ONLY = ("model", "teacher", "pruned")
"""Of those, the ones in which a word may be a preset: it is a place where it is none, or a folder."""
NO_PLACES = ("task",)
"""Fields with slashes in them that are no places: code is asked for by itself."""

_allowed: set[str] = set()
"""What was typed in this process: `_names` and `named_texts` of recipes."""
_received: set[str] = set()
"""Places of recipes that this process has read from a run's folder."""
_granted: dict[str, None] = {}
"""Digests that were agreed to in this process, the newest last."""


def state_folder() -> Path:
    """Where this user's consent is kept: $ISOBATCH_STATE, else the user's state folder."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(os.environ.get(STATE) or Path(base) / "isobatch")


def places(recipe: Recipe) -> list[tuple[str, str]]:
    """(field, value) of what a recipe reads outside its run: a path, an address, a hub id."""
    return [
        (name, value)
        for name, value in _texts(recipe)
        if "/" in value or name not in NAMED_ONLY or value not in _presets() or Path(value).exists()
    ]


def _presets() -> set[str]:
    """Names of models that are built here, from nothing."""
    from isobatch.models.causal_lm import model_sizes
    from isobatch.models.classification import task as classifiers

    return {*model_sizes.PRESETS, *classifiers.PRESETS}


def named_texts(recipe: Recipe) -> set[str]:
    """`field value` of all that may be a place, on whatever machine."""
    return {f"{name} {value}" for name, value in _texts(recipe)}


def _texts(recipe: Recipe) -> Iterator[tuple[str, str]]:
    values = {**recipe.values(), "from": (recipe.starts_from or {}).get("run")}
    for name in values.keys() - set(NO_PLACES):
        for value in values[name] if isinstance(values[name], list | tuple) else [values[name]]:
            is_text = isinstance(value, str) and value and (name, value) != ("data", DEMO)
            is_file = name == "template" and value.endswith(".jinja")
            if is_text and ("/" in value or name in PLACES or is_file):
                yield name, value


def adapter_base(run: Path) -> str:
    """The base model, a folder or a hub id, of the adapter in a run's final/; empty without one."""
    return str(_adapter(run / "final").get("base_model_name_or_path") or "")


def _adapter(final: Path) -> dict[str, Any]:
    file = final / "adapter_config.json"
    return atomic_files.read_json(file) if file.is_file() else {}


def whole_path(model: str | None) -> str:
    """The whole path of a model's folder, as a saved adapter has it; empty where it is none."""
    folder = Path(model or "").expanduser()
    return str(folder.resolve()) if model and folder.is_dir() else ""


def allow_task_file(name: str) -> None:
    """The user has typed the name of this task file: it may run in this process."""
    _allowed.add(f"{name} {task_file_hash(name)}")


def allow_typed(recipe: Recipe) -> None:
    """The user has typed the recipe: its places may be read in this process, and after --remote-code the
    model's own code may run.
    """
    _allowed.update(_names(recipe) | named_texts(recipe))


def received(recipe: Recipe) -> None:
    """The recipe comes from a run's folder, whoever made it: see `require_reading`."""
    _received.update(named_texts(recipe))


def is_allowed(recipe: Recipe) -> bool:
    """Whether the recipe's code, if it has any, may run in this process."""
    return _names(recipe) <= _allowed


def check(recipe: Recipe) -> None:
    """Raise UserError where the recipe brings code that may not run in this process."""
    if not is_allowed(recipe):
        raise _refusal(recipe.task, {CODE: [*code_of(recipe, None)]})


def require(
    recipe: Recipe, run: Path | None = None, trust: bool = False, options: RunOptions | None = None
) -> None:
    """Let a recipe's code, and that in a run's folder, run in this process where this user agreed to it; so
    for the base model that final/ names, and for the hooks that a launch has and where it sends (`options`).

    With `trust` the user does so now, and to what `require_reading` asks. Raises UserError where the user has
    not, or where a task file is not the one that was trained.
    """
    if _names(recipe) and (changed := task_files.task_file_problem(recipe)):
        raise UserError(changed)
    if trust:
        _remember(recipe, run, options)
    asked = asks(recipe, run, options)
    if asked.keys() - {READING}:  # all that --trust agrees to is named with it
        raise _refusal(run or recipe.task, asked)
    _allowed.update(_names(recipe))


def require_reading(recipe: Recipe, run: Path | None, but_for: Collection[str] = ()) -> None:
    """Raise UserError where the recipe would read places that this user has not agreed to.

    `but_for`: fields that are not read.
    """
    if unknown := _unknown_places(recipe, run, _known(), but_for):
        raise _refusal(run or recipe.task, {READING: unknown})


def asks(recipe: Recipe, run: Path | None, options: RunOptions | None = None) -> dict[str, list[str]]:
    """What this user has not agreed to: CODE -> files of `code_of`, BASE -> the base model of the adapter in
    a run's final/, SENDING -> where the options send, READING -> addresses and paths outside the run. Without
    a run, only places that came from a run's folder count.
    """
    known = _known()
    outside = _unknown_places(recipe, run, known)
    found = {
        CODE: code_of(recipe, run) | (hook_code(options) if options else {}),
        BASE: {base: f"{BASE} {base}" for base in _foreign_bases(recipe, run, bool(outside))},
        SENDING: {target: target for target in (options.sends() if options else ())},
    }
    unknown = {
        what: [shown for shown, content in named.items() if _digest(recipe, content) not in known]
        for what, named in found.items()
    }
    return {what: named for what, named in {**unknown, READING: outside}.items() if named}


def _foreign_bases(recipe: Recipe, run: Path | None, is_foreign: bool) -> list[str]:
    """The base model of the adapter in final/, unless it lies in the run, was typed, or is the model of a
    recipe whose places are this user's own.
    """
    base = adapter_base(run) if run else ""
    own = () if is_foreign else (recipe.model, whole_path(recipe.model))
    if not run or not base or base in own or f"model {base}" in _allowed:
        return []
    return [] if Path(base).resolve().is_relative_to(run.resolve()) else [base]


def _unknown_places(
    recipe: Recipe, run: Path | None, known: set[str], but_for: Collection[str] = ()
) -> list[str]:
    if _digest(recipe, READING) in known:
        return []
    named = [f"{name} {value}" for name, value in places(recipe) if name not in but_for]
    return [one for one in named if one not in _allowed and (run is not None or one in _received)]


def remember(recipe: Recipe, options: RunOptions | None = None) -> None:
    """Keep that the user typed this recipe and these options, for later commands and for the processes that
    this one starts.
    """
    if is_allowed(recipe):
        _remember(recipe, None, options)


def environment() -> dict[str, str]:
    """The variable for processes that are started for what was agreed to here."""
    granted = [*_inherited(), *_granted][-MOST_CARRIED:]
    return {VARIABLE: ",".join(sorted(granted))} if granted else {}


def code_of(recipe: Recipe, run: Path | None) -> dict[str, str]:
    """File -> hash of its content, for the code that this recipe, and the model of a run, would execute."""
    found = _code_of_file(recipe.task)
    if recipe.options.get("remote_code"):
        for name, folder in _models(recipe, run and run / "final"):
            found |= _code_in(folder, str(recipe.model)) if folder else {name: _hash(name.encode())}
    return found


def hook_code(options: RunOptions) -> dict[str, str]:
    """As `code_of`, for the hooks of a launch."""
    return {file: content for hook in options.hook for file, content in _code_of_file(hook).items()}


def _code_of_file(location: str) -> dict[str, str]:
    """As `code_of`, for ./file.py:Class; nothing for another word, or where there is no file."""
    if not is_task_file(location) or not task_file(location).is_file():
        return {}
    return {str(p): _hash(p.read_bytes()) for p in task_files.imported_files(task_file(location).resolve())}


def _models(recipe: Recipe, final: Path | None) -> Iterator[tuple[str, Path | None]]:
    """Name and folder of the models whose own code transformers would take; None where it is not here yet."""
    names = [(recipe.model, recipe.revision)]
    if final is not None and final.is_dir():
        yield str(final), final
        base = _adapter(final)
        names += [(base.get("base_model_name_or_path"), base.get("revision"))] if base else []
    for name, revision in names:
        folder = Path(str(name)).expanduser()
        if not folder.is_dir() and hub_cache.is_id(str(name)):
            folder = hub_cache.snapshot("models", str(name), revision) or folder
        yield f"{name}@{revision}", folder if folder.is_dir() else None


def _code_in(folder: Path, model: str) -> dict[str, str]:
    """As `code_of`, for a model's folder; other repositories' code that its config names counts as a file."""
    files = list(itertools.islice(folder.rglob("*.py"), MOST_FILES + 1))
    if len(files) > MOST_FILES:
        raise UserError(f"{folder}: holds more than {MOST_FILES:,} files of Python code: is it a model?")
    found = {str(p): _hash(p.read_bytes()) for p in files if p.is_file()}
    if (folder / "config.json").is_file():
        named = atomic_files.read_json(folder / "config.json").get("auto_map") or {}
        for place in named.values() if isinstance(named, dict) else [named]:
            repository = str(place).rpartition("--")[0]
            if repository and repository != model:
                found[f"{folder}/config.json ({place})"] = _hash(str(place).encode())
    return found


def _names(recipe: Recipe) -> set[str]:
    """What in the recipe brings code: its task file with the hash, its model with the revision."""
    names = {f"{recipe.task} {task_file_hash(recipe.task)}"} if is_task_file(recipe.task) else set()
    return names | ({f"{recipe.model} {recipe.revision}"} if recipe.options.get("remote_code") else set())


def _remember(recipe: Recipe, run: Path | None, options: RunOptions | None) -> None:
    agreed = {*code_of(recipe, run).values()}
    if recipe.options.get("remote_code"):  # its names as well: a model's folder may be gone later
        agreed |= {_hash(name.encode()) for name, _ in _models(recipe, run and run / "final")}
    if named_texts(recipe):
        agreed.add(READING)
    if base := adapter_base(run) if run else whole_path(recipe.model):  # as an adapter will name it
        agreed.add(f"{BASE} {base}")
    _keep(recipe, agreed)
    if options is not None:
        remember_options(recipe, options)


def remember_options(recipe: Recipe, options: RunOptions) -> None:
    """Keep that the user typed these options for a recipe: the hooks' code, where it sends."""
    _keep(recipe, {*hook_code(options).values(), *options.sends()})


def _keep(recipe: Recipe, agreed: Collection[str]) -> None:
    digests = [_digest(recipe, content) for content in agreed]
    new = [digest for digest in digests if digest not in _known()]
    _granted.update(dict.fromkeys(digests))
    with suppress(OSError, RuntimeError):  # a home that cannot be written: children have the variable
        if new:
            folder = state_folder()
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with (folder / "trusted.jsonl").open("a", encoding="utf-8") as stream:
                rows = ({"digest": digest, "recipe": recipe.hash()} for digest in new)
                stream.write("".join(f"{json.dumps(row)}\n" for row in rows))


def _known() -> set[str]:
    """The digests that this user has agreed to, here or in the process that started this one."""
    kept: list[str] = []
    with suppress(OSError, RuntimeError):
        kept = [str(row.get("digest")) for row in atomic_files.rows_in(state_folder() / "trusted.jsonl")]
    return {*kept, *_granted, *_inherited()}


def _inherited() -> set[str]:
    return set(filter(None, os.environ.get(VARIABLE, "").split(",")))


def _digest(recipe: Recipe, content: str) -> str:
    return _hash(f"{recipe.digest()} {content}".encode())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _refusal(place: Path | str, asked: Mapping[str, list[str]]) -> UserError:
    parts = [
        f"{what}: {', '.join(named[:3])}" + (f" and {len(named) - 3} more" if len(named) > 3 else "")
        for what, named in asked.items()
    ]
    way_out = "read it, then add --trust (`inspect RUN` does none of it)"
    return UserError(f"{place} would {'; '.join(parts)}: {way_out}")
