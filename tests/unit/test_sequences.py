"""Tests of data/sequences.py: texts and lists of ids become rows with an end token; bad input is one line."""

from __future__ import annotations

import json
import tracemalloc
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from isobatch.core.errors import UserError
from isobatch.data import corpora, sequences, tokenizers
from isobatch.data.sequences import INTEGERS, TEXT, SequenceOptions, Sequences
from isobatch.tests.unit.test_plain_text import byte_tokenizer, write

if TYPE_CHECKING:
    from pathlib import Path

IDS = [[3, 1], [], [4, 1, 5], None, [2, 6, 5, 3, 5]]
"""Rows of ids; the second and the fourth are empty."""


def make(data: Path | str, max_length: int = 16, tokenizer: Path | None = None, **options: Any) -> Sequences:
    values = {"format": None, "model": "tiny", "revision": None, "seed": 0}
    given = tokenizer and str(tokenizer)
    recipe = SimpleNamespace(data=str(data), max_length=max_length, tokenizer=given, **values)
    return Sequences(recipe, SequenceOptions(**options))


def write_parquet(file: Path, rows: int | None = None, **columns: Any) -> Path:
    """A Parquet file of these columns with so many rows a row group."""
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), file, row_group_size=rows, write_page_checksum=True)
    return file


def prepared(data: Sequences, folder: Path) -> tuple[dict[str, list[list[int]]], dict[str, Any]]:
    """(rows of each split, facts), after the form that every split must have was checked."""
    data.check()
    extra = data.prepare(folder)
    rows = {}
    for split, sizes in extra["splits"].items():
        columns = data.open(folder, split).columns
        tokens, weights = columns["tokens"], columns["token.weight"]
        rows[split] = [r.tolist() for r in np.split(tokens.values, tokens.offsets[1:-1])]
        assert tokens.values.dtype == (np.uint16 if extra["vocabulary"] <= 1 << 16 else np.int32)
        assert weights.dtype == np.int32
        assert weights.tolist() == [len(r) for r in rows[split]]
        assert sizes["sequences"] == len(rows[split])
        assert sizes["tokens"] == len(tokens.values)
        assert all(row[-1] == extra["eos"] and extra["eos"] not in row[:-1] for row in rows[split])
        assert max(map(len, rows[split])) <= data.recipe.max_length
    size = extra["data_vocabulary"]
    assert [extra[k] for k in ("bos", "eos", "unk", "vocabulary")] == [size, size + 1, size + 2, size + 3]
    return rows, extra


def texts_of(rows: list[list[int]], folder: Path) -> list[str]:
    tokenizer = tokenizers.open_tokenizer(folder / "tokenizer.json")
    return tokenizer.decode_batch([row[:-1] for row in rows])


