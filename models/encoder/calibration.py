"""What validation says of a finished classifier, kept beside it for those who use it: a temperature for its
probabilities, the confidence from which its answers have a wanted precision, and what its texts are like.

Letters: C classes, n samples, K thresholds.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.core.terminal import rendered
from isobatch.models.encoder import class_metrics
from isobatch.models.encoder.drift import Profile
from isobatch.models.protocols import ReportTable

FILE = "calibration.safetensors"
TEXTS = "texts."
"""What the names of counts of texts begin with."""
SHOWN_PRECISIONS = (0.9, 0.95, 0.98, 0.99)
"""Of which the metrics say what is answered."""
SHOWN_THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""The same, probabilities from which answers are given."""

ASSUMED_ANSWERS = 20
"""Held-out answers, added to those that there are, of which the probabilities as they are would be true.

Measured on simulated logits (2 to 20 classes, true T of .5 to 3, 60 draws each), in nats that the fitted T
costs on fresh rows beside the true one: of 20 rows where T is 1 .071 on average and 5.1 at worst without such
answers, .006 and .05 with 20 of them; from 200 rows on both cost the same to .002. Keeping T at 1 unless the
likelihood ratio is significant costs .043 and 5.1 there: few rows that can be parted are significant, too.
"""
LARGEST_TEMPERATURE = 100.0
BISECTIONS = 40
MAX_THRESHOLDS = 512
"""Confidences of held-out answers, evenly spaced in their order, among which a threshold is looked for."""
STARTS = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Shares of all answers."""
DOUBT = 0.05
"""Chance at most that answers above a threshold have less than the wanted precision."""


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """The T for which softmax(logits / T) has the least cross-entropy (Guo et al. 2017), with ASSUMED_ANSWERS
    among the samples: near 1 where these are few. Where nothing is answered wrong, which says nothing of it,
    1. logits (n, C), labels (n,).
    """
    if (logits.argmax(1) == labels).all():
        return 1.0
    logits = logits.astype(np.float64) - logits.max(1, keepdims=True)
    assumed = (class_metrics.softmax(logits) * logits).sum(1)
    wanted = logits[np.arange(len(labels)), labels]
    wanted += (assumed - wanted) * ASSUMED_ANSWERS / (len(labels) + ASSUMED_ANSWERS)
    low, high = -math.log(LARGEST_TEMPERATURE), math.log(LARGEST_TEMPERATURE)
    for _ in range(BISECTIONS):  # cross-entropy is convex in 1 / T: its slope changes sign once
        middle = (low + high) / 2
        weights = np.exp(logits * math.exp(middle))
        slope = ((weights * logits).sum(1) / weights.sum(1) - wanted).sum()
        low, high = (middle, high) if slope < 0 else (low, middle)
    return math.exp(-(low + high) / 2)


@dataclass(frozen=True, slots=True)
class Confidences:
    """How many held-out samples were answered with at least such a confidence, and how many of them wrong."""

    confidence: np.ndarray
    """(K,) from the surest on."""
    answered: np.ndarray
    """(K,)"""
    wrong: np.ndarray
    """(K,)"""

    @classmethod
    def of(cls, confidence: np.ndarray, is_right: np.ndarray) -> Confidences:
        """Of held-out answers: (n,) each."""
        order, count = np.argsort(-confidence, kind="stable"), len(confidence)
        ordered, wrong = confidence[order], np.cumsum(~is_right[order])
        places = np.unique(np.linspace(0, count - 1, min(count, MAX_THRESHOLDS)).round().astype(int))
        answered = np.searchsorted(-ordered, -ordered[places], side="right")  # those of the same confidence
        return cls(ordered[places], answered, wrong[answered - 1])

    def threshold(self, precision: float) -> float | None:
        """The least confidence found whose answers have this precision, unless with a chance of DOUBT, on
        texts like those held out; None where they cannot show it.

        Angelopoulos et al. 2021, Learn then Test: exact binomial tests in an order that is fixed beforehand,
        from each of STARTS towards more answers until one fails, each sequence at its share of DOUBT.
        """
        last = -1
        for start in STARTS:
            for place in range(int(start * len(self.answered)), len(self.answered)):
                wrong, answered = int(self.wrong[place]), int(self.answered[place])
                if binomial_tail(wrong, answered, 1 - precision) > DOUBT / len(STARTS):
                    break
                last = max(last, place)
        return None if last < 0 else float(self.confidence[last])

    def rows_needed(self, precision: float) -> int | None:
        """About how many validation rows would show it, were as large a part of the surest answers wrong as
        here; None where no thousandfold would.
        """
        for times in 1.1 ** np.arange(73):
            for place in (int(start * len(self.answered)) for start in STARTS):
                wrong, answered = (round(times * float(of[place])) for of in (self.wrong, self.answered))
                if binomial_tail(wrong, answered, 1 - precision) <= DOUBT / len(STARTS):
                    return math.ceil(times * float(self.answered[-1]))
        return None

    def shown(self) -> dict[str, float]:
        """SHOWN_PRECISIONS that they can show, each with its threshold."""
        found = ((f"{one:g}", self.threshold(one)) for one in SHOWN_PRECISIONS)
        return {name: threshold for name, threshold in found if threshold is not None}


def answering_table(name: str, rows: list[dict[str, Any]]) -> ReportTable:
    """What `Calibration.answering` found of the model of this name, for people."""
    head = ["with", "from probability", "answered", "not answered", "right of these"]
    note = "With predict and serve: --precision is found on validation, --threshold a probability."
    lines = rendered(__file__, "answering", rows=rows).splitlines()
    return ReportTable(f"Answers of {name} that are sure enough", note, head, [x.split("|") for x in lines])


def binomial_tail(successes: int, trials: int, chance: float) -> float:
    """The probability of at most so many successes; `chance` is above 0 and below 1."""
    counts = np.arange(1, successes + 1)
    ways = np.cumsum([0.0, *np.log((trials - counts + 1) / counts)])
    counts = np.arange(successes + 1)
    return float(np.exp(ways + counts * math.log(chance) + (trials - counts) * math.log1p(-chance)).sum())


@dataclass(frozen=True, slots=True)
class Calibration:
    """What is kept in FILE. A model without that file has a temperature of 1 and nothing else."""

    temperature: float = 1.0
    confidences: Confidences | None = None
    profile: Profile | None = None
    """Of the validation texts."""
    thresholds: Any = 0.5
    """Of multi-label, from which probability on a label is answered: (C,), or one for all."""

    @classmethod
    def fit(cls, found: class_metrics.Predictions, profile: Profile) -> Calibration:
        """From the logits of validation, of one class a sample, whose texts `profile` has counted."""
        temperature = fit_temperature(found.logits, found.labels)
        probabilities = class_metrics.softmax(found.logits / temperature)
        profile.add_answers(probabilities)
        return cls(temperature, Confidences.of(probabilities.max(1), found.is_correct), profile)

    def metrics(self, found: class_metrics.Predictions) -> dict[str, Any]:
        """Of held-out answers: what the temperature does, and how many are given how well from where on."""
        confidence = class_metrics.softmax(found.logits / self.temperature).max(1)
        error, abstaining = class_metrics.calibration_error(confidence, found.is_correct), {}
        for row in self.answering(found):
            if row["flag"] == "precision" and (threshold := row["threshold"]) is not None:
                share = row["right"] / row["answered"] if row["answered"] else 1.0
                figures = {"coverage": row["answered"] / row["samples"], "precision": share}
                abstaining[f"{row['wanted']:g}"] = {"threshold": threshold, **figures}
        return {"temperature": self.temperature, "calibration_error_after": error, "abstaining": abstaining}

    def answering(self, found: class_metrics.Predictions) -> list[dict[str, Any]]:
        """Of held-out answers: how many are given, and how many of these are right, with each --precision of
        SHOWN_PRECISIONS, whose threshold is None where validation does not show it, and each --threshold of
        SHOWN_THRESHOLDS. Nothing where answers are not one class a text.
        """
        if (known := self.confidences) is None:
            return []
        confidence, rows = class_metrics.softmax(found.logits / self.temperature).max(1), []
        asked = [("precision", one, known.threshold(one)) for one in SHOWN_PRECISIONS]
        for flag, wanted, least in [*asked, *(("threshold", one, one) for one in SHOWN_THRESHOLDS)]:
            right = found.is_correct[confidence >= (math.inf if least is None else least)]
            row: dict[str, Any] = {"flag": flag, "wanted": wanted, "threshold": least}
            row |= {"samples": len(confidence), "answered": len(right), "right": int(right.sum())}
            rows.append(row | {"right_ci95": class_metrics.wilson_interval(row["right"], len(right))})
        return rows

    def save(self, folder: Path) -> None:
        """Write FILE."""
        from safetensors.numpy import save_file

        kept = {"temperature": np.array([self.temperature])}
        kept |= {"thresholds": self.thresholds} if np.ndim(self.thresholds) else {}
        if self.confidences is not None:
            kept |= dataclasses.asdict(self.confidences)
        if self.profile is not None:
            kept |= {"seen": np.packbits(self.profile.seen)}
            kept |= {f"{TEXTS}{name}": counts for name, counts in self.profile.counts.items()}
        save_file({k: v if k == "seen" else v.astype(np.float32) for k, v in kept.items()}, folder / FILE)

    @classmethod
    def open(cls, folder: Path) -> Calibration:
        """What was kept beside a model, which may be nothing."""
        from safetensors.numpy import load_file

        if not (folder / FILE).is_file():
            return cls()
        kept = load_file(folder / FILE)
        profile = None
        if "seen" in kept:
            counts = {k.removeprefix(TEXTS): v for k, v in kept.items() if k.startswith(TEXTS)}
            profile = Profile(np.unpackbits(kept["seen"]).astype(bool), len(counts["length"]) - 1)
            profile.counts = counts
        known = [kept[name] for name in ("confidence", "answered", "wrong") if name in kept]
        confidences = Confidences(*known) if known else None
        return cls(float(kept["temperature"][0]), confidences, profile, kept.get("thresholds", 0.5))
