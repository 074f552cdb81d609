"""The columns of labelled texts: named by flags, or found by their usual names."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from isobatch.core.errors import UserError
from isobatch.core.flags import nearest_hint
from isobatch.data import readers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TEXT_COLUMNS = (
    *("sentence", "text", "sentence1", "premise", "question1", "question"),
    *("content", "comment", "review", "message", "tweet", "body", "feedback", "description"),
)
"""Usual names of a text column; the first that the data has is taken."""
PAIR_COLUMNS = {"sentence1": "sentence2", "premise": "hypothesis", "question1": "question2"}
LABEL_COLUMNS = ("label", "labels", "class", "category", "target", "sentiment", "intent", "topic", "emotion")


class ColumnNames(NamedTuple):
    """The columns to read; `pair` is None for single texts."""

    text: str
    pair: str | None
    label: str


def find_columns(
    data: str,
    available: Sequence[str],
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
) -> ColumnNames:
    """The columns asked for, else the first of the usual names among those available.

    Raises UserError where one is missing.
    """
    wanted = {"--text-column": (text, TEXT_COLUMNS), "--label-column": (label, LABEL_COLUMNS)}
    if pair is not None:
        wanted["--pair-column"] = (pair, ())
    found = {flag: _find_column(asked, usual, available) for flag, (asked, usual) in wanted.items()}
    if missing := {flag: wanted[flag][0] for flag, name in found.items() if name is None}:
        raise UserError(_missing_columns(missing, available, data))
    texts, classes = str(found["--text-column"]), str(found["--label-column"])
    if pair is None and PAIR_COLUMNS.get(texts) in available:
        pair = PAIR_COLUMNS[texts]
    return ColumnNames(texts, pair, classes)


def _find_column(asked: str | None, usual: tuple[str, ...], available: Sequence[str]) -> str | None:
    """The column asked for, else the first of the usual names, in letters of any size; None without it."""
    if asked is not None:
        return asked if asked in available else None
    found = {name.lower(): name for name in reversed(available)}
    return next((found[name] for name in usual if name in found), None)


def _hint(flag: str, asked: str, available: Sequence[str]) -> str:
    """What may be meant: of texts no column that usually holds labels, and of labels none of texts."""
    usual = {"--text-column": TEXT_COLUMNS, "--label-column": LABEL_COLUMNS}
    others = {name for kind, names in usual.items() if kind != flag for name in names}
    like = [name for name in available if name not in others]
    if hint := nearest_hint(asked, like):
        return hint
    known = next((name for name in usual.get(flag, ()) if name in available), None)
    return f" (did you mean {known}?)" if known else ""


def _missing_columns(missing: Mapping[str, str | None], available: Sequence[str], data: str) -> str:
    """One line on all columns that are not there. `missing`: flag -> the name asked for, if one was."""
    said = [
        f"{flag} {asked}: {data} has no such column{_hint(flag, asked, available)}"
        for flag, asked in missing.items()
        if asked is not None
    ]
    if open_flags := [flag for flag, asked in missing.items() if asked is None]:
        question = "which column? {} says" if len(open_flags) == 1 else "which columns? {} say"
        said.append(f"--data {data}: {question.format(' and '.join(open_flags))}")
    return "; ".join([*said, f"it has: {readers.name_columns(available)}"])
