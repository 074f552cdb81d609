"""Hub ids: what the local cache holds, and whether the hub answers. Standard library only, never a hang.

Mirrors huggingface_hub's cache layout and environment variables, so that a question costs milliseconds and
no import.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from data.base import DataError

TIMEOUT_SECONDS = 1.5
TRUE = ("1", "ON", "YES", "TRUE")


def is_id(name: str) -> bool:
    """Whether `name` has the form of a hub id: `owner/name`, or one word."""
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None


def home() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("HF_HOME", f"{cache}/huggingface")).expanduser()


def snapshot(kind: str, name: str, revision: str | None = None) -> Path | None:
    """The cached folder of a `models` or `datasets` repository, or None."""
    cache = Path(os.environ.get("HF_HUB_CACHE", home() / "hub")).expanduser()
    folder = cache / f"{kind}--{name.replace('/', '--')}"
    reference = folder / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision or "main"
    found = folder / "snapshots" / commit
    return found if found.is_dir() and any(found.iterdir()) else None


def offline() -> bool:
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in TRUE for name in names)


def reachable() -> bool:
    """Whether the hub, or the proxy on the way to it, takes a connection within 1.5 s."""
    if offline():
        return False
    address = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    url = urlsplit(address or os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = url.port or (80 if url.scheme == "http" else 443)
    answered = threading.Event()

    def connect() -> None:
        try:
            with socket.create_connection((url.hostname or "", port), TIMEOUT_SECONDS):
                answered.set()
        except OSError:
            pass

    # A thread, because looking up a name may take far longer than any timeout a socket takes.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(TIMEOUT_SECONDS)
    return answered.is_set()


def require_dataset(name: str) -> None:
    """Raise unless the data set called `name` is in a cache or the hub answers."""
    close = _nearby(Path(name).expanduser())
    if not is_id(name):
        raise DataError(f"--data {name}: there is no such file or folder{close}")
    if not is_cached_dataset(name) and not reachable():
        raise DataError(
            f"--data {name}: there is no such file or folder{close}; as a hub id it is not in the cache "
            f"{home()}, and the hub cannot be reached: give a folder, set HF_HOME to a cache that holds it, "
            "or run `prepare` on a machine with internet"
        )


def is_cached_dataset(name: str) -> bool:
    arrow = Path(os.environ.get("HF_DATASETS_CACHE", home() / "datasets")).expanduser()
    prepared = arrow / name.replace("/", "___").lower()
    return prepared.is_dir() or snapshot("datasets", name) is not None


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
        raise DataError(f"--data {name}: hub data needs datasets: pip install datasets") from None
    folder = None
    if not reachable():
        folder = snapshot("datasets", name)
        # Else every file is asked for over the network, with retries, before the cache is looked at.
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(str(folder or name), config)
    except Exception as error:  # network, missing configuration, gated: all are one line to the user
        raise DataError(f"--data {name}: {str(error).splitlines()[0]}") from None
