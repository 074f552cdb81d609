"""`recommend`: the best items for a user or for all users, and items like another."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from isobatch.core import number_ranges
from isobatch.core.errors import UserError
from isobatch.core.terminal.console import print_answer, print_lines
from isobatch.core.terminal.status import doing
from isobatch.data.interactions.formats import ITEM_COLUMNS
from isobatch.launch.commands.evaluate import require_capability
from isobatch.launch.local.run_setup import AnswerOptions, TrustOptions, open_single_run
from isobatch.launch.predicting import tables
from isobatch.models.protocols import OpensItemLists

if TYPE_CHECKING:
    from isobatch.models.recommendation.recommendations import Recommendations

    Answer = tuple[dict[str, Any], list[dict[str, Any]]]
    """What was asked, a user, an item that others are like or items taken, and the list."""

LISTS_AT_A_TIME = 1000
MOST_NAMED = 5
NOTHING_LEFT = "what users had is left out unless --with-seen, and --only and --without restrict the rest"
EMPTY_LIST = f"recommend: nothing is left to offer: {NOTHING_LEFT}"


@dataclass(frozen=True, kw_only=True)  # without slots it goes together with SamplingOptions
class ListOptions(TrustOptions):
    """Flags of what lists of items hold."""

    top: number_ranges.Positive = 10
    """Length of a recommender's lists."""
    by: Literal["model", "popularity", "knn", "ease", "best"] = "model"
    """What ranks a recommender's items: the model, a baseline of the same interactions that final/ keeps, or
    the best of them on the validation data."""
    only: str | None = None
    """Of a recommender: offer these items alone, ids or titles with commas between them, or a file."""
    without: str | None = None
    """Of a recommender: offer none of these items: what is sold out, or of a category."""
    with_seen: bool = False
    """Of a recommender: offer also what a user had already (filter_already_liked_items or remove_seen false
    elsewhere)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecommendOptions(ListOptions, AnswerOptions):
    """Flags of `recommend`."""

    user: str | None = None
    """The user, by the id that the data has; several with commas between them."""
    items: str | None = None
    """A user who was not in training, by what they took: ids or titles of items, with commas between them."""
    similar_to: str | None = None
    """Items like this one, by its id or title."""
    out: str | None = None
    """Write a row for each item here, Parquet, csv or jsonl; without another word the lists of all users."""


def recommend(words: Sequence[str]) -> int:
    """Usage: recommend RUN --user ID,ID | --items ID,ID | --similar-to ITEM [--out list.csv], or for all
    users recommend RUN --out lists.parquet [--only FILE|ID,ID] [--without FILE|ID,ID] [--with-seen]
    [--by ease|knn|popularity|best] [--top 10] [--json]
    """
    run, options = open_single_run(words, "recommend", RecommendOptions)
    asked = [one for one in (options.user, options.items, options.similar_to) if one is not None]
    if len(asked) > 1 or not (asked or options.out):
        raise UserError("recommend: needs one of --user ID, --items ID,ID, --similar-to ITEM, or --out FILE")
    if options.with_seen and options.similar_to is not None:
        raise UserError("--with-seen: is about users, and --similar-to names an item: leave it out")
    task = require_capability(run, OpensItemLists, "recommend", "recommends nothing")
    if options.out is not None:  # before the lists are read
        tables.check_out(options.out, None)
    lists = task.open_lists(run.final, options.by)
    remarks = restrict(lists, options, run.recipe.options.get("item_column"))
    if options.by != "model" and not options.json:  # which has it inside
        remarks.append(f"ranked by {lists.by}")
    return answer(lists, options, remarks)


def answer(lists: Recommendations, options: RecommendOptions, remarks: list[str]) -> int:
    """Write or print the lists that are asked for; `remarks` are said with them, and not before an error."""
    answers = _lists(lists, options, remarks)
    if options.out is not None:
        blocks = iter(lambda: list(itertools.islice(answers, LISTS_AT_A_TIME)), [])
        code = tables.write_rows(tables.check_out(options.out, None), ranked(blocks), options.json)
        print_lines(*remarks)
        return code
    found = list(answers)
    if not any(items for _, items in found):
        raise UserError(EMPTY_LIST)
    print_lines(*remarks)
    each = [{**asked, "by": lists.by, "items": items} for asked, items in found]
    lines = (
        "  ".join([*([asked["user"]] if each[1:] else []), f"{entry['score']:8.3f}", *named])
        for asked, items in found
        for entry in items
        for named in [dict.fromkeys((entry["item"], entry["title"]))]
    )
    shown = {"by": lists.by, "users": each} if each[1:] else each[0]
    return print_answer(shown, "\n".join(lines), options.json)


def _lists(lists: Recommendations, options: RecommendOptions, remarks: list[str]) -> Iterator[Answer]:
    """The lists that are asked for; adds remarks on what was named. Raises UserError."""
    top = options.top
    if options.similar_to is not None:
        remarks += lists.remarks([options.similar_to])
        yield {"similar_to": options.similar_to}, lists.similar(options.similar_to, top)
    elif options.items is not None:
        taken = lists.split_items(options.items)
        remarks += lists.remarks(taken)
        yield {"taken": taken}, lists.for_items(taken, top)
    elif options.user is not None:
        yield from (({"user": u}, lists.recommend(u, top)) for u in lists.split_users(options.user))
    else:
        yield from (({"user": u}, items) for u, items in lists.recommend_to_all(top))


def ranked(answers: Iterable[Sequence[Answer]]) -> Iterator[list[dict[str, Any]]]:
    """The rows of lists as files have them: whose it is, rank from 1, item, title, score.

    Empty lists are counted at the end. Raises UserError where all are.
    """
    done = empty = 0
    for block in answers:
        yield [
            {**{name: value for name, value in asked.items() if name != "taken"}, "rank": rank, **entry}
            for asked, entries in block
            for rank, entry in enumerate(entries, 1)
        ]
        done, empty = done + len(block), empty + sum(not entries for _, entries in block)
        doing(f"recommending: {done:,} lists done")
    if empty == done:
        raise UserError(EMPTY_LIST)
    if empty:
        print_lines(f"{empty:,} of {done:,} lists are empty: {NOTHING_LEFT}")


def restrict(lists: Recommendations, options: ListOptions, column: str | None) -> list[str]:
    """Restrict the lists as the flags say; lines on items that training did not know. Raises UserError.

    `column`: of the items in a file; by default a usual name, or the only one there is.
    """
    only, without = (
        None if text is None else _named_items(lists, flag, text, column)
        for flag, text in (("--only", options.only), ("--without", options.without))
    )
    missing = lists.restrict(only, without or (), options.with_seen)
    few = ", ".join(missing[:MOST_NAMED])
    said = f"{len(missing)} items are not in the training data: {few}" if missing else ""
    if not lists.offered:
        raise UserError(f"--only, --without: no item is left to offer: give others; {said}")
    return [f"--only, --without: {said}"] if said else []


def _named_items(lists: Recommendations, flag: str, text: str, column: str | None) -> list[str]:
    if not tables.is_table(text):
        return lists.split_items(text)
    rows = [row for _, row in tables.read_table(text, flag, [column])]
    usual = (column, *ITEM_COLUMNS, *(rows[0] if len(rows[0]) == 1 else ()))
    name = next((name for name in usual if name in rows[0]), None)
    if name is None:
        raise UserError(f"{flag} {text}: has no column item_id; it has: {', '.join(rows[0])}")
    # In a list without a header the first item is taken for one.
    first = [name] if name not in (column, *ITEM_COLUMNS) and lists.knows_item(name) else []
    return [*first, *(str(row.get(name)) for row in rows)]
