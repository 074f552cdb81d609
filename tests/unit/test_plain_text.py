"""Tests of plain text: readers, tokenizers and the arithmetic of blocks, on files made here."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from isobatch.core import hub_cache
from isobatch.core.errors import UserError
from isobatch.data import corpora, readers, tokenizers
from isobatch.data.text import demo_stories
from isobatch.data.text.dataset import Text, TextOptions
from isobatch.data.text.plain_text import blocks, windows

if TYPE_CHECKING:
    from pathlib import Path

LINES = "".join(f"line {i} of the text with a few words\n" for i in range(200))


def make(data: Path | str, tokenizer: Path | str | None = None, **changes: Any) -> Text:
    options = {k: changes.pop(k) for k in ("text_column", "vocab_size", "data_config") if k in changes}
    values = {"model": "tiny", "revision": None, "format": None, "max_length": 16, "seed": 0, **changes}
    recipe = SimpleNamespace(data=str(data), tokenizer=tokenizer and str(tokenizer), **values)
    return Text(recipe, TextOptions(**options))


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content, encoding="utf-8")
    return folder


def byte_tokenizer(folder: Path, *more: str) -> Path:
    """GPT-2 style files whose tokens are the 256 bytes, one merge (h e), and `more`."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "he", *more])}
    return write(folder, vocab__json=json.dumps(vocabulary), merges__txt="#version: 0.2\nh e\n")


def tokens_of(text: Text, split: str, folder: Path) -> tuple[list[int], dict[str, Any]]:
    extra = text.prepare(folder)
    column = text.open(folder, split).columns["tokens"]
    return column.values.tolist(), extra


def test_blocks_are_cut_by_width_and_a_lone_last_token_is_dropped() -> None:
    cut = blocks(np.arange(11, dtype=np.uint16), 4)  # 0-3, 4-7, 8-10
    assert cut["tokens"].lengths.tolist() == [4, 4, 3]
    assert cut["token.weight"].tolist() == [3, 3, 2]
    assert cut["tokens"].rows(np.array([2, 0])).tolist() == [[8, 9, 10, 0], [0, 1, 2, 3]]
    assert blocks(np.arange(9, dtype=np.uint16), 4)["tokens"].lengths.tolist() == [4, 4]


@pytest.mark.parametrize(
    ("count", "width", "stride"), [(2, 8, 3), (8, 8, 8), (50, 8, 3), (51, 8, 8), (9, 8, 1)]
)
def test_windows_predict_every_token_but_the_first_once(count: int, width: int, stride: int) -> None:
    columns = windows(np.arange(count), width, stride)
    rows = np.arange(len(columns["token.weight"]))
    learnt = [columns["tokens"].rows(rows[k : k + 1])[0] for k in rows]
    masks = [columns["learn"].rows(rows[k : k + 1])[0].astype(bool) for k in rows]
    assert np.concatenate([t[m] for t, m in zip(learnt, masks, strict=True)]).tolist() == [*range(1, count)]
    assert columns["token.weight"].tolist() == [int(m.sum()) for m in masks]
    assert all(int(m.argmax()) >= width - stride for m in masks[1:])


@pytest.mark.parametrize("name", ["", "vocab.json", "merges.txt"])
def test_byte_level_files_open_from_a_folder_or_either_file(tmp_path: Path, name: str) -> None:
    folder = byte_tokenizer(tmp_path / "of her's é")
    tokenizer = tokenizers.open_tokenizer(folder / name)
    assert tokenizer.encode("he", add_special_tokens=False).ids == [256]
    assert tokenizer.decode(tokenizer.encode("héhe\n").ids) == "héhe\n"


def test_a_trained_tokenizer_is_saved_repeatable_and_lossless(tmp_path: Path) -> None:
    data = write(tmp_path / "data", train__txt=LINES, valid__txt="línea 5 — «ü»\n")
    for name in ("a", "b"):
        extra = make(data, vocab_size=300).prepare(tmp_path / name)
    assert 257 <= extra["vocabulary"] <= 300
    assert extra["tokenizer"] == "tokenizer.json"
    saved = [(tmp_path / name / "tokenizer.json").read_text() for name in ("a", "b")]
    assert saved[0] == saved[1]
    valid, _ = tokens_of(make(data, tmp_path / "a", vocab_size=300), "valid", tmp_path / "c")
    reopened = tokenizers.open_tokenizer(tmp_path / "c" / "tokenizer.json")
    assert reopened.decode(valid) == "línea 5 — «ü»\n"


def test_a_txt_file_is_one_stream_counted_in_words_and_bytes(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", tokenizers.END_OF_TEXT)
    data = write(tmp_path / "d", train__txt="he é\nhe\n", valid__txt="ab")
    values, extra = tokens_of(make(data, tokenizer, max_length=4), "train", tmp_path / "out")
    # he | space | two bytes of é | newline | he | newline
    assert len(values) == 7
    assert values[0] == values[5] == 256
    # Blocks of 4 and 3 tokens predict 3 and 2.
    sizes = {"tokens": 7, "predicted": 5, "words": 3, "bytes": 9}
    assert extra["splits"]["train"] == {**sizes, "lines": 2}
    # The last line has no line break, and ends all the same.
    assert extra["splits"]["valid"] == {"tokens": 2, "predicted": 1, "words": 1, "bytes": 2, "lines": 1}


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl", "json", "parquet"])
def test_rows_are_documents_with_an_end_token_behind_each(tmp_path: Path, form: str) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", tokenizers.END_OF_TEXT)
    data = tmp_path / "d"
    for split, texts in {"train": ["ab", "", "he"], "dev": ["he"]}.items():
        write_rows(data / f"{split}.{form}", texts)
    values, extra = tokens_of(make(data, tokenizer, text_column="words"), "train", tmp_path / "out")
    assert [v for v in values if v >= 256] == [257, 256, 257]
    assert len(values) == 5
    assert extra["splits"]["train"]["bytes"] == 4
    assert extra["splits"]["train"]["lines"] == 2
    assert extra["notes"] == [
        "train: rows left out: 1 with an empty text",
        "valid: 1 of 1 rows are in train too: leave them out of one of the two",
        "3 rows: the field `id` is not read",
    ]


def write_rows(file: Path, texts: list[str]) -> None:
    file.parent.mkdir(exist_ok=True)
    records = [{"id": i, "words": text} for i, text in enumerate(texts)]
    if file.suffix == ".parquet":
        pytest.importorskip("pyarrow")
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), str(file))
    elif file.suffix in (".csv", ".tsv"):
        tab = "," if file.suffix == ".csv" else "\t"
        file.write_text("".join(f"{a}{tab}{b}\n" for a, b in [("id", "words"), *enumerate(texts)]))
    else:
        lines = file.suffix == ".jsonl"
        file.write_text("\n".join(map(json.dumps, records)) if lines else json.dumps(records))


