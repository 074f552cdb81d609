"""Tests of the files that interactions come in: whatever the form, the same numbered log."""

from __future__ import annotations

import gzip
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from isobatch.core.errors import UserError
from isobatch.core.recipe import Recipe
from isobatch.data.interactions import formats, log_splits
from isobatch.data.interactions.dataset import InteractionOptions, Interactions
from isobatch.data.interactions.formats import read_tables
from isobatch.data.interactions.log_splits import Numbering, read_log
from isobatch.data.tables import delimited

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.data.interactions.tables import Table

IDS = {
    "integers": ("7", "12", "300"),
    "text": ("ann", "bob", "c\u00e9d"),
    "UUIDs": tuple(f"{n:08x}-1b2c-4d3e-8f90-0123456789ab" for n in (0xA1, 0xB2, 0xC3)),
    "beyond 2^53": ("9007199254740993", "9007199254740994", "18446744073709551615"),
    "mixed": ("7", "x-1", "0012"),
}
EVENTS = [  # user, item: numbers in IDS; rating, time
    *((0, 1, 4.0, 1_600_000_009), (1, 0, 2.5, 1_600_000_001), (0, 2, 5.0, 1_600_000_003)),
    *((2, 0, 1.0, 1_600_000_003), (1, 2, -3.0, 1_600_000_002), (2, 1, 3.0, 1_600_000_000)),
]
NAMES = ["user_id", "item_id", "rating", "timestamp"]
SIGNS = {",": "csv", "\t": "tsv", ";": "csv", "|": "txt", "::": "dat", " ": "txt", "\t ": "log"}


def rows(ids: str = "integers") -> list[list[str]]:
    names = IDS[ids]
    return [[names[u], names[i], str(rating), str(time)] for u, i, rating, time in EVENTS]


def opened(
    path: Path, form: str | None = None, split: str = "all", **options: Any
) -> tuple[Table, list[str]]:
    raw = read_tables(path, form, InteractionOptions(**options))
    return raw.splits[split], raw.notes


def log_of(table: Table) -> list[tuple[str, ...]]:
    """(user, item, perhaps rating and time) of each row as they were read."""
    users, items = Numbering(), Numbering()
    log = read_log(table, users, items, [])
    others = [log.columns[name].tolist() for name in ("rating", "time") if name in log.columns]
    named = [[users.names[n] for n in log.user], [items.names[n] for n in log.item]]
    return [*zip(*named, *others, strict=True)]


def expected(ids: str = "integers", width: int = 4) -> list[tuple[Any, ...]]:
    return [(u, i, float(r), int(t))[:width] for u, i, r, t in rows(ids)]


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("packed", [False, True], ids=["", "gzip"])
@pytest.mark.parametrize("header", ["none", "names", "types"])
@pytest.mark.parametrize("sign", SIGNS)
def test_every_form_of_a_table_is_the_same_log(
    sign: str, header: str, packed: bool, ids: str, tmp_path: Path
) -> None:
    typed = [f"{name}:{kind}" for name, kind in zip(NAMES, ["token"] * 2 + ["float"] * 2, strict=True)]
    above = {"none": [], "names": [NAMES], "types": [typed]}[header]
    content = "".join(sign.join(row) + "\n" for row in [*above, *rows(ids)]).encode()
    file = tmp_path / f"log.{SIGNS[sign]}{'.gz' * packed}"
    file.write_bytes(gzip.compress(content) if packed else content)
    table, notes = opened(file)
    assert log_of(table) == expected(ids)
    by_place = any("read 1 as user, 2 as item, 3 as rating, 4 as time" in note for note in notes)
    assert by_place == (header == "none")


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("ids", IDS)
def test_parquet_is_the_same_log(ids: str, typed: bool, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    names = [f"{name}:token" if typed else name for name in NAMES]
    columns = dict(zip(names, zip(*rows(ids), strict=True), strict=True))
    kinds = [pa.large_string(), pa.uint64() if ids in ("integers", "beyond 2^53") else pa.string()]
    own = [
        [int(v) for v in c] if k == pa.uint64() else [*c]
        for c, k in zip(columns.values(), kinds, strict=False)
    ]
    arrays = [pa.array(v, k) for v, k in zip(own, kinds, strict=True)]
    arrays += [pa.array([*c]) for c in [*columns.values()][2:]]  # numbers as text
    parquet.write_table(pa.table(arrays, names=names), tmp_path / "x.inter.parquet", row_group_size=2)
    assert log_of(opened(tmp_path)[0]) == expected(ids)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 3, 2)], ids=["rating first", "time first"])
