"""Sequences of different lengths, of text or of integers: rows of ids, each with an end token."""

from __future__ import annotations

import dataclasses
import itertools
import math
import platform
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tokenizers import Tokenizer

from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.core.terminal import doing
from isobatch.data import corpora, readers, tokenizers
from isobatch.data.base import Columns, Ragged
from isobatch.data.corpora import DEMO, Corpus
from isobatch.data.preparation.encoding import batches
from isobatch.data.preparation.spooled_array import SpooledColumns
from isobatch.data.tables.delimited import is_number
from isobatch.data.tokenized import TOKENIZER_FILE, Encoded, TokenizedData, path_of

MODEL_IDS = ("bos", "eos", "unk")
"""Ids that only the model uses, numbered after those of the data."""
MAX_IDS = (1 << 31) - len(MODEL_IDS)
"""Most ids of the data: all must fit int32."""
BLOCK_ENTRIES = 1 << 18
END = -1
"""Stands for the end token until the number of ids is known."""
TEXT, INTEGERS = "text", "lists of integers"
"""What a column may hold that can be learnt."""
FLAGS = {TEXT: "--text-column", INTEGERS: "--sequence-column"}
USUAL_COLUMNS = {TEXT: ("text", "sentence"), INTEGERS: ("tokens", "input_ids", "ids", "sequence")}
SAMPLED_ROWS = 100
"""Rows that are read to see what the columns of csv, tsv, jsonl and json hold."""
DEMO_LINES = {"train": 6000, "valid": 600}
"""Most lines of each split of the demo."""
DEMO_LINE_WORDS = 3
"""Fewest words of a line of the demo."""


def find_column(
    data: str, kinds: Mapping[str, str], asked: Mapping[str, str | None], prefers_text: bool
) -> tuple[str, str]:
    """(name, kind) of the column of the sequences among columns that hold `kinds`.

    The one `asked` for, by kind; else one of lists of integers; else, or if that is preferred, one of text.
    Raises UserError where there is none, or where several could be meant.
    """
    for kind, name in asked.items():
        if name is not None:
            readers.require_name(name, list(kinds), data, FLAGS[kind])
            return name, kind
    found = {kind: [name for name, held in kinds.items() if held == kind] for kind in FLAGS}
    kind = TEXT if found[TEXT] and (prefers_text or not found[INTEGERS]) else INTEGERS
    names = [name for name in USUAL_COLUMNS[kind] if name in found[kind]][:1] or found[kind]
    if len(names) != 1:
        problem = f"which column? {FLAGS[kind]} says" if names else f"no column holds {TEXT} or {INTEGERS}"
        has = readers.name_columns([f"{name} ({held})" for name, held in kinds.items()] or ["no rows"])
        raise UserError(f"--data {data}: {problem}; it has: {has}")
    return names[0], kind


def column_kinds(rows: readers.LocatedRows) -> dict[str, str]:
    """Column -> what it holds by the first rows: TEXT, INTEGERS, or a word for users."""
    first: dict[str, str] = {}
    useful: dict[str, str] = {}
    for _, row in itertools.islice(rows, SAMPLED_ROWS):
        for name, cell in row.items():
            kind = _cell_kind(cell)
            (useful if kind in FLAGS else first).setdefault(str(name), kind)
    return first | useful


def _cell_kind(cell: Any) -> str:
    if isinstance(cell, str):  # as is every cell of csv and tsv
        return TEXT if cell.strip() and not is_number(cell) else "numbers"
    if isinstance(cell, list) and cell:
        strange = next((v for v in cell if type(v) is not int), 0)
        return INTEGERS if type(strange) is int else f"lists of {type(strange).__name__}"
    return type(cell).__name__


def _demo_lines(texts: Callable[[], Iterable[str]], most: int) -> list[str]:
    """Lines of source code of Python's standard library, a part of them at even distances."""
    lines = [line for text in texts() for line in text.split("\n") if len(line.split()) >= DEMO_LINE_WORDS]
    return lines[:: math.ceil(len(lines) / most)]


