"""Tests of labels of every kind, in every format and way to write them: read, or refused in one line."""

from __future__ import annotations

import csv
import json
import random
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from isobatch.core.errors import UserError
from isobatch.core.recipe import Recipe
from isobatch.data import corpora, readers, tokenizers
from isobatch.data.base import Ragged, in_train, load
from isobatch.data.labelled.dataset import NO_LABEL, Labelled, LabelledOptions
from isobatch.data.labelled.kinds import KINDS, as_bio, form_of_sets
from isobatch.engine.loading.prepare import prepare
from isobatch.launch.local.shown_samples import shown_samples
from isobatch.launch.predicting.tables import UnansweredRowError, WordReader
from isobatch.tests.paths import ROOT
from isobatch.tests.unit.test_labelled import make

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHARED_DATA = ROOT.parent / "shared" / "data"
Rows = list[dict[str, Any]]
EMOTIONS = ["anger", "fear", "joy", "relief"]


def as_csv(file: Path, rows: Rows, mark: str = ",") -> None:
    with file.open("w", encoding="utf-8", newline="") as stream:
        quoting: Any = {"quoting": csv.QUOTE_NONE, "quotechar": None} if mark == "\t" else {}
        writer = csv.DictWriter(stream, [*rows[0]], delimiter=mark, **quoting)
        writer.writeheader()
        writer.writerows(rows)


def as_jsonl(file: Path, rows: Rows) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def as_parquet(file: Path, rows: Rows) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), file)


WRITERS: dict[str, Callable[[Path, Rows], None]] = {
    "csv": as_csv,
    "tsv": lambda file, rows: as_csv(file, rows, "\t"),
    "jsonl": as_jsonl,
    "json": lambda file, rows: file.write_text(json.dumps(rows), encoding="utf-8"),  # type: ignore[dict-item,return-value]
    "parquet": as_parquet,
}
TABLES, LISTS = [*WRITERS], ["jsonl", "json", "parquet"]


def sets_of(seed: int, rows: int = 60, most: int = 3) -> list[list[str]]:
    draw = random.Random(seed)
    found = [draw.sample(EMOTIONS, draw.randint(0, most)) for _ in range(rows)]
    return [*found, *([name] for name in EMOTIONS), ["joy", "anger"], ["fear", "joy"]]


def flags(names: list[str], yes: Any, no: Any) -> dict[str, Any]:
    return {name: yes if name in names else no for name in EMOTIONS}


WAYS: dict[str, tuple[list[str], Callable[[list[str]], dict[str, Any]], dict[str, Any]]] = {
    "a|b": (TABLES, lambda s: {"label": "|".join(s)}, {}),
    "a ; b": (TABLES, lambda s: {"label": " ; ".join(s)}, {}),
    "a, b": (TABLES, lambda s: {"label": ", ".join(s)}, {"problem": "multi-label"}),
    "a|b, asked": (TABLES, lambda s: {"label": "|".join(s)}, {"problem": "multi-label"}),
    "a list as text": (TABLES, lambda s: {"label": str(s)}, {}),
    "a tuple as text": (TABLES, lambda s: {"label": str((*s,))}, {}),
    "numpy's text": (TABLES, lambda s: {"label": str(np.array(s, str))}, {}),
    "numpy's numbers": (TABLES, lambda s: {"label": str(np.array([*map(EMOTIONS.index, s)], int))}, {}),
    "numpy's flags": (
        TABLES,
        lambda s: {"label": str(np.array([name in s for name in EMOTIONS], float))},
        {},
    ),
    "a bar behind each": (TABLES, lambda s: {"label": "".join(f"{name}|" for name in s)}, {}),
    "lists": (LISTS, lambda s: {"labels": s}, {}),
    "vectors": (LISTS, lambda s: {"labels": [float(name in s) for name in EMOTIONS]}, {}),
    "numbers": (TABLES, lambda s: {"label": ",".join(str(EMOTIONS.index(name)) for name in s)}, {}),
    "lists of numbers": (LISTS, lambda s: {"labels": [EMOTIONS.index(name) for name in s]}, {}),
    "columns of 0 and 1": (TABLES, lambda s: flags(s, 1, 0), {"label_column": ",".join(EMOTIONS)}),
    "columns of 0.0 and 1.0": (TABLES, lambda s: flags(s, 1.0, 0.0), {"label_column": ",".join(EMOTIONS)}),
    "columns of words": (TABLES, lambda s: flags(s, "True", "false"), {"label_column": ",".join(EMOTIONS)}),
    "columns of booleans": (LISTS, lambda s: flags(s, True, False), {"label_column": ",".join(EMOTIONS)}),
}


@pytest.mark.parametrize("way", WAYS)
def test_sets_are_the_same_however_they_are_written(way: str, tmp_path: Path) -> None:
    formats, written, options = WAYS[way]
    sets = {"train": sets_of(1), "valid": sets_of(2, 20), "test": sets_of(3, 20)}
    for ending in formats:
        folder = tmp_path / ending
        folder.mkdir()
        for split, found in sets.items():
            rows = [{"text": f"{split} text {n}", **written(one)} for n, one in enumerate(found)]
            WRITERS[ending](folder / f"{split}.{ending}", rows)
        data = make(folder, **options)
        data.check()
        splits, _, extra = data.encode_splits()
        assert (extra["problem"], len(extra["labels"])) == ("multi-label", 4)
        assert extra["labels"] in (EMOTIONS, ["0", "1", "2", "3"])
        for split, found in sets.items():
            label = np.asarray(splits[split]["label"])
            assert label.dtype == np.float32
            assert label.tolist() == [[float(name in one) for name in EMOTIONS] for one in found], ending
        counts = Counter(name for one in sets["train"] for name in one)
        assert extra["label_counts"] == [counts[name] for name in EMOTIONS]
        assert any("problem: multi-label" in note for note in extra["notes"]) != ("problem" in options)


