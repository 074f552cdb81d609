"""What a trained model is held against: the constant answer, and TF-IDF with a linear model of scikit-learn,
or for tags the usual one of each word.

They learn from the training split as it is prepared and answer the held-out one. The texts are its tokens put
together again, so that they are cut where the model's are.
Letters: n samples of a split, m what is labelled in them (samples or words), C classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from isobatch.core.extras import has
from isobatch.core.facts import Facts
from isobatch.models import saving
from isobatch.models.base import Batch
from isobatch.models.encoder import evaluation, problems
from isobatch.models.encoder.class_metrics import Predictions
from isobatch.models.protocols import Batches, ReportRow

FEWEST = 30
"""Held-out samples from which a paired test can tell a good model from a constant answer."""
EXCELLENT = 0.95
"""A headline figure of a baseline from which a model that is within the noise of it may stand: so little is
left to gain that a held-out set of some hundred samples cannot show it."""
TOKEN = r"\w+|[^\w\s]"
"""A word, or a mark: texts without words, too, have features."""
INVERSE_DECAY = 10.0
"""scikit-learn's C. On CLINC150, SST-2 and 1,000 of its rows it beats the default 1 by 2 points and more."""
UNCOMPARED = "without scikit-learn nothing else was compared: pip install 'isobatch[baselines]'"


class Kind(NamedTuple):
    """The baselines of one kind of labels."""

    constant_name: str
    constant: Callable[[np.ndarray, int], np.ndarray]
    """Labels of training and C -> the one row of logits, (C,), that answers everything."""
    name: str
    """Of what reads the texts."""
    fit: Callable[[Any, np.ndarray, Any, int], np.ndarray] | None = None
    """Features and labels of training, features of n samples, C -> logits (n, C); None where words are
    labelled."""


Baseline = tuple[str, "Predictions"]
"""The name of a simple model, and its answers to the held-out samples."""
_kept: dict[str, list[Baseline]] = {}
"""By the fingerprint of the data: the gate and the report of a chain ask for the same ones."""


def baselines_of(facts: Facts, batches: Batches) -> list[Baseline]:
    """The baselines on the held-out split, the simplest first."""
    if facts.fingerprint not in _kept:
        _kept[facts.fingerprint] = list(measured(facts, batches))
    return _kept[facts.fingerprint]


def measured(facts: Facts, batches: Batches) -> Iterator[Baseline]:
    """The same of any samples that `batches()` gives."""
    kind, count = KINDS[problems.of_facts(facts).name], len(facts.extra["labels"])
    axes = 2 if kind.fit is None else 1

    def unanswered(inputs: dict[str, np.ndarray]) -> np.ndarray:
        return np.zeros((*inputs["input_ids"].shape[:axes], count), np.float32)

    learnt = evaluation.predict(unanswered, batches("train")).labels
    asked = evaluation.predict(unanswered, batches())
    constant = np.tile(kind.constant(learnt, count), (len(asked.labels), 1))
    yield kind.constant_name, dataclasses.replace(asked, logits=constant)
    if kind.fit is None:
        logits = usual_tags(batches, count)
        yield kind.name, dataclasses.replace(asked, logits=logits)
    elif has("sklearn") and len(np.unique(learnt, axis=0)) > 1:
        from sklearn.feature_extraction.text import TfidfVectorizer

        vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=TOKEN)
        train = vectorizer.fit_transform(texts_of(facts, batches("train")))
        logits = kind.fit(train, learnt, vectorizer.transform(texts_of(facts, batches())), count)
        yield f"TF-IDF with {kind.name}", dataclasses.replace(asked, logits=logits)


def standings(problem: problems.Problem, mine: Predictions, others: Iterable[Baseline]) -> list[ReportRow]:
    """How the model stands to each baseline by the problem's paired test: `name` and headline figure,
    `score`, of the latter, the fields of the `Difference`, and its `verdict`. What was settled for the
    model, as thresholds, is not for the others.
    """
    evidence, plain = problem.evidence(mine), problems.PROBLEMS[problem.name](problem.labels)
    found = []
    for name, answers in others:
        difference = problem.difference(evidence, other := plain.evidence(answers))
        one = {"name": name, "score": problem.score(other), "verdict": difference.verdict}
        found.append(one | difference._asdict())
    return found


