"""What a finished classifier offers to those who use it: calibration, abstaining, drift, neighbours."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isobatch.data.labelled.dataset import SUREST, UNPROVEN
from isobatch.launch.predicting import neighbours
from isobatch.models.encoder import calibration, drift, problems
from isobatch.models.encoder.calibration import Calibration, Confidences
from isobatch.models.encoder.class_metrics import (
    Predictions,
    calibration_error,
    softmax,
    wilson_interval,
)
from isobatch.models.encoder.drift import Profile
from isobatch.models.encoder.prediction import TextClassifier
from isobatch.models.encoder.problems import LossTerms

LABELS = ["a", "b", "c", "d"]
VOCABULARY = 400


def answers(rows: int, times: float, seed: int) -> Predictions:
    """Labels that follow softmax(logits / `times`): a model is too sure by that factor."""
    draw = np.random.default_rng(seed)
    true = draw.normal(size=(rows, len(LABELS))) * 1.5
    labels = (softmax(true).cumsum(1) > draw.uniform(size=(rows, 1))).argmax(1)
    return Predictions((true * times).astype(np.float32), labels)


def texts(rows: int, seed: int, mean: float = 12, highest: int = VOCABULARY // 2) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(1, highest, max(1, int(n))).tolist() for n in draw.poisson(mean, rows)]


def profile(found: list[list[int]], logits: np.ndarray | None = None) -> Profile:
    """Of a model that learnt the lower half of the pieces."""
    made = Profile(np.arange(VOCABULARY) < VOCABULARY // 2, 64)
    made.add_texts(found)
    if logits is not None:
        made.add_answers(softmax(logits))
    return made


@pytest.mark.parametrize("times", [0.5, 1.0, 3.0])
def test_the_temperature_is_found_and_calibrates(times: float) -> None:
    fitted = answers(4000, times, seed=0)
    temperature = calibration.fit_temperature(fitted.logits, fitted.labels)
    assert temperature == pytest.approx(times, rel=0.06)
    fresh = answers(20_000, times, seed=1)

    def error(divided_by: float) -> float:
        return calibration_error(softmax(fresh.logits / divided_by).max(1), fresh.is_correct)

    assert error(temperature) < 0.02
    if times != 1:
        assert error(temperature) < error(1) / 4
        assert error(1) > 0.08


def test_the_temperature_is_where_cross_entropy_is_least() -> None:
    found = answers(500, 2.0, seed=2)
    best = calibration.fit_temperature(found.logits, found.labels)

    def loss(temperature: float) -> float:
        said = np.log(softmax(found.logits / temperature))
        assumed = calibration.ASSUMED_ANSWERS * (softmax(found.logits) * said).sum(1).mean()
        return float(-said[np.arange(500), found.labels].sum() - assumed)

    assert loss(best) < min(loss(best * 0.99), loss(best * 1.01))


@pytest.mark.parametrize("rows", [5, 10, 20, 40])
def test_a_handful_of_rows_moves_the_temperature_little(rows: int) -> None:
    """Its likelihood alone says .01 or 20 of some of these."""
    found = [answers(rows, 1.0, seed) for seed in range(100)]
    temperatures = [calibration.fit_temperature(one.logits, one.labels) for one in found]
    assert min(temperatures) > 0.4
    assert max(temperatures) < 2.5
    fresh = answers(2000, 1.0, seed=1000)

    def loss(temperature: float) -> float:
        return float(-np.log(softmax(fresh.logits / temperature)[np.arange(2000), fresh.labels]).mean())

    assert np.mean([loss(t) for t in temperatures]) < loss(1) + 0.02


def test_nothing_wrong_says_nothing_of_the_temperature() -> None:
    found = answers(50, 1.0, seed=0)
    assert calibration.fit_temperature(found.logits, found.predicted_labels) == 1.0


@pytest.mark.parametrize(("successes", "trials", "chance"), [(0, 7, 0.2), (3, 20, 0.2), (50, 900, 0.07)])
def test_the_binomial_tail_is_the_sum_of_its_terms(successes: int, trials: int, chance: float) -> None:
    terms = (math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(successes + 1))
    assert calibration.binomial_tail(successes, trials, chance) == pytest.approx(sum(terms), rel=1e-9)


@pytest.mark.parametrize("precision", [0.8, 0.9])
def test_a_threshold_keeps_its_precision_on_fresh_samples(precision: float) -> None:
    """An answer of confidence c is right with chance c, which is uniform from .3 on: above t it is right in
    (1 + t) / 2.
    """
    draw, kept, trials = np.random.default_rng(0), 0, 200
    for _ in range(trials):
        confidence = draw.uniform(0.3, 1, 6000)
        found = Confidences.of(confidence, draw.uniform(size=6000) < confidence).threshold(precision)
        assert found is not None
        assert found <= 2 * precision - 1 + 0.15  # not so careful that nothing is answered
        kept += (1 + found) / 2 >= precision
    assert kept / trials >= 1 - calibration.DOUBT


def test_a_precision_that_cannot_be_shown_has_no_threshold() -> None:
    right = np.random.default_rng(0).uniform(size=400) < 0.7  # whatever the confidence
    found = Confidences.of(np.linspace(0, 1, 400), right)
    assert found.threshold(0.95) is None
    assert found.threshold(0.5) == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(("wrong", "precision"), [(0, 0.95), (5, 0.95), (10, 0.9), (300, 0.95)])
def test_the_rows_that_would_show_a_precision_do(wrong: int, precision: float) -> None:
    """Of 400 answers as many are wrong, evenly among the sure and the unsure."""

    def answered(times: int) -> Confidences:
        right = np.ones(400, bool)
        right[np.linspace(0, 399, wrong + 2).astype(int)[1:-1]] = False
        return Confidences.of(np.linspace(0, 1, 400 * times), np.tile(right, times))

    rows = answered(1).rows_needed(precision)
    if wrong == 300:
        assert rows is None
    else:
        assert rows is not None
        assert answered(math.ceil(1.1 * rows / 400)).threshold(precision) is not None


def test_prepare_and_predict_have_one_chance_of_what_is_not_shown() -> None:
    assert pytest.approx(UNPROVEN) == calibration.DOUBT / len(calibration.STARTS)
    assert calibration.STARTS[-1] == SUREST
    for rows, most in ((90, 0.94), (235, 0.97), (459, 0.98), (20, 0.78)):
        found = Confidences.of(np.linspace(0, 1, rows), np.ones(rows, bool))
        shown = UNPROVEN ** (1 / (1 + int(SUREST * rows)))
        assert found.threshold(shown - 1e-9) is not None
        assert found.threshold(shown + 1e-9) is None
        assert int(100 * shown) / 100 == most


@pytest.mark.parametrize("file", ["final", "m.onnx"])
def test_a_wanted_precision_says_what_validation_measured_and_of_which_file(file: str) -> None:
    known = Confidences.of(np.repeat([0.9, 0.5], 200), np.repeat([True, False], [398, 2]))
    problem: Any = problems.Classes(["a", "b"], Calibration(confidences=known))
    nothing: Any = None
    found = TextClassifier(Path(file), nothing, nothing, problem, 8, 0, {}, None).abstaining(0.95)
    low, high = wilson_interval(398, 400)
    rows = f"{low:.1%} to {high:.1%} of 400 held-out rows"
    own = "`isobatch evaluate` of this file, in its run, measures it"
    of_onnx = f". The trained model is right there on {rows} (95 %); {own}"
    said = f", above which {rows} are right (95 %)" if file == "final" else of_onnx
    assert (found.threshold, found.shown) == (0.5, said)


def test_what_is_answered_how_well_is_counted_for_precisions_and_probabilities() -> None:
    """Validation has 800 rows of .8, of which 4 are wrong, and 200 of .4, all wrong; then 100 rows of .9 and
    100 of .4 are answered, all right.
    """
    known = Confidences.of(np.repeat([0.8, 0.4], [800, 200]), np.repeat([True, False], [796, 204]))
    logits = np.log(np.repeat([[0.9, 0.05, 0.05], [0.4, 0.3, 0.3]], 100, axis=0))
    kept, found = Calibration(confidences=known), Predictions(logits, np.zeros(200, np.int64))
    rows = {f"--{row['flag']} {row['wanted']:g}": row for row in kept.answering(found)}
    assert [rows[f"--precision {one}"]["threshold"] for one in (0.9, 0.98, 0.99)] == [0.8, 0.8, None]
    assert rows["--precision 0.98"]["right_ci95"] == wilson_interval(100, 100)
    answered = [rows[f"--threshold {one}"]["answered"] for one in (0.5, 0.95)]
    assert answered == [rows["--precision 0.98"]["answered"], 0] == [100, 0]
    table = calibration.answering_table("m", [*rows.values()])
    assert table.rows[2][:4] == ["--precision 0.98", "0.8", "100 (50.0%)", "100"]
    assert table.rows[3][2:] == ["none: validation does not show it", "", ""]
    assert {len(row) for row in table.rows} == {len(table.head)}
    assert kept.metrics(found)["abstaining"].keys() == kept.confidences.shown().keys()  # type: ignore[union-attr]
    assert Calibration().answering(found) == []


def test_answers_of_one_confidence_are_given_or_not_together() -> None:
    found = Confidences.of(np.repeat([0.9, 0.5], 100), np.repeat([True, False], 100))
    assert sorted({*found.answered.tolist()}) == [100, 200]
    assert found.threshold(0.9) == 0.9


def test_what_is_kept_is_read_back(tmp_path: Path) -> None:
    found, counted = answers(800, 2.0, seed=3), profile(texts(800, 0))
    made = Calibration.fit(found, counted)
    made.save(tmp_path)
    read = Calibration.open(tmp_path)
    assert read.temperature == pytest.approx(made.temperature, rel=1e-6)
    assert read.confidences is not None
    assert made.confidences is not None
    assert read.confidences.threshold(0.7) == pytest.approx(made.confidences.threshold(0.7), rel=1e-6)
    assert read.profile is not None
    assert read.profile.seen.tolist() == counted.seen.tolist()
    for name, counts in counted.counts.items():
        assert read.profile.counts[name].tolist() == counts.tolist()
    assert Calibration.open(tmp_path / "nowhere") == Calibration()


def test_a_text_without_tokens_is_counted_as_one() -> None:
    """As of a tokenizer without special tokens, of a text that has only signs which it drops."""
    found = profile([[], [1, VOCABULARY - 1], []])
    assert found.counts["length"][:3].tolist() == [2, 0, 1]
    assert {int(n): int(found.counts["unseen"][n]) for n in found.counts["unseen"].nonzero()[0]} == {
        0: 2,
        50: 1,
    }


@pytest.mark.parametrize("rows", [10, 100, 3000])
def test_texts_of_the_same_kind_raise_no_alarm(rows: int) -> None:
    said = 0
    for seed in range(100):
        then = profile(texts(1000, 2 * seed), answers(1000, 1.0, 2 * seed).logits)
        now = profile(texts(rows, 2 * seed + 1), answers(rows, 1.0, 2 * seed + 1).logits)
        said += bool(drift.differences(now.counts, then.counts, LABELS))
    assert said <= 1


def test_what_differs_is_said() -> None:
    logits = answers(1000, 1.0, 0).logits
    then = profile(texts(1000, 0), logits)
    shifted = logits[:200] * 0.2 + [0.0, 0.0, 0.0, 0.6]
    for found, given, words in (
        (texts(200, 1, mean=20), logits[:200], ["tokens a text (12.1)"]),
        (texts(200, 1, highest=VOCABULARY), logits[:200], ["% of pieces that training never saw (0 %)"]),
        (texts(200, 1), shifted, ["% sure on average", "d is"]),
    ):
        now = profile(found, given)
        said = drift.differences(now.counts, then.counts, LABELS)
        assert len(said) == len(words)
        assert all(word in line for word, line in zip(words, said, strict=True))


def test_a_small_difference_is_none_however_many_texts_there_are() -> None:
    then, now = profile(texts(20_000, 0)), profile(texts(20_000, 1, mean=12.3))
    assert drift.differences(now.counts, then.counts, LABELS) == []


@pytest.mark.parametrize("pairs", [40 * 77, 1 << 24])
def test_the_nearest_are_those_of_all_products(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "PRODUCTS", pairs)
    draw = np.random.default_rng(0)
    vectors, asked = (torch.tensor(draw.normal(size=(n, 16))) for n in (1000, 40))
    products, numbers = zip(*neighbours.nearest(vectors, asked, 5), strict=True)
    every = (asked @ vectors.T).numpy()
    assert [*numbers] == np.argsort(-every, 1)[:, :5].tolist()
    assert np.allclose(products, -np.sort(-every, 1)[:, :5])
    assert [len(found) for _, found in neighbours.nearest(vectors[:3], asked, 5)] == [3] * 40


def focal_loss(
    kind: str, logits: torch.Tensor, label: torch.Tensor, gamma: float, weights: torch.Tensor
) -> torch.Tensor:
    """Lin et al. 2017, equation 4, written out in fp64; alpha are the weights."""
    logits = logits.double()
    if kind == "multi-label":
        p = logits.sigmoid()
        there = weights * label * (1 - p) ** gamma * p.log()
        return -(there + (1 - label) * p**gamma * (1 - p).log()).sum() / logits.shape[1]
    p = logits.softmax(-1).flatten(0, -2)[torch.arange(label.numel()), label.flatten().clamp(min=0)]
    counted = (label.flatten() >= 0) * weights[label.flatten().clamp(min=0)]
    return -(counted * (1 - p) ** gamma * p.log()).sum()


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["classes", "multi-label", "tokens"])
def test_the_focal_loss_is_its_formula_and_so_is_its_gradient(
    kind: str, weighted: bool, gamma: float
) -> None:
    torch.manual_seed(0)
    names = ["O", "B-a", "I-a", "B-b"]
    shape = (6, 5, 4) if kind == "tokens" else (6, 4)
    logits = (torch.randn(shape) * 3).requires_grad_()
    label = torch.randint(0, 4, shape[:-1])
    if kind == "multi-label":
        label = (torch.rand(shape) < 0.3).float()
    if kind == "tokens":
        label[:, 2] = -100
    weights = torch.tensor([0.5, 1.0, 2.0, 3.0]) if weighted else torch.ones(4)
    terms = LossTerms(weights if weighted else None, focal=gamma)
    found = problems.PROBLEMS[kind](names).loss(logits, {"label": label}, terms)
    expected = focal_loss(kind, logits, label, gamma, weights.double())
    assert found.sum.item() == pytest.approx(expected.item(), rel=1e-5)
    (mine,), (theirs,) = (torch.autograd.grad(loss, logits) for loss in (found.sum, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert (
        found.unit
        == problems.PROBLEMS[kind](names).loss(logits, {"label": label}, LossTerms(terms.weights)).unit
    )


def test_a_sample_that_is_certain_has_a_focal_loss_without_a_slope() -> None:
    logits = torch.tensor([[80.0, -80.0]]).requires_grad_()
    loss = problems.PROBLEMS["classes"](["a", "b"]).loss(
        logits, {"label": torch.tensor([0])}, LossTerms(focal=0.5)
    )
    (slope,) = torch.autograd.grad(loss.sum, logits)
    assert (loss.sum.item(), slope.tolist()) == (0.0, [[0.0, 0.0]])
