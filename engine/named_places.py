"""What a run names outside its own folder: paths, addresses and hub ids that it reads.

The kind is decided here once, for all fields: `consent` asks for it, `inspect` shows it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core import atomic_files
from isobatch.core.recipe import DEMO

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isobatch.core.recipe import Recipe

PLACES = ("data", "tokenizer", "valid", "model", "teacher", "pruned", "start")
"""Fields of recipes that name places without a slash too."""
NAMED_ONLY = ("model", "teacher", "pruned", "start")
"""Of those, the ones in which a word may be a preset: it is a place where it is none, or a folder."""
NO_PLACES = ("task", "generate_prompt")
"""Fields with slashes in them that are no places: code is asked for by itself."""


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
            if is_text and ("/" in value or name in PLACES):
                yield name, value


def adapter_base(run: Path) -> str:
    """The base model, a folder or a hub id, of the adapter in a run's final/; empty without one."""
    file = run / "final" / "adapter_config.json"
    return str(atomic_files.read_json(file).get("base_model_name_or_path") or "") if file.is_file() else ""


def whole_path(model: str | None) -> str:
    """The whole path of a model's folder, as a saved adapter has it; empty where it is none."""
    folder = Path(model or "").expanduser()
    return str(folder.resolve()) if model and folder.is_dir() else ""
