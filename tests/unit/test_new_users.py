"""Tests of models/recommendation/recommendations.py: lists for a user who was not in training."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

from isobatch.core.errors import UserError
from isobatch.models.recommendation.recommendations import RecommendationError, Recommendations
from isobatch.tests.unit.test_recommender import recommender

if TYPE_CHECKING:
    from pathlib import Path

USERS, ITEMS, DIM = 40, 30, 6


def write_model(
    folder: Path, head: str = "dot", counts: dict[int, int] | None = None, described: tuple[int, ...] = ()
) -> Recommendations:
    """A trained recommender: two groups of users, and of items that they like; `counts` where not 50."""
    draws = np.random.default_rng(0)
    sides = np.where(np.arange(USERS) % 2, 1.0, -1.0)[:, None]
    users = draws.normal(size=(USERS, DIM)) * 0.3
    items = draws.normal(size=(ITEMS, DIM)) * 0.3
    users[:, :1] += sides
    items[:, :1] += np.where(np.arange(ITEMS) < ITEMS // 2, 2.0, -2.0)[:, None]
    arrays = {"users": users, "items": items, "bias": draws.normal(size=ITEMS)}
    vectors = {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()}
    save_file({**vectors, "had": np.arange(3)}, folder / "model.safetensors")
    titles = [f"Book {n}" for n in range(ITEMS)]
    titles[4:6] = "Bug's Life, A", "Life"
    names = {"users": [f"u{n}" for n in range(USERS)], "items": [f"i{n}" for n in range(ITEMS)]}
    known = {
        "counts": [(counts or {}).get(n, 50) for n in range(ITEMS)],
        "described": [int(n in described) for n in range(ITEMS)],
    }
    (folder / "names.json").write_text(json.dumps({**names, "titles": titles, **known}))
    (folder / "config.json").write_text(json.dumps({"head": head}))
    return Recommendations(folder)


def log_posterior(model: Recommendations, u: np.ndarray, taken: list[int]) -> float:
    """By the definition: log softmax of each item taken, and the normal density of the users' vectors."""
    v, b, users = (model.arrays[name].astype(np.float64) for name in ("items", "bias", "users"))
    scores = v @ u + b
    chosen = sum(scores[n] - np.log(np.exp(scores).sum()) for n in taken)
    covariance = np.cov(users.T, ddof=0)
    off = u - users.mean(0)
    return float(chosen - off @ np.linalg.solve(covariance, off) / 2)


@pytest.mark.parametrize("taken", [[0], [1, 2, 20], list(range(12)), [29] * 3])
def test_no_vector_is_likelier(tmp_path: Path, taken: list[int]) -> None:
    model = write_model(tmp_path)
    found = model.new_user(np.array(taken))
    best = log_posterior(model, found, taken)
    assert best > log_posterior(model, model.arrays["users"].mean(0), taken)
    draws = np.random.default_rng(1)
    for size in (0.3, 0.1, 0.03):
        for _ in range(50):
            assert log_posterior(model, found + size * draws.normal(size=DIM), taken) < best


def test_who_took_items_of_a_group_is_given_more_of_it(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    model.arrays["bias"][:] = 0
    found = [entry["item"] for entry in model.for_items(["i0", "i1", "Book 2"], 10)]
    assert all(int(item[1:]) < ITEMS // 2 for item in found)
    assert not {"i0", "i1", "i2"} & set(found)


def test_a_title_may_hold_commas(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    assert model.split_items("i1,Bug's Life, A, Life") == ["i1", "Bug's Life, A", "Life"]
    assert model.split_items("i1, nothing,i2") == ["i1", "nothing", "i2"]


def test_what_cannot_be_answered_is_said(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    with pytest.raises(RecommendationError, match=r"item Bok 7: is not .* \(did you mean Book 7\?\)"):
        model.for_items(["i1", "Bok 7"], 3)
    with pytest.raises(UserError, match="item x: is not in the training data"):
        recommender().open_lists(tmp_path).for_items(["x"], 3)
    with pytest.raises(RecommendationError, match="needs --head dot; this model has --head mlp"):
        write_model(tmp_path, "mlp").for_items(["i1"], 3)
