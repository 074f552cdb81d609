"""Tests of baselines: their weights by formula, what final/ keeps of them, and the model against each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from isobatch.core.errors import UserError
from isobatch.launch.predicting.recommend import answer_users
from isobatch.launch.predicting.tables import ListRequest
from isobatch.models.recommendation import baselines, classics, ranking
from isobatch.models.recommendation.recommendations import BASELINES, Recommendations, open_recommendations
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


SETTINGS = {"knn": 2, "ease": 3, "als": 1}
"""Of classics, by their places in what is tried."""


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


def training(model: RecommenderNet) -> classics.TrainingPairs:
    x = baselines.input_matrix(model, torch.arange(USERS), model.trained)
    return classics.TrainingPairs(x, x.t().to_sparse_csr(), model.recent, int(model.counts.sum()))


def dense(kept: dict[str, Any]) -> np.ndarray:
    """(items, items) weights."""
    found, starts = np.zeros((ITEMS, ITEMS)), np.asarray(kept["starts"])
    rows = np.repeat(np.arange(ITEMS), np.diff(starts))
    found[rows, np.asarray(kept["targets"]).astype(int)] = np.asarray(kept["values"])
    return found


def ridge(gram: np.ndarray, sources: np.ndarray, item: int, l2: float) -> np.ndarray:
    """(sources,) weights by which an item is predicted from others."""
    return np.linalg.solve(gram[np.ix_(sources, sources)] + l2 * np.eye(len(sources)), gram[sources, item])


def test_exact_ease_and_knn_are_those_of_the_formulas() -> None:
    model = net(text=False)
    x, data = interactions(model), training(model)
    gram = x.T @ x
    p = np.linalg.inv(gram + 1000 * np.eye(ITEMS))
    norms = np.sqrt(np.diag(gram))
    knn = gram / (np.outer(norms, norms) + classics.KNN_SHRINKAGES[0])
    for fit, wanted in ((classics.fit_ease, -p / np.diag(p)), (classics.fit_knn, knn)):
        np.fill_diagonal(wanted, 0)
        (_, kept), *others = fit(data, slice(1))
        np.testing.assert_allclose(dense(kept), wanted, rtol=1e-3, atol=1e-7)
        assert not others
        assert kept["values"].dtype == torch.float16


@pytest.mark.parametrize("k", [ITEMS, 3])
def test_ease_of_a_large_catalogue_is_a_ridge_on_the_items_taken_with_each(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"EXACT_ITEMS": 0, "EASE_NEIGHBOURS": k, "FLOATS_AT_ONCE": 64}.items():
        monkeypatch.setattr(classics, name, value)
    model = net(text=False)
    x, data = interactions(model), training(model)
    gram = x.T @ x
    (settings, kept), *others = classics.fit_ease(data, slice(None))
    assert settings == {"lambda": 1000.0, "neighbours": k}
    assert len(others) == len(classics.EASE_LAMBDAS) - 1
    found = dense(kept)
    p = np.linalg.inv(gram + 1000 * np.eye(ITEMS))
    for item in range(ITEMS):
        shared = np.where(np.arange(ITEMS) == item, 0, gram[:, item])
        sources = np.flatnonzero(found[:, item])
        most = np.sort(shared)[::-1][:k]
        assert np.sort(shared[sources]).tolist() == np.sort(most[most > 0]).tolist()
        wanted = np.zeros(ITEMS)
        wanted[sources] = ridge(gram, sources, item, 1000.0)
        np.testing.assert_allclose(found[:, item], wanted, rtol=1e-3, atol=1e-7)
        if k == ITEMS:  # with all others it is EASE, but for items that nobody took together
            np.testing.assert_allclose(found[sources, item], -p[sources, item] / p[item, item], rtol=0.1)


def test_als_solves_its_normal_equations() -> None:
    x, data = interactions(net(text=False)), training(net(text=False))
    fixed = torch.randn(ITEMS, 4, generator=torch.Generator().manual_seed(3))
    found, v = classics.als_vectors(fixed, data.x, 0.02, 0.3), fixed.double().numpy()
    for user in range(USERS):
        own = v[x[user] > 0]
        a = own.T @ own + 0.3 * v.T @ v + 0.02 * (len(own) + 0.3 * ITEMS) * np.eye(4)
        np.testing.assert_allclose(found[user], np.linalg.solve(a, own.sum(0)), rtol=1e-3, atol=1e-5)


def test_settings_and_the_best_are_chosen_on_validation_alone(tmp_path: Path) -> None:
    model, found = write_model(tmp_path)
    x, full = interactions(model), {}
    for settings, kept in classics.fit_ease(training(model), slice(None)):
        scores = torch.from_numpy(x @ dense(kept))
        others = ranking.candidates(model, VALID["user"], VALID["inputs"])
        ranks = ranking.ranks_of_held_out(VALID, scores[VALID["user"]], others)["full_"]
        full[settings["lambda"]] = float(ranking.gains(ranks.double(), 3)["ndcg"].mean())
    assert full[found["ease_lambda"]] == max(full.values())
    assert open_recommendations(tmp_path).by == found["best_on_validation"]
    untuned = baselines.final_figures(model, tmp_path, lambda: [TEST], None, 3)
    assert untuned["ease_lambda"] == classics.EASE_LAMBDAS[0]
    assert "best_on_validation" not in untuned
    assert open_recommendations(tmp_path).by == "model"


def test_a_blend_adds_standardized_scores_of_the_two_best(tmp_path: Path) -> None:
    model, found = write_model(tmp_path)
    parts = [part.split() for part in found["blend_of"].split(" + ")]
    assert sum(float(share) for share, _ in parts) == pytest.approx(1)
    wanted = np.zeros((USERS, ITEMS))
    for share, name in parts:
        scores = every(open_recommendations(tmp_path, name))
        scores = scores - scores.mean(1, keepdims=True)
        wanted += float(share) * scores / np.maximum(scores.std(1, keepdims=True), 1e-9)
    np.testing.assert_allclose(every(open_recommendations(tmp_path, "blend")), wanted, atol=1e-3)
    kept, _ = baselines._read(tmp_path)  # noqa: SLF001  what is measured is what is answered by
    own = baselines._scorers(model, kept)["blend"](torch.arange(USERS), model.trained)  # noqa: SLF001
    np.testing.assert_allclose(own, wanted, atol=1e-3)


def test_without_a_network_the_best_classic_stands_in_its_place(tmp_path: Path) -> None:
    model, _ = write_model(tmp_path)
    model.is_trained = False
    found = baselines.final_figures(model, tmp_path, lambda: [TEST], lambda: [VALID], 3)
    best = found["best_on_validation"]
    assert best in BASELINES
    assert "model" not in found["blend_of"]
    assert f"full_{best}_ndcg@3_difference_ci95" not in found
    if best != "popularity":
        assert found["full_ndcg@3"] == found[f"full_{best}_ndcg@3"]
    baselines.fit_unmeasured(model, tmp_path)
    assert open_recommendations(tmp_path).by == "ease"
    (tmp_path / "config.json").write_text(json.dumps({"head": "none"}))
    with pytest.raises(UserError, match="--by model: this run trained none"):
        recommender().open_lists(tmp_path, "model")


@pytest.mark.parametrize("by", ["popularity", "recent", "knn", "ease", "als"])
def test_lists_and_figures_are_those_of_the_file_that_is_kept(by: str, tmp_path: Path) -> None:
    model, found = write_model(tmp_path)
    kept, x = load_file(tmp_path / baselines.BASELINES_FILE), interactions(model)
    if by == "popularity":
        scores = np.tile(x.sum(0), (USERS, 1))
    elif by == "recent":
        assert any((kept["recent.counts"] == counts.numpy()).all() for counts in model.recent)
        scores = np.tile(kept["recent.counts"].astype(float), (USERS, 1))
    elif by == "als":
        scores = (
            classics.CLASSICS["als"]
            .score(
                {part: torch.from_numpy(kept[f"als.{part}"]) for part in ("items", "settings")},
                training(model).x,
            )
            .numpy()
        )
    else:
        scores = x @ dense({part: kept[f"{by}.{part}"] for part in ("starts", "targets", "values")})
    lists = open_recommendations(tmp_path, by)
    assert lists.by == by
    np.testing.assert_allclose(every(lists), scores, atol=1e-5)
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


def test_vectors_of_users_are_kept_where_the_best_ranks_by_them(tmp_path: Path) -> None:
    model, _ = write_model(tmp_path)
    kept, _ = baselines._read(tmp_path)  # noqa: SLF001
    solved = every(open_recommendations(tmp_path, "als"))
    for best in ("als", "ease"):
        kept["als"].pop("users", None)
        fits = {name: baselines.Fitted(0.0, {}, arrays) for name, arrays in kept.items()}
        baselines._write(tmp_path, model, fits, best)  # noqa: SLF001
        assert ("als.users" in load_file(tmp_path / baselines.BASELINES_FILE)) == (best == "als")
        lists = open_recommendations(tmp_path, "als")
        found, scores = lists.lists(range(USERS), 3)
        there = found >= 0
        rows = np.nonzero(there)[0]
        np.testing.assert_allclose(scores[there], solved[rows, found[there]], rtol=1e-3, atol=1e-5)


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


def test_what_is_not_kept_is_refused_in_one_line(tmp_path: Path) -> None:
    model, _ = write_model(tmp_path)
    model.recent = torch.zeros(0, ITEMS)
    baselines.fit_unmeasured(model, tmp_path)
    for by, why in {"recent": "no times, or few", "blend": "nothing was held out"}.items():
        with pytest.raises(UserError, match=f"--by {by}: .* is not kept here: {why}"):
            recommender().open_lists(tmp_path, by)


def test_the_share_of_recent_interactions_is_one_of_interactions_not_of_pairs(tmp_path: Path) -> None:
    model, _ = write_model(tmp_path)
    once = [settings["share"] for settings, _ in classics.fit_recent(training(model), slice(None))]
    model.counts, model.recent = model.counts * 3, model.recent * 3  # each pair three times
    assert [settings["share"] for settings, _ in classics.fit_recent(training(model), slice(None))] == once


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


def test_a_run_that_goes_on_keeps_the_settings_of_the_classics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are fitted once each, to its own data; held-out data or none."""
    model, chosen = write_model(tmp_path)
    fits = {name: baselines.Fitted(0.0, {}, {}, number) for name, number in SETTINGS.items()}
    baselines._write(tmp_path, model, fits, "model")  # noqa: SLF001
    tried: dict[str, list[slice]] = {}
    for name, classic in classics.CLASSICS.items():

        def fit(data: Any, which: slice, name: str = name, classic: Any = classic) -> Any:
            tried.setdefault(name, []).append(which)
            return classic.fit(data, which)

        monkeypatch.setitem(baselines.CLASSICS, name, classics.Classic(fit, classic.score))
    again = tmp_path / "again"
    again.mkdir()
    found = baselines.final_figures(model, again, lambda: [TEST], lambda: [VALID], 3, earlier=tmp_path)
    assert found["knn_shrinkage"] == classics.KNN_SHRINKAGES[SETTINGS["knn"]]
    assert found["ease_lambda"] == classics.EASE_LAMBDAS[SETTINGS["ease"]]
    assert found.keys() == chosen.keys()
    baselines.fit_unmeasured(model, again, earlier=tmp_path)
    one_each = {name: [slice(number, number + 1)] * 2 for name, number in SETTINGS.items()}
    assert {name: tried[name] for name in SETTINGS} == one_each
    assert [which.stop for which in tried["recent"]] == [None, 1]  # windows are the data's own


