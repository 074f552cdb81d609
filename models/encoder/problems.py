"""What is asked of a text, by the kind of its labels: everything in which one kind differs from another.

A `Problem` is made of the names of the labels, of facts, of a saved config or of a model. No other code asks
which one it is. Letters: B samples of a batch, C classes, n samples of a split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from isobatch.models.base import Batch, Loss, Rows, Sum
from isobatch.models.encoder import class_metrics
from isobatch.models.encoder.evaluation import softmax
from isobatch.models.protocols import ReportRow, ReportTable

if TYPE_CHECKING:
    from torch import Tensor

    from isobatch.models.encoder.evaluation import Predictions

CLASS_WEIGHT, CLASS_WEIGHTS = "class.weight", "class_weights"
"""The column of a sample's weight by its class; the field of the facts, and the buffer, with all weights."""
MOST_ANSWERS = 12
"""Classes up to which the table of classes says how often each was answered with which."""


class Difference(NamedTuple):
    """How far one model's headline figure is above another's on the same samples."""

    value: float
    low: float
    high: float
    """low to high: 95 % interval."""
    p: float
    """p-value of the paired test."""


class Problem(ABC):
    """One kind of labels. Logits and labels are those of a batch, or of a whole split."""

    name: ClassVar[str]
    """In `Facts.extra["problem"]`, and in config.json."""
    head: ClassVar[str] = "SequenceClassification"
    """transformers' classes for it end with `For` and this."""
    headline: ClassVar[str]
    """The metric that is led with, that chooses the best checkpoint, and by which models are compared."""
    title: ClassVar[str]
    """Its name for people."""
    test_name: ClassVar[str]
    """The metric with the p-value of the paired test."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = tuple(labels)

    @abstractmethod
    def loss(
        self, logits: Tensor, batch: Batch, weights: Tensor | None = None, smoothing: float = 0.0
    ) -> Loss:
        """The training loss as a sum with its unit. `weights` (C,): what a sample counts by its class."""

    @abstractmethod
    def soft_loss(self, logits: Tensor, teacher: Tensor, batch: Batch, temperature: float) -> Loss:
        """How far the logits are from a teacher's, as a sum with its unit."""

    @abstractmethod
    def parts(self, logits: Tensor, batch: Batch) -> dict[str, Sum | Rows]:
        """What an evaluation adds up or gathers of a batch."""

    @abstractmethod
    def metrics(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Metrics of the reduced parts: `loss`, `headline`, its interval `headline`_ci95, and others."""

    @abstractmethod
    def evidence(self, found: Predictions) -> np.ndarray:
        """(n, k): what each sample adds to the headline figure."""

    @abstractmethod
    def score(self, evidence: np.ndarray) -> float:
        """The headline figure of samples."""

    @abstractmethod
    def interval(self, evidence: np.ndarray) -> list[float]:
        """[low, high]: its 95 % interval."""

    @abstractmethod
    def difference(self, one: np.ndarray, other: np.ndarray) -> Difference:
        """The paired test of two models, from their evidence on the same samples."""

    @abstractmethod
    def figures(self, found: Predictions) -> dict[str, Any]:
        """More of a finished model for the report, as JSON."""

    @abstractmethod
    def chance(self, row: ReportRow) -> tuple[float, str]:
        """The headline figure of the best answer that reads no text, and which that is.

        `row`: `figures` among others, as of `table`.
        """

    @abstractmethod
    def table(self, name: str, row: ReportRow) -> ReportTable:
        """A line for each label of the model of this name."""

    @abstractmethod
    def answers(self, logits: np.ndarray) -> list[dict[str, Any]]:
        """What `predict` says of each row of logits."""

    def compare(self, mine: Predictions, baseline: Predictions) -> dict[str, float]:
        """The headline figure of a baseline, and the p-value of the difference."""
        ours, theirs = self.evidence(mine), self.evidence(baseline)
        return {
            f"baseline_{self.headline}": self.score(theirs),
            self.test_name: self.difference(ours, theirs).p,
        }


class Classes(Problem):
    """A class per sample; logits (B, C), labels (B,) int64, the numbers of the classes."""

    name = "classes"
    headline = title = "accuracy"
    test_name = "mcnemar_p"

    def loss(
        self, logits: Tensor, batch: Batch, weights: Tensor | None = None, smoothing: float = 0.0
    ) -> Loss:
        """As torch.nn.CrossEntropyLoss with weights and smoothing: the sum, and what it is over.

        With weights its unit is their sum over the global batch, by which PyTorch's mean divides too.
        """
        from torch.nn import functional as F

        total = F.cross_entropy(logits, batch["label"], weights, reduction="sum", label_smoothing=smoothing)
        return Loss(total, "sample" if weights is None else "class")

    def soft_loss(self, logits: Tensor, teacher: Tensor, batch: Batch, temperature: float) -> Loss:
        """T^2 KL(teacher || student), both at temperature T (Hinton et al. 2015)."""
        from torch.nn import functional as F

        ours, theirs = (F.log_softmax(x / temperature, -1) for x in (logits, teacher.float()))
        total = F.kl_div(ours, theirs, reduction="sum", log_target=True)
        return Loss(total * temperature**2, "sample")

    def parts(self, logits: Tensor, batch: Batch) -> dict[str, Sum | Rows]:
        """`answers` (B, 3): label, class with the largest logit, and its probability."""
        import torch
        from torch.nn import functional as F

        confidence, answer = logits.softmax(1).max(1)
        return {
            "nll": Sum(F.cross_entropy(logits, batch["label"], reduction="sum"), len(logits)),
            "answers": Rows(torch.stack([batch["label"].float(), answer.float(), confidence], dim=1)),
        }

    def metrics(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        label, answer, confidence = parts["answers"].T
        count, correct = len(label), int((label == answer).sum())
        confusion = class_metrics.confusion_matrix(label, answer, len(self.labels))
        return {
            "loss": float(parts["nll"].value) / float(parts["nll"].weight),
            "accuracy": correct / count,
            "accuracy_ci95": class_metrics.wilson_interval(correct, count),
            "calibration_error": class_metrics.calibration_error(confidence, label == answer),
            **class_metrics.class_metrics(confusion, self.labels),
        }

    def evidence(self, found: Predictions) -> np.ndarray:
        """(n, 1) bool: whether each is right."""
        return found.is_correct[:, None]

    def score(self, evidence: np.ndarray) -> float:
        return int(evidence.sum()) / len(evidence)

    def interval(self, evidence: np.ndarray) -> list[float]:
        return class_metrics.wilson_interval(int(evidence.sum()), len(evidence))

    def difference(self, one: np.ndarray, other: np.ndarray) -> Difference:
        """Agresti and Min's interval of the difference in accuracy, and McNemar's exact test."""
        both = one[:, 0], other[:, 0]
        return Difference(*class_metrics.paired_difference(*both), class_metrics.mcnemar(*both))

    def figures(self, found: Predictions) -> dict[str, Any]:
        answers, confidence = found.predicted_labels, softmax(found.logits).max(1)
        confusion = class_metrics.confusion_matrix(found.labels, answers, len(self.labels))
        error = class_metrics.calibration_error(confidence, found.is_correct)
        return {"confusion": confusion.tolist(), "calibration_error": error}

    def chance(self, row: ReportRow) -> tuple[float, str]:
        samples = np.array(row["confusion"]).sum(1)
        answer = f"always answering `{self.labels[samples.argmax()]}` would be right in"
        return float(samples.max() / samples.sum()), answer

    def table(self, name: str, row: ReportRow) -> ReportTable:
        """And one for their mean; how often each was answered with which, of few classes."""
        names, confusion = self.labels, np.array(row["confusion"])
        shares, means = class_metrics.class_figures(confusion)
        answers = names if len(names) <= MOST_ANSWERS else []
        lines = [
            [
                label,
                f"{line.sum():,}",
                *(f"{share:.3f}" for share in parts),
                *(f"{n:,}" for n in line if answers),
            ]
            for label, parts, line in zip(names, shares.T, confusion, strict=True)
        ]
        mean = (f"{mean:.3f}" for mean in means)
        lines.append(["mean", f"{confusion.sum():,}", *mean, *("" for _ in answers)])
        correlation, bins = class_metrics.matthews_correlation(confusion), class_metrics.CALIBRATION_BINS
        note = (
            f"Matthews correlation {correlation:.3f}; expected calibration error"
            f" {row['calibration_error']:.3f} ({bins} bins); the mean is over classes (macro)."
        )
        head = [
            "class",
            "samples",
            "precision",
            "recall",
            "F1",
            *(f"answered {answer}" for answer in answers),
        ]
        return ReportTable(f"Classes of {name}", note, head, lines)

    def answers(self, logits: np.ndarray) -> list[dict[str, Any]]:
        """`prediction`, its `probability`, and the `probabilities` of all classes."""
        found = softmax(logits)
        return [
            {
                "prediction": self.labels[best],
                "probability": float(row[best]),
                "probabilities": dict(zip(self.labels, row.tolist(), strict=True)),
            }
            for row, best in zip(found, found.argmax(1), strict=True)
        ]


PROBLEMS: Mapping[str, type[Problem]] = {kind.name: kind for kind in (Classes,)}


def named(name: str, labels: Sequence[str]) -> Problem:
    """The problem of this name."""
    return PROBLEMS[name](labels)


def of_facts(facts: Any) -> Problem:
    """The problem of prepared data."""
    return named(facts.extra.get("problem", Classes.name), facts.extra["labels"])


def of_config(config: Mapping[str, Any]) -> Problem:
    """The problem that a model of this config.json was trained on. Raises KeyError without labels."""
    names = {int(number): str(name) for number, name in config["id2label"].items()}
    noted = (config.get("isobatch") or {}).get("problem")
    return named(noted or Classes.name, [names[number] for number in range(len(names))])


def of_model(model: Any) -> Problem:
    """The problem of a transformers classifier."""
    fields = ("id2label", "isobatch", "problem_type", "architectures")
    return of_config({name: getattr(model.config, name, None) for name in fields})
