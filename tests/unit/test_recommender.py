"""Tests of the workload recommender: losses against their formulas, ranking metrics, and checks of flags."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from isobatch.core.errors import UserError
from isobatch.models.recommendation import losses, ranking
from isobatch.models.recommendation.model_size import fit_costs
from isobatch.models.recommendation.network import RecommenderNet
from isobatch.models.recommendation.task import Recommender, RecommenderOptions
from isobatch.tests.unit.test_text_encoder import encoder, texts

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.models.recommendation.catalogue import Catalogue

USERS, ITEMS, DIM = 6, 23, 8


def catalogue() -> Catalogue:
    draw = np.random.default_rng(1)
    user, item = draw.integers(USERS, size=40), draw.integers(ITEMS, size=40)
    seen = np.unique(user.astype(np.int64) * ITEMS + item)
    counts = np.bincount(seen % ITEMS, minlength=ITEMS)
    of_users, of_items = np.arange(USERS) % 3, np.arange(ITEMS)
    of_items[5] = -1
    texts_of = {"user_text": of_users, "item_text": of_items}
    starts = np.searchsorted(seen, np.arange(USERS + 1) * ITEMS)
    of = {
        "counts": counts,
        "seen": seen,
        "history": seen % ITEMS,
        "starts": starts,
        "trained": np.diff(starts),
        "recent": np.stack([counts // 2, counts // 3]),
    }
    return dataclasses.replace(texts(ITEMS), **texts_of, **of)


def net(head: str = "dot", text: bool = True) -> RecommenderNet:
    made = encoder() if text else None
    torch.manual_seed(0)
    return RecommenderNet(catalogue(), DIM, (12, 6), head, made)


def scores(model: RecommenderNet) -> Tensor:
    (found,) = model(torch.arange(USERS), [torch.arange(ITEMS)])
    assert isinstance(found, Tensor)
    return found.detach()


@pytest.mark.parametrize("head", ["dot", "mlp", "neumf"])
def test_scores_are_the_same_for_shared_and_own_items(head: str) -> None:
    model = net(head)
    own = torch.randint(ITEMS, (USERS, 4), generator=torch.Generator().manual_seed(0))
    (found,) = model(torch.arange(USERS), [own])
    torch.testing.assert_close(found, scores(model).gather(1, own), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", ["dot", "neumf"])
def test_deduplication_changes_no_gradient(head: str) -> None:
    model = net(head)
    model.train()
    user, item = torch.tensor([0, 1, 0, 3, 3]), torch.tensor([[2, 2], [7, 5], [2, 9], [9, 9], [0, 5]])
    gradients = []
    for vectors in (model.vectors, model._fused_vectors):  # noqa: SLF001  the same, row by row
        model.zero_grad()
        model.vectors = lambda u, i, _, found=vectors: found(u, i)  # type: ignore[method-assign]
        (found,) = model(user, [item])
        found.square().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    once, each = gradients
    assert any("lora_A" in name for name in once)
    assert once.keys() == each.keys()
    for name, gradient in once.items():
        assert gradient is not None
        assert (gradient - each[name]).norm() <= 1e-5 * gradient.norm() + 1e-9, name


def test_an_item_without_text_uses_its_id_alone() -> None:
    model = net()
    _, before = model.vectors(torch.tensor([0]), torch.tensor([5, 6]))
    with torch.no_grad():
        model.item_meta_proj.weight.mul_(3)
        model.item_meta_proj.bias.add_(1)
    _, after = model.vectors(torch.tensor([0]), torch.tensor([5, 6]))
    assert torch.equal(before[0], after[0])
    assert not torch.allclose(before[1], after[1])


def test_sampled_softmax_is_the_softmax_where_all_items_are_drawn() -> None:
    model, user, item = net(text=False), torch.tensor([0, 2, 5]), torch.tensor([4, 4, 9])
    found = losses.sampled_softmax(model, user, item, torch.arange(ITEMS)).detach()
    wanted = torch.nn.functional.cross_entropy(scores(model)[user], item, reduction="sum")
    assert float(found) == pytest.approx(float(wanted), rel=1e-5)


def test_sampled_softmax_is_near_the_softmax_on_average() -> None:
    """logQ: without log(I/S) the loss would be smaller by about log(I/S) per pair."""
    model, user, item = net(text=False), torch.tensor([0, 2, 5]), torch.tensor([4, 4, 9])
    draws = [losses.draw_shared_negatives(12, ITEMS, (0, "x", n)) for n in range(200)]
    found = np.mean([float(losses.sampled_softmax(model, user, item, p).detach()) for p in draws])
    wanted = torch.nn.functional.cross_entropy(scores(model)[user], item, reduction="sum")
    assert found == pytest.approx(float(wanted), abs=0.1)


def test_shared_negatives_are_distinct_and_keyed_by_step() -> None:
    one = losses.draw_shared_negatives(8, ITEMS, (0, "x", 1))
    assert len(set(one.tolist())) == 8
    assert torch.equal(one, losses.draw_shared_negatives(8, ITEMS, (0, "x", 1)))
    assert not torch.equal(one, losses.draw_shared_negatives(8, ITEMS, (0, "x", 2)))
    assert losses.draw_shared_negatives(99, ITEMS, (0, "x", 1)).tolist() == list(range(ITEMS))


def test_an_item_unseen_in_training_uses_its_text_alone() -> None:
    model = net()
    unseen = int((model.counts == 0).nonzero()[0, 0])
    assert not model.item_ids.weight[unseen].any()
    _, (vector,) = model.vectors(torch.tensor([0]), torch.tensor([unseen]))
    assert vector.any()


def test_in_batch_negatives_are_those_of_the_cohort() -> None:
    model, user = net(text=False), torch.tensor([0, 1, 2, 3, 4])
    item = torch.tensor([3, 8, 3, 3, 7])  # two cohorts of two and a rest; 3 and 3 in one of them
    found = float(losses.in_batch_softmax(model, user, item, 2).detach())
    logits = scores(model) - torch.log(model.counts.clamp_min(1) * 2 / model.counts.sum())
    first = torch.nn.functional.cross_entropy(logits[:2][:, [3, 8]], torch.tensor([0, 1]), reduction="sum")
    assert found == pytest.approx(float(first), rel=1e-5)  # the others have nobody to lose against


def test_binary_cross_entropy_ignores_positives() -> None:
    model, user, item = net(text=False), torch.tensor([0]), torch.tensor([4])
    positive = int(model.seen[0])  # of user 0
    free = next(i for i in range(ITEMS) if not model.seen_in_training(user, torch.tensor([[i]]))[0, 0])
    all_scores = scores(model)[0]
    sigmoid = torch.nn.functional.logsigmoid
    for drawn, negative in (([positive, free], free), ([free, positive], free), ([positive, positive], None)):
        found = losses.binary_cross_entropy(
            model, user, item, *losses.avoid_positives(model, user, torch.tensor([[drawn]]))
        )
        wanted = -sigmoid(all_scores[4]) - (0 if negative is None else sigmoid(-all_scores[negative]))
        assert float(found.detach()) == pytest.approx(float(wanted), rel=1e-5)


def test_l2_counts_what_the_loss_leaves_out_as_taken_too() -> None:
    model = net(text=False)
    key = int(model.seen[0])
    user, taken = key // ITEMS, key % ITEMS
    draws = torch.full((1, 1, 2), taken)  # drawn against itself: a negative that the user had
    noise = SimpleNamespace(integers=lambda *_: draws)
    batch = {"user": torch.tensor([user]), "item": torch.tensor([taken])}
    step: Any = SimpleNamespace(noise=noise)
    found = recommender(text="off", loss="bce", negatives=1, l2=0.5).loss(model, batch, step)
    u, v = (t.weight.detach().numpy()[n] for t, n in ((model.user_ids, user), (model.item_ids, taken)))
    assert float(found["l2"].sum.detach()) == pytest.approx(0.5 * 2 * float(u @ u + v @ v), rel=1e-5)
    score = float(u @ v)
    assert float(found["ranking"].sum.detach()) == pytest.approx(np.log1p(np.exp(-score)), rel=1e-5)


def test_ranks_hit_rate_and_ndcg() -> None:
    others = torch.tensor([[3.0, 1.0, 2.0], [5.0, 5.0, 9.0]])
    there = torch.tensor([[True, True, True], [True, True, False]])
    rank = ranking.ranks(torch.tensor([2.0, 5.0]), others, there)
    assert rank.tolist() == [1.5, 1.0]
    found = ranking.gains(torch.tensor([0.0, 1.0, 2.0, 3.0]), 3)
    assert float(found["mrr"].sum()) == pytest.approx(1 + 1 / 2 + 1 / 3)
    assert float(found["hr"].sum()) == 3
    assert float(found["ndcg"].sum()) == pytest.approx(1 + 1 / math.log2(3) + 0.5)


def test_nan_counts_against_the_model() -> None:
    nan = float("nan")
    there = torch.ones(1, 3, dtype=torch.bool)
    assert ranking.ranks(torch.tensor([nan]), torch.tensor([[1.0, nan, 2.0]]), there).tolist() == [3.0]
    assert ranking.ranks(torch.tensor([1.5]), torch.tensor([[1.0, nan, 2.0]]), there).tolist() == [2.0]


def test_full_ranking_leaves_out_what_the_user_had() -> None:
    model = net(text=False)
    user = torch.tensor([0, 3])
    batch = {**held_out([0, 3], [2, 7]), "rivals": torch.tensor([[1, 4, -1], [2, 3, 9]])}
    found = ranking.metric_parts(model, batch, 10)
    every = scores(model)[user]
    hits = 0
    for row, target in enumerate((2, 7)):
        had = {int(k) % ITEMS for k in model.seen if int(k) // ITEMS == int(user[row])} | {[-1, 11][row]}
        better = [
            i for i in range(ITEMS) if i not in had and i != target and every[row, i] > every[row, target]
        ]
        hits += len(better) < 10
    assert float(found["full_hr@10"].value) == hits
    assert found["full_hr@10"].weight == 2


def held_out(users: list[int], items: list[int]) -> dict[str, torch.Tensor]:
    rivals = torch.tensor([[i for i in range(ITEMS) if i != item][:5] for item in items])
    inputs = torch.from_numpy(catalogue().trained[users])
    return {"user": torch.tensor(users), "item": torch.tensor(items), "inputs": inputs, "rivals": rivals}


def recommender(**options: Any) -> Recommender:
    from isobatch.core.recipe import Recipe

    common = {k: options.pop(k) for k in ("batch_size", "model", "optimizer", "data") if k in options}
    return Recommender(
        Recipe(task="recommender", **{"model": "tiny", **common}), RecommenderOptions(**options)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_cache": "on"}, "passes no gradient, so the encoder learns nothing"),
        ({"text_cache": "on", "text": "lora"}, "--text frozen"),
        ({"text_cache": "on", "text": "full"}, "learns nothing"),
        ({"trainable": "ids,fussion"}, "--trainable fussion: is not one of projection"),
        ({"head": "none"}, "--head none, as in --preset classics: .*; --preset sequence --text frozen"),
        ({"head": "neumf", "dim": 7}, "--dim 7: neumf halves it"),
        ({"layers": "64,x"}, "--layers 64,x: give widths"),
        ({"cohort": 1}, "--cohort 1: must be 0, or from 2 on"),
        ({"cohort": 7, "batch_size": 32}, "--cohort 7: .* divide --batch-size 32"),
        ({"cohort": 8, "loss": "bce", "batch_size": 32}, "--cohort 8: in-batch negatives are for"),
        ({"sparse_tables": True, "optimizer": "sgd"}, "--sparse-tables: rows are updated by Adam"),
        ({"model": "tinny"}, "--text-model tinny: is no preset"),
    ],
)
def test_bad_input_is_answered_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recommender(**options).check()


def test_model_size_counts_every_parameter(tmp_path: Path) -> None:
    for head, loss in (("dot", "sampled-softmax"), ("mlp", "sampled-softmax"), ("neumf", "bce")):
        task = recommender(text="off", head=head, loss=loss, dim=DIM, layers="12,6")
        more = {"samples": {"train": 40}, "mean_length": 1.0}
        facts = SimpleNamespace(extra={"users": USERS, "items": ITEMS}, folder=str(tmp_path), **more)
        made = RecommenderNet(catalogue(), DIM, (12, 6), head, None, user_bias=loss == "bce")
        count = sum(p.numel() for p in made.parameters())
        assert task.model_size(facts).parameters == pytest.approx(count, abs=DIM // 2)


def metrics_beside(name: str, figure: float, interval: tuple[float, float]) -> dict[str, Any]:
    beside = {f"full_{name}_ndcg@10": figure, f"full_{name}_ndcg@10_difference_ci95": [*interval]}
    return {"full_ndcg@10": 0.3, "held_out_users": 800, **beside}


def test_a_baseline_that_ranks_better_beyond_doubt_is_named() -> None:
    task = recommender(data="shop")
    metrics = metrics_beside("knn", 0.31, (-0.01, 0.03)) | metrics_beside("ease", 0.32, (0.01, 0.03))
    said = "EASE ranks better than this model by +0.0200 (95 %: +0.0100 to +0.0300; full_ndcg@10 0.3200"
    assert task.final_remark(metrics).startswith(said)
    assert "--by ease" in task.final_remark(metrics)
    assert recommender(data="demo").final_remark(metrics).startswith(said)


def test_a_difference_that_may_be_chance_is_said_to_be_one() -> None:
    task, metrics = recommender(data="shop"), metrics_beside("popularity", 0.31, (-0.01, 0.03))
    assert task.final_remark(metrics).startswith(
        "the 800 held-out users do not tell popularity alone and this model apart: +0.0100 (95 %: -0.0100"
    )
    worse = metrics_beside("ease", 0.2, (-0.12, -0.08))
    assert task.final_remark(worse).startswith(
        "this model ranks better than EASE by +0.1000 (95 %: +0.0800 to +0.1200; full_ndcg@10 0.3000 against"
    )
    hostile = {"full_ease_ndcg@10_difference_ci95": 3, "held_out_users": None, "full_ndcg@10": "x"}
    for received in ({name: value} for name, value in hostile.items()):
        assert task.final_remark({**metrics_beside("ease", 0.4, (0.05, 0.15)), **received}) == ""


def test_what_a_shop_would_show_without_a_model_stands_beside_it() -> None:
    """Of the classics alone the one that validation chose; not twice where popularity is what ranks best."""
    both = metrics_beside("ease", 0.2, (-0.12, -0.08)) | metrics_beside("popularity", 0.1, (-0.25, -0.15))
    said = recommender(data="shop").final_remark(both)
    assert said.endswith("; beside what most took this model has +0.2000 (95 %: +0.1500 to +0.2500)")
    classics = recommender(data="shop", head="none", text="off")
    assert "beside what most took ALS has +0.2000" in classics.final_remark(
        {**both, "best_on_validation": "als"}
    )
    most = metrics_beside("ease", 0.2, (-0.12, -0.08)) | metrics_beside("popularity", 0.4, (0.05, 0.15))
    assert "beside" not in recommender(data="shop").final_remark(most)


def test_the_baseline_that_was_best_on_validation_is_held_against_the_model() -> None:
    task = recommender(data="shop")
    metrics = metrics_beside("knn", 0.33, (0.02, 0.04)) | metrics_beside("ease", 0.32, (0.01, 0.03))
    said = task.final_remark({**metrics, "best_on_validation": "ease"})
    assert said.startswith("EASE ranks better than this model by +0.0200 (")
    assert said.endswith("lists are by EASE unless --by names another")
    classics = recommender(data="shop", head="none", text="off")
    said = classics.final_remark({**metrics_beside("knn", 0.2, (-0.2, -0.05)), "best_on_validation": "als"})
    assert said.startswith("ALS ranks better than item-kNN by +0.1000 (95 %: +0.0500 to +0.2000")
    assert task.final_remark({**metrics, "best_on_validation": "model"}).startswith("item-kNN ranks better")


@pytest.mark.parametrize(
    ("counts", "megabytes", "seconds"),
    [((943, 1682, 98_114), 260, 32.5), ((22_363, 12_101, 153_776), 303, 53.1)],
)
def test_fits_of_the_classics_are_planned_as_they_were_measured(
    counts: tuple[int, int, int], megabytes: float, seconds: float
) -> None:
    """MovieLens 100K and Amazon Beauty: the largest of each fit's peaks, all seconds of one thread."""
    peak, planned = fit_costs(*counts, tuned=True)
    assert peak / 1e6 == pytest.approx(megabytes, rel=0.1)
    assert planned == pytest.approx(seconds, rel=0.15)
    assert fit_costs(*counts, tuned=False)[1] < planned / 3


@pytest.mark.parametrize("options", [{"head": "none", "text": "off"}, {"text": "off"}])
def test_the_figure_of_a_run_is_its_own_whether_a_network_or_the_classics_rank(options: Any) -> None:
    assert recommender(data="shop", **options).monitor == ("full_ndcg@10", "max")