@pytest.mark.parametrize("has_model", [True, False])
def test_a_run_without_held_out_data_ranks_as_the_one_before_chose(has_model: bool, tmp_path: Path) -> None:
    """Also one that goes on from that in turn; a classic that cannot be fitted is not chosen."""
    model, _ = write_model(tmp_path)
    model.is_trained = has_model
    kept, _ = baselines._read(tmp_path)  # noqa: SLF001
    shares = {"als": torch.tensor([0.3]), "model" if has_model else "knn": torch.tensor([0.7])}
    fits = {n: baselines.Fitted(0.0, {}, a, SETTINGS.get(n)) for n, a in (kept | {"blend": shares}).items()}
    for best in ("blend", "als"):
        baselines._write(tmp_path, model, fits, best)  # noqa: SLF001
        for folder, earlier in (("live", tmp_path), ("tuesday", tmp_path / "live")):
            (tmp_path / folder).mkdir(exist_ok=True)
            said = baselines.fit_unmeasured(model, tmp_path / folder, earlier)
            assert said == ("als" if best == "als" else f"0.3 als + 0.7 {[*shares][1]}")
            again, chosen = baselines._read(tmp_path / folder)  # noqa: SLF001
            assert (chosen, again["blend"]) == (best, shares)
    if has_model:
        model.is_trained = False
        assert baselines.fit_unmeasured(model, tmp_path / "live", tmp_path) == ""
        assert baselines._read(tmp_path / "live")[1] == "ease"  # noqa: SLF001


