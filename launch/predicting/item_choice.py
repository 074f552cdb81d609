"""Which items a recommender may offer: `--only` and `--without`, each a file or ids and titles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.data.interactions.formats import ITEM_COLUMNS
from isobatch.launch.predicting import tables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from isobatch.models.recommendation.recommendations import Recommendations

TEXT_LINE = "text"
"""The column of a .txt file, which has an item a line."""
MOST_NAMED = 5


def restrict(
    lists: Recommendations, only: str | None, without: str | None, with_seen: bool, column: str | None
) -> list[str]:
    """Restrict the lists as the flags say; lines on items that training did not know. Raises UserError.

    `column`: of the items in a file; by default a usual name, or the only one there is.
    """
    flags = {"--only": only, "--without": without}
    given = {flag: text for flag, text in flags.items() if text is not None}
    named = {flag: _named_items(lists, flag, text, column) for flag, text in given.items()}
    unknown = set(lists.restrict(named.get("--only"), named.get("--without", []), with_seen))
    remarks = []
    for flag, names in named.items():
        if missing := [name for name in names if name in unknown]:
            if len(missing) == len(names) or not _is_table(given[flag]):
                raise UserError(f"{flag} {given[flag]}: {missing[0]} is not in the training data")
            few = ", ".join(missing[:MOST_NAMED]) + (", ..." if len(missing) > MOST_NAMED else "")
            remarks.append(
                f"{flag}: {len(missing):,} of {len(names):,} items are not in the training data: {few}"
            )
    if not lists.offered:
        raise UserError(
            f"{' and '.join(map(' '.join, given.items()))}: no item is left to offer: give others"
        )
    return remarks


def _is_table(text: str) -> bool:
    return Path(text).suffix.lower() in tables.ROW_ENDINGS


def _named_items(lists: Recommendations, flag: str, text: str, column: str | None) -> list[str]:
    if not _is_table(text):
        return lists.split_items(text)
    rows = list(tables.read_table(text, flag, [column]))
    names = list(rows[0][1])
    first = [n for n in names if len(names) == 1 and n not in ITEM_COLUMNS and lists.knows_item(n)]
    return [*first, *(_item_in(row, flag, where, column) for where, row in rows)]


def _item_in(row: Mapping[str, Any], flag: str, where: str, column: str | None) -> str:
    usual = (*([column] if column else []), *ITEM_COLUMNS, TEXT_LINE)
    wanted = [name for name in usual if name in row] or list(row)
    if len(row) > 1 and wanted == list(row):
        raise UserError(f"{flag}: {where}: has no column item_id; it has: {', '.join(row)}")
    return str(row[wanted[0]])
