"""Tests of baselines: their weights by formula, what final/ keeps of them, and the model against each."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from isobatch.core.errors import UserError
from isobatch.models.recommendation import baselines, ranking
from isobatch.models.recommendation.recommendations import Recommendations, open_recommendations
from isobatch.tests.unit.test_recommender import ITEMS, USERS, held_out, net, recommender

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.models.recommendation.network import RecommenderNet

TEST, VALID = held_out([0, 3], [2, 7]), held_out([1, 2, 4], [5, 9, 3])


def interactions(model: RecommenderNet) -> np.ndarray:
    """(users, items) 0 and 1."""
    x = np.zeros((USERS, ITEMS))
    x[model.seen.numpy() // ITEMS, model.seen.numpy() % ITEMS] = 1
    return x


def write_model(folder: Path) -> tuple[RecommenderNet, dict[str, Any]]:
    """A model's folder as `Recommendations` reads it, with baselines; their figures on TEST."""
    model = net(text=False)
    users, items = model.all_vectors()
    arrays = {"users": users, "items": items, "bias": model.item_bias.weight[:, 0]}
    vectors = {k: np.ascontiguousarray(v.detach().numpy()) for k, v in arrays.items()}
    save_file({**vectors, "had": model.seen.numpy()}, folder / "model.safetensors")
    names = {"users": [f"u{n}" for n in range(USERS)], "items": [f"i{n}" for n in range(ITEMS)]}
    known = {"counts": model.counts.tolist(), "described": [0] * ITEMS, "titles": names["items"]}
    (folder / "names.json").write_text(json.dumps({**names, **known}))
    (folder / "config.json").write_text(json.dumps({"head": "dot"}))
    return model, baselines.final_figures(model, folder, lambda: [TEST], lambda: [VALID], 3)


def every(lists: Recommendations) -> np.ndarray:
    """(users, items) scores."""
    return np.stack([lists.scores(user) for user in range(USERS)])


def test_weights_are_those_of_the_formulas() -> None:
    x = interactions(net(text=False))
    gram = x.T @ x
    p = np.linalg.inv(gram + 30.0 * np.eye(ITEMS))
    ease = -p / np.diag(p)
    knn = np.array(
        [[gram[i, j] / (math.sqrt(gram[i, i] * gram[j, j]) + 5) for j in range(ITEMS)] for i in range(ITEMS)]
    )
    for made, wanted in ((baselines.ease_weights, ease), (baselines.knn_weights, knn)):
        np.fill_diagonal(wanted, 0)
        found = made(torch.from_numpy(gram), 30.0 if wanted is ease else 5.0)
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-8)