@pytest.mark.parametrize("by", ["knn", "ease", "blend"])
def test_an_item_that_is_among_the_nearest_of_no_other_speaks_for_its_own_nearest(
    by: str, tmp_path: Path
) -> None:
    """As a new one. What no other has weights for either tells nothing, and the catalogue's order neither."""
    write_model(tmp_path)
    arrays = dict(load_file(tmp_path / baselines.BASELINES_FILE))
    for name in ("knn", "ease"):
        rows = {"starts": [0, 0, 0, *[2] * (ITEMS - 2)], "targets": [0, 3], "values": [0.5, 0.2]}
        for part, values in rows.items():  # item 2 speaks for items 0 and 3, and none for it
            arrays[f"{name}.{part}"] = np.array(values, arrays[f"{name}.{part}"].dtype)
    arrays = {k: v for k, v in arrays.items() if not k.startswith("blend")}
    arrays |= {f"blend.{name}": np.array([x], np.float32) for name, x in (("popularity", 0.6), ("knn", 0.4))}
    save_file(arrays, tmp_path / baselines.BASELINES_FILE, {"best": by})
    lists = open_recommendations(tmp_path)
    assert [entry["item"] for entry in lists.similar("i0", 3)] == ["i2"]
    assert lists.for_items(["i0"], 1)[0]["item"] == "i2" or by == "blend"
    assert [entry["item"] for entry in lists.similar("i2", 3)] == ["i0", "i3"]
    assert not lists.knows_item("i1")
    for ask in (lists.similar, lambda item, top: lists.for_items([item], top)):
        with pytest.raises(UserError, match="item i1: nobody took it with another item in training"):
            ask("i1", 3)
    (found,) = answer_users(lists, 3, [ListRequest(items=("i1",))])
    assert "nobody took it with another" in found["fallback"]
    had = [{*lists._had_by(np.array([n]))[1].tolist()} for n in range(USERS)]  # noqa: SLF001
    silent = [user for user, items in zip(lists.users, had, strict=True) if not items & {0, 2, 3}]
    assert silent
    for found in lists.recommend_each(silent, 3) if by != "blend" else []:
        counts = [lists.counts[lists.items.index(one["item"])] for one in found]
        assert counts == sorted(counts, reverse=True)


def test_without_held_out_data_the_first_settings_are_fitted(tmp_path: Path) -> None:
    model, _ = write_model(tmp_path)
    baselines.fit_unmeasured(model, tmp_path)
    assert open_recommendations(tmp_path).by == "model"
    (_, kept), *_ = classics.fit_knn(training(model), slice(1))
    wanted = interactions(model) @ dense(kept)
    np.testing.assert_allclose(every(open_recommendations(tmp_path, "knn")), wanted, atol=1e-5)
