"""Shapes of well-known models, so that `plan --assume-length` needs their name alone: no files, no network.

Each in known_models.json is an excerpt of the config.json on the model's page of the Hugging Face Hub.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

from isobatch.core import hub_cache
from isobatch.core.errors import NotHereError
from isobatch.models import hub

KNOWN_MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Hub id -> the numbers of its config.json."""


COPIES = "instruct(-2507)?|chat|it|base|hf|pt|bf16|(unsloth-)?bnb-4bit"
"""Words in the name of a model that is another's copy, or another trained further: its shape is the same."""


def find(name: str) -> str | None:
    """The hub id in the table whose shape a name has: whoever's copy it is, tuned to instructions or not."""
    return next((known for known in KNOWN_MODELS if plain(known) == plain(name)), None)


def plain(name: str) -> str:
    """A name without its owner, dashes and the words of a copy."""
    return re.sub(rf"^meta-|-({COPIES})(?=-|$)|[-_ ]", "", name.lower().rpartition("/")[2])


def load_config(name: str, revision: str | None) -> dict[str, Any]:
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
    spellings = {plain(known): known for known in KNOWN_MODELS}
    near = [spellings[close] for close in difflib.get_close_matches(plain(name), spellings, n=3, cutoff=0.5)]
    hint = f"{' or '.join(near)}, or " if near else ""
    raise NotHereError(
        f"--model {name}: is no preset, no folder and none of the {len(KNOWN_MODELS)} models whose shape is"
        f" known: give {hint}a folder with its config.json, which is enough"
    )


def transformers_config(name: str, revision: str | None, remote_code: bool) -> Any:
    """transformers' config object of the same."""
    from transformers import AutoConfig

    if path := hub.local_folder(name, revision):
        return AutoConfig.from_pretrained(str(path), **hub.remote_code_kwargs(remote_code))
    return AutoConfig.for_model(**load_config(name, revision))
