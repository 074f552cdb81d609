"""Of a file whose rows have labels: how many a classifier answers with them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.measures import counted
from isobatch.data.labelled.columns import LABEL_COLUMNS
from isobatch.data.labelled.rows import class_name
from isobatch.models.encoder.class_metrics import class_figures
from isobatch.models.encoder.evaluation import wilson_interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from isobatch.launch.predicting.trained_texts import TrainedTexts


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
        self._classes = self._classes or list(answers[0]["probabilities"])
        seen = self._trained.holds(samples).tolist() if self._trained else [False] * len(samples)
        for row, answer, was_seen in zip(rows, answers, seen, strict=True):
            label = class_name(row.get(self._column))
            if label is None:
                continue
            if label in answer["probabilities"]:
                self._pairs[was_seen][label, answer["prediction"]] += 1
            else:
                self._foreign += 1

    def lines(self) -> list[str]:
        """Accuracy with its 95 % interval, and the mean F1 of the classes; none where no label is known."""
        new, trained = self._pairs[False].total(), self._pairs[True].total()
        foreign = f"; the model does not know the labels of {self._foreign:,} more" if self._foreign else ""
        lines = []
        if new:
            have = "has" if new == 1 else "have"
            named = f"{counted(new, 'row')} {have} a label in `{self._column}`"
            lines.append(f"{named}: {self._figures(False)}{foreign}")
        if trained:
            others = "left out above" if new else "so that this is no evaluation"
            rows = f"{counted(trained, 'row')}{' more' if new else ''} {'is' if trained == 1 else 'are'}"
            lines.append(
                f"{rows} in the run's training data, {others}: {self._figures(True)}{'' if new else foreign}"
            )
        return lines

    def _figures(self, trained: bool) -> str:
        places = {name: place for place, name in enumerate(self._classes)}
        confusion = np.zeros((len(places), len(places)), np.int64)
        for (label, answer), count in self._pairs[trained].items():
            confusion[places[label], places[answer]] += count
        right, rows, figures = int(confusion.trace()), int(confusion.sum()), class_figures(confusion)
        low, high = (100 * share for share in wilson_interval(right, rows))
        return (
            f"accuracy {100 * right / rows:.1f} % ({low:.1f} to {high:.1f}),"
            f" macro F1 {figures.f1[figures.occurs].mean():.3f}"
        )
