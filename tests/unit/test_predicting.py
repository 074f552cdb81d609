"""Tests of launch/predicting: how rows are read, and tables in and out."""

from __future__ import annotations

import contextlib
import datetime
import gzip
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from isobatch.core.errors import UserError
from isobatch.data.base import ArraySource
from isobatch.data.text import chat_templates
from isobatch.launch.predicting import own_task, tables
from isobatch.launch.predicting.predict import Answerer, format_row
from isobatch.launch.predicting.tables import (
    ListRequest,
    PromptReader,
    SequenceReader,
    TextReader,
    UserReader,
)
from isobatch.models.encoder.prediction import batches_of_one_width

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

ROWS = [{"id": str(n), "text": f'text "{n}", ü'} for n in range(5)]
ANSWER: dict[str, Any] = {
    "prediction": "a",
    "probability": 0.1 + 0.2,
    "probabilities": {"a": 0.25, "b b": 1e-9},
    "latent": [1.5, 2.0],
}


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_back(path: Path) -> list[dict[str, Any]]:
    return [dict(row) for _, row in tables.read_table(str(path))]


@pytest.mark.parametrize("ending", tables.OUT_ENDINGS)
def test_every_format_is_written_in_pieces(ending: str, tmp_path: Path) -> None:
    """An answer's columns are flat in tables, lists are JSON in csv, and dates are text in text."""
    out, day = tmp_path / f"out{ending}", datetime.date(2024, 2, 29)
    rows = [tables.beside({**row, "prediction": "?", "day": day}, ANSWER) for row in ROWS]

    def pieces() -> Iterator[list[dict[str, Any]]]:
        yield rows[:3]
        assert not out.exists()
        yield rows[3:]

    assert tables.write_rows(out, pieces()) == 0
    flat = {"prediction": "a", "probability": 0.1 + 0.2, "probabilities.a": 0.25, "probabilities.b b": 1e-9}
    answer = ANSWER if ending == ".jsonl" else {**flat, "latent": ANSWER["latent"]}
    written = {"input.prediction": "?", "day": day if ending == ".parquet" else "2024-02-29", **answer}
    expected: list[dict[str, Any]] = [{**row, **written} for row in ROWS]
    if ending == ".csv":
        expected = [{k: str(v) for k, v in row.items()} for row in expected]
    assert read_back(out) == expected
    assert [p.name for p in tmp_path.iterdir()] == [out.name]


@pytest.mark.parametrize("ending", tables.OUT_ENDINGS)
@pytest.mark.parametrize("given", [";.csv", ",.csv", "\t.tsv", ";.csv.gz", ".txt", None])
def test_csv_has_the_semicolons_of_its_input_and_what_excel_reads_beside_them(
    ending: str, given: str | None, tmp_path: Path
) -> None:
    """Cells of tables that are whole or texts stay; without semicolons the bytes are as they ever were."""
    out, file = tmp_path / f"out{ending}", given and tmp_path / f"in{given.lstrip(';,').strip()}"
    if given and file:
        text = "".join(f"{n}{given[0]}ein Wort 1.5{given[0]}Maß\n" for n in ("id", *"123"))
        file.write_bytes(gzip.compress(text.encode()) if given.endswith("gz") else text.encode())
    rows = [{"id": 3, "text": "1.5; ü", "probability": 0.25, "tiny": 1e-9}]
    assert tables.write_rows(out, [rows], like=file and str(file)) == 0
    if ending != ".csv":
        assert read_back(out) == rows
    elif given and given.startswith(";"):
        assert out.read_bytes().decode() == '\ufeffid;text;probability;tiny\n3;"1.5; ü";0,25;1e-09\n'
    else:
        assert out.read_bytes().decode() == "id,text,probability,tiny\n3,1.5; ü,0.25,1e-09\n"


def test_what_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="several shapes"):
        tables.write_rows(tmp_path / "a.parquet", [[{"a": 1}], [{"a": "x"}]])
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("text\n")
    (tmp_path / "rows.doc").write_text("")
    for name, expected in (("empty.csv", "no rows"), ("rows.doc", "ends in"), ("none.csv", "no such file")):
        with pytest.raises(UserError, match=expected):
            tables.read_table(str(tmp_path / name))
    file = write(tmp_path / "rows.jsonl")
    wrong = {"a.txt": "must end in", "no/a.csv": "no such folder", "rows.jsonl": "another name"}
    for out, expected in wrong.items():
        with pytest.raises(UserError, match=expected):
            tables.check_out(str(tmp_path / out), str(file))