def test_columns_without_names_are_taken_by_place(width: int, order: tuple[int, ...], tmp_path: Path) -> None:
    kept = [[row[n] for n in order][:width] for row in rows()]
    (tmp_path / "events.txt").write_text("".join(" ".join(row) + "\n" for row in kept))
    table, _ = opened(tmp_path)
    names = ["user", "item", "rating", "time"]
    assert {*table.columns} == {names[n] for n in order[:width]}
    swapped, _ = opened(tmp_path, user_column="2", item_column="1")
    assert [row[:2] for row in log_of(swapped)] == [row[1::-1] for row in expected()]


SEQUENCES = {"u1": "7 8 9 4 5 6", "u2": "9 8", "u3": "1 7 2 3 4", "u4": "8 3 1", "u5": "4 7 9 2"}


@pytest.mark.parametrize("sign", [" ", "\t", ",", ";"])
@pytest.mark.parametrize("leads", [True, False], ids=["users", "no users"])
def test_a_sequence_in_each_line(leads: bool, sign: str, tmp_path: Path) -> None:
    items = {user: line.split() for user, line in SEQUENCES.items()}
    if not leads:
        items["u6"] = ["7", "1"]  # as another line begins
    lines = [sign.join([user] * leads + line) for user, line in items.items()]
    (tmp_path / "Shop.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "Shop_attributes.json").write_text("{}")
    (tmp_path / "README.txt").write_text("Of a shop.")
    users = [*items] if leads else [str(n + 1) for n in range(len(items))]
    wanted = [(u, i) for u, own in zip(users, items.values(), strict=True) for i in own]
    for form in (None, "sequences"):
        table, notes = opened(tmp_path, form)
        assert log_of(table) == wanted
        assert ("first field" if leads else "number") in next(n for n in notes if n.startswith("Shop.txt"))
        assert f"{tmp_path.name}: not read: Shop_attributes.json" in notes
    other, _ = opened(tmp_path, user_column="none" if leads else "1")
    assert len(log_of(other)) == len(wanted) + (len(items) if leads else -len(items))


DAYS = {
    "days": ["2024-01-01.csv", "2024-01-02.csv", "2024-01-10.csv"],
    "parts": ["part-2.csv", "part-9.csv.gz", "part-10.csv"],
    "folders": [f"dt=2024-01-0{n}/part.csv" for n in (1, 2, 3)],
    "months": [f"year=2024/month={n}/log.csv" for n in (1, 2, 12)],
    "one word": ["events-1.csv", "events-2.csv", "events-3.csv"],
    "a split": ["train/a.csv", "train/b.csv", "train/c.csv"],
}


@pytest.mark.parametrize("name", ["yesterday.csv", "2024-01-04.csv", "yesterday.csv.gz"])
def test_a_table_that_is_no_log_by_its_name_alone_is_not_passed_over(name: str, tmp_path: Path) -> None:
    text = "".join(",".join(row) + "\n" for row in [NAMES, *rows()])
    (tmp_path / "orders.csv").write_text(text)
    (tmp_path / "notes.csv").write_text("day,what\n1,rain\n")
    formats.refuse_twins(tmp_path, [tmp_path / "orders.csv"])
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    with pytest.raises(UserError, match=f"not read: name it orders-{name}, or"):
        formats.refuse_twins(tmp_path, formats.find_tables(tmp_path, None))


@pytest.mark.parametrize("bare", ["", ",".join(NAMES), ",".join(NAMES) + "\n\n"])
def test_a_day_without_rows_is_left_out(bare: str, tmp_path: Path) -> None:
    text = "".join(",".join(row) + "\n" for row in [NAMES, *rows()])
    (tmp_path / "orders-1.csv").write_text(bare)
    (tmp_path / "orders-2.csv").write_text(text)
    table, notes = opened(tmp_path)
    assert log_of(table) == expected()
    assert "left out, as they hold no rows: orders-1.csv" in notes


@pytest.mark.parametrize("case", DAYS)
def test_files_of_one_log_are_read_in_the_order_of_their_names(case: str, tmp_path: Path) -> None:
    for n, name in reversed([*enumerate(DAYS[case])]):
        (file := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = "".join(",".join(row) + "\n" for row in [NAMES, *rows()[2 * n : 2 * n + 2]]).encode()
        file.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    (tmp_path / "products.csv").write_text("item_id,title\n7,Dune\n")
    (tmp_path / "_SUCCESS").write_text("")
    table, notes = opened(tmp_path, split="train" if case == "a split" else "all")
    assert log_of(table) == expected()
    assert any(note.startswith("3 files are read as one") for note in notes)


LOG = "user,item,time\na1,b1,5\na2,b2,6\n"
REFUSED: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "two logs": (
        {"interactions.csv": LOG, "ratings.csv": "user,item,rating\n1,2,3\n"},
        {},
        "same split.*keep one, or give both the same columns",
    ),
    "a day without a header": ({"1.csv": LOG, "2.csv": "a3,b3,7\na4,b4,8\n"}, {}, "the same columns"),
    "only empty days": ({"1.csv": "\n", "2.csv": "\n"}, {}, "1.csv: is empty: leave it out"),
    "neither": ({"log.csv": LOG + "\u00e9\x81,b3,7\n"}, {}, "is not UTF-8: save it as "),
    "no end of time": ({"log.csv": LOG + "a3,b3,inf\n"}, {}, "row 3: has no time"),
    "half a Parquet file": ({"log.parquet": "PAR1"}, {}, "is no whole parquet file: .*: fetch it again"),
    "twins": ({"log.csv": "user,item,item\na,b,c\n"}, {}, "two columns .* --item-column 1"),
    "two kinds": ({"1.csv": LOG, "2.tsv": LOG}, {}, "holds csv and tsv files: choose with --format"),
    "only guests": ({"log.csv": "user,item\n ,b3\n,b4\n"}, {}, "2 of 2 rows have no user: .* --user-column"),
    "words as times": (
        {"log.csv": LOG + "a3,b3,noon\n"},
        {},
        "time holds 'noon'.*or leave it out by --time-column none",
    ),
    "both": (
        {"1.csv": LOG, "2.csv": LOG.replace(",5", ",2024-01-01").replace(",6", ",2024-01-02")},
        {},
        "one kind",
    ),
    "unknown names": (
        {"log.csv": "who,what\nann,x\nbob,y\n"},
        {},
        "no column user.*--user-column says which",
    ),
    "many columns": (
        {"log.txt": "1 2 3 4 5\n2 3 4 5 6\n"},
        {},
        "--format sequences.*a number takes a column",
    ),
    "a torn row": ({"log.txt": "1 2 5\n2 3 5\n2 4\n3 4 1\n"}, {}, "no column user"),
    "a torn line below": ({"log.txt": "1 2 5\n" * 150 + "1 2\n"}, {}, "log.txt line 151: has 2 fields"),
    "prose": ({"log.txt": "It was so.\nAnd it went on and on.\nThen 3 came.\n"}, {}, "no column user"),
    "half a gzip": ({"log.csv.gz": LOG}, {}, "is no whole gzip file"),
    "nothing": (
        {"movies.dat": "1::A\n", "README": "x"},
        {},
        "no table of interactions.*found: README, movies.dat",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_ambiguous_is_refused_in_a_line(case: str, tmp_path: Path) -> None:
    files, options, message = REFUSED[case]
    for name, content in files.items():
        plain = content.encode("latin-1")
        (tmp_path / name).write_bytes(gzip.compress(plain)[:-9] if name.endswith(".gz") else plain)
    with pytest.raises(UserError, match=message) as caught:
        log_of(opened(tmp_path, **options)[0])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([1.0, 2.0**53], "rounded, as decimals"),
        ([b"a", b"b"], "are binary"),
        ([{"id": 1}, {"id": 2}], "are struct"),
        ([" ", None], "2 of 2 rows have no item: left out, so that none is left"),
    ],
)
def test_ids_that_are_none_are_refused(values: list[Any], says: str, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"user": [1, 2], "item": values}), tmp_path / "log.parquet")
    with pytest.raises(UserError, match=says):
        log_of(opened(tmp_path)[0])


