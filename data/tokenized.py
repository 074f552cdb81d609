"""What all data made of text shares: where it lies, and the tokenizer it goes through."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from isobatch.core.errors import UserError
from isobatch.data import tokenizers
from isobatch.data.base import Data
from isobatch.data.corpora import DEMO

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
        self._require_models_own(tokenizer)
        return tokenizer, tokenizers.special_ids(tokenizer, path)

    def _require_models_own(self, tokenizer: Tokenizer) -> None:
        """A pretrained model knows its own tokens only; another tokenizer's numbers mean others to it."""
        recipe, options = self.recipe, getattr(self.recipe, "options", {})
        if recipe.tokenizer is None or options.get("resize_embeddings"):
            return
        own = tokenizers.locate(None, recipe.model, recipe.revision).path
        if own is not None and tokenizers.open_tokenizer(own).get_vocab() != tokenizer.get_vocab():
            more = (
                ", or say --resize-embeddings: tokens that both know keep their embeddings"
                if "resize_embeddings" in options
                else ""
            )
            raise UserError(
                f"--tokenizer {recipe.tokenizer}: its tokens are not those that {recipe.model} was trained"
                f" with: leave it out{more}"
            )
