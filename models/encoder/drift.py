"""Whether texts are like those on which a classifier was measured: their lengths, pieces that training never
saw, and what is answered how surely.

Letters: C classes, n texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.models.base import Batch

FALSE_ALARM = 1e-3
"""Chance at most that one of the distributions is said to differ where it does not."""
LEAST_DISTANCE = 0.1
"""Of two distributions that are said to differ, from 0 to 1: in a large file anything is significant."""
PERCENT = 101
NAMES = {
    "length": "{:.3g} tokens a text ({:.3g})",
    "unseen": "{:.2g} % of pieces that training never saw ({:.2g} %)",
    "confidence": "{:.3g} % sure on average ({:.3g} %)",
}
"""What is counted over ordered bins, and how its means are told: now, and where the model was measured."""
ANSWERS = "answers"


def training_pieces(folder: Path, vocabulary: int, unknown: int | None) -> np.ndarray:
    """(vocabulary,) bool: which pieces the training texts of prepared data have, `unknown` not among them."""
    pieces = np.load(folder / "train" / "tokens-values.npy", mmap_mode="r")
    seen = np.zeros(vocabulary, bool)
    for start in range(0, len(pieces), 1 << 20):
        seen[pieces[start : start + (1 << 20)]] = True
    if unknown is not None:
        seen[unknown] = False
    return seen


class Profile:
    """Counts of texts, added up as they come: its size does not grow with them."""

    def __init__(self, seen: np.ndarray, longest: int) -> None:
        """`seen`: as of `training_pieces`. Texts of more than `longest` tokens count as that long."""
        self.seen, self.longest = seen, longest
        self.counts: dict[str, np.ndarray] = {}
        """Name -> texts in each bin; of ANSWERS (C,)."""

    def counting(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, whose texts are added as they pass."""
        for batch in batches:
            rows = zip(batch["tokens"].tolist(), batch["length"].tolist(), strict=True)
            self.add_texts([tokens[:length] for tokens, length in rows])
            yield batch

    def add_texts(self, texts: Sequence[Sequence[int]]) -> None:
        """Texts as their tokens; one without any has none that training never saw."""
        strange = [100 * (~self.seen[np.asarray(text, np.int64)]).sum() / max(1, len(text)) for text in texts]
        self._count("length", [min(len(text), self.longest) for text in texts], self.longest + 1)
        self._count("unseen", strange, PERCENT)

    def add_answers(self, probabilities: np.ndarray) -> None:
        """(n, C), of the same texts."""
        self._count("confidence", 100 * probabilities.max(1), PERCENT)
        self._count(ANSWERS, probabilities.argmax(1), probabilities.shape[1])

    def _count(self, name: str, values: Any, bins: int) -> None:
        found = np.bincount(np.asarray(values, np.int64), minlength=bins)
        self.counts[name] = self.counts.get(name, 0) + found


def differences(
    now: Mapping[str, np.ndarray], then: Mapping[str, np.ndarray], labels: Sequence[str]
) -> list[str]:
    """What differs from `then`, each as some words; by so much that chance does it once in 1 / FALSE_ALARM
    files, and by LEAST_DISTANCE at least.

    Of ordered bins the distance is Kolmogorov and Smirnov's, with the bound of Wei and Dudley 2012
    (Dvoretzky-Kiefer-Wolfowitz of two samples); of answers half the sum of differences of their shares
    (total variation), with McDiarmid's bound of 1989 on how far it is above its mean, and Jensen's on that.
    """
    said = []
    for name, counts in now.items():
        (p, q), (few, many) = zip(*((c / c.sum(), c.sum()) for c in (counts, then[name])), strict=True)
        spread = math.sqrt(1 / few + 1 / many)
        if name == ANSWERS:
            distance = np.abs(p - q).sum() / 2
            both = (counts + then[name]) / (few + many)
            chance = spread * (np.sqrt(both * (1 - both)).sum() / 2 + math.sqrt(-math.log(FALSE_ALARM) / 2))
            most = int((p - q).argmax())
            words = f"{labels[most]} is {100 * p[most]:.3g} % of the answers ({100 * q[most]:.3g} %)"
        else:
            distance = np.abs(np.cumsum(p - q)).max()
            chance = spread * math.sqrt(math.log(2 / FALSE_ALARM) / 2)
            words = NAMES[name].format(*(share @ np.arange(len(share)) for share in (p, q)))
        if distance > max(LEAST_DISTANCE, chance):
            said.append(f"{words}, distance {distance:.2f}")
    return said