PLAIN = chat_templates.tokenizer_training_template("auto", "plain")
READ: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "usual": (TextReader(), {"id": 1, "text": "a"}, "a"),
    "named": (TextReader("body"), {"text": "b", "body": "a"}, "a"),
    "usual pair": (TextReader(), {"premise": "a", "hypothesis": "b"}, ("a", "b")),
    "ids": (SequenceReader(), {"tokens": [1, 2]}, [1, 2]),
    "user": (UserReader(), {"user_id": 7}, ListRequest("7", [])),
    "a new user": (UserReader(), {"items": [3, "b"]}, ListRequest("", ["3", "b"])),
    "nothing taken": (UserReader(), {"items": []}, ListRequest("", [])),
}


@pytest.mark.parametrize("reader", [PromptReader(template=PLAIN), PromptReader("question", template=PLAIN)])
def test_a_question_is_read_with_what_lies_beside_it(reader: PromptReader) -> None:
    """With an answer or without, and where the column is named."""
    row = {"question": "Why?", "context": "It rains.", "system": "Be kind.", "history": [["Hi", "Hi!"]]}
    for more in ({}, {"answer": "So."}):
        text = "".join(segment.text for segment in reader.from_row(row | more, "here"))
        assert text == "Be kind.\nHi\nHi!\nWhy?\nIt rains.\n"


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "missing": (TextReader(), {"txt": "a"}, "here: has no column sentence or text"),
    "misspelt": (TextReader("texts"), {"text": "a"}, r"no column texts \(did you mean text\?\)"),
    "empty": (TextReader(), {"text": ""}, "here: text: is empty"),
    "no ids": (SequenceReader(), {"tokens": ["a"]}, "a list of whole numbers"),
}


@pytest.mark.parametrize("case", [*READ, *REFUSED])
def test_a_row_is_read_or_refused_in_one_line(case: str) -> None:
    reader, row, expected = (READ | REFUSED)[case]
    with pytest.raises(UserError, match=expected) if case in REFUSED else contextlib.nullcontext():
        assert reader.from_row(row, "here") == expected


def test_a_row_without_a_text_stays_in_its_place_without_an_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "rows.jsonl", [{"text": "a"}, {"text": " "}, {"text": "bc"}])
    asked: list[str] = []

    def predict(samples: Sequence[str]) -> list[dict[str, Any]]:
        asked.extend(samples)
        return [{"prediction": len(s), "probabilities": {"x": 0.5}} for s in samples]

    (rows,) = Answerer(predict, TextReader()).answer_file(str(file))
    assert asked == ["a", "bc"]
    assert [row["prediction"] for row in rows] == [1, None, 2]
    assert list(map(list, map(tables.flatten, rows))) == [["text", "prediction", "probabilities.x"]] * 3
    assert format_row(rows[1]) == "text:    prediction:   probabilities: x "
    assert "1 row without an answer (no text); the first: " in capsys.readouterr().err
    with pytest.raises(UserError, match="is empty"):
        list(Answerer(predict, TextReader()).answer_file(str(write(file, [{"text": ""}]))))


def test_a_batch_has_one_width_and_every_sample_is_in_one() -> None:
    widths = np.random.default_rng(0).integers(1, 9, 500) * 2000
    batches = list(batches_of_one_width(widths.tolist()))
    assert sorted(place for batch in batches for place in batch) == list(range(500))
    for batch in batches:
        assert len({int(widths[place]) for place in batch}) == 1
        assert len(batch) == 1 or len(batch) * widths[batch[0]] <= 8192


def test_each_line_of_a_text_file_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "asked.txt").write_text("When do you open?\n\nWhere?\r\n")
    rows = list(tables.read_table(str(tmp_path / "asked.txt")))
    assert [row for _, row in rows] == [{"text": "When do you open?"}, {"text": "Where?"}]
    assert rows[1][0].endswith("asked.txt line 3")


def test_a_column_that_an_own_tasks_data_reads_too_stands_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new.csv").write_text("id,x\na,1\nb,2\n")
    read = ArraySource({"x": np.array([1.0, 2.0])}), [{"id": "a"}, {"id": "b"}]
    model = SimpleNamespace(answer=lambda *_: [{"y": 0}, {"y": 1}])
    monkeypatch.setattr(own_task, "_read_rows", lambda *_: read)
    monkeypatch.setattr(own_task, "OwnModel", lambda _: model)
    (rows,) = own_task.predict_own_rows(cast("Any", None), str(tmp_path / "new.csv"), None)
    assert rows == [{"id": name, "x": f"{n + 1}", "sample": n, "y": n} for n, name in enumerate("ab")]
