"""Shapes of well-known models, so that `plan --assume-length` needs their name alone: no files, no network.

Each in known_models.json is an excerpt of the config.json on the model's page of the Hugging Face Hub.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from isobatch.core import hub_cache
from isobatch.core.errors import UserError
from isobatch.models import hub

Config = dict[str, Any]
KNOWN_MODELS: dict[str, Config] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Hub id -> the numbers of its config.json."""


def find(name: str) -> str | None:
    """The hub id in the table that a name means: itself, or its part after the slash, in any case."""
    return next((known for known in KNOWN_MODELS if name.lower() in _spellings(known)), None)


def _spellings(hub_id: str) -> tuple[str, ...]:
    whole = hub_id.lower()
    short = whole.partition("/")[2]
    return whole, short, short.removesuffix("-hf"), short.removeprefix("meta-")


def load_config(name: str, revision: str | None) -> Config:
    """A model's config from its folder or the cache, of which config.json is enough; or from this table; or
    from the hub. Raises UserError.
    """
    if folder := hub.local_folder(name, revision):
        hub.check_folder(folder, tokenizer="not needed")
        return hub.load_config(name, revision)
    if known := find(name):
        return dict(KNOWN_MODELS[known])
    if hub.is_id(name) and hub_cache.is_reachable():
        return hub.load_config(name, revision)
    spellings = {spelling: known for known in KNOWN_MODELS for spelling in _spellings(known)}
    close = difflib.get_close_matches(name.lower(), spellings, n=3, cutoff=0.5)
    near = list(dict.fromkeys(spellings[spelling] for spelling in close))
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    raise UserError(
        f"--model {name}: is no preset, no folder and none of the {len(KNOWN_MODELS)} models whose shape is"
        f" known{hint}; a folder with its config.json is enough"
    )


def transformers_config(name: str, revision: str | None, remote_code: bool) -> Any:
    """transformers' config object of the same."""
    from transformers import AutoConfig

    if path := hub.local_folder(name, revision):
        return AutoConfig.from_pretrained(str(path), **hub.remote_code_kwargs(remote_code))
    return AutoConfig.for_model(**load_config(name, revision))