def refusal(data: Sequences, prepare: bool = False) -> str:
    """The line that `check` answers with, or, if the error can only be seen later, `read`."""
    if prepare:
        data.check()
    with pytest.raises(UserError) as error:
        data.read() if prepare else data.check()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_each_line_of_a_text_file_is_a_sequence(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", train__txt=" = Heading = \n \n\tone two \r\n\nthree", valid__txt="é\n\n")
    rows, extra = prepared(make(folder, vocab_size=257), tmp_path / "out")
    assert texts_of(rows["train"], tmp_path / "out") == ["= Heading =", "one two", "three"]
    assert texts_of(rows["valid"], tmp_path / "out") == ["é"]
    assert extra["kind"] == "text"
    assert extra["data_vocabulary"] == 257  # 256 bytes, and the tokenizer's own end token, which is not used
    # "= Heading =" 11, "one two" 7, "three" 5, and three end tokens
    counts = {"sequences": 3, "tokens": 26, "words": 6, "cut": 0, "empty": 2}
    assert extra["splits"]["train"] == counts
    assert extra["notes"] == ["train: empty sequences left out: 2", "valid: empty sequences left out: 1"]


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl", "json", "parquet"])
def test_each_text_of_a_table_is_a_sequence(tmp_path: Path, form: str) -> None:
    tokenizer, texts = byte_tokenizer(tmp_path / "t"), ["he two", "  ", "é\u2028a", ""]
    for split in ("train", "dev"):
        write_table(tmp_path / "d" / f"{split}.{form}", {"label": [0, 1, 0, 1], "sentence": texts})
    rows, extra = prepared(make(tmp_path / "d", tokenizer=tokenizer), tmp_path / "out")
    assert texts_of(rows["train"], tmp_path / "out") == ["he two", "é\u2028a"]
    assert rows["valid"] == rows["train"]
    # he, space, t, w, o, end; two bytes of é, three of the separator, a, end
    assert [len(row) for row in rows["train"]] == [6, 7]
    assert extra["data_vocabulary"] == 257
    assert extra["splits"]["train"] == {"sequences": 2, "tokens": 13, "words": 4, "cut": 0, "empty": 2}
    left_out = [f"{split}: empty sequences left out: 2" for split in ("train", "valid")]
    assert extra["notes"] == ["not read: label", *left_out]


def write_table(file: Path, columns: dict[str, list[Any]]) -> None:
    file.parent.mkdir(exist_ok=True)
    records = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if file.suffix == ".parquet":
        write_parquet(file, **columns)
    elif file.suffix in (".csv", ".tsv"):
        lines = [columns, *(r.values() for r in records)]
        comma = "," if file.suffix == ".csv" else "\t"
        file.write_text("".join(comma.join(map(str, line)) + "\n" for line in lines), encoding="utf-8")
    else:
        is_lines = file.suffix == ".jsonl"
        file.write_text("\n".join(map(json.dumps, records)) if is_lines else json.dumps(records))


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet"])
def test_each_list_of_integers_is_a_sequence(tmp_path: Path, form: str) -> None:
    for split in ("train", "valid", "test"):
        write_table(tmp_path / "d" / f"{split}.{form}", {"id": list(range(5)), "tokens": IDS})
    rows, extra = prepared(make(tmp_path / "d"), tmp_path / "out")
    wanted = [[3, 1, 8], [4, 1, 5, 8], [2, 6, 5, 3, 5, 8]]  # 7 ids, then bos 7 and eos 8
    assert rows == dict.fromkeys(("train", "valid", "test"), wanted)
    assert extra["kind"] == "integers"
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    counts = {"sequences": 3, "tokens": 13, "words": None, "cut": 0, "empty": 2}
    assert extra["splits"]["train"] == counts


def random_lists(sequences: int, longest: int, size: int) -> pa.Array:
    """Lists of 0 to `longest` ids below `size`; the largest is there."""
    generator = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(generator.integers(0, longest + 1, sequences))])
    values = generator.integers(0, size, offsets[-1])
    values[0] = size - 1
    return pa.ListArray.from_arrays(offsets.astype(np.int32), values)


def test_a_large_parquet_file_is_not_read_into_memory(tmp_path: Path) -> None:
    lists = random_lists(24_000, 100, 30_000)  # about 1.2 million ids, 10 MB as they are in the file
    file = write_parquet(tmp_path / "big.parquet", 1200, tokens=lists)
    data, total = make(file, max_length=64), len(lists.flatten()) * 8
    assert parquet.ParquetFile(file).num_row_groups == 20
    data.check()
    tracemalloc.start()
    try:
        data.prepare(tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total > 9e6
    assert peak < total / 3


def test_the_last_twentieth_of_the_rows_is_held_out(tmp_path: Path) -> None:
    for name, begin in (("train-1", 0), ("train-2", 30)):
        write_parquet(tmp_path / f"{name}.parquet", 8, ids=[[i] for i in range(begin, begin + 30)])
    rows, extra = prepared(make(tmp_path, vocab_size=60), tmp_path / "out")
    assert [row[0] for row in rows["train"]] == list(range(57))
    assert [row[0] for row in rows["valid"]] == [57, 58, 59]
    assert extra["notes"] == [corpora.held_out_note(None)]


def test_long_sequences_are_cut_and_counted(tmp_path: Path) -> None:
    lines = "abc\nabcd\nab cd ef gh\n"  # 3, 4 and 11 bytes; 4 entries hold 3 and the end token
    folder = write(tmp_path / "d", train__txt=lines, valid__txt="a b\n")
    rows, extra = prepared(
        make(folder, max_length=4, tokenizer=byte_tokenizer(tmp_path / "t")), tmp_path / "out"
    )
    assert texts_of(rows["train"], tmp_path / "out") == ["abc", "abc", "ab "]
    # Words of what is left: abc, nothing of a word that is cut, ab.
    assert extra["splits"]["train"] == {"sequences": 3, "tokens": 12, "words": 2, "cut": 2, "empty": 0}
    assert extra["splits"]["valid"]["words"] == 2
    assert extra["notes"] == ["train: sequences cut to --max-length 4 with the end token: 2 of 3 (66.7%)"]


@pytest.mark.parametrize(("largest", "dtype"), [(65532, np.uint16), (65533, np.int32)])
def test_ids_have_two_bytes_where_all_fit(tmp_path: Path, largest: int, dtype: type) -> None:
    file = write_parquet(tmp_path / "a.parquet", ids=[[largest], [0]])
    rows, extra = prepared(make(file), tmp_path / "out")
    assert rows == {"train": [[largest, largest + 2]], "valid": [[0, largest + 2]]}
    assert extra["unk"] == largest + 3  # the largest id of all: 65535, or one more
    assert make(file).read()["train"]["tokens"].values.dtype == dtype


KINDS = {"id": "int64", "text": TEXT, "title": TEXT, "ids": INTEGERS, "mask": INTEGERS}


@pytest.mark.parametrize(
    ("columns", "asked", "prefers_text", "found"),
    [
        ("id title", {}, False, ("title", TEXT)),
        ("title text", {}, False, ("text", TEXT)),
        ("text mask ids", {}, False, ("ids", INTEGERS)),
        ("text ids", {INTEGERS: "ids"}, True, ("ids", INTEGERS)),
    ],
)
def test_the_column_is_found_by_what_it_holds(
    columns: str, asked: dict[str, str | None], prefers_text: bool, found: tuple[str, str]
) -> None:
    kinds = {name: KINDS[name] for name in columns.split()}
    assert sequences.find_column("d", kinds, asked, prefers_text) == found


BAD_SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("lines", {"max_length": 1}, "--max-length 1: must be at least 2"),
    ("ids", {"text_column": "note", "sequence_column": "tokens"}, "--sequence-column exclude each other"),
    ("lines", {"vocab_size": 256}, "--vocab-size 256: must be at least 257"),
    ("lines", {"sequence_column": "tokens"}, "is lines of text, without columns"),
    ("ids", {"sequence_column": "token"}, "no such column (did you mean tokens?); it has: tokens, note"),
    ("floats", {}, "no column holds text or lists of integers; it has: tokens (lists of float), deep"),
    ("split", {}, "valid.parquet has no such column (did you mean tokns?)"),
    ("lines/empty.txt", {}, "empty.txt is empty"),
]


