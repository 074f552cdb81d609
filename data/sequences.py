"""Sequences of different lengths, of text or of integers: rows of ids, each with an end token."""

from __future__ import annotations

import dataclasses
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data import corpora, hub, readers, sequence_sources, tokenizers
from isobatch.data.base import Columns, Ragged, TextQuery
from isobatch.data.corpora import DEMO, Corpus
from isobatch.data.preparation.spooled_array import SpooledArray, spool_to_array
from isobatch.data.sequence_sources import INTEGERS, TEXT
from isobatch.data.tokenized import TOKENIZER_FILE, TokenizedData

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from tokenizers import Tokenizer

    from isobatch.core.facts import Facts
    from isobatch.data.readers import SplitFiles
    from isobatch.data.sequence_sources import IdCorpus, SequenceColumn
    from isobatch.data.tokenized import Encoded

MODEL_IDS = ("bos", "eos", "unk")
"""Ids that only the model uses, numbered after those of the data."""
MAX_IDS = (1 << 31) - len(MODEL_IDS)
"""Most ids of the data: all must fit int32."""
SPLITS = ("train", "valid", "test")
BATCH_ROWS = 1000
BLOCK_ENTRIES = 1 << 18
END = -1
"""Stands for the end token until the number of ids is known."""


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

    def check(self) -> None:
        options, path, length = self.options, self._data_path(), self.recipe.max_length
        if length < 2:
            raise UserError(f"--max-length {length}: must be at least 2: an id and the end token")
        if options.text_column is not None and options.sequence_column is not None:
            raise UserError("--text-column and --sequence-column exclude each other: give one of them")
        if options.vocab_size is not None and not 1 <= options.vocab_size <= MAX_IDS:
            raise UserError(f"--vocab-size {options.vocab_size}: must be at least 1 and at most {MAX_IDS}")
        self._tokenizer_source()
        if self.recipe.data == DEMO:
            corpora.demo_files()
            self._check_lines()
        elif path is None:
            hub.require_dataset(self.recipe.data)
        else:
            self._check_files(self._find_files(path))

    def _check_files(self, parts: Mapping[str, SplitFiles]) -> None:
        """Raise UserError unless every file has the column of the sequences."""
        column = self._find_column_in(parts["train"])
        if column is None:
            self._check_lines()
            return
        if column.kind == TEXT:
            self._check_vocabulary_size()
        for part in parts.values():
            readers.require_column(part, column.name, sequence_sources.FLAGS[column.kind])

    def _check_lines(self) -> None:
        """Raise UserError where a column is named of data that has none."""
        for kind, name in self._asked_columns().items():
            if name is not None:
                raise UserError(
                    f"{sequence_sources.FLAGS[kind]} {name}: {self.recipe.data} is lines of text and has no"
                    " columns: leave it out"
                )
        self._check_vocabulary_size()

    def _find_files(self, path: Path) -> dict[str, SplitFiles]:
        parts = readers.find_splits(path, self.recipe.format, self.options)
        if not any(file.stat().st_size for file in parts["train"].files):
            raise UserError(f"--data {path}: {parts['train'].files[0]} is empty")
        return parts

    def _asked_columns(self) -> dict[str, str | None]:
        return {TEXT: self.options.text_column, INTEGERS: self.options.sequence_column}

    def _find_column(self, kinds: Mapping[str, str]) -> SequenceColumn:
        # Whoever gives a tokenizer means text.
        prefers_text = self.recipe.tokenizer is not None
        found = sequence_sources.find_column(self.recipe.data, kinds, self._asked_columns(), prefers_text)
        unread = ", ".join(name for name in kinds if name != found.name)
        said = [found.note] * bool(found.note) + [f"not read: {unread}"] * bool(unread)
        return found._replace(note="; ".join(said))

    def _find_column_in(self, part: SplitFiles) -> SequenceColumn | None:
        """The column of the sequences; None for lines of text."""
        if part.is_stream:
            return None
        return self._find_column(sequence_sources.column_kinds(readers.read_rows(part)))

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"options": dataclasses.asdict(self.options)}

    def _content_identity(self) -> Any:
        if self.recipe.data == DEMO:
            return [platform.python_version(), *super()._content_identity()]
        if (path := self._data_path()) is None:
            return self.recipe.data
        return readers.content_hashes(self._find_files(path))

    def text_query(self, facts: Facts, split: str, text: str) -> TextQuery:  # noqa: ARG002
        """A whole row: a text, or integers with white space or commas between them."""
        if facts.extra["kind"] == "integers":
            words = text.replace(",", " ").split()
            if not words or not all(word.isdecimal() for word in words):
                raise UserError("--text: this run learnt lists of integers: give one, as in --text '3 14 15'")
            ids = [int(word) for word in words]
        else:
            encoded = self.prepared_tokenizer(facts).encode(text.strip(), add_special_tokens=False)
            ids = list(encoded.ids)
        room = self.recipe.max_length - 1
        note = f"the text is cut to {room} tokens, as the rows are" if len(ids) > room else ""
        return TextQuery({"tokens": [np.array([*ids[:room], facts.extra["eos"]])]}, whole=True, note=note)

    def describe_rows(self, facts: Facts, batch: Mapping[str, np.ndarray]) -> list[str]:
        if facts.extra["kind"] == "integers":
            rows = zip(batch["tokens"], batch["length"].tolist(), strict=True)
            return [" ".join(map(str, row[: length - 1].tolist())) for row, length in rows]
        return super().describe_rows(facts, batch)

    def encode_splits(self, folder: Path | None = None) -> Encoded:
        """Raises UserError for a split without sequences, and for ids that are not in the vocabulary."""
        corpus = self._open_corpus()
        found = {s: SequenceRows(self.recipe.max_length, folder) for s in SPLITS if s in corpus.splits}
        notes, tokenizer = [*corpus.notes], None
        if isinstance(corpus, Corpus):
            tokenizer = self._collect_texts(corpus, found)
            size = tokenizers.vocabulary_size(tokenizer)
        else:
            size = self._collect_ids(corpus, found)
            if self.recipe.tokenizer is not None:
                notes.append(f"--tokenizer {self.recipe.tokenizer} is not used: the data holds ids")
        own = {name: size + number for number, name in enumerate(MODEL_IDS)}
        vocabulary = size + len(MODEL_IDS)
        dtype = np.uint16 if vocabulary <= 1 << 16 else np.int32
        extra = {
            **({"kind": "integers"} if tokenizer is None else {"kind": "text", "tokenizer": TOKENIZER_FILE}),
            "vocabulary": vocabulary,
            "data_vocabulary": size,
            **own,
            "splits": {split: rows.sizes(has_words=tokenizer is not None) for split, rows in found.items()},
            "notes": [*notes, *(note for split, rows in found.items() for note in rows.notes(split))],
        }
        return {split: rows.columns(own["eos"], dtype) for split, rows in found.items()}, tokenizer, extra

    def _open_corpus(self) -> Corpus | IdCorpus:
        if self.recipe.data == DEMO:
            return sequence_sources.open_demo()
        if (path := self._data_path()) is None:
            rows = corpora.rows_from_hub(self.recipe.data, self.options.data_config)
            return sequence_sources.open_column(
                rows, self._find_column(sequence_sources.column_kinds(rows.splits["train"]()))
            )
        parts = self._find_files(path)
        if (column := self._find_column_in(parts["train"])) is None:
            return sequence_sources.open_lines(parts)
        read = {split: dataclasses.replace(part, only=column.name) for split, part in parts.items()}
        return sequence_sources.open_column(corpora.rows_from_files(read), column)

    def _collect_texts(self, corpus: Corpus, found: Mapping[str, SequenceRows]) -> Tokenizer:
        """Tokenize the texts of every split into its rows; the tokenizer."""
        self._check_vocabulary_size()  # what a hub data set holds is not known before
        tokenizer, _ = self._open_or_train_tokenizer(
            lambda size: tokenizers.train_byte_level_bpe(corpus.splits["train"](), size)
        )
        for split, rows in found.items():
            texts = rows.count_words(corpus.splits[split]())
            ids = tokenizers.encode_texts(tokenizer, texts, [], np.int32)
            for batch in sequence_sources.batched(ids, BATCH_ROWS):
                tails = [i[rows.room :].tolist() for i in batch if len(i) > rows.room]
                rows.words -= sum(len(tail.split()) for tail in tokenizer.decode_batch(tails))
                rows.add(np.concatenate(batch), np.array([len(i) for i in batch]))
            rows.require_some(split, self.recipe.data)
        return tokenizer

    def _collect_ids(self, corpus: IdCorpus, found: Mapping[str, SequenceRows]) -> int:
        """Collect the ids of every split in its rows; the number of ids."""
        asked = self.options.vocab_size
        size, why = MAX_IDS, "it is too large: number the ids from 0"
        if asked is not None:
            size, why = asked, f"--vocab-size {asked} allows 0 to {asked - 1}"
        for split, rows in found.items():
            for batch in sequence_sources.batched(corpus.splits[split](), BATCH_ROWS):
                ids = [one for _, one in batch]
                values = np.concatenate(ids)
                if values.min(initial=0) < 0 or values.max(initial=0) >= size:
                    sequence_sources.require_ids_below(size, batch, why)
                rows.add(values, np.array([len(one) for one in ids]))
            rows.require_some(split, self.recipe.data)
            if split == "train" and asked is None:
                size = rows.largest + 1
                why = f"the largest training id is {rows.largest}: --vocab-size says how many ids there are"
        return size


