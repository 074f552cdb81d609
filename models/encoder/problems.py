"""What is asked of a text, by the kind of its labels: everything in which one kind differs from another.

A `Problem` is made of the names of the labels, of facts, of a saved config or of a model. No other code asks
which one it is. Letters: B samples of a batch, C classes, n samples of a split.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from isobatch.core.errors import refuse
from isobatch.models.base import Batch, Loss, Rows, Sum
from isobatch.models.encoder import class_metrics
from isobatch.models.encoder.calibration import Calibration
from isobatch.models.encoder.class_metrics import Predictions, softmax
from isobatch.models.protocols import ReportRow, ReportTable

if TYPE_CHECKING:
    from torch import Tensor

    from isobatch.models.encoder.drift import Profile

CLASS_WEIGHTS = "class_weights"
"""The field of the facts, and the buffer, with the weights of all classes."""
WORD = re.compile(r"[@#]?\w+(?:[-'\u2019.&/:]\w+)*|[^\w\s]")
"""A word of a text, much as data sets of tagged words part them: letters and digits, with signs between them
as in don't, e-mail and 3.5, and with @ or # before; every other sign is a word."""
NOISE = "within the noise"
SIGNIFICANT = 0.05
"""The paired test's p from which a difference is within the noise."""
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

    @property
    def verdict(self) -> str:
        """What the one model is."""
        if self.p >= SIGNIFICANT:
            return NOISE
        return "better" if self.value > 0 else "worse"


class LossTerms(NamedTuple):
    """What a recipe and data say of a loss beside the logits and the labels."""

    weights: Tensor | None = None
    """(C,): what a sample, or a word, counts by its class; of multi-label what a label that is there counts
    beside one that is not."""
    smoothing: float = 0.0
    huber: bool = False
    """Of scores: Huber's loss in place of the square."""
    focal: float = 0.0
    """gamma of the focal loss (Lin et al. 2017), of labels that are not smoothed; 0 is cross-entropy."""


PLAIN = LossTerms()


