"""Data sets of the hub: in the cache, or to be had."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from isobatch.core import hub_cache
from isobatch.core.errors import UserError


def require_dataset(name: str) -> None:
    """Raise unless the data set called `name` is in a cache or the hub answers."""
    close = _nearby(Path(name).expanduser())
    if not hub_cache.is_id(name):
        raise UserError(f"--data {name}: there is no such file or folder{close}")
    if not is_cached_dataset(name) and not hub_cache.is_reachable():
        raise UserError(
            f"--data {name}: there is no such file or folder{close}; as a hub id it is not in the cache"
            f" {hub_cache.cache_home()}, and the hub cannot be reached: give a folder, set HF_HOME to a cache"
            " that holds it, or run `prepare` on a machine with internet"
        )


def is_cached_dataset(name: str) -> bool:
    arrow = Path(os.environ.get("HF_DATASETS_CACHE", hub_cache.cache_home() / "datasets")).expanduser()
    prepared = arrow / name.replace("/", "___").lower()
    return prepared.is_dir() or hub_cache.snapshot("datasets", name) is not None


def _nearby(path: Path) -> str:
    names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f" (did you mean {path.parent / close[0]}?)" if close else ""


def load_dataset(name: str, config: str | None) -> Any:
    """Splits by name. Without the hub: from the cached repository, or what `datasets` prepared before."""
    try:
        import datasets
        import huggingface_hub.constants
    except ImportError:
        raise UserError(f"--data {name}: hub data needs datasets: pip install datasets") from None
    folder = None
    if not hub_cache.is_reachable():
        folder = hub_cache.snapshot("datasets", name)
        # Else every file is asked for over the network, with retries, before the cache is looked at.
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(str(folder or name), config)
    except Exception as error:  # network, missing configuration, gated: all are one line to the user
        raise UserError(f"--data {name}: {str(error).splitlines()[0]}") from None
