"""`recommend`: the best items for a user or for all users, and items like another."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from isobatch.core import number_ranges
from isobatch.core.errors import UserError
from isobatch.core.flags import nearest_hint
from isobatch.core.terminal import doing, print_answer, print_lines
from isobatch.data import readers
from isobatch.data.interactions.formats import usual_column
from isobatch.data.interactions.tables import DATE
from isobatch.data.tables import delimited
from isobatch.launch.commands.evaluate import require_capability
from isobatch.launch.local.options import AnswerOptions, TrustOptions
from isobatch.launch.local.run_setup import open_single_run
from isobatch.launch.predicting import tables
from isobatch.models.protocols import OpensItemLists

if TYPE_CHECKING:
    from isobatch.models.recommendation.recommendations import Recommendations

    Answer = tuple[dict[str, Any], list[dict[str, Any]]]
    """What was asked, a user, an item that others are like or items taken, and the list."""
    Columns = Sequence[str | None]

OTHERWISE: dict[str, Any] = {
    "=([<>])": r"\1=",
    "(?<![=!<>])=(?!=)": "==",
    "<>": "!=",
    " *&&? *": " and ",
    r" *\|\| *": " or ",
    r"\b(AND|OR|NOT|IN)\b": lambda found: found[0].lower(),
    r"(?<=\d),(?=\d)": ".",
}
"""How other languages write --where, and ours: Jinja would refuse it, or take 29,90 for a pair."""
LISTS_AT_A_TIME = 1000
ROWS_AT_A_TIME = 1 << 20
MOST_NAMED = 5
GUEST_COLUMNS = "a user and an item are needed: --user-column and --item-column name other columns"
NOTHING_LEFT = "what users had is left out unless --with-seen, and --only and --without restrict the rest"
NOTHING_KNOWN = "no item that training knows: the list is what most users took"
EMPTY_LIST = f"recommend: nothing is left to offer: {NOTHING_LEFT}"


@dataclass(frozen=True, kw_only=True)  # without slots it goes together with SamplingOptions
class ListOptions(TrustOptions):
    """Flags of what lists of items hold."""

    top: number_ranges.Positive = 10
    """Length of a recommender's lists."""
    by: Literal["best", "model", "popularity", "recent", "knn", "ease", "als", "blend"] = "best"
    """What ranks a recommender's items: the best on the validation data, the model, or a baseline of the same
    interactions that final/ keeps."""
    only: str | None = None
    """Of a recommender: offer these items alone, ids or titles with commas between them, or a file."""
    without: str | None = None
    """Of a recommender: offer none of these items: what is sold out, or of a category."""
    where: str | None = None
    """Of the table that --only names, the rows of which this is true, as a Jinja expression of its columns:
    "stock > 0 and price <= 20 and category != 'wine'". Numbers may be written as 1.234,50 or 1,234.50 and
    stand beside a currency. An empty cell is unequal to everything."""
    without_category: str | None = None
    """Of that table, no row whose column `category`, Warengruppe or the like is one of these, with commas
    between them."""
    with_seen: bool = False
    """Of a recommender: offer also what a user had already (filter_already_liked_items or remove_seen false
    elsewhere)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecommendOptions(ListOptions, AnswerOptions):
    """Flags of `recommend`."""

    user: str | None = None
    """The user, by the id that the data has; several with commas between them."""
    items: str | None = None
    """A user who was not in training, by what they took: ids or titles of items, with commas between them, or
    a file of them."""
    guests: str | None = None
    """Users who were not in training: a file with a row for each item that one took (user, item and perhaps
    quantity, which weighs a user's items against each other), or with a list `items` in a row."""
    user_column: str | None = None
    """The column of users in such a file; by default the run's own, or a usual name."""
    item_column: str | None = None
    """The column of items in a file; by default the run's own, or a usual name."""
    similar_to: str | None = None
    """Items like this one, by its id or title."""
    out: str | None = None
    """Write a row for each item here, Parquet, csv or jsonl; without another word the lists of all users."""


def answer_users(
    lists: Recommendations, top: int, asked: Sequence[str | tables.ListRequest]
) -> list[dict[str, Any]]:
    """`items`, `titles` and `scores` for each, computed together for users by id. Raises UserError; a client
    gets the popular list in its place, or a user's without the items that are sent with it. The answer has
    `unknown` items, and why it is a `fallback`, or items are `unused`, without the ids of others.
    """
    requests = [one if isinstance(one, tables.ListRequest) else tables.ListRequest(one) for one in asked]
    ids_of = {name: lists.ids_of(name) for without in {one.without for one in requests} for name in without}
    most = max(
        (one.top or top) + len(one.items) + sum(len(ids_of[n]) for n in one.without) for one in requests
    )
    ids = [one.user for one in requests if lists.knows_user(one.user)]
    known, answers = dict(zip(ids, lists.recommend_each(ids, most), strict=True)), []
    for request, (user, taken, length, without) in zip(asked, requests, strict=True):
        telling = [item for item in taken if lists.knows_item(item)]
        unknown = [n for n in taken if n not in telling] + [n for n in without if not ids_of[n]]
        asked_of = dict.fromkeys(unknown, False) | ({} if user in known else {user: True})
        meant = {name: close for name, of in asked_of.items() if (close := lists.meant(name, of))}
        marks: dict[str, Any] = {k: v for k, v in (("unknown", unknown), ("did_you_mean", meant)) if v}
        out = {item for name in without for item in ids_of[name]}
        try:
            if user in known:
                found = lists.with_items(user, telling, most) if telling else known[user]
            elif not (user or taken):
                raise UserError("neither a user nor an item is given")
            else:
                found = lists.for_items(telling or taken, most) if taken else lists.recommend(user, most)
        except UserError as error:
            if request is user:
                raise
            mark, found = ("unused", known[user]) if user in known else ("fallback", lists.popular(most))
            marks[mark] = str(error).partition(" (ids such as")[0]
            out |= {item for name in taken for item in lists.ids_of(name)}
        found = [entry for entry in found if entry["item"] not in out][: length or top]
        columns = {f"{name}s": [entry[name] for entry in found] for name in ("item", "title", "score")}
        answers.append(columns | marks)
    return answers


def recommend(words: Sequence[str]) -> int:
    """Usage: recommend RUN --user ID,ID | --items ID,ID|FILE | --guests FILE | --similar-to ITEM
    [--out list.csv], or for all users recommend RUN --out lists.parquet [--only FILE|ID,ID]
    [--where "stock > 0"] [--without-category wine] [--without FILE|ID,ID] [--with-seen]
    [--by model|popularity|recent|knn|ease|als|blend] [--top 10] [--json]
    [--user-column NAME] [--item-column NAME]
    """
    run, options = open_single_run(words, "recommend", RecommendOptions, finished=True)
    asked = [options.user, options.items, options.guests, options.similar_to]
    if (given := len(asked) - asked.count(None)) > 1 or not (given or options.out):
        ways = "--user ID, --items ID,ID, --guests FILE, --similar-to ITEM"
        raise UserError(f"recommend: needs one of {ways}, not both; or --out")
    if options.with_seen and options.similar_to is not None:
        raise UserError("--with-seen: is about users, and --similar-to names an item: leave it out")
    task = require_capability(run, OpensItemLists, "recommend", "recommends nothing")
    if options.out is not None:  # before the lists are read
        tables.check_out(options.out, None)
    lists = task.open_lists(run.final, options.by)
    names = [f"{name}_column" for name in ("user", "item", "time", "order")]
    columns = [getattr(options, name, None) or run.recipe.options.get(name) for name in names]
    remarks = restrict(lists, options, columns[1])
    if not options.json:  # which has it inside
        remarks.append(f"ranked by {lists.by}")
    return answer(lists, options, remarks, columns)


def answer(
    lists: Recommendations,
    options: RecommendOptions,
    remarks: list[str],
    columns: Columns = (None,) * 4,
) -> int:
    """Write or print the lists that are asked for; `remarks` are said with them, and not before an error.

    `columns` of users, items, times and orders that files have, in place of the usual ones.
    """
    answers = _lists(lists, options, remarks, columns)
    if options.out is not None:
        blocks = _rows(answers) if answers is not None else _tables(lists, options.top)
        code = tables.write_rows(tables.check_out(options.out, None), _counted(blocks), options.json)
        print_lines(*remarks)
        return code
    assert answers is not None
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


def _lists(
    lists: Recommendations, options: RecommendOptions, remarks: list[str], columns: Columns
) -> Iterator[Answer] | None:
    """The lists that are asked for, None for those of all users; adds remarks on what was named.

    Raises UserError.
    """
    top = options.top
    if options.similar_to is not None:
        remarks += lists.remarks([options.similar_to])
        return iter([({"similar_to": options.similar_to}, lists.similar(options.similar_to, top))])
    if options.items is not None:
        taken = _named_items(lists, "--items", options.items, columns[1])
        if tables.is_table(options.items):
            remarks += _unknown(lists, "--items", [n for n in taken if not lists.ids_of(n)])
            taken = [n for n in taken if lists.ids_of(n)]
        remarks += lists.remarks(taken)
        remarks += [] if any(map(lists.knows_item, taken)) else [f"--items: {NOTHING_KNOWN}"]
        return iter([_by_items(lists, {"taken": taken}, taken, top)])
    if options.guests is not None:
        guests = _read_guests(lists, options.guests, columns, remarks)
        return (_by_items(lists, {"user": u}, [*g], top, [*g.values()]) for u, g in guests.items())
    if options.user is not None:
        return (({"user": u}, lists.recommend(u, top)) for u in lists.split_users(options.user))
    return None


def _by_items(lists: Recommendations, asked: dict[str, Any], taken: Sequence[str], *more: Any) -> Answer:
    """The list of who took these items; where training knows none, what most users took. `more`: its length,
    perhaps how many of each item."""
    if any(map(lists.knows_item, taken)):
        return asked, lists.for_items(taken, *more)
    return asked | {"fallback": NOTHING_KNOWN}, lists.popular(more[0])


def _read_guests(
    lists: Recommendations, file: str, columns: Columns, remarks: list[str]
) -> dict[str, dict[str, float]]:
    """User -> the known items of theirs in time -> quantity, without what came back whole. Where a row has
    no user its order is one; a list without goes by its row's number.

    Rows without times are in time already.
    """
    guests: dict[str, dict[str, float]] = {}
    unknown, said = list[str](), Counter[str]()
    rows = sorted(
        enumerate(tables.read_table(file, "--guests", columns), 1),
        key=lambda row: _when(row[1][1].get(_column(row[1][1], columns[2], "time") or "")),
    )
    for number, (where, row) in rows:
        user, item = _column(row, columns[0], "user"), _column(row, columns[1], "item")
        order = _column(row, columns[3], "order")
        filled = [n for n in (user, order) if n and row[n] not in (None, "") and row[n] == row[n]]
        said[f"have no {user or 'user'}: their {order} is the guest"] += filled == [order]
        whose = str(row[filled[0]]) if filled else ""
        if (given := row.get(tables.ITEMS_COLUMN)) is None:
            for column, usual in ((user or order, "user_id"), (item, "item_id")):
                readers.require_name(column or usual, [*row], where, otherwise=GUEST_COLUMNS)
            given = [row[str(item)]]
            if not whose:
                way = "--user-column ORDER takes another column for guests"
                raise UserError(f"{where}: has no {user}: {way}")
        quantity = usual_column("quantity", row)
        (amount,) = delimited.numbers([row[quantity] if quantity else 1])
        if not isinstance(amount, float) or not abs(amount) < float("inf"):
            raise UserError(f"{where}: {quantity} {row[str(quantity)]}: is not a number: leave the row out")
        said[f"are returns ({quantity} 0 or less): what came back whole is left out"] += amount <= 0
        taken = guests.setdefault(whose or str(number), {})
        for name in lists.split_items(given) if isinstance(given, str) else map(str, given):
            if not lists.knows_item(name):
                unknown.append(name)
            elif amount > 0:  # without a quantity an item counts once
                taken[name] = taken.pop(name, 0.0) * bool(quantity) + amount  # its last place counts
            else:
                taken[name] = taken.get(name, 0.0) + amount
    remarks += [f"--guests: {n:,} of {len(rows):,} rows {what}" for what, n in said.items() if n]
    guests = {user: {n: much for n, much in taken.items() if much > 0} for user, taken in guests.items()}
    remarks += _unknown(lists, "--guests", unknown)
    if empty := sum(not taken for taken in guests.values()):
        remarks.append(f"--guests: {empty:,} of {len(guests):,} users have {NOTHING_KNOWN}")
    return guests


def _column(row: Mapping[str, Any], given: str | None, kind: str) -> str | None:
    """The column of a row that is its user, item or time; None for none."""
    return given if given in row else usual_column(kind, row)


def _when(cell: Any) -> tuple[float, str]:
    """What sorts rows by time: none comes first; dates, which sort as written, come after numbers."""
    (time,) = delimited.numbers([cell])
    if not isinstance(time, float):
        return float("inf"), re.sub(r"\b(\d)\b", r"0\1", re.sub(DATE, r"\3-\2-\1", str(time)))
    return time if time == time else -float("inf"), ""


def _rows(answers: Iterator[Answer]) -> Iterator[tuple[list[dict[str, Any]], int, int]]:
    """Rows as files have them: whose it is, rank from 1, item, title, score; how many lists; empty ones."""
    while block := list(itertools.islice(answers, LISTS_AT_A_TIME)):
        rows = [
            {**{n: v for n, v in asked.items() if n in ("user", "similar_to")}, "rank": rank, **entry}
            for asked, entries in block
            for rank, entry in enumerate(entries, 1)
        ]
        yield rows, len(block), sum(not entries for _, entries in block)


def _tables(lists: Recommendations, top: int) -> Iterator[tuple[Any, int, int]]:
    """The same of all users, in tables of pyarrow: ten million dictionaries take minutes."""
    import numpy as np
    import pyarrow

    users, items, titles = map(pyarrow.array, (lists.users, lists.items, lists.titles))
    step = max(1, ROWS_AT_A_TIME // top)
    for start in range(0, len(users), step):
        found, scores = lists.lists(range(start, min(start + step, len(users))), top)
        whose, ranks = np.nonzero(found >= 0)
        numbers = pyarrow.array(found[whose, ranks])
        columns = {"user": users.take(pyarrow.array(whose + start)), "rank": ranks + 1}
        columns |= {"item": items.take(numbers), "title": titles.take(numbers)}
        rows = pyarrow.table({**columns, "score": scores[whose, ranks]})
        yield rows, len(found), int((found[:, 0] < 0).sum())


def _counted(blocks: Iterable[tuple[Any, int, int]]) -> Iterator[Any]:
    """The rows; empty lists are counted at the end. Raises UserError where all are."""
    done = empty = 0
    for rows, some, blank in blocks:
        yield rows
        done, empty = done + some, empty + blank
        doing(f"recommending: {done:,} lists done")
    if empty == done:
        raise UserError(EMPTY_LIST)
    if empty:
        print_lines(f"{empty:,} of {done:,} lists are empty: {NOTHING_LEFT}")


def restrict(lists: Recommendations, options: ListOptions, column: str | None) -> list[str]:
    """Restrict the lists as the flags say; lines on items that training did not know. Raises UserError.

    `column`: of the items in a file; by default a usual name, or the only one there is.
    """
    out = delimited.numbers(n.strip() for n in (options.without_category or "").split(",") if n.strip())
    where = options.where or ""
    if (where or out) and not tables.is_table(options.only or ""):
        raise UserError("--where, --without-category: are about a table: name it, as in --only products.csv")
    only = None if options.only is None else _named_items(lists, "--only", options.only, column, where, out)
    without = _named_items(lists, "--without", options.without, column) if options.without is not None else ()
    return _unknown(lists, "--only, --without", lists.restrict(only, without, options.with_seen))


def _unknown(lists: Recommendations, flag: str, missing: Sequence[str]) -> list[str]:
    named = [*dict.fromkeys(missing)][:MOST_NAMED]
    few = ", ".join(f"{n} (did you mean {close}?)" if (close := lists.meant(n)) else n for n in named)
    return [f"{flag}: {len(missing)} items are not in the training data: {few}"] if missing else []


def _named_items(
    lists: Recommendations, flag: str, text: str, column: str | None, where: str = "", out: Sequence[Any] = ()
) -> list[str]:
    """The items that a flag names; of a table those in rows of which `where` is true and whose category is
    not `out`. Raises UserError, also for one that no row has: misspelt, it would be offered.
    """
    if not tables.is_table(text):
        return lists.split_items(text)
    located = [*tables.read_table(text, flag, [column])]
    category = usual_column("category", located[0][1])
    there = delimited.numbers(row.get(category or "") for _, row in located) if out else []
    if lost := [str(name) for name in out if name not in there]:
        known = [*dict.fromkeys(str(one) for one in there if one == one)]
        close = f"{nearest_hint(lost[0], known)}; there is: {', '.join(known[:MOST_NAMED]) or 'none'}"
        raise UserError(f"--without-category {lost[0]}: no row of {text} has this category{close}")
    offered = [one for one, its in itertools.zip_longest(located, there) if its not in out or not out]
    rows = [row for _, row in (_where_true(offered, where) if where and offered else offered)]
    columns = [*located[0][1]]
    usual = column if column in columns else usual_column("item", columns)
    name = usual or (columns[0] if len(columns) == 1 else None)
    if name is None:
        raise UserError(f"{flag} {text}: has no column item_id; it has: {', '.join(columns)}")
    # In a list without a header the first item is taken for one.
    first = [name] if name != usual and lists.knows_item(name) else []
    return [*first, *(str(row.get(name)) for row in rows)]


def _where_true(located: Sequence[tuple[str, Any]], where: str) -> list[tuple[str, Any]]:
    """The rows of which the expression is true. Raises UserError."""
    from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, UndefinedError
    from jinja2.sandbox import SandboxedEnvironment

    parts = re.split(
        r"""('[^']*'|"[^"]*"|(?<=\b[iI][nN])\s*[(\[][^)\]]*)""", where
    )  # texts, and lists behind `in`
    for pattern, ours in OTHERWISE.items():
        parts[::2] = [re.sub(pattern, ours, part) for part in parts[::2]]
    if (meant := "".join(parts)) != where:
        raise UserError(f'--where {where}: write it as --where "{meant}"')
    columns = {delimited.simple_name(n): n for n in located[0][1]} | {n: n for n in located[0][1]}
    found = {w: columns.get(w) or columns.get(delimited.simple_name(w)) for w in re.findall(r"\w+", where)}
    named = {w: delimited.numbers(row.get(n) for _, row in located) for w, n in found.items() if n}
    rows = zip(located, *named.values(), strict=True)
    try:
        meets = SandboxedEnvironment(undefined=StrictUndefined).compile_expression(where, False)
        return [one for one, *cells in rows if meets(dict(zip(named, cells, strict=True)))]
    except (TemplateError, ArithmeticError, AttributeError, TypeError, ValueError) as error:
        hint = nearest_hint(str(error).split("'")[1], columns) if isinstance(error, UndefinedError) else ""
        kind, broken = type(error), "breaks off, or lacks a sign between two words"
        why = {TemplateSyntaxError: broken, TypeError: "a cell holds text where a number is asked for"}
        way = f"write columns ({', '.join(located[0][1])}), numbers and 'texts', with ==, and, or, not, in"
        raise UserError(f"--where {where}: {why.get(kind, error)}{hint}: {way}") from None