def _lines(part: readers.SplitFiles) -> Iterator[str]:
    """The lines of .txt files; a very long one comes in several chunks."""
    for file in part.files:
        rest = ""
        for chunk in readers.read_stream(dataclasses.replace(part, files=(file,))):
            *lines, rest = (rest + chunk).split("\n")
            yield from lines
        if rest:
            yield rest


def _texts(rows: Callable[[], readers.LocatedRows], column: str) -> Iterator[str]:
    return (readers.text_cell(row, column, where) for where, row in rows())


def _ids(rows: Callable[[], readers.LocatedRows], column: str) -> Iterator[tuple[str, np.ndarray]]:
    """(place, (ids,) int64) of each row; null is one without.

    Raises UserError, which names the place, for what is no list of integers.
    """
    for where, row in rows():
        cell, place = row.get(column), f"{where}: {column}"
        cell = [] if cell is None else cell
        if cell != [] and (kind := _cell_kind(cell)) != INTEGERS:
            raise UserError(f"{place} holds {kind}, not {INTEGERS}")
        try:
            yield place, np.array(cell, np.int64)
        except OverflowError:
            raise UserError(f"{place} holds an id of more than 64 bits: number the ids from 0") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceOptions:
    """The fields of sequences."""

    text_column: str | None = None
    """The column of csv, jsonl, json, parquet and hub data that holds text; by default text, sentence, or the
    only one that does."""
    sequence_column: str | None = None
    """The column that holds lists of integers; by default tokens, input_ids, ids, sequence, or the only one
    that does."""
    vocab_size: int | None = None
    """Of text, the size of a tokenizer trained on it; by default 8192, and 1024 for the demo. Of integers,
    the number of ids; by default the largest training id + 1."""
    data_config: str | None = None
    """The configuration of a hub data set that has several, such as sst2 of glue."""


