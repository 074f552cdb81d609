"""Of a file whose rows have labels: how many a classifier answers with them, and which it was trained on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.measures import counted
from isobatch.data.base import Ragged, load
from isobatch.data.labelled.rows import LABEL_COLUMNS, class_name
from isobatch.models.encoder.class_metrics import class_figures, confusion_matrix, wilson_interval

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tokenizers import Tokenizer


class TrainedTexts:
    """The texts of a run's training split, known by their tokens. `folder`: its prepared data."""

    def __init__(self, folder: str, tokenizer: Tokenizer, max_length: int) -> None:
        self._folder, self._tokenizer, self._max_length = Path(folder), tokenizer, max_length
        self._keys: np.ndarray | None = None

    def holds(self, samples: Sequence[str | tuple[str, str]]) -> np.ndarray:
        """(n,) bool, of each text or pair whether a training row has its tokens."""
        self._tokenizer.enable_truncation(self._max_length, strategy="longest_first")
        encoded = self._tokenizer.encode_batch(list(samples), add_special_tokens=True)
        if self._keys is None:
            tokens = load(self._folder / "train")["tokens"]
            assert isinstance(tokens, Ragged)
            parts = zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True)
            self._keys = _keys(tokens.values[start:stop] for start, stop in parts)
        return np.isin(_keys(one.ids for one in encoded), self._keys)


def _keys(rows: Iterable[Sequence[int] | np.ndarray]) -> np.ndarray:
    """(n,) int64, equal for rows of the same tokens; for others with a chance of about 2^-64."""
    return np.fromiter((hash(np.asarray(row, np.int32).tobytes()) for row in rows), np.int64)


class LabelledRows:
    """Counts the rows whose label is one of the model's. `column`: where it is; None for a usual name.

    Rows that the model was trained on are counted apart where that is known (`trained`).
    """

    def __init__(self, column: str | None, trained: TrainedTexts | None) -> None:
        self._columns = (column,) if column else LABEL_COLUMNS
        self._trained = trained
        self._column = ""
        self._classes: list[str] = []
        self._pairs: dict[bool, Counter[tuple[str, str]]] = {True: Counter(), False: Counter()}
        """Whether the row was trained on -> (label, answer) -> rows."""
        self._foreign = 0
        """Rows with a label that the model does not know."""

    def count(
        self, rows: Sequence[Mapping[str, Any]], samples: Sequence[Any], answers: Sequence[Mapping[str, Any]]
    ) -> None:
        """`answers`: with the `prediction` and the `probabilities` of a classifier; others count nothing."""
        self._column = self._column or next((name for name in self._columns if name in rows[0]), "")
        if not self._column or "probabilities" not in answers[0]:
            return
        self._classes = list(answers[0]["probabilities"])
        seen = self._trained.holds(samples).tolist() if self._trained else [False] * len(samples)
        for row, answer, was_seen in zip(rows, answers, seen, strict=True):
            label = class_name(row.get(self._column))
            if label is not None and label in answer["probabilities"]:
                self._pairs[was_seen][label, answer["prediction"]] += 1
            else:
                self._foreign += label is not None

    def lines(self) -> list[str]:
        """Accuracy with its 95 % interval, and the mean F1 of the classes; none where no label is known."""
        new, trained = self._pairs[False].total(), self._pairs[True].total()
        lines = []
        if new:
            lines.append(f"{counted(new, 'row')} with a label in `{self._column}`: {self._figures(False)}")
        if trained:
            others = "left out above" if new else "so that this is no evaluation"
            rows = f"{counted(trained, 'row')} of the run's training data"
            lines.append(f"{rows}, {others}: {self._figures(True)}")
        if lines and self._foreign:
            lines[0] += f"; the model does not know the labels of {self._foreign:,} more"
        return lines

    def _figures(self, trained: bool) -> str:
        labels, answers = (
            np.array([self._classes.index(name) for name in names])
            for names in zip(*self._pairs[trained].elements(), strict=True)
        )
        confusion = confusion_matrix(labels, answers, len(self._classes))
        right, rows, figures = int(confusion.trace()), int(confusion.sum()), class_figures(confusion)
        low, high = (100 * share for share in wilson_interval(right, rows))
        return (
            f"accuracy {100 * right / rows:.1f} % ({low:.1f} to {high:.1f}),"
            f" macro F1 {figures.f1[figures.occurs].mean():.3f}"
        )