@pytest.mark.parametrize(("data", "options", "says"), BAD_SETTINGS)
def test_bad_settings_are_answered_in_one_line(
    tmp_path: Path, data: str, options: dict[str, Any], says: str
) -> None:
    write(tmp_path / "lines", train__txt="a\nb\n", empty__txt="")
    write_parquet(tmp_path / "ids" / "train.parquet", tokens=[[1]], note=["x"])
    write_parquet(tmp_path / "floats" / "train.parquet", tokens=[[0.5]], deep=[[[1]]])
    write_parquet(tmp_path / "split" / "train.parquet", tokens=[[1]])
    write_parquet(tmp_path / "split" / "valid.parquet", tokns=[[1]])
    assert says in refusal(make(tmp_path / data, **options))


def test_a_validation_id_that_training_lacks_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", tokens=[[1, 6], [2]])
    file = write_parquet(tmp_path / "valid.parquet", tokens=[[1], [3, 7]])
    wanted = (
        f"{file} row 2: tokens holds the id 7: the largest training id is 6: --vocab-size says how many ids"
        " there are"
    )
    assert refusal(make(tmp_path), prepare=True) == wanted
    make(tmp_path, vocab_size=8).read()


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("[2, 0.5]", "holds lists of float, not lists of integers"),
        ("[18446744073709551616]", "holds an id of more than 64 bits: number the ids from 0"),
        ("[-1]", "holds the id -1: ids begin at 0"),
    ],
)
def test_bad_cells_of_json_are_named_by_line(tmp_path: Path, cell: str, says: str) -> None:
    lines = f'{{"tokens": [1, 2]}}\n\n{{"tokens": {cell}}}\n'
    folder = write(tmp_path, train__jsonl=lines, valid__jsonl=lines)
    assert refusal(make(folder), prepare=True) == f"{folder / 'train.jsonl'} line 3: tokens {says}"


def test_identity_follows_content_and_every_option_and_not_the_place(tmp_path: Path) -> None:
    first = write_parquet(tmp_path / "a" / "train.parquet", tokens=[[1], [2]])
    copy = write_parquet(tmp_path / "b" / "train.parquet", tokens=[[1], [2]])
    changed = write_parquet(tmp_path / "c" / "train.parquet", tokens=[[1], [3]])
    same = make(first).identity()
    assert same == make(copy).identity()
    json.dumps(same)
    options = {"text_column": "a", "sequence_column": "a", "vocab_size": 8192, "data_config": "a"}
    assert options.keys() == set(SequenceOptions.__slots__)
    different = [
        make(changed),
        make(first, max_length=8),
        make(first, tokenizer=byte_tokenizer(tmp_path / "t")),
        *(make(first, **{name: value}) for name, value in options.items()),
    ]
    found = [json.dumps(one.identity()) for one in (make(first), *different)]
    assert len(set(found)) == len(found)
    assert make("demo").identity() == make("demo").identity()
