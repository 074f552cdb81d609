"""Ranking metrics of recommenders: hit rate and NDCG of held-out items, and two baselines.

The baselines, popularity and EASE, are measured under the same protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isobatch.core.terminal.status import doing
from isobatch.models.base import Batch, Sum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

MAX_SCORES_AT_ONCE = 1 << 24
"""Numbers that a full ranking holds in memory at a time."""
MAX_ITEMS_FOR_EASE = 10_000
"""EASE inverts an (items, items) matrix: it is left out for larger catalogues."""
EASE_LAMBDAS = (1000.0, 100.0, 300.0, 3000.0)
"""L2 regularizations of EASE; the best on the validation split is taken, the first where there is none."""


def ranks(target: Tensor, others: Tensor, counts: Tensor) -> Tensor:
    """(B,) rank from 0 of the (B,) targets among (B, n) others; one with the same score counts half.

    `counts`: (B, n) bool, which of the others take part. NaN counts against the model: a target that is NaN
    ranks last, and an other that is NaN ranks above the target.
    """
    above = (~(others <= target[:, None]) & counts).sum(1)
    same = ((others == target[:, None]) & counts).sum(1)
    return above + 0.5 * same


def hit_rate_and_ndcg(name: str, rank: Tensor, k: int) -> dict[str, Sum]:
    """Parts of hit rate and NDCG at k of (B,) ranks from 0: 1 and 1 / log2(rank + 2) within the first k."""
    hit = rank < k
    gain = torch.where(hit, 1 / torch.log2(rank + 2), torch.zeros_like(rank))
    return {
        f"{name}hr@{k}": Sum(hit.sum(), len(rank)),
        f"{name}ndcg@{k}": Sum(gain.sum(), len(rank)),
    }


def metric_parts(net: Any, batch: Batch, k: int) -> dict[str, Sum]:
    """Metrics of the model and of popularity, against the sampled negatives and against all items.

    batch: user (B,), item (B,) held out, rivals (B, n) sampled negatives or -1, hidden (B, 1) another held-
    out item of the user or -1.
    """
    found: dict[str, Sum] = {}
    rows = max(1, MAX_SCORES_AT_ONCE // (len(net.item_text) * net.floats_per_score))
    for start in range(0, len(batch["user"]), rows):
        chunk = {name: batch[name][start : start + rows] for name in ("user", "item", "rivals", "hidden")}
        popular = net.counts.float().expand(len(chunk["user"]), -1)
        parts = _rank_against_all(net, chunk, k) | ranking_parts(net, chunk, popular, "popularity_", k)
        for name, new in parts.items():
            before = found.get(name, Sum(0.0, 0))
            found[name] = Sum(before.value + new.value, before.weight + new.weight)
    return found


def _rank_against_all(net: Any, batch: Batch, k: int) -> dict[str, Sum]:
    """The model's metrics: it scores all items."""
    user = batch["user"].long()
    (scores,) = net(user, [torch.arange(len(net.item_text), device=user.device)])
    return ranking_parts(net, batch, scores, "", k)


def ranking_parts(net: Any, batch: Batch, scores: Tensor, name: str, k: int) -> dict[str, Sum]:
    """Metrics of (B, items) scores against the sampled negatives, and (`full_`) all items new to the user."""
    user, item, eval_negatives = (batch[column].long() for column in ("user", "item", "rivals"))
    hidden = batch["hidden"].long()
    target = scores.gather(1, item[:, None])[:, 0]
    rank = ranks(target, scores.gather(1, eval_negatives.clamp_min(0)), eval_negatives >= 0)
    candidates = torch.ones_like(scores, dtype=torch.bool)
    had = net.training_interactions(user.to(net.seen.device))
    candidates[tuple(places.to(scores.device) for places in had)] = False
    rows = torch.arange(len(user), device=user.device)
    has_hidden = hidden[:, 0] >= 0
    candidates[rows[has_hidden], hidden[has_hidden, 0]] = False
    candidates[rows, item] = False
    return {
        **hit_rate_and_ndcg(name, rank, k),
        **hit_rate_and_ndcg(f"full_{name}", ranks(target, scores, candidates), k),
    }


def chance_of_a_hit(batches: Iterable[Batch], k: int) -> float:
    """The hit rate at k of a random order of the held-out item and its negatives."""
    hits = rows = 0.0
    for batch in batches:
        candidates = 1 + (batch["rivals"] >= 0).sum(1)
        hits += float((k / candidates.double()).clamp_max(1).sum())
        rows += len(candidates)
    return hits / rows


def ease_metrics(
    net: Any,
    batches: Callable[[], Iterable[Batch]],
    validation: Callable[[], Iterable[Batch]] | None,
    k: int,
) -> Mapping[str, float]:
    """Metrics of EASE trained on the same interactions; empty for a large catalogue.

    Against the negatives and against all items its regularization is the one with the best NDCG of that kind
    in `validation`, never in `batches`.
    """
    if len(net.item_text) > MAX_ITEMS_FOR_EASE:
        return {}
    doing("measuring EASE beside it")
    gram = _gram_matrix(net)
    tried = (
        {} if validation is None else {l2: _measure(net, validation(), gram, l2, k) for l2 in EASE_LAMBDAS}
    )
    found: dict[str, float] = {}
    measured: dict[float, dict[str, float]] = {}
    for name in ("ease_", "full_ease_"):
        best = max(tried, key=lambda l2, name=name: tried[l2][f"{name}ndcg@{k}"], default=EASE_LAMBDAS[0])  # type: ignore[misc]
        if best not in measured:
            measured[best] = _measure(net, batches(), gram, best, k)
        found |= {key: value for key, value in measured[best].items() if key.startswith(name)}
        found[f"{name}lambda"] = best
    return found


def _measure(net: Any, batches: Iterable[Batch], gram: Tensor, l2: float, k: int) -> dict[str, float]:
    """Metrics of EASE with this regularization."""
    weights = ease_weights(gram, l2)
    total: dict[str, list[float]] = {}
    for batch in batches:
        scores = _training_matrix(net, batch["user"].long()) @ weights
        for name, part in ranking_parts(net, batch, scores, "ease_", k).items():
            so_far = total.setdefault(name, [0.0, 0.0])
            so_far[0] += float(part.value)
            so_far[1] += part.weight
    return {name: value / weight for name, (value, weight) in total.items()}


def _training_matrix(net: Any, user: Tensor) -> Tensor:
    """(B, items): 1 where a user had the item in training."""
    found = torch.zeros(len(user), len(net.item_text))
    rows, items = net.training_interactions(user.to(net.seen.device))
    found[rows.cpu(), items.cpu()] = 1
    return found


def _gram_matrix(net: Any) -> Tensor:
    """(items, items) X'X of the training interactions, fp64."""
    items, users = len(net.item_text), torch.arange(len(net.user_text))
    gram = torch.zeros(items, items, dtype=torch.float64)
    for chunk in users.split(max(1, MAX_SCORES_AT_ONCE // items)):
        x = _training_matrix(net, chunk)
        gram += x.T @ x
    return gram


def ease_weights(gram: Tensor, l2: float) -> Tensor:
    """(items, items) weights of EASE (Steck 2019): B = I - P / diag(P), P = (X'X + lambda I)^-1."""
    inverse = torch.cholesky_inverse(
        torch.linalg.cholesky(gram + l2 * torch.eye(len(gram), dtype=gram.dtype))
    )
    return (inverse / -inverse.diagonal()).float().fill_diagonal_(0)
