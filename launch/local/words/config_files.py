"""Flags from files: `--config run.yaml`; `--like RUN`, the recipe of a run; `--from RUN`, with its weights.

A file holds flags by name, of isobatch or of the tools whose words it understands, each value as it would be
typed. A run's recipe.json is one too. What stands on the command line comes before what a file says.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.flags import BareValue, Flag, is_on, nearest_hint, value_text
from isobatch.core.recipe import TASK_CODE, Recipe
from isobatch.engine import consent
from isobatch.launch.local.words.foreign_words import Translation, words_for

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

RECIPE_FILE = "recipe.json"
SOURCES = ("config", "like", "from")
"""Flags that name where other flags come from."""
INSTEAD = {"epochs": {"steps", "least_steps"}, "steps": {"epochs", "least_steps"}}
"""A flag that is typed -> the flags of a file that it replaces: the length of a run is said anew."""
NOTHING = ("null", "~", "")


def flags_of_files(flags: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """(the file that --config or --like among these flags names, its flags as text); empty where neither is.

    Raises UserError.
    """
    given = {name: flags[name] for name in SOURCES if name in flags}
    if len(given) > 1:
        first, second = (f"--{name}" for name in list(given)[:2])
        raise UserError(f"{first} and {second} both say where flags come from: give one of them")
    if not given:
        return "", {}
    ((name, value),) = given.items()
    if isinstance(value, BareValue):
        raise UserError(f"--{name}: needs a value")
    path = Path(value).expanduser()
    if name != "config":
        path /= RECIPE_FILE
        if not path.is_file():
            raise UserError(f"--{name} {value}: is no folder of a run")
    values = _read_mapping(path)
    if "task" not in values or not isinstance(values.get("options"), dict):
        return str(path), read_flags(path, values)
    recipe = Recipe.from_dict(atomic_files.read_json(path))  # of a run, whoever made it
    consent.require(recipe, path.parent, is_on("--trust", flags.get("trust", "off")))
    consent.require_reading(recipe, path.parent, flags.keys())  # what is typed instead is not read
    return str(path), flags_of_recipe(recipe)


def read_flags(path: Path, values: Mapping[Any, Any]) -> dict[str, str]:
    """The flags of a YAML or JSON file, by name with `_`, every value as text. Raises UserError."""
    found = {}
    for name, value in values.items():
        text = _as_text(f"--config {path}: {name}", value)
        if text is not None:
            found[str(name).lstrip("-").replace("-", "_")] = text
    return found


def _read_mapping(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        # No type is guessed: 1e-3, on and 007 stay as they are written.
        found = yaml.BaseLoader(path.read_text(encoding="utf-8")).get_single_data()
    except FileNotFoundError:
        raise UserError(f"--config {path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UserError(
            f"--config {path}{where}: {getattr(error, 'problem', None) or 'is no YAML'}"
        ) from None
    if not isinstance(found, dict):
        raise UserError(f"--config {path}: holds no lines such as lr: 1e-3")
    return found


def _as_text(where: str, value: Any) -> str | None:
    """A value as it would be typed; None where the file leaves it open."""
    if isinstance(value, dict):
        raise UserError(f"{where}: holds names of its own; write each flag by itself, as in lr: 1e-3")
    if isinstance(value, list):
        return ",".join(str(_as_text(where, item)) for item in value)
    return None if str(value) in NOTHING else str(value)


def flags_of_recipe(recipe: Recipe) -> dict[str, str]:
    """The recipe's values as text; those that are open are left out."""
    values = {name: value for name, value in recipe.values().items() if name != TASK_CODE}
    found = {name: value_text(value) for name, value in values.items() if value is not None}
    return found | ({"from": recipe.starts_from["run"]} if recipe.starts_from else {})


def join(file: str, base: Translation, typed: Translation, known: Collection[str]) -> Translation:
    """The flags of a file with those that were typed over them. `known`: our names of flags.

    Raises UserError for a name in the file that nobody knows.
    """
    for name, word in base.written.items():
        if name not in known:
            raise UserError(f"{file}: {word} is no flag here{nearest_hint(word, words_for(known))}")
    taken = {*typed.flags}.union(*(INSTEAD.get(name, ()) for name in typed.flags))
    kept = {name: value for name, value in base.flags.items() if name not in taken}
    words = {word for name, word in base.written.items() if name in taken}
    notes = {word: note for word, note in base.notes.items() if word not in words}
    return Translation({**kept, **typed.flags}, {**base.written, **typed.written}, {**notes, **typed.notes})


def config_text(groups: Iterable[tuple[str, Mapping[str, Flag], Mapping[str, Any]]]) -> str:
    """A file for --config. `groups`: (title, flags, their values); values that are None stand as remarks."""
    lines: list[str] = []
    for title, flags, values in groups:
        lines += ["", f"# {title}"] if lines else [f"# {title}"]
        for name, flag in flags.items():
            value = values.get(name, flag.default)
            text = f"# {name}:" if value is None else f"{name}: {scalar(value_text(value))}"
            lines.append(f"{text:<28}  # {flag.help}" if flag.help else text)
    return "\n".join(lines)


def scalar(text: str) -> str:
    """The text as YAML, in quotes where it may need them."""
    is_plain = re.fullmatch(r"[\w./][\w./,%+-]*", text) and text not in NOTHING
    return text if is_plain else json.dumps(text, ensure_ascii=False)
