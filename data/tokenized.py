"""The base class of data that contains text: its path, and its tokenizer."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
from tokenizers import Tokenizer

from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.core.flags import options_to_dict
from isobatch.data import corpora, readers, tokenizers
from isobatch.data.base import TEST, WEIGHT, Columns, Data, save
from isobatch.data.digests import file_hash

Encoded: TypeAlias = "tuple[Mapping[str, Columns], Tokenizer | None, dict[str, Any]]"
TOKENIZER_FILE = "tokenizer.json"
DEFAULT_VOCABULARY_SIZE = 8192
BYTES_PER_TOKEN = 4
"""Of running text, where no tokenizer has read it."""
ROLES = ("set", "learn")
"""Columns that a mixture's samples have, and those of its sets need not."""


def path_of(data: str) -> Path | None:
    """The file or folder that `data` names; None for the demo and for hub ids.

    Raises UserError for what is neither: to open a pipe may wait for ever.
    """
    path = Path(data).expanduser()
    # Path.exists and its like would raise PermissionError.
    if data == corpora.DEMO or not os.path.exists(path):  # noqa: PTH110
        return None
    if not (os.path.isfile(path) or os.path.isdir(path)):  # noqa: PTH113, PTH112
        raise UserError(f"--data {data}: is no regular file and no folder: write what it gives into a file")
    return path


def check_elsewhere(data: str, valid: float | str | None) -> None:
    """Raise UserError where the demo or a hub data set cannot be had, or not with this --valid."""
    if data == corpora.DEMO:
        corpora.check_valid(valid, ("valid",), corpora.DEMO)
    elif isinstance(valid, str):
        raise UserError(f"--valid {valid}: --data {data} is no file: give a share such as 0.1")
    else:
        corpora.require_dataset(data)