def why_not_worth_it(found: list[ReportRow], count: int) -> str:
    """Why a model is no base to make smaller, in words; empty where it is one.

    It must be clearly better than the constant answer. TF-IDF must not be ahead of it: clearly, or at all
    where that is no EXCELLENT answer either. Where a model is ahead, but within the noise, it goes on.
    `count`: held-out samples; of fewer than FEWEST no test can say much, and being ahead is enough.
    """
    constant, *others = found
    if count < FEWEST and constant["value"] > 0:
        return ""
    if constant["verdict"] != "better":
        return f"is not clearly better than {constant['name']}"
    for one in others:
        if one["verdict"] == "worse" or (one["value"] < 0 and one["score"] < EXCELLENT):
            return f"does not beat {one['name']}"
    return ""


def usual_tags(batches: Batches, count: int) -> np.ndarray:
    """(m, C): how often each held-out word had each tag in training; of a new word, how often any had."""
    known, every = dict[tuple[int, ...], np.ndarray](), np.zeros(count)
    for word, tag in _words(batches("train")):
        known.setdefault(word, np.zeros(count))[tag] += 1
        every[tag] += 1
    return np.array([known.get(word, every) for word, _ in _words(batches())])


def _words(batches: Iterable[Batch]) -> Iterator[tuple[tuple[int, ...], int]]:
    """The tokens of each word with its tag: from a token with a label to the next one with one."""
    for batch in batches:
        arrays = (np.asarray(batch[name]) for name in ("tokens", "length", "label"))
        for tokens, length, labels in zip(*arrays, strict=True):
            places = np.flatnonzero(labels >= 0)
            for begin, end in zip(places, [*places[1:], length - 1], strict=False):
                yield tuple(tokens[begin:end].tolist()), int(labels[begin])


def texts_of(facts: Facts, batches: Iterable[Batch]) -> Iterator[str]:
    """The samples' texts from their tokens, those of a pair one after the other."""
    tokenizer = saving.load_tokenizer(facts)
    for batch in batches:
        tokens, lengths = np.asarray(batch["tokens"]), np.asarray(batch["length"])
        rows = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
        yield from tokenizer.decode_batch(rows, skip_special_tokens=True)


def _logistic_regression() -> Any:
    """By SAGA (Defazio et al. 2014), whose time grows least with classes; its order of rows is fixed."""
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=INVERSE_DECAY, solver="saga", tol=1e-2, random_state=0)


def _fit_classes(train: Any, labels: np.ndarray, asked: Any, count: int) -> np.ndarray:
    """A class without a training sample is never answered."""
    model = _logistic_regression().fit(train, labels)
    logits = np.full((asked.shape[0], count), -np.inf)
    logits[:, model.classes_] = model.predict_log_proba(asked)
    return logits


def _fit_sets(train: Any, labels: np.ndarray, asked: Any, count: int) -> np.ndarray:  # noqa: ARG001
    from sklearn.multiclass import OneVsRestClassifier

    model = OneVsRestClassifier(_logistic_regression()).fit(train, labels > 0)
    shares = np.clip(model.predict_proba(asked), 1e-6, 1 - 1e-6)
    return np.log(shares / (1 - shares))


def _fit_scores(train: Any, labels: np.ndarray, asked: Any, count: int) -> np.ndarray:  # noqa: ARG001
    from sklearn.linear_model import Ridge

    return Ridge().fit(train, labels).predict(asked)[:, None]


def _best_set(labels: np.ndarray, count: int) -> np.ndarray:
    """So many of the most frequent labels as give the best micro F1 where they answer every sample."""
    there = labels.sum(0)
    order = np.argsort(-there, kind="stable")
    f1 = np.cumsum(there[order]) / (len(labels) * np.arange(1, count + 1) + there.sum())
    return np.where(np.argsort(order) <= f1.argmax(), 10.0, -10.0)


def _counts(labels: np.ndarray, count: int) -> np.ndarray:
    return np.bincount(labels, minlength=count).astype(float)


KINDS: Mapping[str, Kind] = {
    "classes": Kind("the largest class", _counts, "logistic regression", _fit_classes),
    "multi-label": Kind(
        "the most frequent labels", _best_set, "logistic regression for each label", _fit_sets
    ),
    "regression": Kind("the mean", lambda y, _: y.mean(keepdims=True), "ridge regression", _fit_scores),
    "tokens": Kind("the most frequent tag", _counts, "the usual tag of each word"),
}
"""By the name of the problem."""
