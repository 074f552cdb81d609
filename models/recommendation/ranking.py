"""Ranking metrics of recommenders: of held-out items, of users with several, and of what is listed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobatch.models.base import Batch, Sum
from isobatch.models.recommendation.network import spans

Scorer = Callable[[Tensor, Tensor], Tensor]
"""(B,) users, of whom the first (B,) interactions are known -> (B, items) scores in host memory."""
BATCHES_AT_ONCE = 16
"""Batches of held-out rows that are ranked together."""
BUCKETS = ("head", "middle", "tail")
"""Items from the most popular on, until each bucket has its share of the training interactions, a third."""
MAX_SCORES_AT_ONCE = 1 << 22
"""Numbers that a full ranking holds in memory at a time."""


def ranks(target: Tensor, others: Tensor, counts: Tensor) -> Tensor:
    """(B,) rank from 0 of the (B,) targets among (B, n) others; one with the same score counts half.

    `counts`: (B, n) bool, which of the others take part. NaN counts against the model: a target that is NaN
    ranks last, and an other that is NaN ranks above the target.
    """
    # 32 bits: a sum of bool in 64, torch's default, takes three times as long on a processor.
    above = (~(others <= target[:, None]) & counts).sum(1, dtype=torch.int32)
    return above + 0.5 * ((others == target[:, None]) & counts).sum(1, dtype=torch.int32)


def gains(rank: Tensor, k: int) -> dict[str, Tensor]:
    """hr, ndcg and mrr at k of (B,) ranks from 0: 1, 1 / log2(rank + 2), 1 / (rank + 1) within the first k.

    Of one held-out item: hr is its recall, and the ideal DCG is 1.
    """
    each = {"hr": torch.ones_like(rank), "ndcg": 1 / torch.log2(rank + 2), "mrr": 1 / (rank + 1)}
    return {name: gain.where(rank < k, 0.0) for name, gain in each.items()}


def metric_parts(net: Any, batch: Batch, k: int) -> dict[str, Sum]:
    """Metrics of the model and of popularity among all candidates, and among sampled negatives if there are.

    batch: user (B,), item (B,) held out, inputs (B,) how many of the user's interactions are known; perhaps
    rivals (B, n) sampled negatives or -1.
    """
    found: dict[str, Sum] = {}
    for chunk in chunks(net, batch):
        popular = net.counts.float().expand(len(chunk["user"]), -1)
        user, inputs = chunk["user"].long(), chunk["inputs"]
        own, others = score_all_items(net, user, inputs), candidates(net, user, inputs)
        for name, scores in (("", own), ("popularity_", popular)):
            for way, rank in ranks_of_held_out(chunk, scores, others).items():
                for metric, gain in gains(rank, k).items():
                    before = found.get(key := f"{way}{name}{metric}@{k}", Sum(0.0, 0))
                    found[key] = Sum(before.value + gain.sum(), before.weight + len(rank))
    return found


def chunks(net: Any, batch: Batch) -> Iterator[dict[str, Tensor]]:
    """The batch in parts whose scores of all items fit MAX_SCORES_AT_ONCE."""
    rows = max(1, MAX_SCORES_AT_ONCE // (len(net.item_text) * net.floats_per_score))
    for start in range(0, len(batch["user"]), rows):
        yield {name: part[start : start + rows] for name, part in batch.items()}


def score_all_items(net: Any, user: Tensor, inputs: Tensor) -> Tensor:
    """(B, items) scores of the model, which knows the first `inputs` (B,) interactions of each user.

    Rows that know the same of a user are computed once.
    """
    known, rows = torch.stack([user.long(), inputs.long()], 1).unique(dim=0, return_inverse=True)
    if len(known) < len(user):
        return score_all_items(net, *known.unbind(1))[rows]
    return net(user, [torch.arange(len(net.item_text), device=user.device)], inputs)[0]


def ranks_of_held_out(batch: Batch, scores: Tensor, others: Tensor) -> dict[str, Tensor]:
    """`full_` and, where `rivals` were sampled, ``: (B,) ranks of the held-out items by (B, items) scores.

    `others` (B, items) bool: the candidates, among which the held-out item itself does not count.
    """
    item, found = batch["item"].long()[:, None], {}
    target = scores.gather(1, item)[:, 0]
    if "rivals" in batch:
        negatives = batch["rivals"].long()
        found[""] = ranks(target, scores.gather(1, negatives.clamp_min(0)), negatives >= 0)
    return {**found, "full_": ranks(target, scores, others.scatter(1, item, False))}


def candidates(net: Any, user: Tensor, inputs: Tensor) -> Tensor:
    """(B, items) bool: what held-out items are ranked against: all that the user had in no split.

    Where repeats stay, all that does not come after the `inputs` (B,): what the user had may come again.
    """
    place, device = net.starts.device, user.device
    user, inputs = user.to(place), inputs.long().to(place)
    first, stop = net.starts[user] + inputs * net.repeats, net.starts[user + 1]
    rows, positions = spans(first, stop - first)
    found = torch.ones(len(user), len(net.item_text), dtype=torch.bool, device=place)
    found[rows, net.history[positions].long()] = False
    return found.to(device)


class Ranked(NamedTuple):
    """How something ranks held-out rows."""

    figures: dict[str, float]
    """By name, without that of what ranks: see docs/recommender.md, Protocols."""
    full_ndcg: Tensor
    """(rows,) fp64."""


def measure(net: Any, scorer: Scorer, batches: Iterable[Batch], k: int) -> Ranked:
    """All figures of held-out rows. The rows of a user have the same `inputs`."""
    joined, items = [*_joined(batches)], len(net.item_text)
    user, item = (torch.cat([batch[name].long().cpu() for batch in joined]) for name in ("user", "item"))
    pairs = (user * items + item).unique()
    several = len(pairs) > len(user.unique())
    found: dict[str, list[Tensor]] = {}
    listed = torch.zeros(items, dtype=torch.bool)
    takers = torch.bincount(net.seen.cpu() % items, minlength=items).clamp_min(1).double()
    information = torch.log2((net.trained.cpu() > 0).sum() / takers)  # -log2 of the share of users
    novelty = torch.full((len(net.user_text),), torch.nan).double()
    for chunk in itertools.chain.from_iterable(chunks(net, batch) for batch in joined):
        users, rows = chunk["user"].long().unique(return_inverse=True)
        inputs = torch.empty_like(users).scatter_(0, rows, chunk["inputs"].long())
        scores, others = scorer(users, inputs), candidates(net, users, inputs)
        for way, rank in ranks_of_held_out(chunk, scores[rows], others[rows]).items():
            found.setdefault(way, []).append(rank.double())
        first, stop = (torch.searchsorted(pairs, (users + n) * items) for n in (0, 1))
        owners, positions = spans(first, stop - first)
        own = owners, pairs[positions] % items
        if several:
            others[own] = False
            rank = ranks_of_held_out(chunk, scores[rows], others[rows])["full_"]
            found.setdefault("among_others", []).append(rank.double())
        others[own] = True
        chosen = best_of(scores, others, k)
        listed |= chosen.any(0)
        novelty[users] = chosen.double() @ information / chosen.sum(1)
    of_rows = {way: torch.cat(parts) for way, parts in found.items()}
    alone = of_rows.pop("among_others", None)
    figures: dict[str, float] = {}
    for way, rank in of_rows.items():
        each = gains(rank, k)
        figures |= {f"{way}{metric}@{k}": float(gain.mean()) for metric, gain in each.items()}
    if alone is not None:
        figures |= {f"full_{n}@{k}": v for n, v in user_means(user * items + item, alone, items, k).items()}
    figures |= {f"coverage@{k}": float(listed.double().mean()), f"novelty@{k}": float(novelty.nanmean())}
    for name, chosen in row_groups(net, user, item).items():
        figures |= {f"full_{m}@{k}_{name}": float(each[m][chosen].mean()) for m in ("hr", "ndcg")}
    return Ranked(figures, each["ndcg"])


def _joined(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The same rows in larger batches: a user's scores are then computed once for many of his rows."""
    waiting = iter(batches)
    while some := list(itertools.islice(waiting, BATCHES_AT_ONCE)):
        yield {name: torch.cat([batch[name] for batch in some]) for name in some[0]}


