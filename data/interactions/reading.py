"""From tables of interactions to logs: ids are numbered, a block of rows at a time."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data.interactions.log import InteractionLog
from isobatch.data.interactions.tables import NotInBlocksError
from isobatch.data.preparation.progress import position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import pyarrow as pa

    from isobatch.data.interactions.tables import Table

WHOLE_DECIMAL = re.compile(r"(-?\d+)\.0*")


def whole_ids(names: Iterable[str]) -> list[str]:
    """The ids of a table with 3.0 as 3, which is what a column of numbers with a gap becomes on its way.

    They stay where another has digits behind its point: 1.0 beside 1.5 is a version, not a number.
    """
    known = list(names)
    whole = {name: found[1] for name in known if (found := WHOLE_DECIMAL.fullmatch(name))}
    if any("." in name and name not in whole for name in known):
        return known
    return [whole.get(name, name) for name in known]


def some_ids(names: Iterable[str]) -> str:
    """The first three, for a sentence."""
    return ", ".join(itertools.islice(names, 3))


class Numbering:
    """Numbers ids as they come; their final numbers follow from the names of all."""

    def __init__(self) -> None:
        self._place: dict[str, int] = {}

    def codes(self, column: Any) -> np.ndarray:
        """(n,) int32 provisional numbers of a pyarrow array without empty values."""
        coded, place = column.dictionary_encode(), self._place
        of = [place.setdefault(str(value).strip(), len(place)) for value in coded.dictionary.to_pylist()]
        found: np.ndarray = np.array(of, np.int32)[coded.indices.to_numpy()]
        return found

    def finish(self, named: Iterable[str] = ()) -> tuple[list[str], np.ndarray]:
        """(all ids in order, also those `named`; (provisional numbers,) int32 the place of each)."""
        own = whole_ids(self._place)
        names = list(dict.fromkeys((*own, *named)))
        names.sort(key=(lambda n: (int(n), n)) if all(n.isdecimal() for n in names) else str)
        place = {name: number for number, name in enumerate(names)}
        return names, np.array([place[name] for name in own], np.int32)


def read_log(table: Table, users: Numbering, items: Numbering, folder: Path | None) -> InteractionLog:
    """The interactions with provisional numbers of users and items. Raises UserError."""
    try:
        return InteractionLog.collect(_numbered(table.batches(), users, items, table), folder)
    except NotInBlocksError:
        return InteractionLog.collect(_numbered(table.batches(True), users, items, table), folder)


def _numbered(
    batches: Iterable[pa.RecordBatch], users: Numbering, items: Numbering, table: Table
) -> Iterator[dict[str, np.ndarray]]:
    done = 0
    for batch in batches:
        position.show("reading interactions")
        columns = {}
        for name, numbering in (("user", users), ("item", items)):
            empty = batch[name].is_null(nan_is_null=True).to_numpy(zero_copy_only=False)
            if empty.any():
                row = done + int(empty.argmax()) + 1
                raise UserError(f"{table.where(row)}: has no {name}: fill it in, or leave the row out")
            columns[name] = numbering.codes(batch[name])
        for name in ("time", "rating"):
            if name in batch.schema.names:
                values = batch[name].to_numpy(zero_copy_only=False)
                columns[name] = values.astype(np.int64) if values.dtype.kind == "M" else values
        done += len(batch)
        yield columns


def renumbered(
    log: InteractionLog, users: np.ndarray, items: np.ndarray, min_rating: float
) -> InteractionLog:
    """The log with final numbers, without ratings, and without interactions rated below `min_rating`."""

    def chunks() -> Iterator[dict[str, np.ndarray]]:
        for chunk in log.chunks():
            found = {"user": users[chunk["user"]], "item": items[chunk["item"]]}
            if "time" in chunk:
                found["time"] = chunk["time"]
            if "rating" in chunk:
                kept = chunk["rating"] >= min_rating
                found = {name: values[kept] for name, values in found.items()}
            yield found

    return InteractionLog.collect(chunks(), log.folder)