TIMES = {
    "days": ["2024-01-02", "2024-01-01"],
    "dots": ["1.2.2024", "31.01.2024"],
    "dots and a time": ["01.02.2024 9:05", "01.02.2024 08:59:59"],
    "day first": ["01/02/2024", "31/1/2024"],
    "month first": ["2/1/2024 8:26", "1/31/2024 8:26"],
    "with zone": ["2024-01-01T00:00:00+01:00", "2024-01-01T00:00:00+02:00"],
    "nanoseconds": ["2024-01-01 00:00:01.000002999", "2024-01-01 00:00:01.000001999"],
    "decimals": ["2.5", "1"],
    "negative": ["-1", "-2"],
}


@pytest.mark.parametrize("case", TIMES)
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_times_as_text_are_ordered_as_times(form: str, case: str, tmp_path: Path) -> None:
    if form == "csv":
        content = "".join(f"{user},x,{time}\n" for user, time in zip("ab", TIMES[case], strict=True))
        (tmp_path / "log.csv").write_text("user,item,time\n" + content)
    else:
        import pyarrow as pa
        from pyarrow import parquet

        table = pa.table({"user": ["a", "b"], "item": ["x", "x"], "time": TIMES[case]})
        parquet.write_table(table, tmp_path / "log.parquet")
    log = read_log(opened(tmp_path)[0], Numbering(), Numbering(), [])
    assert log.time[0] > log.time[1]
    assert log.time.dtype in (np.int64, np.float64)


