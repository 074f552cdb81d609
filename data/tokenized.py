"""What all data made of text shares: where it lies, and the tokenizer it goes through."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from data import tokenizers
from data.base import Data
from data.corpora import DEMO

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 8192


def path_of(data: str) -> Path | None:
    """The file or folder of this name, if there is one."""
    path = Path(data).expanduser()
    # Path.exists raises where it may not look
    return path if data != DEMO and os.path.exists(path) else None


class Tokenized(Data):
    """Data with texts; its options have a `vocab_size`."""

    demo_vocabulary: ClassVar[int]

    def _place(self) -> tokenizers.Place:
        return tokenizers.locate(self.recipe.tokenizer, self.recipe.model, self.recipe.revision)

    def _path(self) -> Path | None:
        """The file or folder that --data names, if it names one."""
        return path_of(self.recipe.data)

    def _vocabulary_size(self) -> int:
        by_default = self.demo_vocabulary if self.recipe.data == DEMO else VOCABULARY
        return self.options.vocab_size or by_default

    def _tokenizer_folder(self) -> Path | None:
        """Where the model's tokenizer lies on this machine, fetched where it must be; None: to be trained."""
        place = self._place()
        return place.path if place.hub_id is None else tokenizers.download(place.hub_id, place.revision)

    def _tokenizer(self, train: Callable[[int], Tokenizer]) -> tuple[Tokenizer, dict[str, int | None]]:
        """The model's tokenizer, or one trained to a size; and its special ids."""
        path = self._tokenizer_folder()
        tokenizer = tokenizers.open_tokenizer(path) if path is not None else train(self._vocabulary_size())
        return tokenizer, tokenizers.special_ids(tokenizer, path)