def best_of(scores: Tensor, among: Tensor, k: int) -> Tensor:
    """(B, items) bool: the k best of those `among` (B, items), of equal ones the first."""
    scores = scores.masked_fill(~among, -torch.inf)
    least = scores.topk(min(k, scores.shape[1])).values[:, -1:]
    above, equal = scores > least, (scores == least) & among
    left = k - above.sum(1, keepdim=True, dtype=torch.int32)
    return above | (equal & (equal.cumsum(1, dtype=torch.int32) <= left))


def user_means(pair: Tensor, rank: Tensor, items: int, k: int) -> dict[str, float]:
    """Means over users of recall, average precision and NDCG at k of their list of candidates.

    `pair` (rows,) user * items + item, of which equal ones count once; `rank` (rows,) fp64 from 0 among the
    candidates that are not held out of the user, so that the m-th of those that are stands m places lower.
    Of n held-out items recall is the share of n that is listed; average precision is the sum of the
    precisions at their places divided by min(n, k), and NDCG is divided by that of min(n, k) on top.
    """
    pairs, inverse = pair.unique(return_inverse=True)
    rank = torch.empty(len(pairs), dtype=rank.dtype).scatter_(0, inverse, rank)
    order = rank.argsort(stable=True)
    order = order[(pairs[order] // items).argsort(stable=True)]
    _, group, count = (pairs[order] // items).unique_consecutive(return_inverse=True, return_counts=True)
    before = torch.arange(len(pairs)) - (count.cumsum(0) - count)[group]
    gain = gains(rank[order] + before, k)
    ideal = (1 / torch.log2(torch.arange(k) + 2.0).double()).cumsum(0)[count.clamp_max(k) - 1]
    each = {
        "recall": (gain["hr"], count),
        "map": (gain["mrr"] * (before + 1), count.clamp_max(k)),
        "user_ndcg": (gain["ndcg"], ideal),
    }
    sums = {n: (torch.zeros(len(count)).double().index_add(0, group, g), by) for n, (g, by) in each.items()}
    return {name: float((total / by).mean()) for name, (total, by) in sums.items()}


def row_groups(net: Any, user: Tensor, item: Tensor) -> Mapping[str, Tensor]:
    """Masks (rows,) of held-out rows: by BUCKETS of their items, and, where some are not, those of which
    training has both user and item, `warm`. A group without rows is left out.
    """
    counts, trained = net.counts.cpu(), net.trained.cpu()
    order = counts.argsort(descending=True, stable=True)
    before = counts[order].cumsum(0) - counts[order]
    bucket = torch.empty_like(order)
    bucket[order] = (before * len(BUCKETS)).div(counts.sum(), rounding_mode="floor").long()
    bucket[counts == 0] = -1
    warm = (trained[user] > 0) & (counts[item] > 0)
    found = {name: bucket[item] == number for number, name in enumerate(BUCKETS)}
    found |= {} if warm.all() else {"warm": warm}
    return {name: rows for name, rows in found.items() if rows.any()}