def test_an_unknown_format_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(LOG)
    recipe = Recipe(task="recommender", data=str(tmp_path), format="lines")
    with pytest.raises(UserError, match=re.escape("csv, tsv, parquet, txt, sequences")):
        Interactions(recipe, InteractionOptions()).check()


def test_ratings_of_movielens_without_the_texts_are_read_by_their_name(tmp_path: Path) -> None:
    (file := tmp_path / "ratings.dat").write_text("1::10::5::100\n2::20::3::200\n")
    said = re.escape(f"there is no users.dat; --data {file} reads the interactions alone")
    with pytest.raises(UserError, match=said):
        Interactions(Recipe(task="recommender", data=str(tmp_path)), InteractionOptions()).check()
    assert log_of(opened(file)[0]) == [("1", "10", 5.0, 100), ("2", "20", 3.0, 200)]


def test_a_note_on_texts_that_are_missing_names_those_there_are() -> None:
    (with_others,) = log_splits.join_notes("items", ["1", "2", "3"], ["1", "x"])
    (without,) = log_splits.join_notes("items", ["1", "2", "3"], ["1"])
    assert with_others.endswith("ids such as 2, 3 are not, and the table has x")
    assert without.endswith("ids such as 2, 3 are not")
    (zeros,) = log_splits.join_notes("items", ["12", "2"], ["0012", "2"])
    assert "(12 and 0012: write them alike)" in zeros