class SequenceRows:
    """The rows of one split as they are collected on disk: cut, ended and counted."""

    def __init__(self, max_length: int, folder: Path | None) -> None:
        self.room, self.folder = max_length - 1, folder
        self.values = SpooledArray(np.int32, folder)
        self.lengths = [np.empty(0, np.int64)]
        self.largest = END
        self.words = self.cut = self.empty = 0

    @property
    def count(self) -> int:
        return sum(map(len, self.lengths))

    def count_words(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield the texts without white space around them, and count words; empty texts are only counted."""
        for text in texts:
            if words := len(text.split()):
                self.words += words
                yield text.strip()
            else:
                self.empty += 1

    def add(self, values: np.ndarray, lengths: np.ndarray) -> None:
        """Append sequences: their ids (t,) end to end and their lengths (n,). Empty ones are only counted."""
        self.largest = max(self.largest, int(values.max(initial=0)))
        self.empty += int((lengths == 0).sum())
        lengths = lengths[lengths > 0]
        if lengths.max(initial=0) > self.room:
            self.cut += int((lengths > self.room).sum())
            begins = np.repeat(np.cumsum(lengths) - lengths, lengths)
            values = values[np.arange(len(values)) - begins < self.room]
            lengths = np.minimum(lengths, self.room)
        self.values.add(np.insert(values.astype(np.int32), np.cumsum(lengths), END))
        self.lengths.append(lengths + 1)

    def require_some(self, split: str, data: str) -> None:
        """Raise UserError where there is no row."""
        if not self.count:
            why = f" (empty: {self.empty:,})" if self.empty else ""
            raise UserError(f"--data {data}: the {split} split holds no sequences{why}")

    def columns(self, eos: int, dtype: type) -> Columns:
        """The columns `tokens` and `token.weight`; nothing can be added after this."""
        lengths, values = np.concatenate(self.lengths), self.values.array()
        blocks = (values[begin : begin + BLOCK_ENTRIES] for begin in range(0, len(values), BLOCK_ENTRIES))
        tokens = spool_to_array((np.where(b == END, eos, b) for b in blocks), dtype, self.folder)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return {"tokens": Ragged(tokens, offsets), "token.weight": lengths.astype(np.int32)}

    def sizes(self, has_words: bool) -> dict[str, int | None]:
        """The counts that facts keep. Tokens: all entries of the rows; words: of what is left of a cut."""
        return {
            "sequences": self.count,
            "tokens": sum(int(lengths.sum()) for lengths in self.lengths),
            "words": self.words if has_words else None,
            "cut": self.cut,
            "empty": self.empty,
        }

    def notes(self, split: str) -> Iterator[str]:
        """What the user should know, one line each."""
        if self.empty:
            yield f"{split}: empty sequences left out: {self.empty:,}"
        if self.cut:
            share = f"{self.cut:,} of {self.count:,} ({self.cut / self.count:.1%})"
            yield f"{split}: sequences cut to --max-length {self.room + 1} with the end token: {share}"
