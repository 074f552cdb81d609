"""Tests of tables as users hand them over: every row is read, or the table is refused by file and line."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.errors import UserError
from isobatch.core.recipe import Recipe
from isobatch.data import readers
from isobatch.data.interactions.dataset import InteractionOptions, Interactions
from isobatch.data.labelled.dataset import LabelledOptions
from isobatch.data.labelled.kinds import ClassLabels
from isobatch.data.labelled.rows import ColumnNames, Label, read_examples
from isobatch.launch.predicting import recommend, tables

if TYPE_CHECKING:
    from pathlib import Path


def rows_of(file: Path, **columns: str) -> list[dict[str, Any]]:
    parts = readers.find_splits(file, None, LabelledOptions(**columns))
    return [dict(row) for _, row in readers.read_rows(parts["train"])]


def written(folder: Path, name: str, content: str) -> Path:
    file = folder / name
    file.write_text(content, encoding="utf-8")
    return file


PAIR = [{"text": "a, b; c", "label": "x"}, {"text": "d", "label": "y"}]
READ: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "blank in the header": ("a.csv", 'text, label\n"a, b; c", x\nd, y\n', PAIR),
    "semicolons": ("a.csv", 'text;label\n"a, b; c";x\nd;y\n', PAIR),
    "tabs in csv": ("a.csv", "text\tlabel\na, b; c\tx\nd\ty\n", PAIR),
    "types of atomic files": ("a.inter", "text:token_seq\tlabel:float\na, b; c\tx\nd\ty\n", PAIR),
    "a line of Excel's": ("a.csv", 'sep=;\ntext;label\n"a, b; c";x\nd;y\n', PAIR),
    "a quote inside": ("a.csv", 'text,n\n"so" it goes,5"\n', [{"text": "so it goes", "n": '5"'}]),
    "a list in an object": ("a.json", json.dumps({"tags": ["t"], "rows": PAIR}), PAIR),
    "columns of one length": ("a.json", json.dumps({"text": ["a, b; c", "d"], "label": ["x", "y"]}), PAIR),
}


@pytest.mark.parametrize("case", READ)
def test_a_table_is_read_whole(tmp_path: Path, case: str) -> None:
    name, content, expected = READ[case]
    assert rows_of(written(tmp_path, name, content)) == expected


REFUSED = {
    "open quote": ("a.csv", 'n,text\n1,a\n2,"b\n3,c\n4,d\n', "a.csv line 3: a quote opens here"),
    "a key twice": ("a.jsonl", '{"text": "a", "text": "b"}\n', "a.jsonl line 1: .* has the key .text. twice"),
    "twins": ("a.csv", "text,text,n\na,b,1\n", "a.csv: two columns are called text: .* --text-column 1"),
    "fields": ("a.csv", "a;b\n1;2\n" * 60 + "1;2;3\n", "line 121: has 3 fields .* holds a semicolon"),
    "two lists": ("a.json", json.dumps({"a": PAIR, "b": PAIR}), r"several lists of rows \(a, b\)"),
    "no list": ("a.json", json.dumps({"text": "a"}), "an object without a list of rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_table_that_would_lose_rows_is_refused(tmp_path: Path, case: str) -> None:
    name, content, says = REFUSED[case]
    with pytest.raises(UserError, match=says):
        rows_of(written(tmp_path, name, content))


@pytest.mark.parametrize(
    ("header", "first", "said"),
    [
        ("", {"1": "so it", "2": "27"}, "is a row, too"),
        ("utterance\tn\n", {"1": "so it", "2": "27"}, "names"),
    ],
)
def test_columns_by_number_eat_no_row(tmp_path: Path, header: str, first: dict[str, str], said: str) -> None:
    file = written(tmp_path, "a.tsv", f'{header}so it\t27\n"goes\t2\n')
    assert rows_of(file, text_column="1", label_column="2") == [first, {"1": '"goes', "2": "2"}]
    (note,) = readers.table_notes(readers.find_splits(file, None, LabelledOptions(text_column="1")))
    assert said in note
    named = written(tmp_path, "b.csv", "0,1\na,5\n")
    assert rows_of(named, text_column="0", label_column="1") == [{"0": "a", "1": "5"}]
    ambiguous = written(tmp_path, "c.csv", "so it,1\ngoes,2\n")
    assert [row["1"] for row in rows_of(ambiguous, text_column="1")] == ["so it", "goes"]


@pytest.mark.parametrize(
    ("content", "text", "said"),
    [
        (
            "Konto 5 \u20ac, M\u00fcller".encode("cp1252"),
            "Konto 5 \u20ac, M\u00fcller",
            "read as Windows-1252",
        ),
        ("Konto 5 \u20ac, M\u00fcller".encode(), "Konto 5 \u20ac, M\u00fcller", None),
        ("M\u00fcller, Stra\u00dfe ".encode() + b"\xfc", None, "iconv -f cp1252"),
        (b"\x81\xfc", None, "iconv -f cp1252"),
    ],
)
def test_a_table_is_read_in_the_encoding_that_it_has(
    tmp_path: Path, content: bytes, text: str | None, said: str | None
) -> None:
    """And one of mostly whole UTF-8 characters is no other encoding."""
    file = tmp_path / "a.csv"
    file.write_bytes(b'text,label\n"' + content + b'",a\n')
    if text is None:
        with pytest.raises(UserError, match=str(said)):
            rows_of(file)
        return
    assert rows_of(file) == [{"text": text, "label": "a"}]
    notes = readers.table_notes(readers.find_splits(file, None))
    assert [bool(re.search(str(said), note)) for note in notes] == [True] * (said is not None)


def labels_in(file: Path) -> list[Label]:
    rows = readers.read_rows(readers.find_splits(file, None)["train"])
    return [example.label for example in read_examples(rows, ColumnNames("text", None, "label"))]


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_a_class_has_one_name_in_every_format(tmp_path: Path, form: str) -> None:
    """1, 1.0 and "1" are one; NaN and null are none."""
    import pyarrow
    from pyarrow import parquet

    file = tmp_path / f"a.{form}"
    if form == "csv":
        file.write_text("text,label\na,1\na,1.0\na,-2.00\na,nan\na,\na,null\n")
    elif form == "jsonl":
        values = ["1", "1.0", "-2.0", "NaN", "null", '"NULL"']
        file.write_text("".join(f'{{"text": "a", "label": {value}}}\n' for value in values))
    else:
        values = [1.0, 1.0, -2.0, float("nan"), None, float("nan")]
        parquet.write_table(pyarrow.table({"text": ["a"] * 6, "label": values}), file)
    assert labels_in(file) == ["1", "1", "-2", None, None, None]


@pytest.mark.parametrize("value", [4.56, "0.5", [1], "8,20"])
def test_what_is_no_class_is_refused_with_what_is_offered(tmp_path: Path, value: Any) -> None:
    file = written(tmp_path, "a.jsonl", json.dumps({"text": "a", "label": value}) + "\n")
    with pytest.raises(
        UserError,
        match=r"line 1: column label holds .*, (several values: a text has one|a decimal number: a)",
    ):
        ClassLabels("label").names_in(labels_in(file)[0], f"{file} line 1")


def test_an_object_is_no_label(tmp_path: Path) -> None:
    file = written(tmp_path, "a.jsonl", json.dumps({"text": "a", "label": {"a": 1}}) + "\n")
    with pytest.raises(
        UserError, match=r"line 1: column label holds .*: a label is a word, a number or a list"
    ):
        labels_in(file)


def interactions(folder: Path, **options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    recipe = Recipe(task="recommender", data=str(folder))
    asked = {"vocab_size": 300, "eval_negatives": 1, "split": "none", **options}
    extra = Interactions(recipe, InteractionOptions(**asked)).prepare(folder / "out")
    return extra, json.loads((folder / "out" / "catalogue" / "names.json").read_text())


LOGS = {
    "blanks": ("log.csv", "user_id, item_id, n\n1, 10, 5\n2, 11, 5\n", {}),
    "semicolons": ("log.csv", 'user_id;item_id;n\n1;10;"5;"\n2;11;"5,"\n', {}),
    "atomic": ("x.inter", "user_id:token\titem_id:token\n1\t10\n2\t11\n", {}),
    "no header": ("log.tsv", "1\t10\t5\n2\t11\t5\n", {"user_column": "1", "item_column": "2"}),
}


@pytest.mark.parametrize("case", LOGS)
def test_a_table_of_interactions_loses_nothing(tmp_path: Path, case: str) -> None:
    name, content, options = LOGS[case]
    written(tmp_path, name, content)
    written(tmp_path, "items.csv", "id;title\n10;Dune\n11;Solaris\n")
    extra, names = interactions(tmp_path, **options)
    wanted = ["1", "2"], ["10", "11"], ["Dune", "Solaris"]
    assert (names["users"], names["items"], names["titles"]) == wanted
    noted = {"blanks": False, "atomic": False}.get(case, True)
    assert noted == any(name in note and "read " not in note for note in extra["notes"])


@pytest.mark.parametrize(
    ("log", "items", "says"),
    [
        ("user_id,item_id\n1,2\n", "2,x\n3,y\n", r"items.csv: its first row names no columns \(2, x\)"),
        ("user_id,user_id,item_id\n1,2,3\n", "item_id,t\n2,x\n", "two columns are called user_id"),
    ],
)
def test_a_fault_of_interactions_is_named(tmp_path: Path, log: str, items: str, says: str) -> None:
    written(tmp_path, "log.csv", log)
    written(tmp_path, "items.csv", items)
    with pytest.raises(UserError, match=says):
        interactions(tmp_path)


def test_predict_reads_files_without_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, "a.csv", "so it goes;5\nand on;6\n")
    read = tables.read_table(str(file), columns=["1", None])
    assert [row["1"] for _, row in read] == ["so it goes", "and on"]
    assert "a semicolon is between its fields" in capsys.readouterr().err
    lists = SimpleNamespace(knows_item=lambda item: item in ("7", "8"))
    sold = str(written(tmp_path, "sold.csv", "7\n8\n"))
    assert recommend._named_items(lists, "--without", sold, None) == ["7", "8"]  # type: ignore[arg-type]  # noqa: SLF001
