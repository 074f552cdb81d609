"""Tests of models/encoder/problems.py: losses against PyTorch, metrics against other libraries, answers."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from isobatch.core.errors import UserError
from isobatch.models.encoder import class_metrics, problems
from isobatch.models.encoder.class_metrics import Predictions
from isobatch.models.encoder.drift import Profile
from isobatch.models.encoder.problems import Entities, LossTerms, MultiLabel, Regression

if TYPE_CHECKING:
    from pathlib import Path

TAGS = ("O", "B-per", "I-per", "B-creative-work", "I-creative-work")
NAMES = ("red", "green", "blue", "never")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sets(rows: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and labels that follow them; the last label is nowhere."""
    logits = drawn(rows, len(NAMES))
    label = (logits + drawn(rows, len(NAMES), seed=1) > 0.5).float()
    label[:, 3] = 0
    return logits - torch.tensor([0, 0, 0, 9.0]), label


def tagged(rows: int = 60, width: int = 12) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits that are often right, and labels of which every third token has none."""
    generator = torch.Generator().manual_seed(2)
    label = torch.randint(len(TAGS), (rows, width), generator=generator)
    logits = drawn(rows, width, len(TAGS), seed=3) + 2.5 * F.one_hot(label, len(TAGS))
    label[:, ::3] = -100
    return logits, {"label": label}


def metrics(
    problem: problems.Problem, logits: torch.Tensor, batch: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """As of an evaluation in two micro-batches."""
    cut = len(logits) // 3
    parts = [
        problem.parts(logits[rows], {k: v[rows] for k, v in batch.items()})
        for rows in (slice(cut), slice(cut, None))
    ]
    reduced: dict[str, Any] = {}
    for name, part in parts[0].items():
        other: Any = parts[1][name]
        both: Any = part
        if hasattr(part, "values"):
            reduced[name] = torch.cat([both.values, other.values]).numpy()
        else:
            sums = float(both.value) + float(other.value), float(both.weight) + float(other.weight)
            reduced[name] = type(both)(*sums)
    return problem.metrics(reduced)


def test_multi_label_metrics_are_those_of_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is in the extra baselines")
    logits, label = sets()
    found, answers = metrics(MultiLabel(NAMES), logits, {"label": label}), (logits >= 0).numpy()
    for mean in ("micro", "macro"):
        wanted = sklearn.precision_recall_fscore_support(label, answers, average=mean, zero_division=0)
        for name, value in zip(("precision", "recall", "f1"), wanted, strict=False):
            assert found[f"{name}_{mean}"] == pytest.approx(value, abs=1e-6)
    by_label = sklearn.f1_score(label, answers, average=None, zero_division=0)
    assert found["f1_by_label"] == pytest.approx(by_label.tolist(), abs=1e-6)
    assert found["subset_accuracy"] == pytest.approx(sklearn.accuracy_score(label, answers), abs=1e-6)
    assert found["loss"] == pytest.approx(F.binary_cross_entropy_with_logits(logits, label).item(), abs=1e-6)


def test_scores_have_the_correlations_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy comes with scikit-learn")
    sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is in the extra baselines")
    label = (drawn(150) * 2).round() / 2  # with ties
    logits = (label + drawn(150, seed=1))[:, None]
    logits[::7] = 0.25
    found = metrics(Regression(["score"]), logits, {"label": label})
    one, other = label.numpy().astype(float), logits[:, 0].numpy().astype(float)
    wanted = {
        "pearson": stats.pearsonr(one, other)[0],
        "spearman": stats.spearmanr(one, other)[0],
        "mae": sklearn.mean_absolute_error(one, other),
        "rmse": sklearn.mean_squared_error(one, other) ** 0.5,
        "loss": sklearn.mean_squared_error(one, other),
    }
    assert found == pytest.approx(wanted, abs=1e-6)
    assert metrics(Regression(["score"]), torch.ones(150, 1), {"label": label})["spearman"] == 0


def test_entities_are_those_of_seqeval() -> None:
    seqeval = pytest.importorskip("seqeval.metrics", reason="seqeval is in the extra dev")
    logits, batch = tagged()
    found, answers = metrics(Entities(TAGS), logits, batch), logits.argmax(-1)
    inside = batch["label"] >= 0
    names = [
        [[TAGS[n] for n in row[mask].tolist()] for row, mask in zip(rows, inside, strict=True)]
        for rows in (batch["label"], answers)
    ]
    for name in ("precision", "recall", "f1"):
        for mean in ("micro", "macro"):
            wanted = getattr(seqeval, f"{name}_score")(*names, average=mean)
            assert found[f"{name}_{mean}"] == pytest.approx(wanted, abs=1e-6)
    assert found["labels"] == ["creative-work", "per"]
    assert found["f1_by_label"] == pytest.approx(seqeval.f1_score(*names, average=None).tolist(), abs=1e-6)
    assert found["token_accuracy"] == pytest.approx(seqeval.accuracy_score(*names), abs=1e-6)
    assert 0.2 < found["f1_micro"] < 0.95
    loss = F.cross_entropy(logits.flatten(0, 1), batch["label"].flatten())
    assert found["loss"] == pytest.approx(loss.item(), abs=1e-6)


def test_an_inside_tag_of_another_type_begins_an_entity_and_none_reaches_into_the_next_sample() -> None:
    tags = np.array([1, 2, 4, 4, 0, 2, 2, 1, 2])  # B-per I-per I-work I-work O I-per | I-per B-per I-per
    samples = np.array([0] * 6 + [1] * 3)
    spans = Entities(TAGS).entities(tags, samples).T.tolist()
    assert spans == [[0, 2, 1], [2, 4, 0], [5, 6, 1], [6, 7, 1], [7, 9, 1]]


@pytest.mark.parametrize("cut", [(7,), (2, 5), (1, 6)])
def test_losses_are_those_of_pytorch_however_a_batch_is_cut(cut: tuple[int, ...]) -> None:
    weights = torch.tensor([0.5, 2, 1, 3.0])
    logits, label = sets(7)
    wanted = F.binary_cross_entropy_with_logits(logits, label, pos_weight=weights)
    tags, batch = tagged(7)
    of_words = F.cross_entropy(tags.flatten(0, 1), batch["label"].flatten(), label_smoothing=0.1)
    scores, given = drawn(7, 1), drawn(7, seed=5)
    cases: list[tuple[Any, torch.Tensor, torch.Tensor, LossTerms, float, torch.Tensor]] = [
        (MultiLabel(NAMES), logits, label, LossTerms(weights), 7, wanted),
        (Entities(TAGS), tags, batch["label"], LossTerms(smoothing=0.1), 7 * 8, of_words),
        (Regression("s"), scores, given, LossTerms(), 7, F.mse_loss(scores[:, 0], given)),
        (Regression("s"), scores, given, LossTerms(huber=True), 7, F.huber_loss(scores[:, 0], given)),
    ]
    for problem, rows, labels, terms, weight, expected in cases:
        pairs = zip(rows.split(cut), labels.split(cut), strict=True)
        parts = [problem.loss(part, {"label": of}, terms) for part, of in pairs]
        assert {part.unit for part in parts} == {"word" if problem.per_token else "sample"}
        assert sum(float(part.sum) for part in parts) / weight == pytest.approx(float(expected), abs=1e-6)


def test_a_teacher_is_followed_by_what_the_problem_answers() -> None:
    ours, theirs = drawn(5, 3), drawn(5, 3, seed=1)
    p, q = (theirs / 2).sigmoid(), (ours / 2).sigmoid()
    divergence = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    found = MultiLabel("abc").soft_loss(ours, theirs, {}, 2.0)
    torch.testing.assert_close(found.sum, 4 * divergence.mean(1).sum())
    found = Regression("s").soft_loss(ours[:, :1], theirs[:, :1], {}, 2.0)
    torch.testing.assert_close(found.sum, (ours[:, 0] - theirs[:, 0]).square().sum())
    tags, batch = tagged(4)
    found = Entities(TAGS).soft_loss(tags, tags.flip(0), batch, 1.0)
    inside = batch["label"] >= 0
    wanted = F.kl_div(tags[inside].log_softmax(-1), tags.flip(0)[inside].softmax(-1), reduction="sum")
    torch.testing.assert_close(found.sum, wanted)
    assert found.unit == "word"


def test_a_threshold_is_the_best_of_all_for_f1() -> None:
    logits, label = sets(80)
    probabilities, is_label = torch.sigmoid(logits[:, 0]).double().numpy(), label[:, 0].numpy() > 0
    found = class_metrics.best_threshold(probabilities, is_label)

    def f1(threshold: float) -> float:
        answers = probabilities >= threshold
        return 2 * (answers & is_label).sum() / (answers.sum() + is_label.sum())

    assert f1(found) == max(f1(threshold) for threshold in [0.0, *probabilities])
    assert f1(found) > f1(0.5)


def test_what_is_chosen_on_validation_is_kept_with_the_model(tmp_path: Path) -> None:
    logits, label = sets()
    found = Predictions(logits.numpy(), label.numpy())
    config = {"id2label": dict(enumerate(NAMES)), "problem_type": "multi_label_classification"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = problems.of_folder(tmp_path)
    assert plain.settled_metrics(lambda: found) == {}
    profile = Profile(np.ones(1, bool), 1)
    profile.add_texts([[0]])
    kept = plain.settle(found, profile)
    kept.save(tmp_path)
    tuned = problems.of_folder(tmp_path)
    better = tuned.settled_metrics(lambda: found)["tuned_f1_macro"]
    assert better > plain.figures(plain.evidence(found))["f1_macro"]
    row = np.full(4, -0.1, np.float32)
    row[0] = np.log(kept.thresholds[0] / (1 - kept.thresholds[0])) + 1e-3
    (answer,) = tuned.answers([row], ["a text"])
    assert "red" in answer["prediction"]
    assert list(answer["probabilities"]) == list(NAMES)


@pytest.mark.parametrize("positives", [0, 1, 9])
def test_a_threshold_of_few_samples_is_nearer_to_a_half(positives: int) -> None:
    logits = np.linspace(-5, -1, 40, dtype=np.float32)[:, None]
    label = (np.arange(40) >= 40 - positives).astype(np.float32)[:, None]
    profile = Profile(np.ones(1, bool), 1)
    (kept,) = MultiLabel(("rare",)).settle(Predictions(logits, label), profile).thresholds
    best = class_metrics.best_threshold(1 / (1 + np.exp(-logits[:, 0])), label[:, 0] > 0.5)
    share = {0: 0, 1: 1 / 2, 9: 9 / 10}[positives]
    assert np.log(kept / (1 - kept)) == pytest.approx(np.log(best / (1 - best)) * share, abs=1e-6)


def test_entities_of_a_text_have_their_place_in_it() -> None:
    problem, text = Entities(TAGS), "We met Ada  Lovelace, twice."
    words = [word for word, _, _ in problems.words_of(text)]
    assert words == ["We", "met", "Ada", "Lovelace", ",", "twice", "."]
    logits = np.full((6, 5), -3.0, np.float32)  # the last word was cut off
    for word, tag in enumerate((0, 0, 1, 2, 0, 0)):
        logits[word, tag] = 3
    logits[4] = np.nan  # a word without a token
    (answer,) = problem.answers([logits], [text])
    (entity,) = answer["prediction"]
    assert text[entity["start"] : entity["end"]] == entity["text"] == "Ada  Lovelace"
    assert entity["type"] == "per"
    assert entity["probability"] == pytest.approx(np.exp(3) / (np.exp(3) + 4 * np.exp(-3)), abs=1e-6)
    assert answer["tags"] == ["O", "O", "B-per", "I-per", None, "O", None]
    (answer,) = problem.answers([logits[2:4]], [["New York", "City"]])
    assert answer["prediction"][0]["text"] == "New York City"


def test_two_models_are_compared_by_a_paired_bootstrap() -> None:
    logits, label = sets()
    problem = MultiLabel(NAMES)
    good, bad = Predictions(logits.numpy(), label.numpy()), Predictions(-logits.numpy(), label.numpy())
    evidence, other = problem.evidence(good), problem.evidence(bad)
    found = problem.difference(evidence, other)
    assert found.value == pytest.approx(problem.score(evidence) - problem.score(other))
    assert found.low < found.value < found.high
    assert found.p < 0.01
    assert problem.difference(evidence, evidence)[:3] == (0, 0, 0)
    assert problem.difference(evidence, evidence).p == 1
    low, high = problem.interval(evidence)
    assert low < problem.score(evidence) < high
    assert found == problem.difference(evidence, other), "the draws are the same"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"problem_type": "regression"}, "regression"),
        ({"problem_type": "multi_label_classification"}, "multi-label"),
        ({"problem_type": "single_label_classification"}, "classes"),
        ({"architectures": ["BertForTokenClassification"]}, "tokens"),
        ({"architectures": ["BertForSequenceClassification"]}, "classes"),
        ({"isobatch": {"problem": "tokens"}, "architectures": ["BertModel"]}, "tokens"),
        ({}, "classes"),
    ],
)
def test_a_saved_model_says_what_it_was_trained_on(config: dict[str, Any], name: str) -> None:
    assert problems.of_config({"id2label": {"1": "O", "0": "B-x"}, **config}).name == name
    model = SimpleNamespace(config=SimpleNamespace(id2label={0: "B-x", 1: "O"}, **config))
    assert problems.of_model(model).labels == ("B-x", "O")


@pytest.mark.parametrize(
    ("problem", "flags", "said"),
    [
        (
            Regression(["s"]),
            ("accuracy", 0.0, False, 0.0),
            "--best-metric accuracy: .* take loss, spearman, pearson",
        ),
        (Regression(["s"]), ("auto", 0.1, False, 0.0), "--label-smoothing 0.1: the labels are regression"),
        (Regression(["s"]), ("auto", 0.0, False, 2.0), "--focal 2: the labels are regression"),
        (MultiLabel("ab"), ("auto", 0.1, True, 0.0), "--regression-loss huber: the labels are multi-label"),
    ],
)
def test_flags_that_mean_nothing_are_refused(problem: Any, flags: tuple[Any, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        problem.check(*flags)


@pytest.mark.parametrize("there", [0.0, 1.0])
def test_a_label_that_is_never_likely_has_a_threshold(there: float) -> None:
    found = Predictions.of(np.array([[-90.0, 9.0], [-90.0, -9.0]]), np.array([[there, 1.0], [0.0, 0.0]]))
    assert MultiLabel(["never", "once"]).settle(found, Profile(np.ones(1, bool), 1)).thresholds[0] == 0.5