@pytest.mark.parametrize("text", ["a b\nc d\n", "one line without end", "字" * 40, "字" * 30 + "\n"])
def test_something_is_held_out_of_tiny_files(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, tiny__txt=text) / "tiny.txt"
    parts = corpora.hold_out(readers.find_splits(file, None)["train"])
    head, tail = ("".join(readers.read_stream(part)) for part in parts)
    assert head + tail == text
    assert head
    assert tail


def test_a_long_file_is_read_in_pieces_without_losing_a_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "CHUNK_BYTES", 10)
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 7)
    text = "\ufeffé" * 30 + "\nshort\n\n" + "字" * 50
    file = write(tmp_path, long__txt=text) / "long.txt"
    pieces = list(readers.read_stream(readers.find_splits(file, None)["train"]))
    assert len(pieces) > 10
    assert "".join(pieces) == text.removeprefix("\ufeff")


@pytest.mark.parametrize(
    ("file", "content", "options", "said"),
    [
        ("corpus.xyz", "a", {}, "found: corpus.xyz"),
        ("train.txt", "", {}, "train.txt is empty"),
        ("train.csv", "id,texts\n1,a\n", {"text_column": "txts"}, "did you mean texts?"),
        ("train.txt", LINES, {"format": "doc"}, "--format doc"),
        ("train.txt", LINES, {"vocab_size": 100}, "--vocab-size 100: must be at least 257"),
        ("train.txt", LINES, {"tokenizer": "/no/tokenizer"}, "--tokenizer"),
    ],
)
def test_bad_input_is_answered_in_one_line(
    tmp_path: Path, file: str, content: str, options: dict[str, Any], said: str
) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError) as error:
        make(tmp_path, **options).check()
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    data = write(tmp_path / "d", train__txt=LINES)
    (data / "train.txt").chmod(0)
    with pytest.raises(UserError, match="no permission"):
        make(data).check()


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    file = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.table({"text": LINES.splitlines()}), file, compression="zstd")
    whole = file.read_bytes()
    for damaged in (b"words", whole[:-20], whole[:200] + bytes(200) + whole[400:]):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"train\.parquet: (is no whole|row group)") as error:
            make(tmp_path).read()
        assert "\n" not in str(error.value)


def test_identity_follows_content_and_settings_and_not_the_place(tmp_path: Path) -> None:
    first = write(tmp_path / "a", train__txt=LINES, valid__txt="one\n")
    copy = write(tmp_path / "b", train__txt=LINES, valid__txt="one\n")
    changed = write(tmp_path / "c", train__txt=LINES, valid__txt="two\n")
    tokenizer, other = byte_tokenizer(tmp_path / "t"), byte_tokenizer(tmp_path / "u", tokenizers.END_OF_TEXT)
    same = make(first, tokenizer).identity()
    assert same == make(copy, tokenizer, seed=5).identity()
    json.dumps(same)
    for different in (
        make(changed, tokenizer),
        make(first, other),
        make(first),
        make(first, tokenizer, max_length=8),
        make(first, tokenizer, vocab_size=500),
        make(first, tokenizer, text_column="body"),
    ):
        assert different.identity() != same


def test_the_demo_is_the_same_stories_everywhere() -> None:
    splits = {name: list(texts()) for name, texts in demo_stories.demo_stories().splits.items()}
    found = hashlib.sha256("\n".join(splits["train"] + splits["valid"]).encode()).hexdigest()
    assert (demo_stories.VERSION, found[:16]) == (1, "86e4230c0274a2f1"), "other texts need another VERSION"
    assert not set(splits["train"]) & set(splits["valid"])
    assert all(story.startswith(demo_stories.PROMPT) and "{" not in story for story in splits["train"])
    assert make("demo").identity() == make("demo").identity()


def never_answers(*_: Any) -> None:
    time.sleep(3)
    raise TimeoutError


def test_an_unreachable_hub_is_answered_in_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(socket, "create_connection", never_answers)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    start = time.monotonic()
    with pytest.raises(UserError, match=r"a-team/a-corpus.*cannot be reached.*HF_HOME.*prepare"):
        make("a-team/a-corpus").check()
    assert time.monotonic() - start < 2


def test_offline_asks_no_network_and_finds_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("asked the network"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert not hub_cache.is_reachable()
    cached = tmp_path / "hub" / "datasets--a-team--a-corpus"
    write(cached / "refs", main="abc")
    write(cached / "snapshots" / "abc", train__csv="text\n")
    make("a-team/a-corpus").check()
