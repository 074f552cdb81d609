"""Hub data sets: whether one can be had, and loading it through the library `datasets`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from isobatch.core import hub_cache
from isobatch.core.errors import UserError
from isobatch.core.flags import nearest_path_hint


def require_dataset(name: str) -> None:
    """Raise UserError unless the data set `name` is in a cache, or the hub can be reached."""
    close = nearest_path_hint(Path(name).expanduser())
    if not hub_cache.is_id(name):
        raise UserError(f"--data {name}: there is no such file or folder{close}")
    if not is_cached_dataset(name) and not hub_cache.is_reachable():
        raise UserError(
            f"--data {name}: there is no such file or folder{close}; as a hub id it is not in the cache"
            f" {hub_cache.cache_home()}, and the hub cannot be reached: give a folder, set HF_HOME to a cache"
            " that holds it, or run `prepare` on a machine with internet"
        )


def is_cached_dataset(name: str) -> bool:
    """Whether the data set lies in the cache of `datasets`, or its repository in the hub's cache."""
    datasets_cache = Path(
        os.environ.get("HF_DATASETS_CACHE", hub_cache.cache_home() / "datasets")
    ).expanduser()
    prepared = datasets_cache / name.replace("/", "___").lower()
    return prepared.is_dir() or hub_cache.snapshot("datasets", name) is not None


def load_dataset(name: str, config: str | None) -> Any:
    """Split -> `datasets.Dataset`. Without a network it comes from the caches.

    Raises UserError with one line where it cannot be had.
    """
    try:
        import datasets
        import huggingface_hub.constants
    except ImportError:
        raise UserError(f"--data {name}: hub data needs datasets: pip install datasets") from None
    folder = None
    if not hub_cache.is_reachable():
        folder = hub_cache.snapshot("datasets", name)
        # Otherwise `datasets` asks for every file over the network, with retries, before it uses the cache.
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(str(folder or name), config)
    except Exception as error:  # network, missing configuration, gated: each becomes one line for the user
        raise UserError(f"--data {name}: {str(error).splitlines()[0]}") from None
