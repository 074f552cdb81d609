"""JSON, and where the rows are in it: a list, a list in an object, or columns that are lists."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def lists_of_rows(value: Mapping[str, Any], kind: Any = (dict, list)) -> list[str]:
    """The keys of an object that hold lists of objects, or of lists."""
    return [
        k for k, v in value.items() if isinstance(v, list) and v and all(isinstance(row, kind) for row in v)
    ]


def rows_in(value: Any, key: str | None, file: Path) -> list[Any]:
    """The rows of a JSON file, of an object those at `key`. Raises UserError unless it is clear which."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise UserError(f"{file}: holds {type(value).__name__}, not a list of objects")
    sizes = {len(column) if isinstance(column, list) else None for column in value.values()}
    keys = [key] if key else lists_of_rows(value, dict)
    if not keys and len(value) > 1 and len(sizes) > 1 and None not in sizes:
        lengths = ", ".join(f"{name} {len(column)}" for name, column in value.items())
        raise UserError(f"{file}: its columns are not of one length ({lengths})")
    if not keys and len(value) > 1 and len(sizes) == 1 and None not in sizes:
        return [dict(zip(value, cells, strict=True)) for cells in zip(*value.values(), strict=True)]
    keys = keys or lists_of_rows(value)
    if len(keys) == 1:
        rows: list[Any] = value[keys[0]]
        return rows
    if keys:
        raise UserError(
            f"{file}: holds several lists of rows ({', '.join(keys[:6])}): call them train, valid and test,"
            " or keep one"
        )
    raise UserError(
        f'{file}: is an object without a list of rows: give [{{"text": "..."}}, ...], or an object a line'
    )


def as_row(record: Any, where: str) -> tuple[str, Mapping[str, Any]]:
    """`where` and the row; of a list of values the columns are numbered from 1. Raises UserError."""
    if isinstance(record, list) and len(record) > 1 and not any(isinstance(cell, dict) for cell in record):
        return where, {str(number): cell for number, cell in enumerate(record, 1)}
    if not isinstance(record, dict):
        raise UserError(f'{where}: is {type(record).__name__}, not an object such as {{"text": "..."}}')
    return where, record


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twin = max(found, key=[key for key, _ in pairs].count)
        raise ValueError(f"an object has {twin} twice: keep one")
    return found


def parse(text: str, where: str) -> Any:
    """The value that a text in JSON stands for. Raises UserError."""
    try:
        value = json.loads(text, object_pairs_hook=_object)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:  # half of a character, thousands of digits, ...
        reason = str(error).partition(";")[0] or type(error).__name__
        raise UserError(f"{where}: is not JSON that can be read: {reason}") from None
