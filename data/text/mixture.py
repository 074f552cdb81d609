"""A mixture: several sets of text as one, the samples of each split one set after another."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.data.base import Column, Ragged
from isobatch.data.preparation.spooled_array import SpooledColumns
from isobatch.data.text.conversation_encoder import SHOWN_PROMPTS
from isobatch.data.text.conversations import Conversations

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from isobatch.data.text.plain_text import TokenizationSettings
    from isobatch.data.text.sources import TextSet

SPLITS = ("train", "valid", "test")
SET_COLUMN = "set"
"""The column with the number of a sample's set."""


class Mixture:
    """Several sets of text.

    Columns: `tokens`, `learn` and `token.weight` as of Conversations (of plain text all tokens of a block but
    the first are learnt), and `set` (n,) int64, the number of a sample's set.
    """

    def __init__(self, sets: Sequence[TextSet]) -> None:
        self.sets = sets
        self.splits = [split for split in SPLITS if any(split in s.splits for s in sets)]
        self.samples: list[dict[str, int]] = [{} for _ in sets]
        self.sizes: list[dict[str, dict[str, int]]] = [{} for _ in sets]

    def texts(self) -> Iterator[str]:
        """The texts that a tokenizer is trained on: of each set as many characters, until it ends."""
        return interleave_by_characters([s.texts() for s in self.sets])

    def bind_tokenizer(self, tokenization: TokenizationSettings) -> None:
        """Let every set choose its template for this tokenizer."""
        for one in self.sets:
            one.bind_tokenizer(tokenization)

    def encode(
        self, split: str, tokenization: TokenizationSettings
    ) -> tuple[dict[str, Column], dict[str, int]]:
        """(columns, sizes) of a split; the sizes are summed over the sets."""
        spooled = SpooledColumns(tokenization.spool_folder)
        total: Counter[str] = Counter()
        for number, one in enumerate(self.sets):
            if split in one.splits:
                columns, sizes = one.encode(split, tokenization)
                rows = columns["tokens"]
                assert isinstance(rows, Ragged)
                arrays = {"tokens": rows.values, "learn": _learn_mask(columns), "lengths": rows.lengths}
                arrays |= {"weights": np.asarray(columns["token.weight"])}
                spooled.add({**arrays, SET_COLUMN: np.full(len(rows), number, np.int64)})
                self.samples[number][split], self.sizes[number][split] = len(rows), sizes
                total.update(sizes)
        found = spooled.arrays()
        offsets = np.concatenate([[0], np.cumsum(found["lengths"], dtype=np.int64)])
        return {
            "tokens": Ragged(found["tokens"], offsets, tokenization.special_ids.get("pad") or 0),
            "learn": Ragged(found["learn"], offsets),
            "token.weight": found["weights"],
            SET_COLUMN: found[SET_COLUMN],
        }, dict(total)

    @property
    def _conversation_sets(self) -> list[Conversations]:
        """The sets that have answers: conversations first, then labelled texts."""
        found = [s for s in self.sets if isinstance(s, Conversations)]
        return sorted(found, key=lambda s: s.form != Conversations.FORM)

    def facts(self) -> dict[str, Any]:
        """What Facts should know: the template that all share, prompts of all sets, and each set's own."""
        conversation_sets = self._conversation_sets
        shared: dict[str, Any] = conversation_sets[0].facts() if conversation_sets else {}
        groups = itertools.zip_longest(*(s.prompts for s in conversation_sets))
        prompts = [prompt for group in groups for prompt in group if prompt is not None][:SHOWN_PROMPTS]
        sets = [
            {"name": s.name, "form": s.form, "samples": samples, "splits": sizes} | self._set_facts(s)
            for s, samples, sizes in zip(self.sets, self.samples, self.sizes, strict=True)
        ]
        common: dict[str, Any] = {
            key: shared[key] for key in ("eos", "template", "response_only") if key in shared
        }
        return {"form": "mixture", **common, "prompts": prompts, "sets": sets}

    def _set_facts(self, one: TextSet) -> dict[str, Any]:
        kept = ("template", "labels", "label_tokens", "prompts")
        return {key: value for key, value in one.facts().items() if key in kept}

    @property
    def notes(self) -> list[str]:
        """What the user should know, one line each, with the set's name."""
        return [f"{s.name}: {note}" for s in self.sets for note in s.notes]

    def prompt(self) -> str:
        """A prompt to try the model with: of a conversation if there is any, else words of plain text."""
        return next((found for s in (*self._conversation_sets, *self.sets) if (found := s.prompt())), "")


def _learn_mask(columns: dict[str, Column]) -> np.ndarray:
    """(all tokens,) uint8: the column `learn`; without one, every token of a row but the first."""
    rows, learn = columns["tokens"], columns.get("learn")
    assert isinstance(rows, Ragged)
    if isinstance(learn, Ragged):
        return learn.values
    all_but_first = np.ones(len(rows.values), np.uint8)
    all_but_first[rows.offsets[:-1]] = 0
    return all_but_first


def interleave_by_characters(streams: Iterable[Iterator[str]]) -> Iterator[str]:
    """The texts of all streams, each time from the one that has given the fewest characters so far."""
    waiting = [[0, number, stream] for number, stream in enumerate(streams)]
    while waiting:
        shortest: Any = min(waiting, key=lambda w: (w[0], w[1]))
        text = next(shortest[2], None)
        if text is None:
            waiting.remove(shortest)
        else:
            shortest[0] += max(1, len(text))
            yield text
