"""Atomic writes of small files, reads of JSON and JSON lines."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from isobatch.core.errors import DiskFullError, UserError
from isobatch.core.measures import format_bytes

FULL = (errno.ENOSPC, errno.EDQUOT)
NOT_FINITE = "not_finite"
"""Field of a JSON object that says which of its fields were NaN or infinite: these are null."""


def write_text(path: Path, text: str) -> None:
    """Write atomically (write, sync, rename): a reader sees the old content or the new, never a part.

    A device or a pipe, /dev/null or /dev/stdout for one, is written into: a rename would take its place.
    """
    if path.exists() and not path.is_file():
        with explain_write_errors(path):
            path.write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_write_errors(path, len(text)), temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object atomically."""
    write_text(path, json_text(value, indent=2, ensure_ascii=False) + "\n")


def json_text(value: Any, **options: Any) -> str:
    """JSON; numbers that it does not have become what `finite` makes of them. `options`: of json.dumps."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(finite(value), allow_nan=False, **options)


def finite(value: Any) -> Any:
    """The value with null for NaN and infinity, which JSON does not have.

    In a mapping `not_finite` then says which they were: {"loss": null, "not_finite": {"loss": "inf"}}.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, dict):
        floats = {name: item for name, item in value.items() if isinstance(item, float)}
        wrong = {name: str(item) for name, item in floats.items() if not math.isfinite(item)}
        return {name: finite(item) for name, item in value.items()} | ({NOT_FINITE: wrong} if wrong else {})
    return value


def parse_json(text: str | bytes) -> Any:
    """JSON. Raises ValueError, also where an object has a key twice: readers differ in which one counts."""
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for k, (name, _) in enumerate(pairs) if name in dict(pairs[:k]))
        raise ValueError(f"an object has the key {twice!r} twice: keep one")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError where the file is missing or broken."""
    try:
        if path.exists() and not path.is_file():  # to read a pipe may never end
            raise OSError("it is no regular file")
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object")
    return value


def lines_in(path: Path) -> Iterator[bytes]:
    """The lines of a log of JSON rows, with their ends, one at a time; nothing where there is no log.

    A line cut short by a kill, even within a character, is left out.
    """
    if not path.exists():
        return
    with path.open("rb") as stream:  # as text it would also be split at ends of lines that text may hold
        for line in stream:
            if line.endswith(b"\n") or parse_row(line) is not None:
                yield line


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The row in a line; None where it holds no JSON object."""
    try:
        row = parse_json(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def rows_in(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a log, in order. Lines that are no row are left out."""
    return (row for line in lines_in(path) if (row := parse_row(line)) is not None)


def append_row(path: Path, row: Mapping[str, Any]) -> bytes:
    """Append a row to a log; returns its line. Raises UserError where it cannot be written."""
    line = (json_text(row, ensure_ascii=False) + "\n").encode()
    with explain_write_errors(path), path.open("ab") as stream:
        stream.write(line)
    return line


def nearest_place(path: Path) -> Path:
    """The path, or the nearest above it that this user can see: `exists` raises below a closed folder."""
    return next((one for one in (path, *path.parents) if os.access(one, os.F_OK)), Path(path.anchor))


def share_as_umask_allows(folder: Path) -> None:
    """Give the files under a folder the permissions of new ones: safetensors lets their owner alone read."""
    umask = os.umask(0o077)
    os.umask(umask)
    for path in (p for p in folder.rglob("*") if p.is_file()):
        path.chmod(0o666 & ~umask)


@contextlib.contextmanager
def shared_folder(folder: Path) -> Iterator[None]:
    """Make a folder of a cache. Where the one above it is of mode 2775, for users of a group, what is made
    inside the block is the group's as well, whatever the umask.
    """
    umask = os.umask(0o077)
    os.umask(umask & ~0o070 if nearest_place(folder).stat().st_mode & 0o2020 == 0o2020 else umask)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        os.umask(umask)


def is_disk_full(folder: Path) -> bool:
    """Whether its disk has no room for a small file."""
    return shutil.disk_usage(folder).free <= 2**16


def disk_full(path: str | Path, error: BaseException, needed: int = 0) -> DiskFullError | None:
    """The error for a file that has no room, with its `needed` bytes; None where the system says another."""
    is_of_system = isinstance(error, OSError | RuntimeError)
    if getattr(error, "errno", None) not in FULL and not (is_of_system and "No space left" in str(error)):
        return None
    folder = nearest_place(Path(path).absolute().parent)
    free, takes = format_bytes(shutil.disk_usage(folder).free), f", it takes {format_bytes(needed)}"
    reason = getattr(error, "strerror", None) or "No space left on device"
    said = f"cannot write {path}: {reason} ({free} are free there{takes if needed else ''})"
    return DiskFullError(f"{said}; make space, then go on with `resume`")


@contextlib.contextmanager
def explain_write_errors(path: Path, needed: int = 0) -> Iterator[None]:
    """Raise UserError, naming `path`, where a write inside fails; DiskFullError on a full disk, with how many
    bytes are `needed` where that is known.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if full := disk_full(path, error, needed):
            raise full from None
        if not isinstance(error, OSError) or error.errno is None:
            raise
        raise UserError(f"cannot write {path}: {error.strerror}; choose another place") from None
