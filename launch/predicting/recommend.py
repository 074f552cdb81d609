"""`recommend`: the best items for a user or for all users, and items like another."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isobatch.core import atomic_files, number_ranges
from isobatch.core.errors import UserError, refuse
from isobatch.core.flags import spelling
from isobatch.core.measures import counted, printable
from isobatch.core.terminal.status import doing
from isobatch.data.interactions.formats import ITEM_COLUMNS
from isobatch.launch.commands.evaluate import open_single_run, require_capability
from isobatch.launch.local.run_setup import TrustOptions
from isobatch.launch.predicting import tables
from isobatch.models.protocols import OpensItemLists

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from isobatch.models.recommendation.recommendations import Recommendations

    Answer = tuple[dict[str, Any], list[dict[str, Any]]]
    """What was asked, a user, an item that others are like or items taken, and the list."""

REFUSAL = "recommends nothing"
LISTS_AT_A_TIME = 1000
TEXT_LINE = "text"
"""The column of a .txt file, which has an item a line."""
MOST_NAMED = 5
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
    """Items like this one, by its id or title."""
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
    users recommend RUN --out lists.parquet [--only FILE|ID,ID] [--without FILE|ID,ID] [--with-seen]
    [--by ease|knn|popularity|best] [--top 10] [--json]
    """
    run, options = open_single_run(words, "recommend", RecommendOptions)
    _refuse_contradictions(options)
    out = None if options.out is None else tables.check_out(options.out, None)
    task = require_capability(run, OpensItemLists, "recommend", REFUSAL)
    lists = task.open_lists(run.final, options.by)
    column = run.recipe.options.get("item_column")
    left_out = restrict(lists, options.only, options.without, options.with_seen, column)
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
            "--with-seen: is about users, and --similar-to names an item: leave it out": options.with_seen
            and options.similar_to is not None,
        }
    )


def _answer(lists: Recommendations, options: RecommendOptions, out: Path | None, remarks: list[str]) -> int:
    """Answer the question. `remarks` on the lists are said with an answer, and not before an error."""
    answers, said = _lists(lists, options)
    remarks = [*remarks, *said]
    if out is not None:
        return _write(answers, out, options, remarks)
    found = list(answers)
    if not any(items for _, items in found):
        raise UserError(EMPTY_LIST)
    _say(remarks)
    if options.json:
        asked, items = found[0]
        answer = {**asked, "by": lists.by, "items": items}
        if len(found) > 1:
            answer = {"by": lists.by, "users": [{**asked, "items": items} for asked, items in found]}
        print(atomic_files.json_text(answer, ensure_ascii=False))
        return 0
    for asked, items in found:
        if len(found) > 1:
            print(printable(f"{asked['user']}:"))
        for entry in items:
            named = [] if entry["item"] == entry["title"] else [entry["item"]]
            print(printable("  ".join([f"{entry['score']:8.3f}", *named, entry["title"]])))
    return 0


def _lists(lists: Recommendations, options: RecommendOptions) -> tuple[Iterable[Answer], list[str]]:
    """The lists that are asked for, and remarks on what was named. Raises UserError."""
    top, similar_to = options.top, options.similar_to
    if similar_to is not None:
        return [({"similar_to": similar_to}, lists.similar(similar_to, top))], lists.remarks([similar_to])
    if options.items is not None:
        taken = lists.split_items(options.items)
        return [({"taken": taken}, lists.for_items(taken, top))], lists.remarks(taken)
    if options.user is not None:
        users = lists.split_users(options.user)
        return [({"user": user}, lists.recommend(user, top)) for user in users], []
    return (({"user": user}, items) for user, items in lists.recommend_to_all(top)), []


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(printable(line), file=sys.stderr)


def _write(answers: Iterable[Answer], out: Path, options: RecommendOptions, remarks: list[str]) -> int:
    """Write a row for each item of each list."""
    done, empty, waiting = 0, 0, iter(answers)

    def rows() -> Iterator[list[dict[str, Any]]]:
        nonlocal done, empty
        while block := list(itertools.islice(waiting, LISTS_AT_A_TIME)):
            yield [row for asked, entries in block for row in ranked(asked, entries)]
            done, empty = done + len(block), empty + sum(not entries for _, entries in block)
            doing(f"recommending: {counted(done, 'list')} done")
        if empty == done:
            raise UserError(EMPTY_LIST)

    tables.write_rows(out, rows())
    _say([*remarks, *([f"{empty:,} of {done:,} lists are empty: {NOTHING_LEFT}"] if empty else [])])
    found = {"lists": done, "top": options.top, "out": str(out)}
    said = f"{counted(done, 'list')} of the best {options.top} -> {out}"
    print(atomic_files.json_text(found) if options.json else said)
    return 0


def ranked(asked: dict[str, Any], entries: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of a list as files have them: whose it is, rank from 1, item, title, score."""
    whose = {name: value for name, value in asked.items() if name != "taken"}
    for rank, entry in enumerate(entries, 1):
        yield {**whose, "rank": rank, **entry}


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
            found += ranked({"user": user_in(row) or str(done)}, entries)
        empty += sum(row["items"] == [] for row in rows)
        if found:
            yield found
    if empty:
        _say([f"{counted(empty, 'row')} without a list: {NOTHING_LEFT}"])


def restrict(
    lists: Recommendations, only: str | None, without: str | None, with_seen: bool, column: str | None
) -> list[str]:
    """Restrict the lists as the flags say; lines on items that training did not know. Raises UserError.

    `column`: of the items in a file; by default a usual name, or the only one there is.
    """
    given = {flag: text for flag, text in (("--only", only), ("--without", without)) if text is not None}
    named = {flag: _named_items(lists, flag, text, column) for flag, text in given.items()}
    unknown = set(lists.restrict(named.get("--only"), named.get("--without", []), with_seen))
    remarks = []
    for flag, names in named.items():
        if missing := [name for name in names if name in unknown]:
            few = ", ".join(missing[:MOST_NAMED])
            said = f"{len(missing):,} of {len(names):,} items are not in the training data: {few}"
            if len(missing) == len(names) or not _is_table(given[flag]):
                raise UserError(f"{flag} {given[flag]}: {said}")
            remarks.append(f"{flag}: {said}")
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
