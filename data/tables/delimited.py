"""The shape of a delimited table: what parts its fields, and whether its first row names the columns."""

from __future__ import annotations

import csv
import functools
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from isobatch.core.errors import UserError
from isobatch.core.package import table_beside

csv.field_size_limit(1 << 30)
SAMPLED_LINES = 100
DELIMITERS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}
USUAL = re.compile(r"(?i)(.*_)?(id|text|label|user|item|rating|title|name|tokens|sentence\d?|question\d?)")
"""A word that only a row of names holds."""
ATOMIC = (".inter", ".item", ".user")
"""Endings of RecBole's tables: tabs, and a type behind each name, as in `user_id:token`."""
UNITS = re.compile(r"(?i)[$€£¥]|\b(?:CHF|EUR|USD|GBP|S?Fr)\b\.?|(?<=\d)[.,]-+|^None$")
NUMBER_FORMS = {
    mark: re.compile(rf"[+-]?([1-9]\d{{0,2}}([{other}'\u2019\s]\d{{3}})+|\d+)([{mark}]\d+)?-?")
    for mark, other in (",.", ".,")
}
"""Sign before decimals -> a number as German, English and Swiss writing has it."""
HAS_DIGIT = re.compile(r"\d")
ATOMIC_TYPE = re.compile(":(token|float)(_seq)?$")


USUAL_COLUMNS = {
    kind: {name: tuple(words.split()) for name, words in named.items()}
    for kind, named in table_beside(__file__, "usual_columns").items()
}
"""Kind of data -> what is read -> the usual names of its column."""


@functools.lru_cache
def simple_name(column: str) -> str:
    """The name of a column without what people write in many ways: customer_id, Customer ID, CustomerId."""
    return re.sub(r"[\W_]", "", column.lower())


class Shape(NamedTuple):
    """How the lines of a table become rows."""

    names: list[str]
    """The columns; a number, from 1 on, where there is no name, or a flag takes it by number."""
    header_lines: int
    """Lines above the rows; 0 where the columns have no names."""
    dialect: dict[str, Any]
    """What `csv.reader` should know."""
    notes: list[str]
    """What the user should know, one line each."""
    rows: list[list[str]]
    """The first rows, one that names the columns too."""

    even: bool = False
    """Whether these have the same number of fields, two or more."""


def find_shape(
    lines: Iterable[str], file: Path, usual: str, numbers: Iterable[str] = (), known: Collection[str] = ()
) -> Shape:
    """The shape of a table that begins with these lines; those behind SAMPLED_LINES are not looked at.

    `usual`: what is between the fields unless only something else parts all rows alike. `numbers`: columns
    that flags take by number. `known`: simple names of columns; a first row without any that is like the
    others is a row. Raises UserError for two columns of one name.
    """
    dialect, records = _parted(list(itertools.islice(lines, SAMPLED_LINES)), usual)
    header_lines, first = records[0]
    dialect["skipinitialspace"] = any(name[:1] == " " for name in first[1:])
    names = [name.strip("\ufeff \t\r\n") for name in first]
    if {*ATOMIC} & {*file.suffixes} or all(map(ATOMIC_TYPE.search, names)):
        names = [ATOMIC_TYPE.sub("", name) for name in names]
    mark, notes = dialect["delimiter"], []
    if mark != usual:
        notes.append(f"{file.name}: a {DELIMITERS[mark]} is between its fields")
    rows = [row for _, row in records]
    counted = names == [str(n) for n in range(len(names))] and not (known and len(names) == 2)
    headed = counted or _has_header(rows) or bool({*known} & {*map(simple_name, names)})
    taken = [n for n in numbers if 0 < int(n) <= len(names) and not (headed and n in names)]
    # A first row is one where a cell of it comes again below, or where all of a column have digits.
    columns = zip(*rows, strict=False) if known and not headed else ()
    if taken or any(one[0] in one[1:] or all(map(HAS_DIGIT.search, one)) for one in columns):
        what = "names the columns" if headed else "is a row, too"
        notes.append(f"{file.name}: columns are taken by number; the first row {what}")
        if not headed:
            names, header_lines = [str(n) for n in range(1, len(names) + 1)], 0
        for number in taken:
            names[int(number) - 1] = number
    flag = "--item-column" if known else "--text-column"
    refuse_twins(names, file, f", or take it by its number, as in {flag} 1")
    return Shape(names, header_lines, dialect, notes, rows, len({*map(len, rows)}) == 1 < len(first))


