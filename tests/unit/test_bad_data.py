"""Tests of data that cannot be read: each kind of data answers with one line; UTF-16 is read."""

from __future__ import annotations

import gzip
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.errors import UserError
from isobatch.data import readers
from isobatch.data.interactions.dataset import InteractionOptions, Interactions
from isobatch.data.labelled.dataset import Labelled, LabelledOptions
from isobatch.data.sequences import SequenceOptions, Sequences
from isobatch.data.text.dataset import Text, TextOptions

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.data.base import Data

KINDS: dict[str, tuple[type[Data], type]] = {
    "text": (Text, TextOptions),
    "labelled": (Labelled, LabelledOptions),
    "sequences": (Sequences, SequenceOptions),
    "interactions": (Interactions, InteractionOptions),
}
DEEP = '{"text": ' + "[" * 100_000 + "]" * 100_000 + ', "label": "x"}\n'
BAD = {
    "half.jsonl": (
        '{"text": "a \\ud800 b", "label": "x"}\n' * 30,
        "line 1: is not JSON .* surrogates not allowed",
    ),
    "deep.jsonl": (DEEP, "line 1: is not JSON .* recursion"),
    "digits.jsonl": (
        '{"text": "a", "label": ' + "9" * 5000 + "}\n",
        "line 1: is not JSON .* Exceeds the limit",
    ),
    "null.json": ("null", "holds NoneType, not a list of objects"),
    "header.tsv": ("sentence\tlabel\n", "no (rows|columns)"),
}


def make(kind: str, data: Path) -> Data:
    cls, options = KINDS[kind]
    recipe = {"model": "tiny", "tokenizer": None, "revision": None, "format": None, "options": {}}
    return cls(SimpleNamespace(data=str(data), seed=0, max_length=16, **recipe), options(vocab_size=300))  # type: ignore[arg-type]


def prepare(kind: str, data: Path, folder: Path) -> Any:
    """As the command does: check, then prepare."""
    found = make(kind, data)
    found.check()
    folder.mkdir(exist_ok=True)
    return found.prepare(folder)


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_read_is_a_line(kind: str, name: str, tmp_path: Path) -> None:
    text, message = BAD[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message if kind != "interactions" else ".") as caught:
        prepare(kind, tmp_path / name, tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_compressed_tables_are_read_and_broken_ones_named(tmp_path: Path) -> None:
    rows = b'{"text": "a b"}\n{"text": "c d"}\n'
    (file := tmp_path / "train.jsonl.gz").write_bytes(gzip.compress(rows))
    for place in (file, tmp_path):
        found = readers.read_rows(readers.find_splits(place, None)["train"])
        assert [row["text"] for _, row in found] == ["a b", "c d"]
    file.write_bytes(gzip.compress(rows)[:-9])
    with pytest.raises(UserError, match=r"train\.jsonl\.gz: is no whole gzip file"):
        prepare("text", file, tmp_path / "out")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(rows))
    with pytest.raises(UserError, match=r"b\.txt\.gz: has no known ending .* unpack it"):
        prepare("text", tmp_path / "b.txt.gz", tmp_path / "out")


@pytest.mark.parametrize("kind", ["text", "sequences"])
def test_a_single_row_cannot_be_divided(kind: str, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"text": "a b"}\n')
    with pytest.raises(UserError, match="holds one row, and validation takes one"):
        prepare(kind, tmp_path / "one.jsonl", tmp_path / "out")


@pytest.mark.parametrize("kind", ["text", "labelled", "sequences"])
def test_a_table_of_excel_is_told_to_be_saved_as_csv(kind: str, tmp_path: Path) -> None:
    (tmp_path / "rows.xlsx").write_bytes(b"PK")
    with pytest.raises(UserError, match="save it as CSV"):
        prepare(kind, tmp_path / "rows.xlsx", tmp_path / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipe_is_refused_and_not_waited_for(kind: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match="is no regular file and no folder"):
        prepare(kind, tmp_path / "pipe.jsonl", tmp_path / "out")


REVIEWS = "sentence\tlabel\n" + "a good film\tpos\na b\u00e4d film\tneg\n" * 40
WIDE = {
    "text": ("x.txt", "h\u00e9llo world\n" * 300),
    "labelled": ("x.tsv", REVIEWS),
    "sequences": ("x.tsv", REVIEWS),
    "interactions": ("x.csv", "user,item,time\n" + "".join(f"{n % 5},{n // 4},{n}\n" for n in range(60))),
}


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("kind", KINDS)
def test_utf_16_is_read_as_utf_8_is(kind: str, encoding: str, tmp_path: Path) -> None:
    name, text = WIDE[kind]
    found = []
    for coding in ("utf-8", encoding):
        folder = tmp_path / coding
        folder.mkdir()
        (folder / name).write_bytes(("\ufeff" + text).encode(coding))
        prepare(kind, folder / name, folder / "out")
        found.append({f.relative_to(folder): f.read_bytes() for f in folder.rglob("out/*/*.npy")})
    assert found[0] == found[1] != {}
