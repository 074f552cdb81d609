"""Tables of interactions as pyarrow columns, Parquet a block of rows at a time; small tables row by row."""

from __future__ import annotations

import contextlib
import csv
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.data import readers
from isobatch.data.tables import delimited

if TYPE_CHECKING:
    import pyarrow as pa

    from isobatch.data.tables.delimited import Shape

BATCH_ROWS, BLOCK_BYTES = 1 << 18, 1 << 23
"""What is read at a time of Parquet, and of text."""
NUMBERS = {"rating": "", "quantity": "", "time": ", or dates such as 2019-12-31 23:59:59 or 31.12.2019"}
"""Columns that hold numbers, and what else they may hold: text would be sorted alphabetically."""
GAPS = {"::": "double colons", " ": "blanks"}
"""What is between fields where no single sign is; " " stands for blanks and tabs of any number."""
TIME_CELL = re.compile(r"\d{9,}|\d{4}-\d\d-\d\d|\d\d?([./-])\d\d?\1\d{4}")
"""How times begin: seconds since 1970, or dates."""
TIME_END = r"(:\d\d(?:\.\d{1,6})?)\d*\s*([+-][\d:]+|Z)?$"
"""What is left of a time's end: no nanoseconds, no blank before the zone."""
BASKETS = ("items", "products", "articles", "skus")
"""Names of the column of items, where a cell holds several."""
FIELD = re.compile(r"[^\s,;|]+")
"""A user or an item in a sequence."""
IDS = ("user", "item", "order")
"""Columns that hold ids."""
ID_TYPES = re.compile("(large_)?string$|u?int|double|float|halffloat|dictionary|decimal|bool|date|null")
DATE = r"^(?P<day>\d\d?)[./-](?P<month>\d\d?)[./-](?P<year>\d{4})"
LINE = "line"
"""The column of users where the number of a line is its user."""
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