@pytest.mark.parametrize(
    "header",
    [
        "customer,sku,order_date,qty",
        "Customer-No.,ArticleNumber,Created At,Amount",
        "client_id,product,date,QUANTITY",
        "Kundennummer,Artikel-Nr,Bestelldatum,Menge",
        "Kunden-Nr.,Art.-Nr.,Auftragsdatum,Stückzahl,Auftragsnummer",
        "Debitor,Artikel,Rechnungsdatum,Stück,Rechnungsnummer",
        "Email,Lineitem sku,Created at,Lineitem quantity,Name,Lineitem name",  # Shopify
        "customer_email,sku,created_at,qty_ordered,increment_id",  # Magento
        "customer_id,product_id,date_created,quantity,order_id,billing_email",  # WooCommerce
        "Customer User ID,SKU,Order Date,Quantity (- Refund),Order Number",
        "CustomerID,StockCode,InvoiceDate,Quantity,InvoiceNo",
    ],
)
@pytest.mark.parametrize("turned", [False, True], ids=["", "turned"])
def test_the_columns_of_shops_are_known_and_what_came_back_was_not_taken(
    header: str, turned: bool, tmp_path: Path
) -> None:
    """Of a: x is bought twice and comes back once, y comes back whole; z of b was never there."""
    rows = ["a,x,3.1.2024,2", "a,y,3.1.2024,1", "b,x,4.1.2024,1", "a,x,5.1.2024,-1", "a,y,5.1.2024,1-"]
    width = header.count(",") + 1
    wide = [[*row.split(","), "o1", "other"][:width] for row in (*rows, "b,z,5.1.2024,0")]
    lines = [line[::-1] if turned else line for line in (header.split(","), *wide)]
    (tmp_path / "orders.csv").write_text("".join(",".join(line) + "\n" for line in lines))
    table, notes = opened(tmp_path)
    assert ("order" in table.columns) == (width > 4)
    log = read_log(table, Numbering(), Numbering(), notes)
    assert (log.user.tolist(), log.item.tolist()) == ([0, 1], [0, 0])
    assert notes[-1].startswith("orders.csv: 3 of 6 rows are returns")
    assert "1 that were" in notes[-1]
    kept, _ = opened(tmp_path, quantity_column="none")
    assert len(read_log(kept, Numbering(), Numbering(), [])) == 6


def test_rows_without_a_user_or_an_item_are_left_out_and_counted(tmp_path: Path) -> None:
    """As orders of guests and the lines of shipping; ids of theirs alone are not known."""
    (tmp_path / "log.csv").write_text("user,item\n ,x\na,y\n,z\nb,\nb,y\n")
    table, notes = opened(tmp_path)
    assert log_of(table) == [("a", "y"), ("b", "y")]
    read_log(table, Numbering(), Numbering(), notes)
    assert notes == [
        "log.csv: 2 of 5 rows have no user: left out",
        "log.csv: 1 of 3 rows have no item: left out",
    ]