class TokenizedData(Data):
    """Data with texts. Its options have a `vocab_size`, for a tokenizer that is trained on them."""

    demo_vocabulary_size: ClassVar[int]
    """The size of the tokenizer that is trained on the demo."""
    fewest_tokens: ClassVar[tuple[int, str]] = (257, "256 bytes and an end token")
    """Least size of a tokenizer that is trained, and what it must hold."""
    known: Facts | None = None
    """Of a run whose tokenizer, template and labels are taken in place of what the data would give."""

    def encode_splits(self) -> Encoded:
        """(columns per split, the tokenizer of texts, what Facts should know). Raises UserError."""
        raise NotImplementedError

    def read(self) -> Mapping[str, Columns]:
        return self.encode_splits()[0]

    def prepare(self, folder: Path) -> dict[str, Any]:
        splits, tokenizer, extra = self.encode_splits()
        for split, columns in splits.items():
            save(folder / split, columns)
        if tokenizer is not None:
            tokenizer.save(str(folder / TOKENIZER_FILE))
        return extra

    def prepare_test(self, folder: Path, facts: Facts) -> Mapping[str, Any]:
        own = {field.name for field in dataclasses.fields(self.options)}
        steps = tuple(step for step in getattr(self.options, "clean", None) or () if step != "duplicates")
        changed: dict[str, Any] = {"valid": None, "mix": None, "clean": steps}
        changed["vocab_size"] = facts.extra.get("data_vocabulary")
        self.options = dataclasses.replace(self.options, **{k: v for k, v in changed.items() if k in own})
        self.known = facts
        self.check()
        splits, _, extra = self.encode_splits()
        for name in ("form", "kind"):
            learnt, there = (of.get(name, "running text") for of in (facts.extra, extra))
            if learnt not in (there, "mixture"):
                raise UserError(f"--test {self.recipe.data}: holds {there}, and the run learnt {learnt}")
        columns = json.loads((Path(facts.folder) / "train" / "index.json").read_text())
        is_stored = "length" in columns  # data in a store: its tokens are not there
        differing = () if is_stored else {*columns} ^ {*splits["valid"]}
        if other := [n for n in differing if n not in ROLES and not n.endswith(WEIGHT)]:
            raise UserError(f"--test {self.recipe.data}: {other[0]} of its samples are not as the run's are")
        save(folder / TEST, splits["valid"])
        # A file by itself is read as training rows too.
        said = [note for note in extra.get("notes", ()) if not note.endswith(corpora.IN_TRAIN)]
        notes = [note.removeprefix("valid: ") for note in said if note.startswith("valid: ")]
        return {"notes": notes, **extra.get("splits", {}).get("valid", {})}

    def _tokenizer_facts(self, tokenizer: Tokenizer, special: Mapping[str, int | None]) -> dict[str, Any]:
        """What Facts should know of a tokenizer."""
        size = tokenizers.vocabulary_size(tokenizer)
        return {"tokenizer": TOKENIZER_FILE, "vocabulary": size, **special}

    def identity(self) -> dict[str, Any]:
        return {
            "data": self._content_identity(),
            "format": self.recipe.format,
            "tokenizer": self._tokenizer_source().identity(),
            "max_length": self.recipe.max_length,
            "vocab_size": self._vocabulary_size(),
            "options": options_to_dict(self.options),
        }

    def _content_identity(self) -> Any:
        """What the content depends on: hashes of the files, or the name of a hub data set."""
        if self.recipe.data == corpora.DEMO:
            return [file_hash(file) for file in self.demo_files()]
        if files := self._files():
            return readers.content_hashes(files)
        return [self.recipe.data, self.options.data_config]

    def demo_files(self) -> list[Path]:
        """The files that the demo is made of."""
        return corpora.demo_files()

    def _files(self) -> dict[str, readers.SplitFiles]:
        """The files of each split, with that of --valid; none of the demo and of hub data."""
        path = path_of(self.recipe.data)
        found = corpora.find_splits(path, self.recipe.format, self.options) if path else {}
        return found if self.known is None else {"train": found["train"], "valid": found["train"]}

    def count_samples(self, length: int) -> int | None:
        if (files := self._files().get("train")) is None:
            return None
        if files.is_stream:
            return sum(file.stat().st_size for file in files.files) // (BYTES_PER_TOKEN * length) or 1
        return readers.count_rows(files)

    def _check_tables(self, instead: str) -> dict[str, readers.SplitFiles]:
        """The files of each split, with columns; none of the demo and of hub data.

        Raises UserError where they cannot be had; `instead`: what is said of a .txt file.
        """
        self._tokenizer_source()
        if not (files := self._files()):
            check_elsewhere(self.recipe.data, self.options.valid)
        if any(part.is_stream for part in files.values()):
            raise UserError(f"--data {self.recipe.data}: a .txt file has no {instead}")
        return files

    def _tokenizer_source(self) -> tokenizers.TokenizerSource:
        return tokenizers.locate(self.recipe.tokenizer, self.recipe.model, self.recipe.revision)

    def _check_vocabulary_size(self) -> None:
        size, (least, why) = self.options.vocab_size, self.fewest_tokens
        if size is not None and size < least:
            raise UserError(f"--vocab-size {size}: must be at least {least}: {why}")

    def _vocabulary_size(self) -> int:
        default = self.demo_vocabulary_size if self.recipe.data == corpora.DEMO else DEFAULT_VOCABULARY_SIZE
        return self.options.vocab_size or default

    def _tokenizer_folder(self) -> Path | None:
        """The folder or file of the tokenizer, downloaded if necessary; None where one is to be trained."""
        source = self._tokenizer_source()
        return source.path if source.hub_id is None else tokenizers.download(source.hub_id, source.revision)

    def prepared_tokenizer(self, facts: Facts) -> Tokenizer:
        """The tokenizer that lies beside the prepared data."""
        return tokenizers.open_tokenizer(Path(facts.folder) / TOKENIZER_FILE)

    def describe_rows(self, facts: Facts, batch: Mapping[str, np.ndarray]) -> list[str]:
        """The text of each row; of a pair the first."""
        tokens, lengths = batch["tokens"], batch.get("row_length", batch["length"])
        if tokens.ndim == 3:
            tokens, lengths = tokens[:, 0], lengths[:, 0]
        rows = [row[:length].tolist() for row, length in zip(tokens, lengths.tolist(), strict=True)]
        return list(self.prepared_tokenizer(facts).decode_batch(rows))

    def _open_or_train_tokenizer(
        self, texts: Callable[[], Iterable[str]], lowercase: bool = False
    ) -> tuple[Tokenizer, dict[str, int | None]]:
        """The tokenizer, opened or trained on these texts, and its special tokens' ids."""
        if self.known is not None:
            roles = tokenizers.USUAL_SPECIAL_TOKENS
            return self.prepared_tokenizer(self.known), {role: self.known.extra.get(role) for role in roles}
        path = self._tokenizer_folder()
        if path is None:
            train = tokenizers.train_lowercase_bpe if lowercase else tokenizers.train_byte_level_bpe
            tokenizer = train(texts(), self._vocabulary_size())
        else:
            tokenizer = tokenizers.open_as_transformers(path, self._tokenizer_source().model)
        self._require_same_vocabulary(tokenizer)
        return tokenizer, tokenizers.special_token_ids(tokenizer, path)

    def _require_same_vocabulary(self, tokenizer: Tokenizer) -> None:
        """Raise UserError where --tokenizer has another vocabulary than the pretrained model.

        The model's embeddings belong to its own token ids.
        """
        recipe = self.recipe
        if recipe.tokenizer is None:
            return
        own = tokenizers.locate(None, recipe.model, recipe.revision).path
        if own is not None and tokenizers.open_tokenizer(own).get_vocab() != tokenizer.get_vocab():
            raise UserError(
                f"--tokenizer {recipe.tokenizer}: its tokens are not those that {recipe.model} was trained"
                f" with: leave it out"
            )