@dataclass(frozen=True, slots=True)
class Table:
    """A table of interactions."""

    name: str
    columns: Mapping[str, str]
    """user and item, and perhaps rating and time -> what they are called in the file."""
    read: Callable[[], Iterable[Any]]
    """Gives the rows as pyarrow's batches, with the file's own columns."""
    names: Sequence[str] = ()
    """All columns of the file, also those that are not read."""
    date_order: str | None = None
    """Whether dates such as 3/4/2024 begin with the `day` or the `month`; None: as the column shows."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Its rows, a block at a time: ids as dictionaries, ratings float32, times int64, float64 or
        timestamps in microseconds. Raises UserError that names the fault.
        """
        import pyarrow as pa

        done, dated = 0, set[bool]()
        for batch in self.read():
            cells = {name: batch[column] for name, column in self.columns.items()}
            cells = self._each_item(cells) if "item" in cells else cells
            arrays = [self._checked(name, values, done) for name, values in cells.items()]
            found = pa.RecordBatch.from_arrays(arrays, names=list(self.columns))
            dated |= {pa.types.is_timestamp(one.type) for one in found.schema if one.name == "time"}
            if len(dated) > 1:
                raise UserError(f"{self.name}: some of its times are numbers and some dates: give one kind")
            yield found
            done += len(batch)

    def _each_item(self, cells: dict[str, pa.Array]) -> dict[str, pa.Array]:
        """A row for each item of a cell that holds several: a list, also as text (["a", "b"]), or a|b|c."""
        from pyarrow import compute

        items = cells["item"]
        if re.match("string|large_string|dictionary<values=string", str(items.type)):
            ids = (coded := items.dictionary_encode()).dictionary
            listed = compute.all(compute.match_substring_regex(ids, r"^\[.*\]$")).as_py()
            marks = "[|,;]" if listed or self.columns["item"].lower() in BASKETS else "[|]"
            if compute.any(compute.match_substring_regex(ids, marks)).as_py():
                ids = compute.replace_substring_regex(ids, r"""^\[|\]$|["']""", "") if listed else ids
                items = compute.split_pattern_regex(ids, marks).take(coded.indices)
        if items.null_count or not re.match("(large_)?list", str(items.type)):
            return cells
        whose = compute.list_parent_indices(items)
        return {**{n: values.take(whose) for n, values in cells.items()}, "item": compute.list_flatten(items)}

    def _as_iso(self, texts: pa.Array) -> pa.Array:
        """Texts of dates such as 31.12.2024, and 31/12/2024 or 12/31/2024, as 2024-12-31."""
        from pyarrow import compute

        parts = compute.extract_regex(texts, DATE)
        fields = (compute.struct_field(parts, name) for name in ("day", "month"))
        day, month = (compute.max(field.cast("int8")).as_py() for field in fields)
        if day is None:
            return texts
        is_dotted = compute.any(compute.match_substring_regex(texts, r"^\d\d?[.]")).as_py()
        order = self.date_order or ("day" if is_dotted or day > 12 else "month" if month > 12 else None)
        if order is None:
            either = f"{self.columns['time']}: the day or the month may come first, as in 3/4/2024"
            raise UserError(f"{self.name}: {either}: say --date-order day, or month")
        iso = r"\3-\2-\1" if order == "day" else r"\3-\1-\2"
        dates = compute.replace_substring_regex(texts, DATE, iso)
        return compute.replace_substring_regex(dates, r"([- ])(\d)\b", r"\10\2")

    def _checked(self, name: str, values: pa.Array, before: int) -> pa.Array:
        """The values as `batches` gives them. Raises UserError where a number is missing, or one cannot be
        that.
        """
        from pyarrow import compute, types

        if name in IDS:
            is_decimal, kind = types.is_floating(values.type), str(values.type)
            if is_decimal and (compute.max(compute.abs(values)).as_py() or 0) >= 2**53:
                kind = "rounded, as decimals beyond 2^53 are"
            if not ID_TYPES.match(kind):
                raise UserError(f"{self.name}: its {name}s are {kind}: give an integer or text in each row")
            return values.dictionary_encode()
        values = self._numbers(name, values) if name in NUMBERS else values
        empty = values.is_null(nan_is_null=name != "rating")
        if name == "time" and types.is_floating(values.type):
            empty = compute.or_(empty, compute.is_inf(values).fill_null(False))
        if empty.true_count:
            row = before + empty.index(True).as_py() + 1
            raise UserError(f"{self.name} row {row}: has no {name}: fill it in, or leave the row out")
        return values

    def _numbers(self, name: str, values: pa.Array) -> pa.Array:
        """Ratings or times as `batches` gives them, also of texts, which would be ordered alphabetically."""
        import pyarrow as pa
        from pyarrow import compute, types

        values = values.dictionary_decode() if types.is_dictionary(values.type) else values
        kind, wanted = values.type, [pa.float32()]
        if name == "time":
            wanted = [pa.int64(), pa.float64(), pa.timestamp("us"), pa.timestamp("us", "UTC")]
        if types.is_temporal(kind):
            wanted = wanted[2:3]
        elif "string" in str(kind) and name != "time":
            coded = values.dictionary_encode()
            found = delimited.numbers(coded.dictionary.to_pylist())
            values = pa.array(found).take(coded.indices) if {*map(type, found)} == {float} else values
        elif "string" in str(kind):
            iso = self._as_iso(compute.utf8_trim_whitespace(values))
            values = compute.replace_substring_regex(iso, TIME_END, r"\1\2")
        elif not types.is_signed_integer(kind):  # a cast would cut decimals off
            wanted = wanted[-3:]
        for one in wanted:
            with contextlib.suppress(pa.ArrowInvalid, pa.ArrowNotImplementedError):
                return values.cast(one, safe=False)
        cells = values.drop_null().to_pylist()
        odd = next(
            (c for c in cells if not (delimited.is_number(c) or TIME_CELL.match(str(c)))), [*cells, kind][0]
        )
        way_out = f"give numbers{NUMBERS[name]}, or leave it out by --{name}-column none"
        raise UserError(f"{self.name}: {self.columns[name]} holds {odd!r}: {way_out}")