def _parted(head: Sequence[str], usual: str) -> tuple[dict[str, Any], list[tuple[int, list[str]]]]:
    """(dialect, (number of its last line, fields) of each row that is whole) of what parts all rows alike.

    Of a table that is called tsv and is one, quotes are letters.
    """
    tried: list[tuple[dict[str, Any], list[tuple[int, list[str]]]]] = []
    for mark in (usual, *DELIMITERS):
        dialect: dict[str, Any] = {"delimiter": mark}
        dialect["quoting"] = csv.QUOTE_NONE if mark == usual == "\t" else csv.QUOTE_MINIMAL
        reader = csv.reader(head, **dialect)
        try:
            rows = [(reader.line_num, row) for row in reader if row]
        except csv.Error:  # such as a carriage return in what is a quoted field by another mark
            rows = []
        rows = rows[bool(rows) and rows[0][1][0][:4] == "sep=" :]  # as Excel writes
        rows = rows[: -1 if len(head) == SAMPLED_LINES and len(rows) > 1 else None] or [(0, [])]
        tried.append((dialect, rows))
        if len({len(row) for _, row in rows}) == 1 and len(rows[0][1]) > 1:
            return tried[-1]
    return tried[0]


def _has_header(records: Sequence[Sequence[str]]) -> bool:
    """Whether the first row has a usual name, or no number where all others have one."""
    first, *others = records
    numeric = (
        all(n < len(row) and is_number(row[n]) for row in others) and not is_number(cell)
        for n, cell in enumerate(first)
    )
    return any(USUAL.fullmatch(cell.strip()) for cell in first) or (bool(others) and any(numeric))


def refuse_twins(names: Sequence[str], file: Path, or_else: str = "") -> None:
    """Raise UserError where two columns have one name."""
    if twin := next((n for number, n in enumerate(names) if n and n in names[:number]), None):
        raise UserError(f"{file}: two columns are called {twin}: rename one{or_else}")


def is_number(cell: Any) -> bool:
    """Whether a cell holds a number, or its text."""
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return True


def numbers(cells: Iterable[Any]) -> list[Any]:
    """The cells of a column with the numbers that they hold: 1.234,50 €, CHF 1'234.50, 12,- and SAP's 3- for
    -3, too; NaN for an empty one, and other texts as they are.

    Decimals are parted as most cells tell, and by a comma where all hold one.
    """
    given = [*cells]
    texts = [UNITS.sub("", str(cell)).strip() for cell in given]
    fits = {mark: sum(map(bool, map(form.fullmatch, texts))) for mark, form in NUMBER_FORMS.items()}
    mark = "," if fits[","] > fits["."] or all("," in text for text in texts) else "."

    def number(cell: Any, text: str) -> Any:
        if NUMBER_FORMS[mark].fullmatch(text):
            text = "-" * ("-" in text) + re.sub(rf"[^\d{mark}]", "", text).replace(mark, ".")
        text = text or "nan" * (cell in (None, ""))
        return float(text) if is_number(text) else cell

    return [number(*both) for both in zip(given, texts, strict=True)]


def read(lines: Iterable[str], file: Path, shape: Shape) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, row) of each row that is not empty; None in the columns that a short one lacks.

    Raises UserError with the line for a row of too many fields, and for a quote that is not closed.
    """
    read_lines: list[str] = []
    above, width, mark = shape.header_lines, len(shape.names), DELIMITERS[shape.dialect["delimiter"]]
    reader = csv.reader((read_lines.append(line) or line for line in lines), **shape.dialect)  # type: ignore[func-returns-value]
    name, pair = str(file), itertools.zip_longest
    try:
        for row in reader:
            begin = reader.line_num - len(read_lines) + 1
            if len(read_lines) > 1 or read_lines[0].count('"') % 2:
                _require_closed(read_lines, f"{file} line {begin}", shape)
            read_lines.clear()
            if len(row) > width:
                quotes = shape.dialect["quoting"] != csv.QUOTE_NONE
                way_out = f": quote a field that holds a {mark}" if quotes else ""
                said = f"has {len(row)} fields and the header {width}{way_out}"
                raise UserError(f"{file} line {reader.line_num}: {said}")
            if row and reader.line_num > above:
                yield f"{name} line {reader.line_num}", dict(pair(shape.names, row))
    except csv.Error as error:
        raise UserError(f"{file} line {reader.line_num}: cannot be read as a table: {error}") from None


def _require_closed(lines: Sequence[str], where: str, shape: Shape) -> None:
    try:
        next(csv.reader(lines, strict=True, **shape.dialect))
    except csv.Error as error:
        if len(lines) > 1 or "unexpected end" in str(error):
            raise UserError(
                f"{where}: a quote opens here and is not closed where its field ends (of {len(lines)} lines):"
                " close it, or double the quotes inside a text"
            ) from None
