"""How high held-out items rank: hit rate, NDCG, and what simple rules reach under the same protocol."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from isobatch.models.base import Batch, Sum

MOST_SCORES = 1 << 24
"""Scores of a full ranking computed at a time."""
MOST_FOR_EASE = 10_000
"""Items above which EASE's matrix is not inverted: it has their square."""
EASE_LAMBDA = 1000.0


def ranks(target: Tensor, others: Tensor, counts: Tensor) -> Tensor:
    """(B,) how many of (B, n) others score above (B,) targets; one that scores the same counts half.

    `counts` (B, n) bool says which of the others there are. A score that is no number is below all.
    """
    above = (~(others <= target[:, None]) & counts).sum(1)
    same = ((others == target[:, None]) & counts).sum(1)
    return above + 0.5 * same


def sums(name: str, rank: Tensor, k: int) -> dict[str, Sum]:
    """Parts of hit rate and NDCG: 1 and 1 / log2(rank + 2) for ranks from 0 among the first k."""
    hit = rank < k
    gain = torch.where(hit, 1 / torch.log2(rank + 2), torch.zeros_like(rank))
    return {
        f"{name}hr@{k}": Sum(hit.sum(), len(rank)),
        f"{name}ndcg@{k}": Sum(gain.sum(), len(rank)),
    }


def parts(net: Any, batch: Batch, k: int) -> dict[str, Sum]:
    """Of the model among the rivals and among all items, and of popularity among the rivals."""
    user, item, rivals = (batch[name].long() for name in ("user", "item", "rivals"))
    found: dict[str, Sum] = {}
    rows = max(1, MOST_SCORES // (len(net.item_text) * net.numbers_a_score))
    for start in range(0, len(user), rows):
        part = slice(start, start + rows)
        some = _ranked(net, user[part], item[part], rivals[part], batch["hidden"][part].long(), k)
        for name, new in some.items():
            before = found.get(name, Sum(0.0, 0))
            found[name] = Sum(before.value + new.value, before.weight + new.weight)
    counts = net.counts.float()
    popular = ranks(counts[item], counts[rivals.clamp_min(0)], rivals >= 0)
    return {**found, **sums("popularity_", popular, k)}


def _ranked(net: Any, user: Tensor, item: Tensor, rivals: Tensor, hidden: Tensor, k: int) -> dict[str, Sum]:
    every = torch.arange(len(net.item_text), device=user.device)
    (scores,) = net(user, [every])
    target = scores.gather(1, item[:, None])[:, 0]
    among = ranks(target, scores.gather(1, rivals.clamp_min(0)), rivals >= 0)
    open_ = torch.ones_like(scores, dtype=torch.bool)
    open_[net.seen_by(user)] = False
    rows = torch.arange(len(user), device=user.device)
    some = hidden[:, 0] >= 0
    open_[rows[some], hidden[some, 0]] = False
    open_[rows, item] = False
    return {**sums("", among, k), **sums("full_", ranks(target, scores, open_), k)}


def ease_metrics(net: Any, batches: Iterable[Batch], k: int) -> Mapping[str, float]:
    """Hit rate and NDCG of EASE trained on the same interactions; nothing for a large catalogue."""
    if len(net.item_text) > MOST_FOR_EASE:
        return {}
    weights = ease(net)
    total: dict[str, list[float]] = {}
    for batch in batches:
        user, item, rivals = (batch[name].long() for name in ("user", "item", "rivals"))
        scores = _had(net, user) @ weights
        target = scores.gather(1, item[:, None])[:, 0]
        rank = ranks(target, scores.gather(1, rivals.clamp_min(0)), rivals >= 0)
        for name, part in sums("ease_", rank, k).items():
            so_far = total.setdefault(name, [0.0, 0.0])
            so_far[0] += float(part.value)
            so_far[1] += part.weight
    return {name: value / weight for name, (value, weight) in total.items()}


def _had(net: Any, user: Tensor) -> Tensor:
    """(B, items) 1 where a user had the item in training."""
    found = torch.zeros(len(user), len(net.item_text))
    rows, items = net.seen_by(user.to(net.seen.device))
    found[rows.cpu(), items.cpu()] = 1
    return found


def ease(net: Any) -> Tensor:
    """(items, items) weights of EASE (Steck 2019): B = I - P / diag(P), P = (X'X + lambda I)^-1."""
    items, users = len(net.item_text), torch.arange(len(net.user_text))
    gram = EASE_LAMBDA * torch.eye(items, dtype=torch.float64)
    for some in users.split(max(1, MOST_SCORES // items)):
        x = _had(net, some)
        gram += x.T @ x
    inverse = torch.linalg.inv(gram)
    return (inverse / -inverse.diagonal()).float().fill_diagonal_(0)
