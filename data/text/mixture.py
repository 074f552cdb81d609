"""Several sets of text as one: every split's samples lie end to end, set after set."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from isobatch.data.base import Column, Ragged
from isobatch.data.text.conversations import SHOWN_PROMPTS, Conversations
from isobatch.data.text.plain_text import Encoder, Spool
from isobatch.data.text.sources import TextSet

SPLITS = ("train", "valid", "test")
SET = "set"


class Mixture:
    """Several sets.

    Columns: `tokens`, `learn` and `token.weight` as of Conversations, where plain text learns all tokens of
    a block but the first; and `set` (n,) int64, which set a sample is of.
    """

    def __init__(self, sets: Sequence[TextSet]) -> None:
        self.sets = sets
        self.splits = [split for split in SPLITS if any(split in s.splits for s in sets)]
        self.samples: list[dict[str, int]] = [{} for _ in sets]
        self.sizes: list[dict[str, dict[str, int]]] = [{} for _ in sets]

    def texts(self) -> Iterator[str]:
        """What a tokenizer is trained on: of each set as many characters, while it lasts."""
        return in_turn([s.texts() for s in self.sets])

    def open(self, encoder: Encoder) -> None:
        for one in self.sets:
            one.open(encoder)

    def encode(self, split: str, encoder: Encoder) -> tuple[dict[str, Column], dict[str, int]]:
        """A split's columns, and its sizes summed over the sets."""
        tokens, learn = Spool(encoder.kind, encoder.spool), Spool(np.uint8, encoder.spool)
        lengths, weights, numbers = [], [], []
        total: Counter[str] = Counter()
        for number, one in enumerate(self.sets):
            if split in one.splits:
                columns, sizes = one.encode(split, encoder)
                rows = columns["tokens"]
                assert isinstance(rows, Ragged)
                tokens.add(rows.values)
                learn.add(_learn(columns))
                lengths.append(rows.lengths)
                weights.append(np.asarray(columns["token.weight"]))
                numbers.append(np.full(len(rows), number))
                self.samples[number][split], self.sizes[number][split] = len(rows), sizes
                total.update(sizes)
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths), dtype=np.int64)])
        return {
            "tokens": Ragged(tokens.array(), offsets, encoder.special.get("pad") or 0),
            "learn": Ragged(learn.array(), offsets),
            "token.weight": np.concatenate(weights),
            SET: np.concatenate(numbers).astype(np.int64),
        }, dict(total)

    @property
    def _answering(self) -> list[Conversations]:
        """The sets with answers: conversations before labelled texts."""
        found = [s for s in self.sets if isinstance(s, Conversations)]
        return sorted(found, key=lambda s: s.form != Conversations.FORM)

    def facts(self) -> dict[str, Any]:
        answering = self._answering
        shared: dict[str, Any] = answering[0].facts() if answering else {}
        groups = itertools.zip_longest(*(s.prompts for s in answering))
        prompts = [prompt for group in groups for prompt in group if prompt is not None][:SHOWN_PROMPTS]
        sets = [
            {"name": s.name, "form": s.form, "samples": samples, "splits": sizes} | self._own(s)
            for s, samples, sizes in zip(self.sets, self.samples, self.sizes, strict=True)
        ]
        common: dict[str, Any] = {
            key: shared[key] for key in ("eos", "template", "response_only") if key in shared
        }
        return {"form": "mixture", **common, "prompts": prompts, "sets": sets}

    def _own(self, one: TextSet) -> dict[str, Any]:
        kept = ("template", "labels", "label_tokens", "prompts")
        return {key: value for key, value in one.facts().items() if key in kept}

    @property
    def notes(self) -> list[str]:
        return [f"{s.name}: {note}" for s in self.sets for note in s.notes]

    def prompt(self) -> str:
        """What a sample starts with: a question where there is one."""
        return next((found for s in (*self._answering, *self.sets) if (found := s.prompt())), "")


def _learn(columns: dict[str, Column]) -> np.ndarray:
    rows, learn = columns["tokens"], columns.get("learn")
    assert isinstance(rows, Ragged)
    if isinstance(learn, Ragged):
        return learn.values
    all_but_first = np.ones(len(rows.values), np.uint8)
    all_but_first[rows.offsets[:-1]] = 0
    return all_but_first


def in_turn(streams: Iterable[Iterator[str]]) -> Iterator[str]:
    """The texts of all, always from the stream that has given the fewest characters."""
    waiting = [[0, number, stream] for number, stream in enumerate(streams)]
    while waiting:
        least: Any = min(waiting, key=lambda w: (w[0], w[1]))
        text = next(least[2], None)
        if text is None:
            waiting.remove(least)
        else:
            least[0] += max(1, len(text))
            yield text