def headless(delimiter: str, names: Sequence[str], skip: int = 0) -> Shape:
    """The shape of a table with these columns below so many lines. Its ids are integers."""
    return delimited.Shape([*names], skip, {"delimiter": delimiter, "quoting": csv.QUOTE_NONE}, [], [])


def delimited_table(file: Path, shape: Shape, columns: Mapping[str, str] | None = None) -> Table:
    """A delimited text file, of which these columns are read, by default all. Ids are texts."""
    chosen = dict(zip(shape.names, shape.names, strict=True)) if columns is None else columns
    delimiter, skip = shape.dialect["delimiter"], shape.header_lines

    def read() -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from pyarrow import csv as arrow

        if delimiter in GAPS:
            fields = read_fields(file, delimiter, len(shape.names), skip)
            yield from _batches(shape.names, (row for _, row in fields))
            return
        ids = pa.dictionary(pa.int32(), pa.string()) if shape.rows else pa.int64()
        known = {**dict.fromkeys(IDS, ids), **dict.fromkeys(NUMBERS, pa.string())}
        kinds = {column: known[name] for name, column in chosen.items() if name in known}
        convert = arrow.ConvertOptions(
            include_columns=[*{*chosen.values()}],
            column_types=kinds,
            null_values=[""],
            strings_can_be_null=True,
        )
        options = arrow.ReadOptions(skip_rows=skip, column_names=shape.names, block_size=BLOCK_BYTES)
        options.use_threads = False  # else an error does not name its row
        quote = '"' if shape.dialect["quoting"] != csv.QUOTE_NONE else False
        parse = arrow.ParseOptions(delimiter=delimiter, quote_char=quote)
        is_odd = file.suffix.lower() == readers.GZIP or readers.encoding_of(file) != "utf-8"
        message = "holds no rows: leave it out"
        try:
            for batch in arrow.open_csv(readers.open_utf8(file) if is_odd else file, options, parse, convert):
                message = "" if len(batch) else message
                yield batch
        except UnicodeDecodeError:
            message = readers.NOT_UTF8
        except pa.ArrowInvalid as error:
            message = str(error).splitlines()[0]
            message = re.sub("CSV conversion.* invalid UTF8 data", readers.NOT_UTF8, message)
        if message:
            row, reason = re.fullmatch(r"(?:.*Row #(\d+): )?(.*)", message).groups()  # type: ignore[union-attr]
            line = f" line {row}" if row else ""
            raise UserError(f"{file}{line}: {reason.replace('CSV conversion error to', 'cannot be read as')}")

    return Table(str(file), chosen, read, shape.names)


