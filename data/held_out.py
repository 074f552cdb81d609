"""Validation rows of data without such a split: a file, a share drawn at random, or the end."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data import readers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from isobatch.data.readers import SplitFiles

SEED = 20
"""Of the draw, whatever the seed of the recipe: runs with several are measured on the same rows."""


def random_order(count: int) -> np.ndarray:
    """(count,) row numbers in an order that is the same everywhere.

    Raw numbers, sorted: those are the same in every version of numpy, a Generator's permutation may change.
    """
    return np.argsort(np.random.PCG64(SEED).random_raw(count), kind="stable")


def drawn_rows(count: int, share: float) -> np.ndarray:
    """(count,) bool: a share of the rows, drawn at random; at least one, and of several not all."""
    found = np.zeros(count, bool)
    found[random_order(count)[: min(max(1, round(share * count)), max(1, count - 1))]] = True
    return found


def hold_out(part: SplitFiles, share: float | None = None) -> tuple[SplitFiles, SplitFiles]:
    """(train, validation): the last twentieth is validation, or a `share`, of rows drawn at random.

    A single txt file is cut at the end of a line, other formats between rows. Of several txt files the last
    one is validation. Raises UserError where there are no rows, and for a share of several txt files.
    """
    if not part.is_stream:
        count = readers.count_rows(part)
        if not count:
            raise UserError(f"--data {part.files[0]}: holds no rows")
        if share is not None:
            drawn = drawn_rows(count, share)
            return dataclasses.replace(part, kept=~drawn), dataclasses.replace(part, kept=drawn)
        border = count - max(1, count // readers.VALIDATION_ONE_IN)
    elif len(part.files) > 1:
        if share is not None:
            raise UserError(f"--valid {share:g}: of several .txt files the last is held out: leave it out")
        return dataclasses.replace(part, files=part.files[:-1]), dataclasses.replace(
            part, files=part.files[-1:]
        )
    else:
        border = _split_offset(part.files[0], share or 1 / readers.VALIDATION_ONE_IN)
    return dataclasses.replace(part, stop=border), dataclasses.replace(part, start=border)


def _split_offset(file: Path, share: float) -> int:
    """The byte at which the last `share` of a file begins, never inside a character.

    The first line's end at or after that place; else the last line's end before; else the last space; else
    the place.
    """
    with readers.open_utf8(file) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(size - int(size * share) - 1)
        stream.readline(readers.MAX_LINE_BYTES)
        if stream.tell() < size:
            return stream.tell()
        stream.seek(max(0, size - readers.MAX_LINE_BYTES))
        tail = stream.read().rstrip()
    cut = tail.rfind(b"\n")
    cut = cut if cut >= 0 else tail.rfind(b" ")
    cut = cut + 1 if cut >= 0 else len(tail) - int(len(tail) * share)
    while cut < len(tail) and tail[cut] & 0xC0 == 0x80:  # inside a character
        cut += 1
    return max(0, size - readers.MAX_LINE_BYTES) + cut


def note(share: float | None, is_stream: bool = False) -> str:
    """A line for the user on what was held out; `is_stream`: whether it is running text."""
    missing = "there is no validation split"
    if share is None:
        return f"{missing}: the last 5 % of the training data is it"
    if is_stream:
        return f"{missing}: the last {100 * share:g} % of the text is it (--valid)"
    return f"{missing}: {100 * share:g} % of the rows are it, drawn at random (--valid)"


def share_of(valid: float | str | None) -> float | None:
    """The share that --valid names; None where it names a file or is not given."""
    return valid if isinstance(valid, float) else None


def identity(valid: float | str | None) -> dict[str, object]:
    """What prepared data depends on beside its files, and the file of --valid is one of those."""
    return {"valid": [valid, SEED]} if isinstance(valid, float) else {}


def find_splits(
    path: Path, file_format: str | None, valid: float | str | None, options: Any = None
) -> dict[str, SplitFiles]:
    """As `readers.find_splits`, with the file of --valid. Raises UserError where --valid cannot be had."""
    splits = readers.find_splits(path, file_format, options)
    check(valid, splits, str(path))
    if not isinstance(valid, str):
        return splits
    file = Path(valid).expanduser()
    if not os.path.isfile(file):  # noqa: PTH113 - Path.is_file raises PermissionError
        raise UserError(f"--valid {valid}: is neither a file nor a share above 0 and at most 0.9")
    found = readers.find_splits(file, file_format, options)["train"]
    if found.is_stream != splits["train"].is_stream:
        raise UserError(f"--valid {valid}: has other rows than --data {path}: give both in one format")
    return {**splits, "valid": found}


def check(valid: float | str | None, splits: Mapping[str, object] | tuple[str, ...], data: str) -> None:
    """Raise UserError for a --valid where there is a validation split."""
    if valid is not None and "valid" in splits:
        typed = valid if isinstance(valid, str) else f"{valid:g}"
        raise UserError(f"--valid {typed}: {data} has a validation split: leave it out")


def require_share(valid: float | str | None, data: str) -> None:
    """Raise UserError for a file as validation split of data that is not in files."""
    if isinstance(valid, str):
        raise UserError(f"--valid {valid}: --data {data} is no file: give a share such as 0.1")