class Sequences(TokenizedData):
    """Sequences from text files, tables, hub ids, or the demo: lines of Python's own standard library.

    Columns: `tokens` (n, up to max_length), the ids of a sequence and the end token; `token.weight` (n,)
    int32, the length of the row, because every entry is predicted.
    """

    Options: ClassVar[type] = SequenceOptions
    cache_name: ClassVar[str] = "data.sequences.Sequences"
    demo_vocabulary_size: ClassVar[int] = 1024
    assumed: ClassVar[Mapping[str, Any]] = {"bos": 1, "eos": 2, "unk": 3}

    def check(self) -> None:
        options, path, length = self.options, path_of(self.recipe.data), self.recipe.max_length
        if length < 2:
            raise UserError(f"--max-length {length}: must be at least 2: an id and the end token")
        if options.text_column is not None and options.sequence_column is not None:
            raise UserError("--text-column and --sequence-column exclude each other: give one of them")
        if options.vocab_size is not None and not 1 <= options.vocab_size <= MAX_IDS:
            raise UserError(f"--vocab-size {options.vocab_size}: must be at least 1 and at most {MAX_IDS}")
        self._tokenizer_source()
        if self.recipe.data != DEMO and path is None:
            corpora.require_dataset(self.recipe.data)
            return
        if parts := self._files():
            readers.require_content(parts["train"])
        kind = TEXT
        if parts and not parts["train"].is_stream:
            name, kind, _ = self._find_column(readers.read_rows(parts["train"]))
            for part in parts.values():
                readers.require_column(part, name, FLAGS[kind])
        elif flags := [f"{FLAGS[kind]} {name}" for kind, name in self._asked().items() if name]:
            raise UserError(f"{flags[0]}: {self.recipe.data} is lines of text, without columns: leave it out")
        if kind == TEXT:
            self._check_vocabulary_size()

    def _find_column(self, rows: readers.LocatedRows) -> tuple[str, str, list[str]]:
        """(name, kind, notes) of the column of the sequences."""
        kinds = column_kinds(rows)
        # Whoever gives a tokenizer means text.
        name, kind = find_column(self.recipe.data, kinds, self._asked(), self.recipe.tokenizer is not None)
        unread = ", ".join(other for other in kinds if other != name)
        return name, kind, [f"not read: {unread}"] * bool(unread)

    def _asked(self) -> dict[str, str | None]:
        return {TEXT: self.options.text_column, INTEGERS: self.options.sequence_column}

    def _content_identity(self) -> Any:
        if self.recipe.data == DEMO:
            return [platform.python_version(), *super()._content_identity()]
        return super()._content_identity()

    def describe_rows(self, facts: Facts, batch: Mapping[str, np.ndarray]) -> list[str]:
        if facts.extra["kind"] == "integers":
            rows = zip(batch["tokens"], batch["length"].tolist(), strict=True)
            return [" ".join(map(str, row[: length - 1].tolist())) for row, length in rows]
        return super().describe_rows(facts, batch)

    def encode_splits(self) -> Encoded:
        """Raises UserError for a split without sequences, and for ids that are not in the vocabulary."""
        corpus, kind = self._open_corpus()
        room, folder = self.recipe.max_length - 1, self.workshop.folder
        wanted = readers.SPLIT_NAMES if self.known is None else ("valid",)
        found = {split: SequenceRows(room, folder) for split in wanted if split in corpus.splits}
        tokenizer = self._collect_texts(corpus, found) if kind == TEXT else None
        size = tokenizers.vocabulary_size(tokenizer) if tokenizer else self._collect_ids(corpus, found)
        own = {name: size + number for number, name in enumerate(MODEL_IDS)}
        vocabulary = size + len(MODEL_IDS)
        dtype = np.uint16 if vocabulary <= 1 << 16 else np.int32
        extra = {
            **({"kind": "integers"} if tokenizer is None else {"kind": "text", "tokenizer": TOKENIZER_FILE}),
            "vocabulary": vocabulary,
            "data_vocabulary": size,
            **own,
            "splits": {split: rows.sizes(has_words=tokenizer is not None) for split, rows in found.items()},
            "notes": [*corpus.notes, *(note for split, rows in found.items() for note in rows.notes(split))],
        }
        return {split: rows.columns(own["eos"], dtype) for split, rows in found.items()}, tokenizer, extra

    def _open_corpus(self) -> tuple[Corpus, str]:
        """(the texts, or places and ids, of each split; their kind)."""
        if self.recipe.data == DEMO:
            splits = corpora.demo_corpus().splits
            return Corpus({s: partial(_demo_lines, of, DEMO_LINES[s]) for s, of in splits.items()}), TEXT
        if not (parts := self._files()):
            rows = corpora.open_rows(self.recipe.data, {}, self.options.data_config)
            name, kind, notes = self._find_column(rows.splits["train"]())
        elif parts["train"].is_stream:
            parts, held_out = corpora.with_validation(parts)
            return Corpus({s: partial(_lines, part) for s, part in parts.items()}, notes=held_out), TEXT
        else:
            name, kind, notes = self._find_column(readers.read_rows(parts["train"]))
            parts = {split: dataclasses.replace(part, only=name) for split, part in parts.items()}
            rows = corpora.open_rows(self.recipe.data, parts, None)
        read = _texts if kind == TEXT else _ids
        splits = {split: partial(read, of_split, name) for split, of_split in rows.splits.items()}
        return Corpus(splits, notes=(*rows.notes, *notes)), kind

    def _collect_texts(self, corpus: Corpus, found: Mapping[str, SequenceRows]) -> Tokenizer:
        """Tokenize the texts of every split into its rows; the tokenizer."""
        self._check_vocabulary_size()  # what a hub data set holds is not known before
        tokenizer, _ = self._open_or_train_tokenizer(corpus.splits["train"])
        for split, rows in found.items():
            for batch in batches(rows.count_words(corpus.splits[split]())):
                doing(f"tokenizing: {len(rows.lengths):,} texts done")
                for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                    if tail := encoding.ids[rows.room :]:
                        rows.words -= len(tokenizer.decode(tail).split())
                    rows.add(np.array(encoding.ids, np.int32))
            rows.require_some(split, self.recipe.data)
        return tokenizer

    def _collect_ids(self, corpus: Corpus, found: Mapping[str, SequenceRows]) -> int:
        """Collect the ids of every split in its rows; the number of ids."""
        asked = self.options.vocab_size
        size, why = MAX_IDS, "it is too large: number the ids from 0"
        if asked is not None:
            size, why = asked, f"--vocab-size {asked} allows 0 to {asked - 1}"
        for split, rows in found.items():
            for place, ids in corpus.splits[split]():
                wrong = ids[(ids < 0) | (ids >= size)]
                if len(wrong):
                    problem = "ids begin at 0" if wrong[0] < 0 else why
                    raise UserError(f"{place} holds the id {wrong[0]}: {problem}")
                rows.add(ids)
            rows.require_some(split, self.recipe.data)
            if split == "train" and asked is None:
                size = rows.largest + 1
                why = f"the largest training id is {rows.largest}: --vocab-size says how many ids there are"
        return size


