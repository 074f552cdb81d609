"""`recommend`: the best items for a user or for all users, and items like another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files, number_ranges
from isobatch.core.errors import UserError
from isobatch.core.measures import printable
from isobatch.core.terminal.status import doing
from isobatch.launch.commands.evaluate import open_single_run, require_capability
from isobatch.launch.local.run_setup import TrustOptions
from isobatch.launch.predicting import tables
from isobatch.models.protocols import OpensItemLists

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.models.protocols import ItemLists

REFUSAL = "recommends nothing"
USERS_AT_A_TIME = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class RecommendOptions(TrustOptions):
    """Flags of `recommend`."""

    user: str | None = None
    """The user, by the id that the data has."""
    items: str | None = None
    """A user who was not in training, by what he took: ids or titles of items, with commas between them."""
    similar_to: str | None = None
    """Items like this one, by its id or title."""
    out: str | None = None
    """Write the lists of all users here: Parquet, csv or jsonl, a row for each user and item."""
    top: number_ranges.Positive = 10
    """Length of a list."""
    json: bool = False
    """One JSON object on standard output."""


def recommend(words: Sequence[str]) -> int:
    """Usage: recommend RUN --user ID | --items ID,ID | --similar-to ITEM | --out lists.parquet
    [--top 10] [--json]
    """
    run, options = open_single_run(words, "recommend", RecommendOptions)
    asked = [name for name in ("user", "items", "similar_to", "out") if getattr(options, name) is not None]
    if len(asked) != 1:
        which = "one of them" if asked else "for all users --out lists.parquet"
        raise UserError(f"recommend: needs --user ID, --items ID,ID, --similar-to ITEM, or {which}")
    if options.out is not None:
        return _write_all(run, options.out, options)
    if options.similar_to is not None:
        found = _open_lists(run).similar(options.similar_to, options.top)
        return _print(found, {"similar_to": options.similar_to}, options)
    if options.items is not None:
        lists = _open_lists(run)
        taken = lists.split_items(options.items)
        return _print(lists.for_items(taken, options.top), {"taken": taken}, options)
    assert options.user is not None, "one of them was given"
    return _print(_open_lists(run).recommend(options.user, options.top), {"user": options.user}, options)


def _open_lists(run: RunFolder) -> ItemLists:
    return require_capability(run, OpensItemLists, "recommend", REFUSAL).open_lists(run.final)


def _print(items: list[dict[str, Any]], asked: dict[str, Any], options: RecommendOptions) -> int:
    if options.json:
        print(atomic_files.json_text({**asked, "items": items}, ensure_ascii=False))
    width = max((len(entry["item"]) for entry in items), default=0)
    for entry in [] if options.json else items:
        named = [entry["item"].ljust(width)] if entry["item"] != entry["title"] else []
        print(printable("  ".join([f"{entry['score']:8.3f}", *named, entry["title"]])))
    return 0


def _write_all(run: RunFolder, name: str, options: RecommendOptions) -> int:
    out, users = tables.check_out(name, None), 0
    lists = _open_lists(run)
    with tables.open_table(out) as writer:
        for block in _blocks(lists.recommend_to_all(options.top)):
            writer.write([row for user, entries in block for row in _ranked(user, entries)])
            users += len(block)
            doing(f"recommending: {users:,} users done")
    said = {"users": users, "top": options.top, "out": str(out)}
    print(
        atomic_files.json_text(said) if options.json else f"{users:,} users, the best {options.top} -> {out}"
    )
    return 0


def _ranked(user: str, entries: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for rank, entry in enumerate(entries, 1):
        yield {"user": user, "rank": rank, **entry}


def _blocks(
    found: Iterable[tuple[str, list[dict[str, Any]]]],
) -> Iterator[list[tuple[str, list[dict[str, Any]]]]]:
    import itertools

    waiting = iter(found)
    while block := list(itertools.islice(waiting, USERS_AT_A_TIME)):
        yield block