@pytest.mark.parametrize(
    "cells",
    [
        ["sport|tennis", "sport|golf", "news|local", "news|world", "news|golf", "sport", "news"],  # paths
        ["R&D; tests", "sales", "R&D; tools"],
        ["a|b", "c|d", "e|f"],
        ["books, music", "films, games", "books"],
        ["yes", "no", "yes|no"] * 2,
        ["a|", "b", "|c"],
        ["1", "2", "3"],
    ],
)
def test_names_with_marks_inside_stay_classes(cells: list[str], tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": cell} for n, cell in enumerate(cells * 3)]
    as_jsonl(tmp_path / "train.jsonl", rows)
    splits, _, extra = make(tmp_path).encode_splits()
    if cells[:2] == ["yes", "no"]:  # fewer names than cells, and each stands first somewhere: these are sets
        assert extra["problem"] == "multi-label"
        splits, _, extra = make(tmp_path, problem="classes").encode_splits()
    assert "problem" not in extra
    assert extra["labels"] == sorted(set(cells))
    assert np.asarray(splits["train"]["label"]).dtype == np.int64


@pytest.mark.parametrize(
    ("cells", "asked", "form"),
    [
        (["4,5", "3,5", "1,0"], False, ""),  # as decimals are written in many countries
        (["4,5", "3,5", "1,0"], True, ","),
        (["4,5", "3", "1,0"], False, ","),
        (["1,2,3", "4,5"], False, ","),
        (["12", "3"], False, ""),
        (["12", "3"], True, "list"),
        (["a|b", "b|a", "a", "b"], False, "|"),
        (["a;b", "b;c", "c;a", "a"], False, ";"),
        ([("0", "1", "0"), ("1", "1", "1")], False, "vector"),
        ([("0", "1"), ("1", "0")], False, "list"),
        ([("0", "2", "2"), ("1", "1", "1")], False, "list"),
    ],
)
def test_the_form_of_sets(cells: list[Any], asked: bool, form: str) -> None:
    assert form_of_sets(dict.fromkeys(cells, 1), asked) == form


@pytest.mark.parametrize("ending", TABLES)
def test_scores_are_numbers_in_every_format(ending: str, tmp_path: Path) -> None:
    draw = random.Random(4)
    scores = {s: [round(draw.uniform(-1, 5), 2) for _ in range(30)] for s in ("train", "dev", "test")}
    for split, found in scores.items():
        rows = [{"sentence1": f"{split} {n}", "sentence2": "b", "score": v} for n, v in enumerate(found)]
        WRITERS[ending](tmp_path / f"{split}.{ending}", rows)
    splits, _, extra = make(tmp_path).encode_splits()
    assert (extra["problem"], extra["labels"], extra["label_counts"]) == ("regression", ["score"], [30])
    assert "problem: regression, as there are decimals in column score" in extra["notes"]
    for split, found in (("train", scores["train"]), ("valid", scores["dev"]), ("test", scores["test"])):
        label = np.asarray(splits[split]["label"])
        assert (label.dtype, label.tolist()) == (np.float32, np.array(found, np.float32).tolist())
        assert "types" in splits[split]


def test_whole_numbers_are_classes_and_scores_on_request(tmp_path: Path) -> None:
    as_csv(tmp_path / "train.csv", [{"text": f"text {n}", "rating": n % 5 + 1} for n in range(50)])
    assert make(tmp_path).encode_splits()[2]["labels"] == ["1", "2", "3", "4", "5"]
    splits, _, extra = make(tmp_path, problem="regression").encode_splits()
    assert (extra["labels"], extra["label_counts"]) == (["rating"], [45])
    assert len(splits["valid"]["label"]) == 5
    assert not any("problem:" in note for note in extra["notes"])


SENTENCES = [
    (["Ada", "Lovelace", "lives", "in", "London"], ["B-per", "I-per", "O", "O", "B-loc"]),
    (["a", "quiet", "day"], ["O", "O", "O"]),
    (["Oslo", "Bergen"], ["B-loc", "B-loc"]),
    (["#", "New", "York", "!"], ["O", "B-loc", "I-loc", "O"]),
] * 5


def as_conll(sentences: Any, between: str = "\t", extra: tuple[str, ...] = (), end: str = "\n") -> str:
    lines = [
        between.join([word, *extra, tag]) if word else ""
        for words, tags in sentences
        for word, tag in [*zip(words, tags, strict=True), ("", "")]
    ]
    return "".join(line + end for line in lines)


def tagged(folder: Path, ending: str, sentences: Any = SENTENCES, **how: Any) -> Path:
    for split, part in {"train": sentences, "dev": sentences[:3], "test": sentences[:4]}.items():
        file = folder / f"{split}.{ending}"
        if ending in WRITERS and not how.pop("conll", ending == "tsv"):
            names = how.get("names", ("tokens", "ner_tags"))
            WRITERS[ending](file, [dict(zip(names, one, strict=True)) for one in part])
        else:
            file.write_text(how.get("head", "") + as_conll(part, *how.get("form", ())), encoding="utf-8")
    return folder


WAYS_TO_TAG: dict[str, tuple[str, dict[str, Any]]] = {
    "conll": ("conll", {}),
    "bio": ("bio", {}),
    "iob, blanks": ("iob", {"form": (" ",)}),
    "txt, four columns": ("txt", {"form": (" ", ("NN", "x"))}),
    "txt, documents": ("txt", {"form": (" ", ("-X-", "O")), "head": "-DOCSTART- -X- O O\n\n"}),
    "txt, comments": ("txt", {"form": (" ", ("_", "_")), "head": "# id 1 domain=en\n"}),
    "tsv": ("tsv", {}),
    "several blanks": ("conll", {"form": ("   ",)}),
    "carriage returns": ("conll", {"form": ("\t", (), "\r\n")}),
    "blank lines with tabs": ("conll", {"head": "\t\n\n \n"}),
    "jsonl": ("jsonl", {}),
    "jsonl, other names": ("jsonl", {"names": ("words", "tags")}),
    "csv of lists as text": ("csv", {"names": ("words", "tags")}),
    "json": ("json", {"names": ("tokens", "labels")}),
    "parquet": ("parquet", {}),
}


@pytest.mark.parametrize("way", WAYS_TO_TAG)
@pytest.mark.parametrize("asked", ["auto", "tokens"])
def test_tags_are_the_same_however_they_are_written(way: str, asked: str, tmp_path: Path) -> None:
    ending, how = WAYS_TO_TAG[way]
    data = make(tagged(tmp_path, ending, **how), max_length=64, problem=asked)
    data.check()
    splits, tokenizer, extra = data.encode_splits()
    assert extra["labels"] == ["O", "B-loc", "I-loc", "B-per", "I-per"]
    assert extra["problem"] == "tokens"
    counts = Counter(tag for _, tags in SENTENCES for tag in tags)
    assert extra["label_counts"] == [counts[name] for name in extra["labels"]]
    for split, part in {"train": SENTENCES, "valid": SENTENCES[:3], "test": SENTENCES[:4]}.items():
        label, tokens = splits[split]["label"], splits[split]["tokens"]
        assert isinstance(label, Ragged)
        assert isinstance(tokens, Ragged)
        assert (label.pad, label.values.dtype, label.offsets.tolist()) == (
            -100,
            np.int64,
            tokens.offsets.tolist(),
        )
        rows = [label.values[a:b] for a, b in zip(label.offsets, label.offsets[1:], strict=False)]
        found = [[extra["labels"][n] for n in row[row != NO_LABEL]] for row in rows]
        assert found == [tags for _, tags in part]
        assert np.asarray(splits[split]["word.weight"]).tolist() == [len(words) for words, _ in part]
    assert tokenizer is not None


def random_words(draw: random.Random) -> list[str]:
    letters = "abcdXYZ.,-'é東🙂1 "
    words = [
        "".join(draw.choices(letters, k=draw.randint(1, 12))).strip() or "x"
        for _ in range(draw.randint(1, 9))
    ]
    return [*words, "\u200b"] if draw.random() < 0.3 else words


@pytest.mark.parametrize("kind", ["trained", "wordpiece", "byte-level"])
def test_a_tag_stands_at_the_first_piece_of_its_word(kind: str, tmp_path: Path) -> None:
    """Against a loop that encodes word by word; the pieces of cut words have no label."""
    draw, length = random.Random(5), 20
    sentences = [
        (words, [draw.choice(["O", "B-x", "B-y"]) for _ in words]) for words in map(random_words, [draw] * 80)
    ]
    folder = tagged(tmp_path, "jsonl", [*sentences, (["a"], ["B-x"]), (["a"], ["B-y"])])
    data = make(folder, max_length=length)
    if kind == "wordpiece":
        letters = [chr(c) for c in range(33, 127)]
        lines = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{c}" for c in letters), "ab", "##cd"]
        (tmp_path / "vocab.txt").write_text("\n".join(lines))
        data.recipe.tokenizer = str(tmp_path / "vocab.txt")  # type: ignore[misc]
    if kind == "byte-level":
        tokenizers.train_byte_level_bpe((" ".join(words) for words, _ in sentences), 400).save(
            f"{tmp_path}/tokenizer.json"
        )
        data.recipe.tokenizer = str(tmp_path / "tokenizer.json")  # type: ignore[misc]
    splits, tokenizer, extra = data.encode_splits()
    assert tokenizer is not None
    label, tokens = splits["train"]["label"], splits["train"]["tokens"]
    assert isinstance(label, Ragged)
    assert isinstance(tokens, Ragged)
    special = 0 if kind == "byte-level" else 2
    missing = 0
    for row, (words, tags) in enumerate(sentences):
        ids, wanted = [], []
        for word, tag in zip(words, tags, strict=True):
            pieces = tokenizer.encode([word], is_pretokenized=True, add_special_tokens=False).ids
            ids += pieces
            wanted += [extra["labels"].index(tag), *[NO_LABEL] * (len(pieces) - 1)] if pieces else []
        kept, edge = length - special, special // 2
        place = slice(label.offsets[row] + edge, label.offsets[row + 1] - edge)
        assert tokens.values[place].tolist() == ids[:kept]
        assert label.values[place].tolist() == wanted[:kept]
        missing += len(words) - sum(n != NO_LABEL for n in wanted[:kept])
    assert (label.values != NO_LABEL).sum() == sum(len(words) for words, _ in sentences) + 2 - missing
    assert (
        f"train: {missing} words have no label: cut off, or without pieces in the tokenizer" in extra["notes"]
    ) == (missing > 0)


def test_words_of_a_byte_level_tokenizer_are_as_transformers_gives_them(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    texts = [" ".join(words) for words, _ in SENTENCES]
    tokenizer = tokenizers.train_byte_level_bpe(texts, 300)
    tokenizer.save(str(tmp_path / "own.json"))
    spaced = json.loads((tmp_path / "own.json").read_text())
    spaced["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / "spaced.json").write_text(json.dumps(spaced))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "spaced.json"))
    tokenizers.prepend_space(tokenizer)
    words = ["London", "in", "don't", "é東", "New", ","]
    found, wanted = tokenizer.encode(words, is_pretokenized=True), theirs(words, is_split_into_words=True)
    assert found.ids == wanted["input_ids"]
    assert found.word_ids == wanted.word_ids()


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("O I-a I-a B-a O", "O B-a I-a B-a O"),  # IOB1
        ("I-a I-b O I-b", "B-a B-b O B-b"),
        ("S-a B-a M-a E-a E-b", "B-a B-a I-a I-a B-b"),
        ("B-a L-a U-a U-a I-a", "B-a I-a B-a B-a B-a"),
        ("B-a E-a I-a", "B-a I-a B-a"),
        ("B I O I", "B I O B"),
        ("B-a I-b I-b B-b", "B-a B-b I-b B-b"),
    ],
)
def test_schemes_become_bio_with_the_same_entities(written: str, meant: str) -> None:
    assert " ".join(as_bio(written.split())) == meant
    assert as_bio(meant.split()) == tuple(meant.split())


def entities(tags: list[str]) -> set[tuple[int, int, str]]:
    """As conlleval: from the tag that begins one to the last tag of its type behind it."""
    found, begin = set(), None
    for place, tag in enumerate([*tags, "O"]):
        before = tags[place - 1] if place else "O"
        if begin is not None and (tag[0] in "OB" or tag[2:] != before[2:]):
            found.add((begin, place, before[2:]))
            begin = None
        if tag != "O" and begin is None:
            begin = place
    return found


def test_tags_that_begin_inside_are_read_as_conlleval_does() -> None:
    draw = random.Random(6)
    for _ in range(300):
        tags = draw.choices(["O", "B-a", "I-a", "B-b", "I-b"], k=draw.randint(1, 10))
        assert entities(list(as_bio(tags))) == entities(tags)


AS_CLASSES = {"problem": "classes", "text_column": "words", "label_column": "tags"}
WEIGHED = {"problem": "regression", "class_weights": "balanced"}
BAD_CELLS: list[tuple[str, dict[str, Any], str]] = [
    ("a,1\nb,0\nc,0.5\nd,1\n", {}, r"a.csv line 4: column label holds 0.5, beside whole numbers"),
    ("a,1\n" * 30 + "b,2\nc,2.5\n", {}, r"line 33: column label holds 2.5, beside whole"),
    ('a,"4,5"\nb,"3,0"\n', {}, r"line 2: column label holds 4,5, several values"),
    ("a,x||y\nb,y|z\n", {"problem": "multi-label"}, r"line 2: column label holds x\|\|y, with an empty"),
    ("a,1.5\nb,inf\n", {}, r"line 3: column label holds inf, no finite number"),
    ("a,1.5\nb,1e39\n", {}, r"line 3: column label holds 1e39, no finite number"),
    ("a,1.5\nb,good\n", {"problem": "regression"}, r"line 3: column label holds good, no finite"),
    ("a,1.5\nb,good\n", {}, r"line 2: column label holds 1.5, a decimal number"),
    ("a,1.5\nb,2.5\n", WEIGHED, "--class-weights: there"),
    ("a,x\nb,y\n", {"problem": "tokens"}, r"--problem tokens: the data has texts in text"),
    ("a,0.5\nb,1.5\n", {"problem": "multi-label"}, r"line 2: column label holds 0.5, a decimal number"),
    ("a,0.5\nb,0.5\n", {}, r"line 2: column label holds 0.5, as every training row"),
    ('a,"[1, 0, 1]"\nb,"[1, 0]"\n', {}, r"line 3: column label holds 1, 0, 2 numbers, others 3"),
]
"""Texts and labels of a table, options, what is said."""
BAD_FLAGS = [
    ("b,0.5,0\n", "fear", r"line 3: column joy holds 0.5, not"),
    ("b,1,\n", "fear", r"line 3: column fear holds None, not 1"),
    ("b,-1,-1\n", "fear", r"line 3: column joy holds -1, not 1"),
    ("", "feer", r"--label-column feer: .* has no such column"),
]
"""A row below one of flags, the second column that is asked for."""
BAD_LISTS: list[tuple[str, dict[str, Any], str]] = [
    (
        '"words": ["a", "b"], "tags": ["O", "B-x"]',
        AS_CLASSES,
        "--problem classes: the data has lists of word",
    ),
    ('"words": ["a", "b"], "tags": ["O"]', {}, r"a.jsonl line 1: has 2 words and 1 tags"),
    ('"words": ["a", "b"], "tags": ["O", ""]', {}, r"tags holds an empty tag, of word 2: tags are O"),
    ('"words": ["a", "b"], "tags": [0, 3]', {}, r"line 1: column tags holds 0, of word 1: tags are O"),
    ('"words": ["a", "b"], "tags": ["O", "NOUN"]', {}, r"line 1: column tags holds NOUN, of word 2"),
    ('"words": ["a", "b"], "tags": "O"', {}, r"line 1: words and tags are lists of words and their tags"),
    ('"words": ["a", "b"], "tags": ["O", "O"]', {}, r"tags is O for every training word"),
    ('"words": [], "tags": []', {}, r"the train split holds no rows with words and tags"),
    ('"words": ["a", 1], "tags": ["O", "O"]', {}, r"line 1: words is no list of words"),
    ('"text": "a", "label": [["x"]]', {}, r"line 1: column label holds \[\['x'\]\]: a label is a word"),
    ('"text": "a", "label": ["x", ""]', {}, r"line 1: column label holds x, , with an empty label"),
]
BAD_COLUMNS = [
    ("a\tO\nb\n\n", r"a.conll line 2: 'b' is no word with a tag .* in 2 columns"),
    ("a\tO\nb\tx\tO\n\n", r"line 2: 'b\\tx\\tO' is no word with a tag .* in 2 columns"),
    ("a\tO\nb\t\n\n", r"line 2: 'b\\t' is no word with a tag"),
    ("a\tO\n\tO\n\n", r"line 2: .* is no word with a tag"),
    ("a b\n\n", r"line 1: 'a b' is no word with a tag .* in 2 columns"),
    ("a O\nb B_x\n\n", r"line 2: 'b B_x' is no word with a tag"),
]
UNREADABLE: list[tuple[str, str, dict[str, Any], str]] = [
    *(("a.csv", f"text,label\n{cells}", options, says) for cells, options, says in BAD_CELLS),
    *(
        ("a.csv", f"text,joy,fear\na,1,0\n{r}", {"label_column": f"joy,{c}"}, says)
        for r, c, says in BAD_FLAGS
    ),
    *(("a.jsonl", f"{{{row}}}\n" * 2, options, says) for row, options, says in BAD_LISTS),
    *(("a.conll", lines, {}, says) for lines, says in BAD_COLUMNS),
    ("a.txt", "running text\nand more\n", {}, "a .txt file has no labels"),
]


@pytest.mark.parametrize(("name", "content", "options", "says"), UNREADABLE)
def test_what_cannot_be_read_is_refused_in_one_line(
    name: str, content: str, options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    data = make(tmp_path / name, **options)
    with pytest.raises(UserError, match=says) as refused:
        [data.check(), data.encode_splits()]
    assert "\n" not in str(refused.value)


LABELS_OF_TEST = [
    ({"text": "a", "label": "x"}, {"label": "z"}),
    ({"text": "a", "label": ["x"]}, {"label": ["x", "z"]}),
]
TAGS_OF_TEST = ({"words": ["a"], "tags": ["B-x"]}, {"tags": ["B-z"]})


@pytest.mark.parametrize(("train", "changed"), [*LABELS_OF_TEST, TAGS_OF_TEST])
def test_a_label_of_test_alone_is_refused(train: Any, changed: Any, tmp_path: Path) -> None:
    other = train | {k: ["y"] if isinstance(v, list) else "y" for k, v in train.items() if k == "label"}
    as_jsonl(tmp_path / "train.jsonl", [train, other] * 4)
    as_jsonl(tmp_path / "valid.jsonl", [train])
    as_jsonl(tmp_path / "test.jsonl", [train, train | changed])
    with pytest.raises(UserError, match=r"test.jsonl line 2: the test split has the label (B-)?z, which no"):
        make(tmp_path).encode_splits()


@pytest.mark.parametrize("kind", ["classes", "multi-label", "tokens", "regression"])
def test_the_draw_keeps_each_label_in_training_and_is_the_same_for_every_seed(
    kind: str, tmp_path: Path
) -> None:
    draw = random.Random(7)
    names = [draw.choice("abcdef") for _ in range(201)]
    names[corpora.random_order(201)[0]] = "rare"  # the first row that would be drawn
    made: dict[str, Callable[[str], dict[str, Any]]] = {
        "classes": lambda name: {"label": name},
        "multi-label": lambda name: {"label": [name, *draw.sample("abc", draw.randint(0, 2))]},
        "tokens": lambda name: {"words": ["a", "b"], "tags": ["O", f"B-{name}"]},
        "regression": lambda name: {"label": len(name) + draw.random()},
    }
    rows = [{"text": f"text {n}", **made[kind](name)} for n, name in enumerate(names)]
    as_jsonl(
        tmp_path / "train.jsonl",
        rows if kind != "tokens" else [{k: r[k] for k in ("words", "tags")} for r in rows],
    )
    splits, _, extra = make(tmp_path).encode_splits()
    assert (len(splits["train"]["label"]), len(splits["valid"]["label"])) == (181, 20)
    assert min(extra["label_counts"][:1] if kind == "tokens" else extra["label_counts"]) >= 1
    if kind != "regression":
        assert any(
            note.startswith("labels of one training row each: ") and "rare" in note for note in extra["notes"]
        )
        assert not any(
            n == 0 for name, n in zip(extra["labels"], extra["label_counts"], strict=True) if name[:2] != "I-"
        )
    again, _, _ = make(tmp_path, seed=9).encode_splits()
    one, other = (found["valid"]["tokens"] for found in (splits, again))
    assert isinstance(one, Ragged)
    assert isinstance(other, Ragged)
    assert one.values.tolist() == other.values.tolist()


ALIKE: dict[str, list[str]] = {
    "case": ["Kredit", "kredit", "KREDIT"],
    "blanks": ["New York", "New  York", "New\u00a0York"],
    "encoding": ["caf\u00e9", "cafe\u0301"],
    "none of these": ["Kredit", "Kredite", "Kre dit", "cafe", "caf\u00e9"],
}


@pytest.mark.parametrize("kind", ["classes", "multi-label", "tokens"])
@pytest.mark.parametrize("what", ALIKE)
def test_labels_that_look_alike_are_named_first_and_stay_apart(what: str, kind: str, tmp_path: Path) -> None:
    names = [*ALIKE[what], "other"] * 3
    made: dict[str, Callable[[str], dict[str, Any]]] = {
        "classes": lambda name: {"text": "a", "label": f" {name} "},
        "multi-label": lambda name: {"text": "a", "label": [name, "more"]},
        "tokens": lambda name: {"words": ["a"], "tags": [f"B-{name}"]},
    }
    rows = [made[kind](name) for name in names]
    as_jsonl(tmp_path / "train.jsonl", rows)
    as_jsonl(tmp_path / "valid.jsonl", rows)
    extra = make(tmp_path).encode_splits()[2]
    assert {name.removeprefix("B-") for name in extra["labels"]} >= {*names}
    said = extra["notes"][0] if what != "none of these" else ""
    assert all((repr(name) in said or repr(f"B-{name}") in said) == (said != "") for name in ALIKE[what])
    assert "other" not in said
    assert sum("differ only in case" in note for note in extra["notes"]) == bool(said)


@pytest.mark.parametrize("kind", ["classes", "multi-label", "regression"])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_equal_texts_are_on_one_side_of_a_draw(kind: str, share: float, tmp_path: Path) -> None:
    draw, label = random.Random(3), {"classes": "{}", "multi-label": "{};z", "regression": "{}.5"}[kind]
    rows = [{"text": f"text {n % 70}", "label": label.format("123"[n % 3])} for n in range(200)]
    rows[199] = {"text": "text 0", "label": label.format("9")}  # a label that an equal text alone has
    draw.shuffle(rows)
    as_jsonl(tmp_path / "train.jsonl", rows)
    splits, _, extra = make(tmp_path, valid=share, problem=kind).encode_splits()
    texts = [
        {tuple(row) for row in tokens.rows(np.arange(len(tokens.offsets) - 1), 16).tolist()}
        for tokens in (splits[split]["tokens"] for split in ("train", "valid"))
    ]
    assert not texts[0] & texts[1]
    assert len(splits["valid"]["label"]) == pytest.approx(200 * share, abs=12)
    assert "equal texts are on one side of the draw: 130 rows repeat one" in extra["notes"]


def test_a_few_texts_that_repeat_are_drawn_by_row_so_that_validation_has_two_labels(tmp_path: Path) -> None:
    texts = {"a quiet film": "good", "two lost hours": "bad", "full of holes": "bad"}
    as_jsonl(tmp_path / "train.jsonl", [{"text": t, "label": label} for t, label in texts.items()] * 60)
    splits, _, extra = make(tmp_path).encode_splits()
    assert set(np.asarray(splits["valid"]["label"]).tolist()) == {0, 1}
    assert not any("one side" in note for note in extra["notes"])


def test_rows_of_one_text_with_several_labels_are_named(tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": "ab"[n % 2]} for n in range(40)]
    again = [rows[3], rows[5] | {"label": "a"}, rows[5] | {"label": "a"}, rows[8] | {"label": "b"}]
    as_jsonl(tmp_path / "train.jsonl", [*rows, *again])
    as_jsonl(tmp_path / "valid.jsonl", rows[:9])
    notes = make(tmp_path).encode_splits()[2]["notes"]
    where = [f"{tmp_path}/train.jsonl line {n}" for n in (42, 6, 44, 9)]
    said = f"{where[0]} and {where[1]}; {where[2]} and {where[3]}"
    assert f"train: 3 rows have the text of an earlier row and another label: {said}" in notes
    assert [n for n in notes if n.startswith("valid: ") and "another label" in n] == []
    assert any(note.startswith("without that file a share of training") for note in notes)


def test_an_empty_cell_or_list_is_a_text_without_labels(tmp_path: Path) -> None:
    as_jsonl(tmp_path / "train.jsonl", [{"text": "a", "label": v} for v in (["x"], ["y"], [], None)])
    as_jsonl(tmp_path / "valid.jsonl", [{"text": "b", "label": []}])
    as_jsonl(tmp_path / "test.jsonl", [{"text": "b", "label": None}])
    splits, _, extra = make(tmp_path).encode_splits()
    assert np.asarray(splits["train"]["label"]).tolist() == [[1, 0], [0, 1], [0, 0], [0, 0]]
    assert "test" not in splits
    assert "the test split has no labels and is left out" in extra["notes"]


EMPTY_ROWS: dict[str, tuple[list[Any], list[Any]]] = {
    "classes": (["x", "y", "x"], [None, "", " ", "NaN"]),
    "multi-label": ([["x"], ["y", "x"], []], []),
    "flags": ([(1, 0), (0, 1), (1, 1)], [(None, None), ("", " ")]),
    "regression": ([1.5, 2.5, 3.0], [None, "", "null"]),
    "tokens": ([["B-x", "O"], ["O", "O"], ["O", "B-x"]], [None, ""]),
    "pairs": (["x", "y", "x"], [None, ""]),
}
"""Kind -> labels, and what is none."""


@pytest.mark.parametrize("kind", EMPTY_ROWS)
def test_rows_without_a_text_or_a_label_are_left_out_and_counted(kind: str, tmp_path: Path) -> None:
    """In any place of either split; what is learnt is that of the other rows."""
    labels, nothing = EMPTY_ROWS[kind]
    text, column, full = ("words", "tags", ["a", "b"]) if kind == "tokens" else ("text", "label", "a b")

    def row(value: Any, label: Any, n: int = 0) -> dict[str, Any]:
        found = dict(zip(("joy", "fear"), label, strict=True)) if kind == "flags" else {column: label}
        filled = value if value != "a b" else f"a b {n}"
        pair = {"premise": filled, "hypothesis": "c"} if kind == "pairs" else {text: filled}
        return {**pair, **found}

    filled = [row(full, label, n) for n, label in enumerate(labels)]
    no_text = [row(value, labels[0]) for value in ([None, []] if kind == "tokens" else [None, "", "  "])]
    if kind == "pairs":
        no_text.append({"premise": "a", "hypothesis": "", column: "x"})
    no_label = [row(full, value) for value in nothing]
    more = {"label_column": "joy,fear"} if kind == "flags" else {}
    encoded = []
    for name, first, behind in (("plain", [], []), ("empty", no_text[:1], [*no_text[1:], *no_label])):
        (folder := tmp_path / name).mkdir()
        as_jsonl(folder / "train.jsonl", [*first, *filled[:2], *behind, *filled[2:]])
        as_jsonl(folder / "valid.jsonl", [*filled, *behind])
        encoded.append(make(folder, **more).encode_splits())
    (plain, _, _), (found, _, extra) = encoded
    for split, columns in plain.items():
        assert columns.keys() == found[split].keys()
        for name, values in columns.items():
            both = [
                c.values if isinstance(c, Ragged) else np.asarray(c) for c in (values, found[split][name])
            ]
            assert np.array_equal(*both)
    count, said = len(no_text), "rows have no {} and are left out (the first:"
    of_text = "premise" if kind == "pairs" else text
    of_label = more.get("label_column", column)
    notes = [note for note in extra["notes"] if "left out" in note]
    assert [note.partition(said.format(of_text))[0] for note in notes[:2]] == [
        f"train: {count} of {count + len(nothing) + 3} ",
        f"valid: {count - 1} of {count - 1 + len(nothing) + 3} ",
    ]
    assert notes[0].endswith("empty/train.jsonl line 1): fill these cells to keep them")
    assert [said.format(of_label) in note for note in notes[2:]] == [True] * (2 * bool(nothing))


def test_texts_in_an_encoding_that_was_taken_for_another_are_counted(tmp_path: Path) -> None:
    texts = ["Konto \u2013 gesperrt", "M\u00fcller \u201ekauft\u201c", "plain"]
    wrong = [text.encode("cp1252").decode("latin-1") for text in texts]  # of the first two it is not the text
    as_jsonl(tmp_path / "train.jsonl", [{"text": text, "label": label} for text in wrong for label in "ab"])
    as_jsonl(tmp_path / "valid.jsonl", [{"text": text, "label": label} for text in texts for label in "ab"])
    notes = [note for note in make(tmp_path).encode_splits()[2]["notes"] if "U+0080" in note]
    assert [note.partition(" rows hold ")[0] for note in notes] == ["train: 4"]


def test_cells_with_commas_that_look_like_sets_are_told(tmp_path: Path) -> None:
    sets = ["card,fees", "fees", "card", "fees,card", "loan,card", "loan"]
    places = ["Paris, France", "Bonn, Germany", "Rome, Italy"]
    for labels, told in ((sets, True), (places, False)):
        as_jsonl(tmp_path / "train.jsonl", [{"text": "a", "label": label} for label in labels * 2])
        as_jsonl(tmp_path / "valid.jsonl", [{"text": "b", "label": labels[0]}])
        _, _, extra = make(tmp_path).encode_splits()
        assert extra["labels"] == sorted(labels)
        assert any("card,fees looks like several: --problem multi-label" in n for n in extra["notes"]) == told
    assert make(tmp_path, problem="multi-label").encode_splits()[2]["labels"][:2] == ["Bonn", "France"]


def test_weights_of_sets_are_texts_without_over_texts_with_a_label(tmp_path: Path) -> None:
    as_jsonl(tmp_path / "train.jsonl", [{"text": "a", "label": v} for v in (["x"], ["y", "x"], [], ["x"])])
    as_jsonl(tmp_path / "valid.jsonl", [{"text": "b", "label": ["x"]}])
    splits, _, extra = make(tmp_path, class_weights="balanced").encode_splits()
    assert extra["class_weights"] == pytest.approx([1 / 3, 3 / 1])
    assert "class.weight" not in splits["train"]
    assert make(tmp_path, class_weights=(1.0, 2.0)).encode_splits()[2]["class_weights"] == [1, 2]


def test_weights_of_tags_are_summed_over_a_samples_words(tmp_path: Path) -> None:
    folder = tagged(tmp_path, "conll")
    splits, _, extra = make(folder, max_length=64, class_weights=(1.0, 2.0, 3.0, 4.0, 5.0)).encode_splits()
    weight = dict(zip(extra["labels"], (1, 2, 3, 4, 5), strict=True))
    found = np.asarray(splits["train"]["class.weight"])
    assert found.tolist() == [sum(weight[tag] for tag in tags) for _, tags in SENTENCES]
    extra = make(folder, max_length=64, class_weights="balanced").encode_splits()[2]
    counts = np.array(extra["label_counts"])
    assert extra["class_weights"] == pytest.approx(counts.sum() / (5 * counts))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_described_by_their_labels(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path / "cache"))
    rows: dict[str, Rows] = {
        "classes": [{"text": "good", "label": "x"}, {"text": "bad", "label": "y"}],
        "multi-label": [{"text": "good", "label": ["x", "y"]}, {"text": "bad", "label": []}],
        "regression": [{"text": "good", "label": 2.5}, {"text": "bad", "label": 1}],
        "tokens": [{"words": ["good"], "tags": ["B-x"]}, {"words": ["bad"], "tags": ["O"]}],
    }
    said = {"classes": ["x", "y"], "multi-label": ["x, y", "(none)"], "regression": ["2.5", "1"]}
    for split in ("train", "valid"):
        as_jsonl(tmp_path / f"{split}.jsonl", rows[kind] * 2)

    data = Labelled(
        Recipe(task="classifier", data=str(tmp_path), max_length=16), LabelledOptions(vocab_size=300)
    )
    facts = prepare(data)
    batch = data.open(tmp_path / facts.folder, "train").fetch(np.arange(2))
    found = data.describe_rows(facts, batch)
    assert shown_samples(data, facts, 2, on_terminal=False) == found
    assert [line.partition(":")[0] for line in found] == said.get(kind, ["B-x good", "(none)"])
    assert [line.partition(": ")[2] for line in found] == ["good", "bad"]


@pytest.mark.parametrize(
    ("table", "columns", "problem", "label"),
    [
        (
            'a plane,"one, two",5.0\na man,b,3.5\n',
            {"pair_column": "2", "label_column": "3"},
            "regression",
            [5, 3.5],
        ),
        ("words,1,0\nmore,1,1\n", {"label_column": "2,3"}, "multi-label", [[1, 0], [1, 1]]),
    ],
)
def test_columns_of_a_table_without_names_are_taken_by_number(
    table: str, columns: dict[str, str], problem: str, label: list[Any], tmp_path: Path
) -> None:
    for split in ("train", "dev"):
        (tmp_path / f"{split}.csv").write_text(table)
    splits, _, extra = make(tmp_path, text_column="1", **columns).encode_splits()
    assert extra["problem"] == problem
    assert np.asarray(splits["train"]["label"]).tolist() == label


@pytest.mark.parametrize("value", ["Ada, don't go!", ["New York", "?"], ["one", "two"]])
def test_predict_reads_words_or_a_text(value: Any) -> None:
    assert WordReader().from_text(value, "text 1") == value
    name = "words" if isinstance(value, list) else "text"
    assert WordReader().from_row({name: value, "other": 1}, "row 1") == value


def test_predict_answers_no_empty_list() -> None:
    with pytest.raises(UnansweredRowError, match="row 1: tokens: is an empty list"):
        WordReader().from_row({"tokens": []}, "row 1")
    with pytest.raises(UserError, match="holds int, not text"):
        WordReader().from_text(["a", 3], "text 1")


def real(name: str) -> Path:
    if not (folder := SHARED_DATA / name).is_dir():
        pytest.skip(f"{name} is not on this machine")
    return folder


@pytest.mark.slow
def test_goemotions_is_read_as_a_plain_loop_reads_it() -> None:
    folder = real("goemotions")
    splits, _, extra = make(folder, max_length=16, text_column="1", label_column="2").encode_splits()
    assert (extra["problem"], extra["labels"]) == ("multi-label", [str(n) for n in range(28)])
    for split, file in {"train": "train.tsv", "valid": "dev.tsv", "test": "test.tsv"}.items():
        lines = (folder / file).read_text(encoding="utf-8").rstrip("\n").split("\n")
        wanted = np.zeros((len(lines), 28), np.float32)
        for row, line in enumerate(lines):
            wanted[row, [int(n) for n in line.split("\t")[1].split(",")]] = 1
        assert np.array_equal(np.asarray(splits[split]["label"]), wanted)
    assert [len(splits[s]["label"]) for s in ("train", "valid", "test")] == [43_410, 5_426, 5_427]


@pytest.mark.slow
def test_stsb_is_read_as_a_plain_loop_reads_it() -> None:
    folder = real("stsb")
    columns = {"text_column": "1", "pair_column": "2", "label_column": "3"}
    splits, _, extra = make(folder, max_length=16, **columns).encode_splits()
    assert extra["problem"] == "regression"
    for split, file in {"train": "train.csv", "valid": "dev.csv", "test": "test.csv"}.items():
        with (folder / file).open(encoding="utf-8", newline="") as stream:
            wanted = [float(row[2]) for row in csv.reader(stream)]
        assert np.array_equal(np.asarray(splits[split]["label"]), np.array(wanted, np.float32))
    assert [len(splits[s]["label"]) for s in ("train", "valid", "test")] == [5_749, 1_500, 1_379]


@pytest.mark.slow
def test_wnut17_has_the_sentences_and_entities_that_a_plain_loop_counts() -> None:
    folder = real("wnut17")
    splits, _, extra = make(folder, max_length=512).encode_splits()
    names = {"train": "wnut17train.conll", "valid": "emerging.dev.conll", "test": "emerging.test.conll"}
    for split, name in names.items():
        sentences, entities_there = 0, Counter[str]()
        for block in re.split(r"\n[ \t]*(?=\n)", (folder / name).read_text(encoding="utf-8")):
            lines = [line for line in block.split("\n") if line.strip()]
            sentences += bool(lines)
            tags = [line.split("\t")[-1].split(",")[0] for line in lines]
            entities_there.update(kind for _, _, kind in entities(tags))
        label = splits[split]["label"]
        assert isinstance(label, Ragged)
        found = [extra["labels"][n] for n in label.values[label.values != NO_LABEL]]
        without = re.search(rf"{split}: (\d+) words have no label", "\n".join(extra["notes"]))
        assert len(label) == sentences
        assert Counter(tag[2:] for tag in found if tag[0] == "B") == entities_there, without
    assert [len(splits[s]["label"]) for s in names] == [3_394, 1_009, 1_287]
    assert any(note == "test: of 297 words with several tags the first is taken" for note in extra["notes"])


@pytest.mark.slow
def test_clinc150_is_read_from_its_own_file() -> None:
    file = real("clinc150") / "data_full.json"
    splits, _, extra = make(file, text_column="1", label_column="2").encode_splits()
    assert [len(splits[s]["label"]) for s in ("train", "valid", "test")] == [15_000, 3_000, 4_500]
    assert (len(extra["labels"]), set(extra["label_counts"])) == (150, {100})
    assert "of the splits in the file, oos_val, oos_test, oos_train are not read" in extra["notes"]


def test_lists_of_class_labels_of_a_hub_data_set_have_their_names() -> None:
    datasets = pytest.importorskip("datasets")
    names = datasets.ClassLabel(names=["O", "B-x", "I-x"])
    features = datasets.Features(
        {"tokens": datasets.List(datasets.Value("string")), "ner_tags": datasets.List(names)}
    )
    rows = datasets.Dataset.from_dict({"tokens": [["a", "b"]], "ner_tags": [[1, 2]]}, features=features)
    assert list(corpora.read_hub_rows("me/data", rows)) == [
        ("me/data row 0", {"tokens": ["a", "b"], "ner_tags": ["B-x", "I-x"]})
    ]


def write_class_labels(file: Path, about: Any, **columns: Any) -> Path:
    """A Parquet file with features as the library `datasets` writes them beside the schema."""
    import pyarrow
    from pyarrow import parquet

    metadata = {"huggingface": about if isinstance(about, str) else json.dumps({"info": {"features": about}})}
    parquet.write_table(pyarrow.table(columns).replace_schema_metadata(metadata), file)
    return file


def class_label(*names: str) -> dict[str, Any]:
    return {"names": names, "_type": "ClassLabel"}


def test_class_labels_of_a_parquet_file_have_their_names(tmp_path: Path) -> None:
    tags = {"feature": class_label("O", "B-x", "I-x"), "_type": "List"}
    features = {
        "tokens": {"feature": {"dtype": "string", "_type": "Value"}, "_type": "List"},
        "ner_tags": tags,
    }
    columns = {"tokens": [["a", "b"]] * 6 + [["c"]] * 6, "ner_tags": [[1, 2]] * 6 + [[0]] * 6}
    file = write_class_labels(tmp_path / "train.parquet", features, **columns)
    _, _, extra = make(file).encode_splits()
    assert (extra["problem"], extra["labels"]) == ("tokens", ["O", "B-x", "I-x"])
    features = {"label": class_label("bad", "good"), "group": {"a": class_label("no")}, "more": [tags]}
    columns = {"text": list("abcd"), "label": [0, 1, -1, None], "group": [0] * 4, "more": [[[0]]] * 4}
    file = write_class_labels(tmp_path / "classes.parquet", features, **columns)
    found = [row for _, row in readers.read_rows(readers.find_splits(file, None)["train"])]
    assert [row["label"] for row in found] == ["bad", "good", None, None]
    assert (found[0]["group"], found[0]["more"]) == (0, [[0]])


@pytest.mark.parametrize(
    "about",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"info": {"features": [1]}}',
        {},
        {"ner_tags": {"feature": class_label()}},
    ]
    + [
        {"ner_tags": one}
        for one in (class_label("O"), class_label(), {"names": 7, "_type": "ClassLabel"}, [])
    ],
)
def test_numbers_without_names_are_no_tags(about: Any, tmp_path: Path) -> None:
    columns = {"tokens": [["a", "b"]] * 12, "ner_tags": [[0, 1]] * 12}
    file = write_class_labels(tmp_path / "train.parquet", about, **columns)
    with pytest.raises(UserError, match=r"ner_tags .*of word \d: tags are O, B-TYPE, I-TYPE"):
        make(file).encode_splits()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_for_a_finished_run_are_read_as_its_own(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its tokenizer, which a byte-level one of words changed once, and its labels."""
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path / "cache"))
    made: dict[str, list[dict[str, Any]]] = {
        "classes": [{"text": f"text {n}", "label": "xyz"[n % 3]} for n in range(9)],
        "multi-label": [{"text": f"text {n}", "label": ["x|y", "z|y", "x", "z"][n % 3]} for n in range(9)],
        "regression": [{"text": f"text {n}", "label": n / 4} for n in range(9)],
        "tokens": [{"words": ["New", "York", f"{n}"], "tags": ["B-x", "I-x", "O"]} for n in range(9)],
    }
    new = {
        "classes": {"text": "text 3", "label": "z"},
        "multi-label": {"text": "text 3", "label": "z"},
        "regression": {"text": "text 3", "label": 7},
        "tokens": {"words": ["New", "York", "3"], "tags": ["I-x", "I-x", "O"]},
    }
    as_jsonl(tmp_path / "train.jsonl", made[kind])
    as_jsonl(tmp_path / "dev.jsonl", made[kind])
    trained = tokenizers.train_byte_level_bpe(["New York text"] * 3, 300)
    trained.save(str(tmp_path / "tokenizer.json"))
    options = LabelledOptions(problem=kind)  # type: ignore[arg-type]
    recipe = Recipe(task="classifier", data=str(tmp_path), max_length=16, tokenizer=str(tmp_path))
    facts = prepare(Labelled(recipe, options))
    unseen = {**new[kind], "text": "text 11", "words": ["New", "York", "11"]}
    as_jsonl(tmp_path / "new.jsonl", [new[kind]] * 3 + [unseen])
    other = Recipe(task="classifier", data=str(tmp_path / "new.jsonl"), max_length=16)
    Labelled(other, LabelledOptions()).prepare_test(tmp_path / "prepared", facts)
    found, was = load(tmp_path / "prepared" / "test"), load(tmp_path / facts.folder / "train")
    tokens, before, label = found["tokens"], was["tokens"], found["label"]
    assert isinstance(tokens, Ragged)
    assert isinstance(before, Ragged)
    assert tokens.rows(np.array([2])).tolist() == before.rows(np.array([3])).tolist()
    values = label.rows(np.array([0]))[0] if isinstance(label, Ragged) else label[0]
    wanted = {"classes": 2, "multi-label": [0, 0, 1], "regression": 7, "tokens": [1, 2, 0]}
    assert values.tolist() == wanted[kind] or [n for n in values.tolist() if n != NO_LABEL] == wanted[kind]
    again = in_train(tmp_path / "prepared" / "test", tmp_path / facts.folder / "train", facts)
    assert again.tolist() == [True, True, True, False]
    rows = [{**new[kind], "label": "other", "tags": ["B-other", "O", "O"]}]
    as_jsonl(tmp_path / "strange.jsonl", rows)
    strange = Labelled(Recipe(task="classifier", data=str(tmp_path / "strange.jsonl")), LabelledOptions())
    with pytest.raises(UserError, match=r"^1 of 1 rows have a label that the|holds other, no finite number"):
        strange.prepare_test(tmp_path / "other", facts)
    if kind != "regression":
        as_jsonl(tmp_path / "strange.jsonl", [new[kind], *rows])
        told = dict(strange.prepare_test(tmp_path / "other", facts))
        where = f"the first: {tmp_path / 'strange.jsonl'} line 2"
        assert f"1 of 2 rows have a label that the model does not know and are left out ({where})" in str(
            told
        )
        assert (told["unknown"], len(load(tmp_path / "other" / "test")["tokens"])) == (1, 1)