def test_an_order_is_held_out_whole(tmp_path: Path) -> None:
    """By its column, or by that of times where it is named; else the last item alone."""
    rows = ["a,p,1,o1", "a,q,2,o2", "a,r,2,o2", "a,s,3,o3", "a,t,3,o3", "b,p,1,o4", "b,q,1,o4", "c,u,1,o5"]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,time,order_id", *rows]) + "\n")
    for column, held_out in {None: "st", "time": "st", "none": "qt"}.items():
        options = InteractionOptions(order_column=column)
        found = log_splits.LogSplits(read_tables(tmp_path, None, options), options, Recipe(task="x"))
        assert "".join(sorted(found.items[i] for i in found.logs["test"].item)) == held_out
        assert found.protocol.startswith("leave-one-out, whole orders,") == (column != "none")
        assert any("order is held out whole" in note for note in found.notes) == (column != "none")
        if column != "none":
            valid = found.logs["valid"]
            assert "".join(sorted(found.items[i] for i in valid.item)) == "qr"
            assert found.columns()["test"]["inputs"].tolist() == [3, 3]


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        (["29,90", "1.234,50 €", "7"], [29.9, 1234.5, 7]),
        (["$1,234.50", "-3"], [1234.5, -3]),
        (["CHF 1'234.50", "12.-", "Fr. 7.05"], [1234.5, 12, 7.05]),
        (["1,000", "12,500"], [1, 12.5]),  # all have a comma: three decimals, as ERPs write
        (["1,500", "20"], [1500, 20]),
        (["1.500", "20,5"], [1500, 20.5]),
        (["1.500", "20.5"], [1.5, 20.5]),
        (["3-", "EUR -2"], [-3, -2]),  # SAP's minus
        (["1 234,5", "0,5"], [1234.5, 0.5]),
        (["1e5", 2, 1.5], [1e5, 2, 1.5]),
        (["31.12.2019", "A 12", "12 Stück"], ["31.12.2019", "A 12", "12 Stück"]),
    ],
)
def test_numbers_are_read_as_germany_england_and_switzerland_write_them(
    cells: list[Any], found: list[Any], tmp_path: Path
) -> None:
    assert delimited.numbers(cells) == found
    lines = "\n".join(f'u;i{n};"{cell}"' for n, cell in enumerate(cells))
    (tmp_path / "log.csv").write_text(f"user;item;rating\n{lines}\n")
    if all(isinstance(one, str) for one in found):
        with pytest.raises(UserError, match="rating holds"):
            log_of(opened(tmp_path)[0])
    else:
        assert [row[2] for row in log_of(opened(tmp_path)[0])] == pytest.approx(found)


def test_shopifys_times_are_read_with_their_zone(tmp_path: Path) -> None:
    times = ["2023-05-06 11:55:04 +0200", "2023-05-06 10:55:04 +0100", "2023-05-06 09:56:00 -0000"]
    lines = "".join(f"#{n},a@x.de,{time},L{n}\n" for n, time in enumerate(times))
    (tmp_path / "orders_export.csv").write_text(f"Name,Email,Created at,Lineitem sku\n{lines}")
    first, same, later = read_log(opened(tmp_path)[0], Numbering(), Numbering(), []).time
    assert first == same == later - 56_000_000


@pytest.mark.parametrize("order", [None, "day", "month"])
def test_dates_that_may_begin_with_either_need_a_flag(order: str | None, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item,time\na,x,3/4/2024\na,y,4/2/2024\n")
    table, _ = opened(tmp_path, date_order=order)
    if order is None:
        with pytest.raises(UserError, match="--date-order day, or month"):
            log_of(table)
        return
    (first, second) = read_log(table, Numbering(), Numbering(), []).time
    assert (first > second) == (order == "day")


@pytest.mark.parametrize(
    ("column", "cells"),
    [
        ("item", ["x|y", "z"]),
        ("items", ["x,y", "z"]),
        ("sku", ['["x", "y"]', "['z']"]),
        ("item", [["x", "y"], ["z"]]),
    ],
)
def test_a_cell_may_hold_several_items(column: str, cells: list[Any], tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({"user": ["a", "b"], column: cells, "time": [1, 2]})
    parquet.write_table(table, tmp_path / "log.parquet")
    wanted = [("a", "x", 1), ("a", "y", 1), ("b", "z", 2)]
    assert log_of(opened(tmp_path)[0]) == wanted
    if isinstance(cells[0], str):
        quoted = [cell.replace('"', '""') for cell in cells]
        text = "".join(f'{u},"{c}",{t}\n' for u, c, t in zip("ab", quoted, "12", strict=True))
        (tmp_path / "log.parquet").unlink()
        (tmp_path / "log.csv").write_text(f"user,{column},time\n{text}")
        assert log_of(opened(tmp_path)[0]) == wanted
