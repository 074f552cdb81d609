"""Places of data in a store: what --data names, which library reads it, and whether the store answers."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from isobatch.core import hub_cache
from isobatch.core.errors import UserError
from isobatch.core.flags import nearest_hint

REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
SECRET = re.compile(r"sig|token|secret|credential|password|key|session", re.IGNORECASE)
"""Names of parts of an address that let its reader in: addresses are written into recipes and logs."""
CHAINED = re.compile(r"::(?=\w[\w+.-]*(?:://|::))")
NAMES_BEFORE_AT = ("hf", "abfs", "abfss")
"""Schemes that write something else than a user before an @."""
ENDINGS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".jsonl.gz": "jsonl.gz"}
ENDINGS |= {".ndjson.gz": "jsonl.gz"}


@dataclass(frozen=True, slots=True)
class Library:
    """What reads a kind of address beside fsspec."""

    module: str = ""
    install: str = ""
    """What pip is asked for."""


LIBRARIES = {
    "s3": Library("s3fs", "'isobatch[s3]'"),
    "gs": Library("gcsfs", "'isobatch[gs]'"),
    "hf": Library("huggingface_hub", "huggingface_hub"),
    "https": Library("aiohttp", "aiohttp"),
    "http": Library("aiohttp", "aiohttp"),
    "file": Library(),
    "memory": Library(),
}


def is_remote(data: str) -> bool:
    """Whether --data names a store: it begins with s3://, gs://, hf://, https:// or the like."""
    return REMOTE.match(data) is not None


def patterns(data: str) -> list[str]:
    """The addresses of --data, which commas separate; together they are one set."""
    return [one.strip() for one in data.split(",")]


def file_format(address: str) -> str | None:
    """parquet, jsonl or jsonl.gz, by the ending of an address; None for another one."""
    name = PurePosixPath(urlsplit(address).path).name.lower()
    return next((kind for ending, kind in ENDINGS.items() if name.endswith(ending)), None)


def check(data: str) -> None:
    """Raise UserError for addresses that nothing here can read, or a store that does not answer in 2 s."""
    for address in patterns(data):
        if not is_remote(address):
            raise UserError(
                f"--data {data}: {address or 'nothing'} is no address such as s3://bucket/*.parquet"
            )
        scheme = address.partition("://")[0]
        library = LIBRARIES.get(scheme)
        if library is None:
            known = ", ".join(f"{name}://" for name in LIBRARIES)
            raise UserError(f"--data {data}: {scheme}:// is none of {known}{nearest_hint(scheme, LIBRARIES)}")
        refuse_secrets(address)
        if library.module and importlib.util.find_spec(library.module) is None:
            raise UserError(
                f"--data {data}: {scheme}:// needs {library.module}: pip install {library.install}"
            )
    for server in dict.fromkeys(found for one in patterns(data) if (found := _server(one))):
        if not (hub_cache.is_reachable() if server == _hub() else hub_cache.answers(server)):
            raise UserError(f"--data {data}: {server} cannot be reached: check the address and the network")


def refuse_secrets(address: str, flag: str = "--data", written: str = "the recipe") -> None:
    """Raise UserError for an address that carries a password or a signature; it is not repeated.

    `written`: where it would be kept. Addresses of fsspec may hold others, behind `::`.
    """
    for one in CHAINED.split(unquote(address)):
        scheme, _, rest = one.partition("://")
        place, *given = re.split(r"[?&#;]", rest)
        host = place.partition("/")[0]
        names_no_user = scheme in NAMES_BEFORE_AT and ":" not in host
        # A key of S3 may hold slashes: then what looks like the host has a port that is none.
        if ("@" in host and not names_no_user) or re.search(r":(?!\d*$)[^\]]*$", host):
            raise UserError(
                f"{flag} {scheme}://{place.rpartition('@')[2]}: leave user and password out, they would be"
                f" written into {written}"
            )
        if any("=" in pair and SECRET.search(pair.partition("=")[0]) for pair in given):
            raise UserError(
                f"{flag} {scheme}://{place}: leave the signature out, it would be written into {written};"
                " give the library its credentials in the environment"
            )


def _hub() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def _server(address: str) -> str | None:
    """The address of the server behind one, None where only the library knows it."""
    scheme, host = address.partition("://")[0], urlsplit(address).netloc
    if scheme in ("http", "https"):
        return f"{scheme}://{host}"
    if scheme == "hf":
        return _hub()
    if scheme == "gs":
        return os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"
    return _s3_endpoint() if scheme == "s3" else None


def _s3_endpoint() -> str | None:
    import fsspec.config

    settings: dict[str, Any] = fsspec.config.conf.get("s3", {})
    named = settings.get("endpoint_url") or settings.get("client_kwargs", {}).get("endpoint_url")
    named = named or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if named or "endpoint_url" in _aws_config():
        return named
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return f"https://s3.{region}.amazonaws.com"


def _aws_config() -> str:
    """The text of the user's AWS configuration, which may name an endpoint; empty without one."""
    path = Path(os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser()
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
