"""The Hugging Face Hub without importing it: the local cache, whether the Hub is reachable, its errors.

These checks never hang and use the standard library only. They follow huggingface_hub's cache layout and
environment variables, so that a check costs milliseconds and no heavy import.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

from isobatch.core.errors import NotHereError, first_line, nearest_file

TIMEOUT_SECONDS = 1.5
TRUE = ("1", "ON", "YES", "TRUE")
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


def is_id(name: str) -> bool:
    """Whether `name` has the form of a hub id: `owner/name`, or one word."""
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None


def cache_home() -> Path:
    """Hugging Face's cache folder: $HF_HOME, else `huggingface` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("HF_HOME", f"{cache}/huggingface")).expanduser()


def hub_folder() -> Path:
    """Where its repositories lie: $HF_HUB_CACHE, else `hub` in the cache folder."""
    return Path(os.environ.get("HF_HUB_CACHE", cache_home() / "hub")).expanduser()


def snapshot(kind: str, name: str, revision: str | None = None) -> Path | None:
    """The cached folder of a `models` or `datasets` repository, or None."""
    folder = hub_folder() / f"{kind}--{name.replace('/', '--')}"
    reference = folder / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision or "main"
    found = folder / "snapshots" / commit
    return found if found.is_dir() and any(found.iterdir()) else None


def is_reachable() -> bool:
    """Whether the Hub, or the proxy before it, accepts a connection within 1.5 s."""
    if any(os.environ.get(name, "").upper() in TRUE for name in OFFLINE):
        return False
    return answers(hub_address())


def require_hub(flag: str, name: str) -> None:
    """Raise NotHereError where what a flag names is no hub id, or the hub cannot be reached for it."""
    missing = f"{flag} {name}: there is no such file or folder{nearest_file(name)}"
    if not is_id(name):
        raise NotHereError(missing)
    if not is_reachable():
        raise NotHereError(
            f"{missing}; as a hub id it is not in the cache"
            f" {cache_home()}, and the hub cannot be reached: give a folder, go to where the run began if it"
            " names one from there, set HF_HOME to a cache with it, or run `prepare` where the internet is"
        )


def hub_address() -> str:
    """The Hub, or what HF_ENDPOINT names in its place."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def answers(address: str) -> bool:
    """Whether the server of an address, or the proxy before it, accepts a connection within 1.5 s."""
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    url = urlsplit(proxy if proxy and address.startswith("https:") else address)
    port = url.port or (80 if url.scheme == "http" else 443)
    answered = threading.Event()

    def connect() -> None:
        with contextlib.suppress(OSError):
            socket.create_connection((url.hostname or "", port), TIMEOUT_SECONDS).close()
            answered.set()

    # In a thread, because a DNS lookup ignores the socket's timeout and may take far longer.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(TIMEOUT_SECONDS)
    return answered.is_set()


def explain_hub_error(error: Exception, revision: str | None) -> str:
    """Why the Hub refused a repository: the end of a sentence that begins with the repository's name."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "is gated: accept its terms on its page of the hub, then log in (hf auth login, or HF_TOKEN)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"has no branch, tag or commit {revision}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "is not on the hub, or private: check the name, or log in (hf auth login, or HF_TOKEN)"
    return f"cannot be had from the hub: {first_line(error)}"
