"""How the prepared training data of two runs differs: which rows changed, moved, or are in one alone.

Where the tokenizers differ, as one that was trained on the data may after a changed word, all tokens do: rows
are then compared by their texts.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from isobatch.data.base import MEASURES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isobatch.core.facts import Facts
    from isobatch.data.base import Data, Source

AT_A_TIME = 1024
"""Rows."""
MOST_NAMED = 10
MOST_MATCHED = 1_000_000
"""Rows of data that is looked through for rows that moved."""
TOKENIZER = "tokenizer"
"""Field of facts.extra: the tokenizer's file in the prepared folder."""
NUMBER = MEASURES[0]
"""The column that `fetch` adds, and that is no content."""


class TrainingRows:
    """The training rows of a run's prepared data, to compare with those of another."""

    def __init__(self, data: Data, facts: Facts) -> None:
        self.data, self.facts = data, facts
        self.source: Source = data.open(Path(facts.folder), "train")

    def __len__(self) -> int:
        return len(self.source)

    def tokenizer(self) -> bytes:
        """Empty where the data has none."""
        name = self.facts.extra.get(TOKENIZER)
        file = Path(self.facts.folder) / str(name)
        return file.read_bytes() if name and file.is_file() else b""

    def contents(self, rows: np.ndarray, width: int, by_text: bool) -> list[bytes]:
        """What each row holds, padded to `width`: equal where the rows are."""
        batch = self.source.fetch(rows, width)
        if by_text:
            return [text.encode() for text in self.data.describe_rows(self.facts, batch)]
        columns = [np.ascontiguousarray(batch[name]) for name in sorted(batch) if name != NUMBER]
        return [b"".join(column[at].tobytes() for column in columns) for at in range(len(rows))]


def compare_data(one: TrainingRows, other: TrainingRows) -> dict[str, object]:
    """`changed`: the first numbers of rows whose content differs, and `changed_rows` how many do, of those
    that both have; `tokenizers_differ`: rows were then compared by text. `alone`: where more rows changed
    than are named, how many rows each side has that the other has nowhere, and `alone_rows` the first of
    them; None where the data is too large to look.
    """
    by_text = one.tokenizer() != other.tokenizer()
    changed, number = _changed(one, other, by_text)
    found = {"changed": changed, "changed_rows": number, "tokenizers_differ": by_text}
    moved = number > MOST_NAMED or len(one) != len(other)
    if not moved or max(len(one), len(other)) > MOST_MATCHED:
        return {**found, "alone": None, "alone_rows": [[], []]}
    counts, rows = _alone(one, other, by_text)
    return {**found, "alone": counts, "alone_rows": rows}


def _changed(one: TrainingRows, other: TrainingRows, by_text: bool) -> tuple[list[int], int]:
    """(the first rows whose content differs, how many do)."""
    named: list[int] = []
    number, width = 0, _width(one, other)
    for rows in _blocks(min(len(one), len(other))):
        pair = one.contents(rows, width, by_text), other.contents(rows, width, by_text)
        differing = [int(row) for row, a, b in zip(rows, *pair, strict=True) if a != b]
        named += differing[: MOST_NAMED - len(named)]
        number += len(differing)
    return named, number


def _alone(one: TrainingRows, other: TrainingRows, by_text: bool) -> tuple[list[int], list[list[int]]]:
    """Rows of each that the other has nowhere: (how many, the first of them)."""
    digests = [_digests(side, _width(one, other), by_text) for side in (one, other)]
    counts, named = [], []
    for own, others in (digests, digests[::-1]):
        left = Counter(others)
        alone = []
        for row, digest in enumerate(own):
            left[digest] -= 1
            if left[digest] < 0:
                alone.append(row)
        counts.append(len(alone))
        named.append(alone[:MOST_NAMED])
    return counts, named


def _digests(side: TrainingRows, width: int, by_text: bool) -> list[bytes]:
    return [
        hashlib.blake2b(content, digest_size=8).digest()
        for rows in _blocks(len(side))
        for content in side.contents(rows, width, by_text)
    ]


def _width(one: TrainingRows, other: TrainingRows) -> int:
    return max(one.facts.longest, other.facts.longest)


def _blocks(count: int) -> Iterator[np.ndarray]:
    for start in range(0, count, AT_A_TIME):
        yield np.arange(start, min(start + AT_A_TIME, count))