class SequenceRows:
    """The rows of one split as they are collected on disk: cut, ended and counted."""

    def __init__(self, room: int, folder: Path | None) -> None:
        """`room`: most ids of a row, beside the end token."""
        self.room, self.folder = room, folder
        self.values = SpooledColumns(folder)
        self.lengths = array("q")
        self.largest = END
        self.words = self.cut = self.empty = 0

    def count_words(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield the texts without white space around them, and count words; empty texts are only counted."""
        for text in texts:
            if words := len(text.split()):
                self.words += words
                yield text.strip()
            else:
                self.empty += 1

    def add(self, ids: np.ndarray) -> None:
        """Append a sequence (t,). An empty one is only counted."""
        if not len(ids):
            self.empty += 1
            return
        self.largest = max(self.largest, int(ids.max()))
        self.cut += len(ids) > self.room
        row = np.append(ids[: self.room], END)
        self.values.add({"ids": row.astype(np.int32)})
        self.lengths.append(len(row))

    def require_some(self, split: str, data: str) -> None:
        """Raise UserError where there is no row."""
        if not self.lengths:
            why = f" (empty: {self.empty:,})" if self.empty else ""
            raise UserError(f"--data {data}: the {split} split holds no sequences{why}")

    def columns(self, eos: int, dtype: type) -> Columns:
        """The columns `tokens` and `token.weight`; nothing can be added after this."""
        lengths, values = np.array(self.lengths, np.int64), self.values.arrays()["ids"]
        ended = SpooledColumns(self.folder)
        for begin in range(0, len(values), BLOCK_ENTRIES):
            block = values[begin : begin + BLOCK_ENTRIES]
            ended.add({"tokens": np.where(block == END, eos, block).astype(dtype)})
        tokens = Ragged.of_lengths(ended.arrays()["tokens"], lengths)
        return {"tokens": tokens, "token.weight": lengths.astype(np.int32)}

    def sizes(self, has_words: bool) -> dict[str, int | None]:
        """The counts that facts keep. Tokens: all entries of the rows; words: of what is left of a cut."""
        return {
            "sequences": len(self.lengths),
            "tokens": sum(self.lengths),
            "words": self.words if has_words else None,
            "cut": self.cut,
            "empty": self.empty,
        }

    def notes(self, split: str) -> Iterator[str]:
        """What the user should know, one line each."""
        if self.empty:
            yield f"{split}: empty sequences left out: {self.empty:,}"
        if self.cut:
            count = len(self.lengths)
            share = f"{self.cut:,} of {count:,} ({self.cut / count:.1%})"
            yield f"{split}: sequences cut to --max-length {self.room + 1} with the end token: {share}"
