"""Of a file whose rows have labels: how many a classifier answers with them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.data.labelled.columns import LABEL_COLUMNS
from isobatch.models.encoder.class_metrics import class_figures
from isobatch.models.encoder.evaluation import wilson_interval

if TYPE_CHECKING:
    from collections.abc import Mapping


class LabelledRows:
    """Counts the rows whose label is one of the model's. `column`: where it is; None for a usual name."""

    def __init__(self, column: str | None) -> None:
        self._columns = (column,) if column else LABEL_COLUMNS
        self._column = ""
        self._classes: list[str] = []
        self._pairs: Counter[tuple[str, str]] = Counter()
        """(label, answer) -> rows."""
        self._foreign = 0
        """Rows with a label that the model does not know."""

    def count(self, row: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        """`answer`: with the `prediction` and the `probabilities` of a classifier; others count nothing."""
        self._column = self._column or next((name for name in self._columns if name in row), "")
        if not self._column or "probabilities" not in answer or row.get(self._column) in (None, ""):
            return
        self._classes = self._classes or list(answer["probabilities"])
        if (label := str(row[self._column])) in answer["probabilities"]:
            self._pairs[label, answer["prediction"]] += 1
        else:
            self._foreign += 1

    def line(self) -> str:
        """Accuracy with its 95 % interval, and the mean F1 of the classes; empty where no label is known."""
        if not (rows := self._pairs.total()):
            return ""
        places = {name: place for place, name in enumerate(self._classes)}
        confusion = np.zeros((len(places), len(places)), np.int64)
        for (label, answer), count in self._pairs.items():
            confusion[places[label], places[answer]] += count
        right, figures = int(confusion.trace()), class_figures(confusion)
        low, high = (100 * share for share in wilson_interval(right, rows))
        foreign = f"; the model does not know the labels of {self._foreign:,} more" if self._foreign else ""
        return (
            f"{rows:,} rows have a label in `{self._column}`: accuracy {100 * right / rows:.1f} %"
            f" ({low:.1f} to {high:.1f}), macro F1 {figures.f1[figures.occurs].mean():.3f}{foreign}"
        )