def _batches(names: Sequence[str], rows: Iterator[Sequence[str]]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    while some := [*itertools.islice(rows, BATCH_ROWS >> 2)]:
        yield pa.record_batch([pa.array(column) for column in zip(*some, strict=True)], names=[*names])


def _sequences(file: Path) -> Iterator[list[str]]:
    """The fields of each line that has some."""
    return filter(None, map(FIELD.findall, readers.read_lines(file)))


def are_sequences(file: Path) -> bool:
    """Whether the first lines have as many fields as they like, all with a digit, as sequences of ids do.

    In a table with a fault most lines have the same number.
    """
    head = [*itertools.islice(_sequences(file), delimited.SAMPLED_LINES)]
    same = max(Counter(map(len, head)).values(), default=0)
    return all(map(delimited.HAS_DIGIT.search, itertools.chain(*head))) and 0 < 2 * same < len(head)


def sequence_table(file: Path, user: str | None, notes: list[str]) -> Table:
    """A file with one user's items a line, in the order of time.

    `user`: "1" where the first field is the user, "none" where it is an item and the line's number stands for
    the user. By default a field that differs in all lines is the user: some item would begin two lines.
    """
    begins = Counter(fields[0] for fields in _sequences(file)) if user is None else {}
    leads = user != "none" and max(begins.values(), default=1) == 1
    which = "first field, as all differ," if leads else "number, as some begin alike,"
    said = f"a line is one user's items in the order of time; its {which} is the user"
    notes.append(f"{file.name}: {said} (--user-column {'none' if leads else '1'}: it is not)")
    names = ("user" if leads else LINE, "item")

    def read() -> Iterator[pa.RecordBatch]:
        numbered = enumerate(_sequences(file), 1)
        lines = (fields if leads else [str(number), *fields] for number, fields in numbered)
        return _batches(names, ((user, item) for user, *items in lines for item in items))

    return Table(str(file), dict(zip(("user", "item"), names, strict=True)), read, names)


def parquet_table(file: Path, columns: Mapping[str, str], names: Sequence[str]) -> Table:
    """A Parquet file."""

    def read() -> Iterator[pa.RecordBatch]:
        with readers.open_parquet(file) as table, readers.explain_parquet_errors(file):
            yield from table.iter_batches(BATCH_ROWS, columns=[*columns.values()])

    return Table(str(file), columns, read, names)


def read_fields(file: Path, delimiter: str, count: int, skip: int = 0) -> Iterator[tuple[str, list[str]]]:
    """(where, fields) of every line behind `skip` that is not empty; the delimiter may have several
    characters, or stand for blanks. What is not UTF-8 is ISO-8859-1, as MovieLens' files are.

    Raises UserError for a line that does not have `count` fields.
    """
    with readers.open_utf8(file) as stream:
        for number, block in enumerate(stream, 1):
            try:
                line = block.decode("utf-8-sig")
            except UnicodeDecodeError:
                line = block.decode("latin-1")
            if line.strip() and number > skip:
                where, row = f"{file} line {number}", line.rstrip("\r\n").split(delimiter.strip() or None)
                if len(row) != count:
                    raise UserError(f"{where}: has {len(row)} fields between {delimiter!r}, not {count}")
                yield where, row


def shape_to_stream(file: Path, form: str, columns: Iterable[str | None], known: Collection[str]) -> Shape:
    """The shape of a table, of which flags name these columns; `known` as of `find_shape`.

    Raises UserError with the line of a quote that is not closed: pyarrow would read on to the next.
    """
    find = partial(delimited.find_shape, file=file, numbers=readers.numbers_in(columns), known=known)
    with readers.open_utf8(file) as stream:
        head = [b.decode("utf-8-sig", "replace") for b in itertools.islice(stream, delimited.SAMPLED_LINES)]
    shape = find(head, usual="," if form == "csv" else "\t")
    shape.notes.extend(readers.encoding_notes(file))
    for gap, what in GAPS.items() if not shape.even else ():
        found = find(["\t".join(line.split(gap.strip() or None)) for line in head], usual="\t")
        if found.even:
            notes = [f"{file.name}: {what} are between its fields", *found.notes]
            return found._replace(dialect={**found.dialect, "delimiter": gap}, notes=notes)
    if shape.dialect["quoting"] != csv.QUOTE_NONE:
        with readers.open_utf8(file) as stream:
            torn = any(line.count(b'"') % 2 for line in stream)
        for _ in delimited.read(readers.read_lines(file), file, shape) if torn else ():
            pass
    return shape


def read_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, column -> value) of each row of a small csv, tsv or parquet table.

    Raises UserError for a row that does not fit the header.
    """
    form = next((readers.FORMATS[e] for e in file.suffixes[::-1] if e in (".parquet", ".csv")), "tsv")
    for where, row in readers.read_rows(readers.SplitFiles((file,), form)):
        if form != "parquet" and None in row.values():
            raise UserError(f"{where}: has another number of fields than the header")
        yield where, {delimited.ATOMIC_TYPE.sub("", name): value for name, value in row.items()}
