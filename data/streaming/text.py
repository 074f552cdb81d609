"""Text in a store, for language models: documents or conversations, encoded a group at a time.

A group becomes what local preparation makes of a file with its rows: documents are joined and cut into blocks
of --max-length, of which the last of a group may be shorter; a conversation is a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from isobatch.core import atomic_files
from isobatch.core.errors import UserError, refuse
from isobatch.data import chat_formats, tokenizers
from isobatch.data.streaming import index, store
from isobatch.data.streaming.groups import GroupCache, GroupTable, groups_folder
from isobatch.data.streaming.shards import Rows, shard_of
from isobatch.data.streaming.source import VERSION, StreamedSource, TextGroupEncoder
from isobatch.data.streaming.store import Store, StoredObject
from isobatch.data.text import chat_templates
from isobatch.data.text.dataset import Text
from isobatch.data.text.plain_text import TokenizationSettings
from isobatch.data.text.sources import TEXT, detect_row_kind
from isobatch.data.tokenized import TOKENIZER_FILE

ENCODER_FILE = "encoder.json"


class StreamedText(Text):
    """Text in a store. Columns: those of PlainText, or of Conversations where the rows hold such."""

    cache_name: ClassVar[str] = "data.streaming.text.StreamedText"
    version: ClassVar[int] = VERSION
    has_groups: ClassVar[bool] = True

    @cached_property
    def objects(self) -> list[StoredObject]:
        """What --data names, as the store lists it. Raises UserError."""
        return Store().find(self.recipe.data)

    def check(self) -> None:
        options, form = self.options, self.recipe.format
        store.check(self.recipe.data)
        asked = {
            "--mix": options.mix is not None,
            f"--valid {options.valid}": options.valid is not None,
            f"--stride {options.stride}": options.stride,
            "--clean duplicates": any(step.name == "duplicates" for step in self._cleaning_steps()),
        }
        here = "needs data on this machine, which is prepared as a whole: copy it here, or leave this out"
        refuse({f"{flag}: {here}": given for flag, given in asked.items()})
        refuse({f"--format {form}: an object in a store says by its ending what it is": form is not None})
        chat_templates.check_name(options.template)
        chat_templates.parse_values(options.template_kwargs or ())
        self._check_vocabulary_size()
        self._tokenizer_source()
        self._detect_kind()

    def _content_identity(self) -> Any:
        return [[one.address, one.size, one.version] for one in self.objects]

    def _detect_kind(self) -> tuple[str, str]:
        """(kind of rows, the column of plain text), from the first object. Raises UserError."""
        first, column = self.objects[0], self.options.text_column or TEXT
        columns = shard_of(Store(), first).columns()
        kind = detect_row_kind(columns, self.options, is_only_set=True, data=first.address)
        if kind == TEXT:
            typed = f"--text-column {column}: " * (self.options.text_column is not None)
            chat_formats.require_field(dict.fromkeys(columns), column, typed + first.address)
        return kind, column

    def _encoder(self, kind: str, column: str) -> TextGroupEncoder:
        steps, folder = self._cleaning_steps(), self._tokenizer_folder()
        return TextGroupEncoder(self.recipe.data, kind, column, steps, self.options, folder)

    def prepare(self, folder: Path) -> dict[str, Any]:
        if self.recipe.max_length < 2:
            raise UserError(f"--max-length {self.recipe.max_length}: a row needs at least 2 tokens")
        kind, column = self._detect_kind()
        encoder, splits = self._encoder(kind, column), index.divide(self.objects)
        tokenizer, special = self._open_or_train_tokenizer(lambda: self._texts(encoder, splits))
        tokenizer.save(str(folder / TOKENIZER_FILE))
        encoder.tokenization = TokenizationSettings(tokenizer, special, self.recipe.max_length)
        atomic_files.write_json(folder / ENCODER_FILE, {"kind": kind, "column": column, "special": special})
        first = self.objects[0]
        is_read = kind != TEXT or not first.address.endswith(".parquet")  # of which one column is read
        unread = [] if is_read else [n for n in shard_of(Store(), first).columns() if n != column]
        builder = index.IndexBuilder(self.objects, encoder, GroupCache(groups_folder()))
        sizes, notes = builder.build(folder, splits)
        return {
            **self._tokenizer_facts(tokenizer, special),
            "splits": sizes,
            "stored_bytes": sum(one.size for one in self.objects),
            **self._shown(encoder, folder),
            "notes": [*notes, *(f"the field `{name}` is not read" for name in unread)],
        }

    def _texts(self, encoder: TextGroupEncoder, splits: Mapping[str, list[int]]) -> Iterator[str]:
        """Training texts from the first object on."""
        for number in splits["train"]:
            shard = shard_of(Store(), self.objects[number], encoder.columns)
            for _, rows in shard.groups():
                yield from encoder.text_set({"train": rows}, shard.stored.address).texts()

    def _shown(self, encoder: TextGroupEncoder, folder: Path) -> dict[str, Any]:
        """What Facts should know of the first groups: a prompt; of conversations their template and turns."""
        rows: dict[str, Rows] = {}
        for table in (GroupTable.open(folder / split) for split in ("train", "valid")):
            shard = shard_of(Store(), table.shards[table.place(0).shard], encoder.columns)
            rows["valid" if rows else "train"] = table.place(0).rows_of(shard)
        found = encoder.text_set(rows, self.recipe.data)
        found.bind_tokenizer(encoder.tokenization)
        for split in found.splits:
            found.encode(split, encoder.tokenization)
        return {"prompt": found.prompt(), **found.facts()}

    def open(self, folder: Path, split: str) -> StreamedSource:  # type: ignore[override]
        """The samples of an indexed split."""
        known = atomic_files.read_json(folder / ENCODER_FILE)
        encoder = self._encoder(known["kind"], known["column"])
        tokenizer = tokenizers.open_tokenizer(folder / TOKENIZER_FILE)
        encoder.tokenization = TokenizationSettings(tokenizer, known["special"], self.recipe.max_length)
        source = StreamedSource(folder / split, encoder, GroupCache(groups_folder()))
        window = self.recipe.shuffle_window * len(source) // len(source.table)
        source.read_ahead = max(1, min(window, len(source)))
        return source