class Problem(ABC):
    """One kind of labels. Logits and labels are those of a batch, or of a whole split."""

    name: ClassVar[str]
    """In `Facts.extra["problem"]`, and in config.json."""
    head: ClassVar[str] = "SequenceClassification"
    """transformers' classes for it end with `For` and this."""
    problem_type: ClassVar[str | None] = None
    """transformers' name in config.json, by which it chooses its own loss."""
    pipeline: ClassVar[str] = "text-classification"
    """The hub's name."""
    description: ClassVar[str]
    """Of the model card; {labels} are their names, {count} how many."""
    is_score: ClassVar[bool] = False
    per_token: ClassVar[bool] = False
    """Whether logits and labels are (B, T, ...)."""
    headline: ClassVar[str]
    """The metric that is led with, that chooses the best checkpoint, and by which models are compared."""
    title: ClassVar[str]
    """Its name for people."""
    choices: ClassVar[Sequence[str]]
    """Metrics that may choose the best checkpoint, beside `headline` and `loss`."""
    test: ClassVar[str] = "the paired bootstrap"
    test_name: ClassVar[str] = "bootstrap_p"
    """The metric with the p-value of the paired test."""

    has_confidence: ClassVar[bool] = False
    """Whether an answer is one class with a `probability`, which can be calibrated."""
    has_thresholds: ClassVar[bool] = False
    """Whether an answer is labels, each from a probability on."""

    def __init__(self, labels: Sequence[str], kept: Calibration | None = None) -> None:
        """`kept`: what validation said of the model, by which it answers."""
        self.labels, self.kept = tuple(labels), kept or Calibration()

    @abstractmethod
    def loss(self, logits: Tensor, batch: Batch, terms: LossTerms = PLAIN) -> Loss:
        """The training loss as a sum with its unit."""

    @abstractmethod
    def soft_loss(self, logits: Tensor, teacher: Tensor, batch: Batch, temperature: float) -> Loss:
        """How far the logits are from a teacher's, as a sum with its unit."""

    def parts(self, logits: Tensor, batch: Batch) -> dict[str, Sum | Rows]:
        """What an evaluation adds up or gathers of a batch."""
        import torch

        found = Predictions.of(logits.cpu().numpy(), batch["label"].cpu().numpy())
        evidence = torch.from_numpy(self.evidence(found))
        return {"nll": Sum(self.loss(logits, batch).sum, len(found.labels)), "evidence": Rows(evidence)}

    def metrics(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Metrics of the reduced parts: `loss`, `headline` and others."""
        loss = float(parts["nll"].value) / max(1.0, float(parts["nll"].weight))
        return {"loss": loss, **self.figures(parts["evidence"])}

    @abstractmethod
    def evidence(self, found: Predictions) -> np.ndarray:
        """(n, k): what of each sample the figures follow from."""

    @abstractmethod
    def figures(self, evidence: np.ndarray) -> dict[str, Any]:
        """Metrics of samples, the headline among them."""

    def brief(self, evidence: np.ndarray) -> np.ndarray:
        """(n, few): as much of it as `score` and `difference` need, which read both."""
        return evidence

    @abstractmethod
    def score(self, evidence: np.ndarray) -> float:
        """The headline figure of samples."""

    def interval(self, evidence: np.ndarray) -> list[float]:
        """[low, high]: its 95 % interval, by the bootstrap."""
        drawn = class_metrics.bootstrap(self.brief(evidence), self.score)
        return [float(end) for end in np.percentile(drawn, (2.5, 97.5))]

    def difference(self, one: np.ndarray, other: np.ndarray) -> Difference:
        """The paired test of two models, from their evidence on the same samples, which are drawn together
        (paired bootstrap, Efron and Tibshirani 1993). p is twice the share of the draws on the rarer side of
        0, a tie on both.
        """
        both = np.stack([self.brief(one), self.brief(other)], 1)

        def apart(rows: np.ndarray) -> float:
            return self.score(rows[:, 0]) - self.score(rows[:, 1])

        drawn = class_metrics.bootstrap(both, apart)
        fewer = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
        low, high = np.percentile(drawn, (2.5, 97.5)).tolist()
        return Difference(apart(both), low, high, min(1.0, 2 * (fewer + 1) / (class_metrics.DRAWS + 1)))

    def detail(self, evidence: np.ndarray) -> dict[str, Any]:
        """What `table` reads, as JSON."""
        return self.figures(evidence)

    @abstractmethod
    def table(self, name: str, row: ReportRow) -> ReportTable:
        """A line for each label of the model of this name."""

    def settle(self, found: Predictions, profile: Profile) -> Calibration:
        """What is kept with the model: of validation, whose texts `profile` has counted."""
        return Calibration(profile=profile)

    def settled_metrics(self, found: Callable[[], Predictions]) -> dict[str, Any]:
        """Held-out metrics of what was chosen on validation, where something was."""
        return {}

    def check(self, metric: str, smoothing: float, huber: bool, focal: float) -> None:
        """Raise UserError for flags that mean nothing here. `metric`: --best-metric."""
        known = ("auto", "loss", self.headline, *self.choices)
        mine = f"the labels are {self.name}"
        refuse(
            {
                f"--best-metric {metric}: {mine}: take {', '.join(known[1:])}": metric not in known,
                f"--label-smoothing {smoothing:g}: {mine}: leave it out": smoothing and self.is_score,
                f"--focal {focal:g}: {mine}: leave it out": focal and self.is_score,
                f"--regression-loss huber: {mine}: leave it out": huber and not self.is_score,
            }
        )

    def encode(self, tokenizer: Any, texts: Sequence[Any]) -> list[Any]:
        """The texts' encodings."""
        return list(tokenizer.encode_batch(list(texts), add_special_tokens=True))

    def pick(self, encoding: Any, logits: np.ndarray) -> np.ndarray:
        """Of a text's logits those that say something."""
        return logits

    @abstractmethod
    def answers(self, logits: Sequence[np.ndarray], texts: Sequence[Any]) -> list[dict[str, Any]]:
        """What `predict` says of each text."""


class OneOfSeveral(Problem):
    """A class for each sample or word: cross-entropy."""

    unit: ClassVar[str] = "sample"

    def loss(self, logits: Tensor, batch: Batch, terms: LossTerms = PLAIN) -> Loss:
        """As torch.nn.CrossEntropyLoss with weights and smoothing: the sum, and what it is over.

        With weights its unit is their sum over the global batch, by which PyTorch's mean divides too.
        """
        from torch.nn import functional as F

        logits, labels = logits.flatten(0, -2), batch["label"].flatten()
        if terms.focal:
            each = _focal(F.cross_entropy(logits, labels, reduction="none"), terms.focal)
            total = (each if terms.weights is None else each * terms.weights[labels.clamp(min=0)]).sum()
        else:
            smoothing = terms.smoothing
            total = F.cross_entropy(logits, labels, terms.weights, reduction="sum", label_smoothing=smoothing)
        return Loss(total, self.unit if terms.weights is None else "class")

    def soft_loss(self, logits: Tensor, teacher: Tensor, batch: Batch, temperature: float) -> Loss:
        """The sum of T^2 KL(teacher || student), both at temperature T (Hinton et al. 2015)."""
        from torch.nn import functional as F

        if self.per_token:
            logits, teacher = (x[batch["label"] >= 0] for x in (logits, teacher))
        ours, theirs = (F.log_softmax(x / temperature, -1) for x in (logits, teacher.float()))
        total = F.kl_div(ours, theirs, reduction="sum", log_target=True)
        return Loss(total * temperature**2, self.unit)


class Classes(OneOfSeveral):
    """A class per sample; logits (B, C), labels (B,) int64, the numbers of the classes."""

    name = "classes"
    description = "Tells {count} classes apart: {labels}."
    headline = title = "accuracy"
    choices = ("f1", "f1_macro", "mcc")
    test, test_name = "McNemar's exact test", "mcnemar_p"
    has_confidence = True

    def figures(self, evidence: np.ndarray) -> dict[str, Any]:
        detail = self.detail(evidence)
        return {
            "accuracy": self.score(evidence),
            "accuracy_ci95": self.interval(evidence),
            "calibration_error": detail["calibration_error"],
            **class_metrics.class_metrics(np.array(detail["confusion"]), self.labels),
        }

    def evidence(self, found: Predictions) -> np.ndarray:
        """(n, 3): label, class with the largest logit, and its probability."""
        return np.stack([found.labels, found.predicted_labels, softmax(found.logits).max(1)], 1)

    def score(self, evidence: np.ndarray) -> float:
        return int(_is_right(evidence).sum()) / len(evidence)

    def interval(self, evidence: np.ndarray) -> list[float]:
        return class_metrics.wilson_interval(int(_is_right(evidence).sum()), len(evidence))

    def difference(self, one: np.ndarray, other: np.ndarray) -> Difference:
        """Agresti and Min's interval of the difference in accuracy, and McNemar's exact test."""
        both = _is_right(one), _is_right(other)
        return Difference(*class_metrics.paired_difference(*both), class_metrics.mcnemar(*both))

    def settle(self, found: Predictions, profile: Profile) -> Calibration:
        """And a temperature, with what is answered how surely."""
        return Calibration.fit(found, profile)

    def settled_metrics(self, found: Callable[[], Predictions]) -> dict[str, Any]:
        return self.kept.metrics(found()) if self.kept.confidences else {}

    def detail(self, evidence: np.ndarray) -> dict[str, Any]:
        label, answer, confidence = evidence.T
        error, count = class_metrics.calibration_error(confidence, label == answer), len(self.labels)
        # Rows are labels, columns answers.
        pairs = np.bincount((label * count + answer).astype(np.int64), minlength=count**2)
        return {"confusion": pairs.reshape(count, count).tolist(), "calibration_error": error}

    def table(self, name: str, row: ReportRow) -> ReportTable:
        """And one for their mean; how often each was answered with which, of few classes."""
        confusion = np.array(row["confusion"])
        shares, means = class_metrics.class_figures(confusion)
        sizes = [*confusion.sum(1), confusion.sum()]
        lines = _share_lines([*self.labels, "mean"], sizes, [*shares.T, means], len(self.labels))
        head = ["class", "samples", "precision", "recall", "F1"]
        if len(self.labels) <= MOST_ANSWERS:
            head += [f"answered {answer}" for answer in self.labels]
            for line, counts in zip(lines, [*confusion, []], strict=True):
                line += [f"{n:,}" for n in counts] or [""] * len(confusion)
        correlation, bins = class_metrics.matthews_correlation(confusion), class_metrics.CALIBRATION_BINS
        note = (
            f"Matthews correlation {correlation:.3f}; expected calibration error"
            f" {row['calibration_error']:.3f} ({bins} bins); the mean is over classes (macro)."
        )
        return ReportTable(f"Classes of {name}", note, head, lines)

    def answers(self, logits: Sequence[np.ndarray], texts: Sequence[Any]) -> list[dict[str, Any]]:
        """`prediction`, its `probability`, and the `probabilities` of all classes."""
        found = softmax(np.array(logits).reshape(len(logits), len(self.labels)))
        return [
            {
                "prediction": self.labels[best],
                "probability": float(row[best]),
                "probabilities": dict(zip(self.labels, row.tolist(), strict=True)),
            }
            for row, best in zip(found, found.argmax(1), strict=True)
        ]


class Counted(Problem):
    """Labels that a sample has any number of; the headline is F1 over all of them together (micro)."""

    headline = "f1_micro"
    choices: ClassVar[Sequence[str]] = ("f1_macro",)
    absent: ClassVar[bool]
    """Whether labels that are nowhere count in means over labels."""
    kinds: tuple[str, ...]
    """What is counted."""

    @abstractmethod
    def evidence(self, found: Predictions) -> np.ndarray:
        """(n, 3 K): of each kind how often it is right, there, and answered."""

    def figures(self, evidence: np.ndarray) -> dict[str, Any]:
        counts = self._counts(evidence)
        by_label, means = class_metrics.label_figures(counts, self.absent)
        micro = class_metrics.label_figures(counts.sum(1, keepdims=True)).means
        found: dict[str, Any] = {}
        for place, name in (2, "f1"), (0, "precision"), (1, "recall"):
            found |= {f"{name}_micro": micro[place], f"{name}_macro": means[place]}
        if len(self.kinds) <= class_metrics.LARGEST_CONFUSION:
            found |= {"labels": list(self.kinds), "f1_by_label": by_label[2].tolist()}
        return found

    def _counts(self, evidence: np.ndarray) -> np.ndarray:
        """(3, K): how often each is right, there, and answered."""
        return evidence.sum(0, dtype=np.float64).reshape(-1, 3).T

    def brief(self, evidence: np.ndarray) -> np.ndarray:
        return evidence.reshape(len(evidence), -1, 3).sum(1)

    def score(self, evidence: np.ndarray) -> float:
        right, labelled, answered = self._counts(evidence).sum(1)
        return float(2 * right / max(1.0, labelled + answered))

    def detail(self, evidence: np.ndarray) -> dict[str, Any]:
        return {"counts": self._counts(evidence).astype(int).tolist()}

    def table(self, name: str, row: ReportRow) -> ReportTable:
        """And the means over labels (macro), and all of them together (micro)."""
        counts = np.array(row["counts"])
        by_label, means = class_metrics.label_figures(counts, self.absent)
        micro = class_metrics.label_figures(counts.sum(1, keepdims=True)).means
        names, sizes = [*self.kinds, "macro", "micro"], [*counts[1], counts[1].sum(), counts[1].sum()]
        lines = _share_lines(names, sizes, [*by_label.T, means, micro], len(self.kinds))
        head = ["label", "there", "precision", "recall", "F1"]
        return ReportTable(f"Labels of {name}", f"{self.title}: of all together.", head, lines)


class MultiLabel(Counted):
    """Any number of labels per sample; logits (B, C), labels (B, C) float32 of 0 and 1.

    A label is answered whose probability, the logit's sigmoid, is at least 0.5, or what was chosen for it.
    """

    name = "multi-label"
    problem_type = "multi_label_classification"
    description = "Says which of {count} labels a text has: {labels}."
    title = "micro F1"
    choices = ("f1_macro", "subset_accuracy")
    absent = has_thresholds = True

    def __init__(self, labels: Sequence[str], kept: Calibration | None = None) -> None:
        super().__init__(labels, kept)
        self.kinds = self.labels

    def loss(self, logits: Tensor, batch: Batch, terms: LossTerms = PLAIN) -> Loss:
        """Over samples the sum of the mean over classes, as the mean of torch.nn.BCEWithLogitsLoss has it;
        `weights` are its pos_weight.
        """
        from torch.nn import functional as F

        wanted = batch["label"].float() * (1 - terms.smoothing) + terms.smoothing / 2
        if terms.focal:
            each = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
            counts = 1.0 if terms.weights is None else 1 + (terms.weights - 1) * wanted
            return Loss((_focal(each, terms.focal) * counts).sum() / logits.shape[1], "sample")
        total = F.binary_cross_entropy_with_logits(logits, wanted, reduction="sum", pos_weight=terms.weights)
        return Loss(total / logits.shape[1], "sample")

    def soft_loss(self, logits: Tensor, teacher: Tensor, batch: Batch, temperature: float) -> Loss:
        """Over samples the sum of the mean over classes of T^2 KL(teacher || student) of there or not."""
        from torch.nn import functional as F

        theirs = teacher.float() / temperature
        crossed, own = (
            F.binary_cross_entropy_with_logits(one, theirs.sigmoid(), reduction="sum")
            for one in (logits / temperature, theirs)
        )
        return Loss((crossed - own) * temperature**2 / logits.shape[1], "sample")

    def evidence(self, found: Predictions) -> np.ndarray:
        is_label, is_answer = found.labels > 0.5, _sigmoid(found.logits) >= self.kept.thresholds
        counts = np.stack([is_label & is_answer, is_label, is_answer], 2)
        return counts.reshape(len(counts), -1).astype(np.float32)

    def figures(self, evidence: np.ndarray) -> dict[str, Any]:
        """And subset_accuracy, the share of samples with exactly their labels."""
        right, labelled, answered = self.brief(evidence).T
        exact = float(((right == labelled) & (right == answered)).mean())
        return {**super().figures(evidence), "subset_accuracy": exact}

    def settle(self, found: Predictions, profile: Profile) -> Calibration:
        """And the threshold of each label that is best for its F1, its log-odds times m / (m + 1) where m
        samples have it: of one sample's it is halfway to 0.5.

        Measured on simulated labels (shares of .01 to .3, log-odds as they are, 1 too high, 1 and 3 too low),
        F1 on fresh rows, mean and worst of 20: with one such sample .52 and .42 so, .52 and .34 with the best
        threshold, .44 with 0.5; from 8 on they differ by .005 at most, of log-odds 3 too low by .017.
        """
        is_label = found.labels > 0.5
        both = zip(_sigmoid(found.logits).T, is_label.T, strict=True)
        best = np.array([class_metrics.best_threshold(*one) for one in both])
        odds = np.log(best / (1 - best)) * is_label.sum(0) / (is_label.sum(0) + 1)
        return Calibration(profile=profile, thresholds=_sigmoid(odds))

    def settled_metrics(self, found: Callable[[], Predictions]) -> dict[str, Any]:
        """Their names begin with `tuned_`."""
        if np.ndim(self.kept.thresholds) == 0:
            return {}
        figures = self.figures(self.evidence(found()))
        return {f"tuned_{name}": value for name, value in figures.items() if isinstance(value, float)}

    def answers(self, logits: Sequence[np.ndarray], texts: Sequence[Any]) -> list[dict[str, Any]]:
        """`prediction`, the labels that are answered, and the `probabilities` of all."""
        found = _sigmoid(np.array(logits).reshape(len(logits), len(self.labels)))
        return [
            {
                "prediction": [self.labels[n] for n in np.flatnonzero(row >= self.kept.thresholds)],
                "probabilities": dict(zip(self.labels, row.tolist(), strict=True)),
            }
            for row in found
        ]


class Regression(Problem):
    """A score per sample, as it stands in the data; logits (B, 1), labels (B,) float32."""

    name = "regression"
    problem_type = "regression"
    description = "Gives a text a score: {labels}."
    is_score = True
    headline = "spearman"
    title = "Spearman's correlation"
    choices = ("pearson", "mae", "rmse")

    def loss(self, logits: Tensor, batch: Batch, terms: LossTerms = PLAIN) -> Loss:
        """The sum over samples of squared errors, or of Huber's loss with delta 1 (Huber 1964)."""
        from torch.nn import functional as F

        loss = F.huber_loss if terms.huber else F.mse_loss
        return Loss(loss(logits[:, 0], batch["label"].float(), reduction="sum"), "sample")

    def soft_loss(self, logits: Tensor, teacher: Tensor, batch: Batch, temperature: float) -> Loss:
        """The sum over samples of the squared distance from the teacher's score."""
        return Loss((logits - teacher.float()).square().sum(), "sample")

    def evidence(self, found: Predictions) -> np.ndarray:
        """(n, 2): the score in the data, and the model's."""
        return np.stack([found.labels, found.logits[:, 0]], 1)

    def figures(self, evidence: np.ndarray) -> dict[str, Any]:
        wanted, given = evidence.astype(np.float64).T
        return {
            "spearman": self.score(evidence),
            "pearson": class_metrics.correlation(wanted, given),
            "mae": float(np.abs(given - wanted).mean()),
            "rmse": float(np.sqrt(np.square(given - wanted).mean())),
        }

    def score(self, evidence: np.ndarray) -> float:
        return class_metrics.correlation(*map(class_metrics.ranks, evidence.T))

    def table(self, name: str, row: ReportRow) -> ReportTable:
        names = {"spearman": "Spearman", "pearson": "Pearson", "mae": "mean absolute error", "rmse": "RMSE"}
        lines = [[said, f"{row[metric]:.4f}"] for metric, said in names.items()]
        title, note = f"Scores of {name}", f"{self.labels[0]}, as in the data."
        return ReportTable(title, note, ["figure", "value"], lines)

    def answers(self, logits: Sequence[np.ndarray], texts: Sequence[Any]) -> list[dict[str, Any]]:
        """`prediction`: the score."""
        return [{"prediction": float(row[0])} for row in logits]


class Entities(OneOfSeveral, Counted):
    """A BIO tag for each word; logits (B, T, C), labels (B, T) int64, NO_LABEL where no word begins.

    Entities count as right with their first word, last word and type (seqeval's default definition).
    """

    name = "tokens"
    head, pipeline = "TokenClassification", "token-classification"
    description = "Finds entities of {count} tags: {labels}."
    per_token = True
    unit = "word"
    title = "entity F1"
    absent = False

    def __init__(self, labels: Sequence[str], kept: Calibration | None = None) -> None:
        super().__init__(labels, kept)
        of = [label[2:] or "_" if label != "O" else "" for label in labels]
        self.kinds = tuple(sorted({*of} - {""}))
        self._kind = np.array([self.kinds.index(name) if name else -1 for name in of])
        self._begins = np.array([label.startswith("B") for label in labels])

    def entities(self, tags: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """(3, e): first word, the word behind the last, and kind of each entity, in order, from the tag and
        the sample of each word: (m,) each.

        An inside tag (I) behind none of its kind begins one too, as conlleval (CoNLL 2000) and seqeval have
        it.
        """
        kinds, same_sample = self._kind[tags], samples[1:] == samples[:-1]
        goes_on = np.pad((kinds[1:] == kinds[:-1]) & same_sample & ~self._begins[tags][1:], 1)
        first = np.flatnonzero((kinds >= 0) & ~goes_on[:-1])
        return np.stack([first, np.flatnonzero((kinds >= 0) & ~goes_on[1:]) + 1, kinds[first]])

    def evidence(self, found: Predictions) -> np.ndarray:
        assert found.words is not None, "words are tagged"
        samples = np.repeat(np.arange(len(found.words)), found.words)
        labelled, answered = (self.entities(tags, samples) for tags in (found.labels, found.predicted_labels))
        keys = [
            (len(samples) + 1) * len(self.kinds) * a + len(self.kinds) * b + kind
            for a, b, kind in (labelled, answered)
        ]
        right = labelled[:, np.isin(keys[0], keys[1])]
        counts = np.zeros((len(found.words), len(self.kinds), 3), np.float32)
        for place, (first, _, kind) in enumerate((right, labelled, answered)):
            np.add.at(counts[..., place], (samples[first], kind), 1)
        return counts.reshape(len(counts), -1)

    def parts(self, logits: Tensor, batch: Batch) -> dict[str, Sum | Rows]:
        is_right = logits.argmax(-1) == batch["label"]
        return {**super().parts(logits, batch), "right": Sum(is_right.sum(), (batch["label"] >= 0).sum())}

    def metrics(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        right, words = parts["right"]
        return {**super().metrics(parts), "token_accuracy": float(right) / max(1.0, float(words))}

    def encode(self, tokenizer: Any, texts: Sequence[Any]) -> list[Any]:
        words = [[word for word, _, _ in words_of(text)] for text in texts]
        return list(tokenizer.encode_batch(words, is_pretokenized=True, add_special_tokens=True))

    def pick(self, encoding: Any, logits: np.ndarray) -> np.ndarray:
        """(words, C): those of each word's first token; NaN of words without one, as of those cut off."""
        words = [-1 if word is None else word for word in encoding.word_ids]
        found = np.full((max(words) + 1, logits.shape[1]), np.nan, np.float32)
        for word, row in [*zip(words, logits, strict=True)][::-1]:
            if word >= 0:
                found[word] = row
        return found

    def answers(self, logits: Sequence[np.ndarray], texts: Sequence[Any]) -> list[dict[str, Any]]:
        """`prediction`, the entities, each with type, text, start and end in characters, and the mean
        probability of its words' tags; the `words`, and their `tags`, None where a word was not read.
        """
        return [self._answer(*one) for one in zip(logits, texts, strict=True)]

    def _answer(self, logits: np.ndarray, text: Any) -> dict[str, Any]:
        words, whole = words_of(text), text if isinstance(text, str) else " ".join(text)
        read = np.flatnonzero(~np.isnan(logits[:, 0]))
        probabilities = softmax(logits[read])
        numbers, entities = probabilities.argmax(1), list[dict[str, Any]]()
        for first, behind, kind in self.entities(numbers, np.zeros_like(numbers)).T.tolist():
            start, end = words[read[first]][1], words[read[behind - 1]][2]
            place = {"type": self.kinds[kind], "text": whole[start:end], "start": start, "end": end}
            entities.append(place | {"probability": float(probabilities[first:behind].max(1).mean())})
        tags = dict(zip(read.tolist(), (self.labels[n] for n in numbers), strict=True))
        named = {"words": [word for word, _, _ in words], "tags": [tags.get(n) for n in range(len(words))]}
        return {"prediction": entities, **named}


def words_of(text: str | Sequence[str]) -> list[tuple[str, int, int]]:
    """(word, start, end) in characters; of a list of words in their text with a space between."""
    if isinstance(text, str):
        return [(found.group(), *found.span()) for found in WORD.finditer(text)]
    ends = np.cumsum([len(word) + 1 for word in text]) - 1
    return [(word, int(end) - len(word), int(end)) for word, end in zip(text, ends, strict=True)]


def _focal(each: Tensor, gamma: float) -> Tensor:
    """Cross-entropies, -log p, each times (1 - p)^gamma (Lin et al. 2017, eq. 4)."""
    return each * (-(-each).expm1()).clamp(min=1e-12) ** gamma  # 0 has no slope where gamma < 1


def _share_lines(
    names: Sequence[str], sizes: Sequence[int], shares: Sequence[Any], labels: int
) -> list[list[str]]:
    """A line of a table for each: name, samples, precision, recall and F1; the recall of the first `labels`
    with its interval.
    """
    rows = zip(names, sizes, shares, strict=True)
    lines = [[name, f"{size:,}", *(f"{share:.3f}" for share in of)] for name, size, of in rows]
    for line, size, of in zip(lines[:labels], sizes, shares, strict=False):
        line[3] += " (95 %: {:.2f} to {:.2f})".format(*class_metrics.wilson_interval(of[1] * size, size))
    return lines


def _is_right(evidence: np.ndarray) -> np.ndarray:
    return np.asarray(evidence[:, 0] == evidence[:, 1])


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    """In fp64; at either end without an overflow."""
    return np.asarray(0.5 * (1 + np.tanh(0.5 * logits.astype(np.float64))))


PROBLEMS: Mapping[str, type[Problem]] = {
    kind.name: kind for kind in (Classes, MultiLabel, Regression, Entities)
}


def of_facts(facts: Any) -> Problem:
    """The problem of prepared data."""
    return PROBLEMS[facts.extra.get("problem", Classes.name)](facts.extra["labels"])


def of_folder(folder: Path) -> Problem:
    """The problem of a saved model, answering as was chosen on validation. Errors as of `of_config`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return of_config(config, Calibration.open(folder))


def of_config(config: Mapping[str, Any], kept: Calibration | None = None) -> Problem:
    """The problem that a model of this config.json was trained on. Raises KeyError without labels."""
    names = {int(number): str(name) for number, name in config["id2label"].items()}
    labels, architecture = [names[n] for n in range(len(names))], (config.get("architectures") or [""])[0]
    noted = (config.get("isobatch") or {}).get("problem")
    kinds = (kind for kind in PROBLEMS.values() if kind.problem_type == config.get("problem_type"))
    tags = [Entities.name] * str(architecture).endswith(Entities.head)
    return PROBLEMS[noted or [*tags, *(kind.name for kind in kinds), Classes.name][0]](labels, kept)


def of_model(model: Any) -> Problem:
    """The problem of a transformers classifier."""
    fields = ("id2label", "isobatch", "problem_type", "architectures")
    return of_config({name: getattr(model.config, name, None) for name in fields})