def test_the_largest_weights_of_each_column_are_kept() -> None:
    weights = torch.tensor([[0.0, 0.5, -0.25], [-2.0, 0.0, 0.125], [1.0, 0.25, 0.0]])
    kept = baselines.ItemWeights.largest(weights, 1)
    assert kept.dense().tolist() == [[0.0, 0.5, -0.25], [-2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert baselines.ItemWeights.largest(weights, 9).dense().tolist() == weights.tolist()
    assert kept.values.dtype == torch.float16


def test_settings_are_chosen_on_validation_alone(tmp_path: Path) -> None:
    model, found = write_model(tmp_path)
    gram = baselines.gram_matrix(model)
    full = {}
    for l2 in baselines.EASE_LAMBDAS:
        scores = (
            torch.from_numpy(interactions(model)).float() @ baselines.ease_weights(gram, l2).half().float()
        )
        others = ranking.candidates(model, VALID["user"], VALID["inputs"])
        ranks = ranking.ranks_of_held_out(VALID, scores[VALID["user"]], others)["full_"]
        full[l2] = float(ranking.gains(ranks.double(), 3)["ndcg"].mean())
    assert full[found["ease_lambda"]] == max(full.values())
    untuned = baselines.final_figures(model, tmp_path, lambda: [TEST], None, 3)
    assert untuned["ease_lambda"] == baselines.EASE_LAMBDAS[0]
    assert "best_on_validation" not in untuned
    assert open_recommendations(tmp_path, "best").by == "model"


@pytest.mark.parametrize("by", ["popularity", "knn", "ease"])
def test_lists_and_figures_are_those_of_the_file_that_is_kept(by: str, tmp_path: Path) -> None:
    model, found = write_model(tmp_path)
    kept, x = load_file(tmp_path / baselines.BASELINES_FILE), interactions(model)
    if by == "popularity":
        scores = np.tile(x.sum(0), (USERS, 1))
    else:
        dense = np.zeros((ITEMS, ITEMS))
        rows = np.repeat(np.arange(ITEMS), np.diff(kept[f"{by}.starts"]))
        dense[rows, kept[f"{by}.targets"]] = kept[f"{by}.values"]
        scores = x @ dense
    lists = open_recommendations(tmp_path, by)
    assert lists.by == by
    np.testing.assert_allclose(every(lists), scores, atol=1e-6)
    ranks = []
    for user, item in zip(TEST["user"].tolist(), TEST["item"].tolist(), strict=True):
        others = [i for i in range(ITEMS) if not x[user, i] and i != item]
        own = scores[user, item]
        ranks.append((scores[user, others] > own).sum() + (scores[user, others] == own).sum() / 2)
    if by != "popularity":  # every evaluation has its figures
        assert found[f"full_{by}_hr@3"] == sum(rank < 3 for rank in ranks) / 2
        assert found[f"full_{by}_mrr@3"] == pytest.approx(sum(1 / (r + 1) for r in ranks if r < 3) / 2)
    listed = [entry["item"] for entry in lists.recommend("u3", ITEMS)]
    had = [f"i{n}" for n in np.flatnonzero(x[3])]
    assert not {*listed} & {*had}
    assert [entry["item"] for entry in lists.for_items([*had, had[0]], ITEMS)] == listed
    (items, _) = lists.lists(range(6), ITEMS)
    assert [lists.items[n] for n in items[3] if n >= 0] == listed


def test_what_an_item_is_like_is_told_by_weights(tmp_path: Path) -> None:
    model, _ = write_model(tmp_path)
    x = interactions(model)
    item = int(x.sum(0).argmax())
    with_it = {f"i{n}" for n in np.flatnonzero(x[x[:, item] > 0].sum(0)) if n != item}
    assert {
        entry["item"] for entry in open_recommendations(tmp_path, "knn").similar(f"i{item}", ITEMS)
    } == with_it
    with pytest.raises(UserError, match="popularity knows no items like another"):
        recommender().open_lists(tmp_path, "popularity").similar("i1", 3)
    (tmp_path / baselines.BASELINES_FILE).unlink()
    with pytest.raises(UserError, match="No such file"):
        recommender().open_lists(tmp_path, "ease")


def test_a_large_catalogue_keeps_popularity_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "MAX_ITEMS", ITEMS - 1)
    _, found = write_model(tmp_path)
    assert "ease_hr@3" not in found
    assert "full_popularity_ndcg@3_difference_ci95" in found
    assert recommender().open_lists(tmp_path, "popularity").recommend("u1", 2)
    with pytest.raises(UserError, match="--by ease: EASE was not fitted: the catalogue is too large"):
        recommender().open_lists(tmp_path, "ease")


def test_intervals_count_rows_of_a_user_together() -> None:
    differences = torch.tensor([0.1, 0.3, -0.2, 0.4], dtype=torch.float64)
    low, high = baselines.paired_interval(differences, torch.tensor([5, 6, 7, 9]))  # type: ignore[misc]
    half = 1.96 * float(differences.std()) / 2  # by the textbook: 1.96 s / sqrt(4)
    assert [low, high] == pytest.approx([0.15 - half, 0.15 + half])
    twice = baselines.paired_interval(differences.repeat(2), torch.tensor([5, 6, 7, 9, 5, 6, 7, 9]))
    assert twice == pytest.approx([low, high])
    assert baselines.paired_interval(differences, torch.tensor([2, 2, 2, 2])) is None


def test_coverage_is_the_share_of_items_that_are_listed(tmp_path: Path) -> None:
    model, _ = write_model(tmp_path)
    x = interactions(model)
    scores = model(torch.arange(USERS), [torch.arange(ITEMS)])[0].detach().numpy()
    best = np.argsort(-np.where(x > 0, -np.inf, scores), axis=1)[[0, 3], :3]
    batch = held_out([0, 3], best[:, 0].tolist())  # what is held out is listed, too
    found = baselines.kept_metrics(model, tmp_path, lambda: [batch], 3)
    assert found["coverage@3"] == pytest.approx(len(np.unique(best)) / ITEMS)
    assert found["held_out_users"] == 2


def test_rows_are_ranked_alike_however_they_are_batched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = write_model(tmp_path)
    user, item = [3, 0, 3, 3, 1, 0], [7, 2, 1, 9, 5, 6]
    at_once = baselines.kept_metrics(model, tmp_path, lambda: [held_out(user, item)], 3)
    one_by_one = [held_out([u], [i]) for u, i in zip(user, item, strict=True)]
    joined = baselines.kept_metrics(model, tmp_path, lambda: one_by_one, 3)
    monkeypatch.setattr(ranking, "BATCHES_AT_ONCE", 1)
    singly = baselines.kept_metrics(model, tmp_path, lambda: one_by_one, 3)
    assert singly.keys() == at_once.keys()
    for name, figure in at_once.items():
        assert singly[name] == pytest.approx(figure), name
        assert joined[name] == pytest.approx(figure), name


def test_without_held_out_data_the_first_settings_are_fitted(tmp_path: Path) -> None:
    model, _ = write_model(tmp_path)
    baselines.fit_unmeasured(model, tmp_path)
    assert open_recommendations(tmp_path, "best").by == "model"
    x = interactions(model)
    shrunk = baselines.knn_weights(baselines.gram_matrix(model), baselines.KNN_SHRINKAGES[0])
    np.testing.assert_allclose(
        every(open_recommendations(tmp_path, "knn")), x @ shrunk.double().numpy(), atol=2e-3
    )
