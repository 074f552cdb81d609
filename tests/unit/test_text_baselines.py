"""Tests of models/encoder/baselines.py: what a trained classifier is held against, and when it may go on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isobatch.core.facts import Facts
from isobatch.models.encoder import baselines, problems
from isobatch.models.encoder.baselines import why_not_worth_it
from isobatch.models.encoder.class_metrics import Predictions
from isobatch.models.encoder.problems import Difference

TOPICS = {"food": ["soup", "bread", "salt", "rice", "bean"], "sky": ["star", "moon", "cloud", "wind", "rain"]}
COMMON = ["the", "a", "of", "it", "is", "very", "some", "and", "not", "this"]


def rows(count: int, seed: int, shuffled: bool = False) -> list[tuple[str, int]]:
    """Texts of common words with one or two of their topic; of every tenth the topic is the other's."""
    draw, found = random.Random(seed), []
    for number in range(count):
        label = number % 2
        topic = TOPICS[list(TOPICS)[label if number % 10 else 1 - label]]
        words = draw.choices(COMMON, k=6) + draw.choices(topic, k=draw.randint(1, 3))
        draw.shuffle(words)
        found.append((" ".join(words) + "!", label))
    if shuffled:
        labels = [label for _, label in found]
        draw.shuffle(labels)
        found = [(text, label) for (text, _), label in zip(found, labels, strict=True)]
    return found


