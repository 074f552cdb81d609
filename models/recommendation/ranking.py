"""Ranking metrics of recommenders: hit rate, NDCG and reciprocal rank of held-out items, and popularity's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from isobatch.models.base import Batch, Sum

MAX_SCORES_AT_ONCE = 1 << 24
"""Numbers that a full ranking holds in memory at a time."""


def ranks(target: Tensor, others: Tensor, counts: Tensor) -> Tensor:
    """(B,) rank from 0 of the (B,) targets among (B, n) others; one with the same score counts half.

    `counts`: (B, n) bool, which of the others take part. NaN counts against the model: a target that is NaN
    ranks last, and an other that is NaN ranks above the target.
    """
    above = (~(others <= target[:, None]) & counts).sum(1)
    same = ((others == target[:, None]) & counts).sum(1)
    return above + 0.5 * same


def gains(rank: Tensor, k: int) -> dict[str, Tensor]:
    """hr, ndcg and mrr at k of (B,) ranks from 0: 1, 1 / log2(rank + 2), 1 / (rank + 1) within the first k.

    Of one held-out item: hr is its recall, and the ideal DCG is 1.
    """
    each = {"hr": torch.ones_like(rank), "ndcg": 1 / torch.log2(rank + 2), "mrr": 1 / (rank + 1)}
    return {name: gain.where(rank < k, 0.0) for name, gain in each.items()}


def metric_parts(net: Any, batch: Batch, k: int) -> dict[str, Sum]:
    """Metrics of the model and of popularity, against the sampled negatives and against all new items.

    batch: user (B,), item (B,) held out, inputs (B,) how many of the user's interactions are known, rivals
    (B, n) sampled negatives or -1.
    """
    found: dict[str, Sum] = {}
    for chunk in chunks(net, batch):
        popular = net.counts.float().expand(len(chunk["user"]), -1)
        own, others = score_all_items(net, chunk["user"].long(), chunk["inputs"]), new_items(net, chunk)
        for name, scores in (("", own), ("popularity_", popular)):
            sampled, full = ranks_of_held_out(chunk, scores, others)
            for prefix, rank in ((name, sampled), (f"full_{name}", full)):
                for metric, gain in gains(rank, k).items():
                    before = found.get(key := f"{prefix}{metric}@{k}", Sum(0.0, 0))
                    found[key] = Sum(before.value + gain.sum(), before.weight + len(rank))
    return found


def chunks(net: Any, batch: Batch) -> Iterator[dict[str, Tensor]]:
    """The batch in parts whose scores of all items fit MAX_SCORES_AT_ONCE."""
    rows = max(1, MAX_SCORES_AT_ONCE // (len(net.item_text) * net.floats_per_score))
    for start in range(0, len(batch["user"]), rows):
        yield {name: batch[name][start : start + rows] for name in ("user", "item", "inputs", "rivals")}


def score_all_items(net: Any, user: Tensor, inputs: Tensor) -> Tensor:
    """(B, items) scores of the model, which knows the first `inputs` (B,) interactions of each user."""
    return net(user, [torch.arange(len(net.item_text), device=user.device)], inputs)[0]


def ranks_of_held_out(batch: Batch, scores: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """(B,) ranks of the held-out items by (B, items) scores among their sampled negatives, and `others`."""
    negatives = batch["rivals"].long()
    target = scores.gather(1, batch["item"].long()[:, None])[:, 0]
    sampled = ranks(target, scores.gather(1, negatives.clamp_min(0)), negatives >= 0)
    return sampled, ranks(target, scores, others)


def new_items(net: Any, batch: Batch) -> Tensor:
    """(B, items) bool: what the user had in no interaction of any split: what negatives are drawn from."""
    user = batch["user"].long()
    found = torch.ones(len(user), len(net.item_text), dtype=torch.bool, device=user.device)
    found.scatter_(1, batch["item"].long()[:, None], False)
    found[net.interactions(user)] = False
    return found
