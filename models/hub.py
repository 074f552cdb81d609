"""Model ids: what the local cache holds, and whether the hub answers. Standard library only, never a hang.

Mirrors huggingface_hub's cache layout and environment variables. data/hub.py asks the same of data sets:
models and data may not import each other.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from models.base import ModelError

TIMEOUT_SECONDS = 1.5
TRUE = ("1", "ON", "YES", "TRUE")


def is_id(name: str) -> bool:
    """Whether `name` has the form `owner/name`."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None


def home() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("HF_HOME", f"{cache}/huggingface")).expanduser()


def snapshot(name: str, revision: str | None = None) -> Path | None:
    """The cached folder of a model, or None."""
    cache = Path(os.environ.get("HF_HUB_CACHE", home() / "hub")).expanduser()
    folder = cache / f"models--{name.replace('/', '--')}"
    reference = folder / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision or "main"
    found = folder / "snapshots" / commit
    return found if (found / "config.json").is_file() else None


def reachable() -> bool:
    """Whether the hub, or the proxy on the way to it, takes a connection within 1.5 s."""
    if any(os.environ.get(name, "").upper() in TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
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


def require(name: str, revision: str | None) -> None:
    """Raise unless the model is in the cache or the hub answers."""
    if snapshot(name, revision) is None and not reachable():
        raise ModelError(
            f"--model {name}: there is no such folder; as a hub id it is not in the cache {home()}, and the "
            "hub cannot be reached: give a folder, set HF_HOME to a cache that holds it, or run `prepare` on "
            "a machine with internet"
        )


def place(name: str, revision: str | None) -> str:
    """What from_pretrained should open: a folder where there is one, so that it asks no network."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder)
    return str(snapshot(name, revision) or name)


def config(name: str, revision: str | None) -> dict[str, Any]:
    """The model's config.json, fetched if need be."""
    folder = Path(place(name, revision))
    file = folder / "config.json" if folder.is_dir() else _fetch_config(name, revision)
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"--model {name}: {file} cannot be read: {error}") from None


def _fetch_config(name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    require(name, revision)
    try:
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except Exception as error:  # network, missing repository, gated: all are one line to the user
        raise ModelError(
            f"--model {name}: cannot be had from the hub: {str(error).splitlines()[0]}"
        ) from None
