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
    from collections.abc import Sequence

    from isobatch.core.facts import Facts
    from isobatch.data.base import Data, Source

AT_A_TIME = 1024
"""Rows."""
MOST_NAMED = 10
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

    def digests(self, width: int, by_text: bool) -> list[bytes]:
        """Of what each row holds, padded to `width`: equal where the rows are."""
        found: list[bytes] = []
        for start in range(0, len(self), AT_A_TIME):
            rows = np.arange(start, min(start + AT_A_TIME, len(self)))
            batch = self.source.fetch(rows, width)
            if by_text:
                contents = [text.encode() for text in self.data.describe_rows(self.facts, batch)]
            else:
                columns = [np.ascontiguousarray(batch[name]) for name in sorted(batch) if name != NUMBER]
                contents = [b"".join(column[at].tobytes() for column in columns) for at in range(len(rows))]
            found += [hashlib.blake2b(content, digest_size=8).digest() for content in contents]
        return found


def compare_data(one: TrainingRows, other: TrainingRows) -> dict[str, object]:
    """`changed`: the first numbers of rows whose content differs, and `changed_rows` how many do, of those
    that both have. `alone`: how many rows each side has that the other has nowhere, and `alone_rows` the
    first of them. `tokenizers_differ`: rows were compared by text.
    """
    by_text, width = one.tokenizer() != other.tokenizer(), max(one.facts.longest, other.facts.longest)
    digests = [side.digests(width, by_text) for side in (one, other)]
    changed = [row for row, (a, b) in enumerate(zip(*digests, strict=False)) if a != b]
    alone = [_alone(*digests), _alone(*digests[::-1])]
    return {
        **{"changed": changed[:MOST_NAMED], "changed_rows": len(changed), "tokenizers_differ": by_text},
        **{"alone": list(map(len, alone)), "alone_rows": [rows[:MOST_NAMED] for rows in alone]},
    }


def _alone(own: Sequence[bytes], others: Sequence[bytes]) -> list[int]:
    """Rows that the other side has nowhere."""
    left, alone = Counter(others), []
    for row, digest in enumerate(own):
        left[digest] -= 1
        if left[digest] < 0:
            alone.append(row)
    return alone
