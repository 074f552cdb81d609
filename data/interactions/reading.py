"""From tables of interactions to logs: ids are numbered, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data.interactions.log import InteractionLog
from isobatch.data.preparation.progress import position

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import pyarrow as pa  # noqa: TC004  heavy, and no class here has flags

BATCH_ROWS = 1 << 18


class NotInBlocksError(Exception):
    """A file that must be read as a whole: its types do not follow from its first block, or it has faults."""


@dataclass(frozen=True, slots=True)
class InteractionTable:
    """A table with the columns user and item, and perhaps rating and time."""

    whole: Callable[[], pa.Table]
    """Reads all of it. Raises UserError that names the fault."""
    blocks: Callable[[], Iterator[pa.RecordBatch]] | None = None
    """Reads it a block at a time. Raises NotInBlocksError where only `whole` can tell what is in it."""


class Numbering:
    """Numbers ids as they come; their final numbers follow from the names of all."""

    def __init__(self) -> None:
        self._place: dict[str, int] = {}

    def codes(self, column: Any, before: int) -> np.ndarray:
        """(n,) int32 provisional numbers of a pyarrow array, of which `before` rows come first.

        Raises UserError for an empty value.
        """
        if column.null_count:
            empty = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            raise UserError(f"interaction {before + empty + 1} has no user or no item")
        coded, place = column.dictionary_encode(), self._place
        of = [place.setdefault(str(value).strip(), len(place)) for value in coded.dictionary.to_pylist()]
        found: np.ndarray = np.array(of, np.int32)[coded.indices.to_numpy()]
        return found

    def finish(self, named: Iterable[str] = ()) -> tuple[list[str], np.ndarray]:
        """(all ids in order, also those `named`; (provisional numbers,) int32 the place of each)."""
        names = list(dict.fromkeys((*self._place, *named)))
        names.sort(key=(lambda n: (int(n), n)) if all(n.isdecimal() for n in names) else str)
        place = {name: number for number, name in enumerate(names)}
        return names, np.array([place[name] for name in self._place], np.int32)


def read_log(
    table: InteractionTable, users: Numbering, items: Numbering, folder: Path | None
) -> InteractionLog:
    """The interactions with provisional numbers of users and items. Raises UserError."""
    if table.blocks is not None:
        try:
            return InteractionLog.collect(_numbered(table.blocks(), users, items), folder)
        except NotInBlocksError:
            pass
    return InteractionLog.collect(_numbered(table.whole().to_batches(), users, items), folder)


def _numbered(
    batches: Iterable[pa.RecordBatch], users: Numbering, items: Numbering
) -> Iterator[dict[str, np.ndarray]]:
    done = 0
    for batch in batches:
        position.show("reading interactions")
        columns = {"user": users.codes(batch["user"], done), "item": items.codes(batch["item"], done)}
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
            if min_rating > 0:
                kept = chunk["rating"] >= min_rating
                found = {name: values[kept] for name, values in found.items()}
            yield found

    return InteractionLog.collect(chunks(), log.folder)