def prepared(folder: Path, splits: dict[str, list[tuple[str, int]]]) -> tuple[Facts, Path, Any]:
    """Facts, the tokenizer's file and the batches of splits, tokens cut into pieces as WordPiece does."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=40, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    tokenizer.train_from_iterator((text for text, _ in splits["train"]), trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))

    def batches(split: str = "test") -> Any:
        for start in range(0, len(splits[split]), 32):
            part = splits[split][start : start + 32]
            ids = [tokenizer.encode(text).ids for text, _ in part]
            tokens = np.zeros((len(ids), max(map(len, ids))), np.int64)
            for row, one in zip(tokens, ids, strict=True):
                row[: len(one)] = one
            label = np.array([label for _, label in part])
            yield {"tokens": tokens, "length": np.array([len(one) for one in ids]), "label": label}

    extra = {"labels": list(TOPICS), "vocabulary": 40, "tokenizer": "tokenizer.json"}
    samples = {split: len(found) for split, found in splits.items()}
    facts = Facts(fingerprint=str(folder), folder=str(folder), samples=samples, lengths=(9,), extra=extra)
    return facts, batches


def answers(labels: np.ndarray, share_right: float) -> Predictions:
    right = np.random.default_rng(0).random(len(labels)) < share_right
    return Predictions(np.eye(2)[np.where(right, labels, 1 - labels)], labels)


def test_tf_idf_learns_from_tokens_what_it_learns_from_texts(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the extra [baselines]")
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    train, test = rows(1200, 0), rows(800, 1)
    constant, linear = baselines.baselines_of(*prepared(tmp_path, {"train": train, "test": test}))
    assert constant[1].is_correct.mean() == 0.5
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    own = make_pipeline(vectorizer, LogisticRegression(C=10, max_iter=1000))
    own.fit(*zip(*train, strict=True))
    assert linear[1].is_correct.mean() == pytest.approx(own.score(*zip(*test, strict=True)), abs=0.01)
    assert linear[1].is_correct.mean() > 0.85


def test_without_scikit_learn_the_constant_answer_is_all_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "has", lambda _: False)
    found = baselines.baselines_of(*prepared(tmp_path, {"train": rows(40, 0), "test": rows(40, 1)}))
    assert [name for name, _ in found] == ["the largest class"]


@pytest.mark.parametrize(
    ("shuffled", "share_right", "why"),
    [
        (False, 0.99, ""),
        (False, 0.7, "does not beat TF-IDF with logistic regression"),
        (True, 0.5, "is not clearly better than the largest class"),
    ],
)
def test_a_base_must_beat_what_is_simple(
    tmp_path: Path, shuffled: bool, share_right: float, why: str
) -> None:
    pytest.importorskip("sklearn", reason="the extra [baselines]")
    splits = {"train": rows(400, 0, shuffled), "test": rows(400, 1, shuffled)}
    facts, batches = prepared(tmp_path, splits)
    simple = baselines.baselines_of(facts, batches)
    mine = answers(simple[0][1].labels, share_right)
    assert why_not_worth_it(baselines.standings(problems.of_facts(facts), mine, simple), 400) == why


def standing(name: str, score: float, difference: Difference) -> dict[str, Any]:
    return {"name": name, "score": score, "verdict": difference.verdict, **difference._asdict()}


@pytest.mark.parametrize(
    ("linear", "difference", "p", "goes_on"),
    [
        (0.91, 0.05, 1e-4, True),
        (0.91, 0.01, 0.3, True),
        (0.91, -0.01, 0.3, False),
        (0.91, -0.05, 1e-4, False),
        (0.98, -0.002, 0.6, True),
        (0.98, -0.02, 1e-4, False),
    ],
)
def test_both_may_be_excellent(linear: float, difference: float, p: float, goes_on: bool) -> None:
    constant = standing("the largest class", 0.1, Difference(linear + difference - 0.1, 0.5, 0.9, 0.0))
    found = [constant, standing("TF-IDF", linear, Difference(difference, -1, 1, p))]
    assert (why_not_worth_it(found, 400) == "") is goes_on


@pytest.mark.parametrize(("difference", "goes_on"), [(0.3, True), (0.0, False), (-0.2, False)])
def test_of_few_samples_being_ahead_is_enough(difference: float, goes_on: bool) -> None:
    found = [standing("the largest class", 0.6, Difference(difference, -0.1, 0.6, 0.5))]
    assert (why_not_worth_it(found, 6) == "") is goes_on
    assert why_not_worth_it(found, 400)


def test_a_word_gets_its_usual_tag() -> None:
    """A word is all of its tokens: 7 is another than 7 with 8 behind it; a new one gets what is usual."""

    def batches(split: str = "test") -> Any:
        words = [2, 7, 8, 7, 9, 3] if split == "train" else [2, 9, 7, 8, 5, 3]
        labels = [-100, 1, -100, 0, 0, -100] if split == "train" else [-100, 0, 1, -100, 0, -100]
        yield {"tokens": np.array([words]), "length": np.array([6]), "label": np.array([labels])}

    assert baselines.usual_tags(batches, 2).tolist() == [[1, 0], [0, 1], [2, 1]]


def test_scores_and_sets_of_labels_have_baselines() -> None:
    pytest.importorskip("sklearn", reason="the extra [baselines]")
    from sklearn.feature_extraction.text import TfidfVectorizer

    train, test = rows(300, 0), rows(100, 1)
    features = TfidfVectorizer().fit([text for text, _ in train])
    learnt, asked = (features.transform([text for text, _ in some]) for some in (train, test))
    is_sky = np.array([label for _, label in train])
    wanted = np.array([label for _, label in test])
    scores = baselines.KINDS["regression"].fit(learnt, is_sky * 2.0, asked, 1)
    assert scores.shape == (100, 1)
    assert np.corrcoef(scores[:, 0], wanted)[0, 1] > 0.6
    both = np.stack([is_sky, 1 - is_sky, np.ones_like(is_sky)], 1).astype(np.float32)
    logits = baselines.KINDS["multi-label"].fit(learnt, both, asked, 3)
    assert ((logits[:, 0] > 0) == wanted).mean() > 0.8
    assert (logits[:, 2] > 0).all()
    assert (baselines.KINDS["multi-label"].constant(both, 3) > 0).tolist()[2]
    assert baselines.KINDS["regression"].constant(is_sky * 2.0, 1) == pytest.approx([is_sky.mean() * 2])
