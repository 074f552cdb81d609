"""Ranking metrics of recommenders: hit rate and NDCG of held-out items, and two baselines.

The baselines, popularity and EASE, are measured under the same protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isobatch.models.base import Batch, Sum

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_SCORES_AT_ONCE = 1 << 24
"""Numbers that a full ranking holds in memory at a time."""
MAX_ITEMS_FOR_EASE = 10_000
"""EASE inverts an (items, items) matrix: it is left out for larger catalogues."""
EASE_LAMBDA = 1000.0
"""L2 regularization of EASE."""


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
    """The model's metrics against the sampled negatives and against all items, and popularity's.

    batch: user (B,), item (B,) held out, rivals (B, n) sampled negatives or -1, hidden (B, 1) another held-
    out item of the user or -1.
    """
    user, item, eval_negatives = (batch[name].long() for name in ("user", "item", "rivals"))
    found: dict[str, Sum] = {}
    rows = max(1, MAX_SCORES_AT_ONCE // (len(net.item_text) * net.floats_per_score))
    for start in range(0, len(user), rows):
        part = slice(start, start + rows)
        chunk_parts = _rank_against_all(
            net, user[part], item[part], eval_negatives[part], batch["hidden"][part].long(), k
        )
        for name, new in chunk_parts.items():
            before = found.get(name, Sum(0.0, 0))
            found[name] = Sum(before.value + new.value, before.weight + new.weight)
    counts = net.counts.float()
    popular = ranks(counts[item], counts[eval_negatives.clamp_min(0)], eval_negatives >= 0)
    return {**found, **hit_rate_and_ndcg("popularity_", popular, k)}


def _rank_against_all(
    net: Any, user: Tensor, item: Tensor, eval_negatives: Tensor, hidden: Tensor, k: int
) -> dict[str, Sum]:
    """Metrics against the sampled negatives, and (`full_`) against all items new to the user."""
    all_items = torch.arange(len(net.item_text), device=user.device)
    (scores,) = net(user, [all_items])
    target = scores.gather(1, item[:, None])[:, 0]
    rank = ranks(target, scores.gather(1, eval_negatives.clamp_min(0)), eval_negatives >= 0)
    candidates = torch.ones_like(scores, dtype=torch.bool)
    candidates[net.training_interactions(user)] = False
    rows = torch.arange(len(user), device=user.device)
    has_hidden = hidden[:, 0] >= 0
    candidates[rows[has_hidden], hidden[has_hidden, 0]] = False
    candidates[rows, item] = False
    return {
        **hit_rate_and_ndcg("", rank, k),
        **hit_rate_and_ndcg("full_", ranks(target, scores, candidates), k),
    }


def ease_metrics(net: Any, batches: Iterable[Batch], k: int) -> Mapping[str, float]:
    """Hit rate and NDCG of EASE trained on the same interactions; empty for a large catalogue."""
    if len(net.item_text) > MAX_ITEMS_FOR_EASE:
        return {}
    weights = ease_weights(net)
    total: dict[str, list[float]] = {}
    for batch in batches:
        user, item, eval_negatives = (batch[name].long() for name in ("user", "item", "rivals"))
        scores = _training_matrix(net, user) @ weights
        target = scores.gather(1, item[:, None])[:, 0]
        rank = ranks(target, scores.gather(1, eval_negatives.clamp_min(0)), eval_negatives >= 0)
        for name, part in hit_rate_and_ndcg("ease_", rank, k).items():
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


def ease_weights(net: Any) -> Tensor:
    """(items, items) weights of EASE (Steck 2019): B = I - P / diag(P), P = (X'X + lambda I)^-1."""
    items, users = len(net.item_text), torch.arange(len(net.user_text))
    gram = EASE_LAMBDA * torch.eye(items, dtype=torch.float64)
    for chunk in users.split(max(1, MAX_SCORES_AT_ONCE // items)):
        x = _training_matrix(net, chunk)
        gram += x.T @ x
    inverse = torch.linalg.inv(gram)
    return (inverse / -inverse.diagonal()).float().fill_diagonal_(0)
