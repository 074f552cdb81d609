"""`recommend`: the best items for a user or for all users, and items like another."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from isobatch.core import atomic_files, number_ranges
from isobatch.core.errors import UserError, refuse
from isobatch.core.flags import spelling
from isobatch.core.measures import counted, printable
from isobatch.core.terminal.status import doing
from isobatch.launch.commands.evaluate import open_single_run, require_capability
from isobatch.launch.local.run_setup import TrustOptions
from isobatch.launch.predicting import item_choice, tables
from isobatch.models.protocols import OpensItemLists

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from isobatch.models.recommendation.recommendations import Recommendations

    Named = tuple[str, list[dict[str, Any]]]
    """A user, or an item that others are like, and the list."""

REFUSAL = "recommends nothing"
USERS_AT_A_TIME = 1000
NOTHING_LEFT = "what users had is left out unless --with-seen, and --only and --without restrict the rest"
EMPTY_LIST = f"recommend: nothing is left to offer: {NOTHING_LEFT}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecommendOptions(TrustOptions):
    """Flags of `recommend`."""

    user: str | None = None
    """The user, by the id that the data has; several with commas between them."""
    items: str | None = None
    """A user who was not in training, by what they took: ids or titles of items, with commas between them."""
    similar_to: str | None = None
    """Items like this one, by its id or title; `all` with --out: those like each."""
    only: str | None = None
    """Offer these items alone: ids or titles with commas between them, or a file with an item a row."""
    without: str | None = None
    """Offer none of these items, given in the same way: what is sold out, or of a category."""
    with_seen: bool = False
    """Offer also what the user had already (filter_already_liked_items or remove_seen false elsewhere)."""
    by: Literal["model", "popularity", "knn", "ease", "best"] = "model"
    """What ranks the items: the trained model, a baseline of the same interactions that final/ keeps, or the
    best of them all on the validation data."""
    out: str | None = None
    """Write a row for each item here, Parquet, csv or jsonl; without another word the lists of all users."""
    top: number_ranges.Positive = 10
    """Length of a list."""
    json: bool = False
    """One JSON object on standard output."""


def recommend(words: Sequence[str]) -> int:
    """Usage: recommend RUN --user ID,ID | --items ID,ID | --similar-to ITEM [--out list.csv], or for all
    users recommend RUN --out lists.parquet, for all items recommend RUN --similar-to all --out like.parquet
    [--only FILE|ID,ID] [--without FILE|ID,ID] [--with-seen] [--by ease|knn|popularity|best] [--top 10]
    [--json]
    """
    run, options = open_single_run(words, "recommend", RecommendOptions)
    _refuse_contradictions(options)
    out = None if options.out is None else tables.check_out(options.out, None)
    task = require_capability(run, OpensItemLists, "recommend", REFUSAL)
    lists = task.open_lists(run.final, options.by)
    column = run.recipe.options.get("item_column")
    left_out = item_choice.restrict(lists, options.only, options.without, options.with_seen, column)
    metrics = (run.summary() or {}).get("metrics", {})
    metrics = metrics if isinstance(metrics, dict) else {}
    ranked_by = task.better_baseline(metrics) if options.by == "model" else f"ranked by {lists.by}"
    remarks = [*left_out, ranked_by] if ranked_by and not options.json else left_out  # --json has it inside
    return _answer(lists, options, out, remarks)


def _refuse_contradictions(options: RecommendOptions) -> None:
    """Raise UserError for no question, for several, and for a flag that the question does not read."""
    asked = [name for name in ("user", "items", "similar_to") if getattr(options, name) is not None]
    several = " and ".join(map(spelling, asked))
    refuse(
        {
            f"recommend: {several} are several questions: give one": len(asked) > 1,
            "recommend: needs one of --user ID, --items ID,ID and --similar-to ITEM, or for all users --out"
            " lists.parquet": not (asked or options.out),
            "--with-seen: changes nothing of --similar-to; leave it out": options.with_seen
            and options.similar_to is not None,
        }
    )


def _answer(lists: Recommendations, options: RecommendOptions, out: Path | None, remarks: list[str]) -> int:
    """Answer the question. `remarks` on the lists are said before an answer, and not before an error."""
    top, similar_to = options.top, options.similar_to
    found: list[dict[str, Any]] = []
    several: Iterable[Named] | None = None
    given: dict[str, Any] = {}
    if similar_to == "all" and not lists.knows_item("all"):
        if out is None:
            raise UserError("--similar-to all: is a list for each item: give --out similar.parquet")
        several = lists.similar_to_all(top)
    elif similar_to is not None:
        found, given = lists.similar(similar_to, top), {"similar_to": similar_to}
        remarks = [*remarks, *lists.remarks([similar_to])]
    elif options.items is not None:
        taken = lists.split_items(options.items)
        found, given = lists.for_items(taken, top), {"taken": taken}
        remarks = [*remarks, *lists.remarks(taken)]
    elif options.user is None:
        several = lists.recommend_to_all(top)
    else:
        answers = [(user, lists.recommend(user, top)) for user in lists.split_users(options.user)]
        several = answers if len(answers) > 1 else None
        user, found = answers[0]
        given = {"user": user}
        if several and not any(items for _, items in answers):
            raise UserError(EMPTY_LIST)
    if several is None and not found:
        raise UserError(EMPTY_LIST)
    _say(remarks)
    if several is not None and out is not None:
        return _write_all("user" if similar_to is None else "similar_to", several, out, options)
    if out is not None:
        tables.write_rows(out, [[{"rank": rank, **entry} for rank, entry in enumerate(found, 1)]])
        return _done({"items": len(found), "out": str(out)}, f"{len(found):,} items -> {out}", options)
    if options.json:
        users = [{"user": user, "items": items} for user, items in several or ()]
        answer = {"by": lists.by, "users": users} if users else {**given, "by": lists.by, "items": found}
        print(atomic_files.json_text(answer, ensure_ascii=False))
        return 0
    for user, items in several or [("", found)]:
        width = max((len(entry["item"]) for entry in items), default=0)
        lines = [f"{user}:"] if user else []
        for entry in items:
            named = [entry["item"].ljust(width)] if entry["item"] != entry["title"] else []
            lines.append("  ".join([f"{entry['score']:8.3f}", *named, entry["title"]]))
        print("\n".join(map(printable, lines)))
    return 0


def _done(found: dict[str, Any], said: str, options: RecommendOptions) -> int:
    print(atomic_files.json_text(found) if options.json else said)
    return 0


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(printable(line), file=sys.stderr)


def _write_all(column: str, found: Iterable[Named], out: Path, options: RecommendOptions) -> int:
    """Write the lists of users, or of items that others are similar to, whose names stand in `column`."""
    what, done, empty, waiting = "users" if column == "user" else "items", 0, 0, iter(found)

    def rows() -> Iterator[list[dict[str, Any]]]:
        nonlocal done, empty
        while block := list(itertools.islice(waiting, USERS_AT_A_TIME)):
            yield [row for name, entries in block for row in ranked(column, name, entries)]
            done, empty = done + len(block), empty + sum(not entries for _, entries in block)
            doing(f"recommending: {done:,} {what} done")
        if empty == done:
            raise UserError(EMPTY_LIST)

    tables.write_rows(out, rows())
    if empty:
        _say([f"{empty:,} of {done:,} {what} have no list: {NOTHING_LEFT}"])
    said = f"{done:,} {what}, the best {options.top} -> {out}"
    return _done({what: done, "top": options.top, "out": str(out)}, said, options)


def ranked(column: str, name: str, entries: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of a list as files have them: whose it is, rank from 1, item, title, score."""
    for rank, entry in enumerate(entries, 1):
        yield {column: name, "rank": rank, **entry}


def listed(
    answered: Iterable[list[dict[str, Any]]], user_in: Callable[[Mapping[str, Any]], str | None]
) -> Iterator[list[dict[str, Any]]]:
    """The rows that `recommend --out` writes, from answered rows of `predict`. `user_in`: the user of a row,
    which is called by its number where it names none.
    """
    done = empty = 0
    for rows in answered:
        found: list[dict[str, Any]] = []
        for row in rows:
            done += 1
            columns = zip(row["items"] or (), row["titles"] or (), row["scores"] or (), strict=True)
            entries = [{"item": item, "title": title, "score": score} for item, title, score in columns]
            found += ranked("user", user_in(row) or str(done), entries)
        empty += sum(row["items"] == [] for row in rows)
        if found:
            yield found
    if empty:
        _say([f"{counted(empty, 'row')} without a list: {NOTHING_LEFT}"])
