"""Losses of pairs against items that were not taken; each is a sum over the pairs."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

NEVER = float("-inf")


def pool(count: int, items: int, moment: tuple[int, str, int]) -> Tensor:
    """(count,) different items that a step's pairs share, the same on every process; at most all.

    Items that nobody took in training are among them: left out, they would score above all that were refused.
    """
    if count >= items:
        return torch.arange(items)
    seed, phase, number = moment
    draw = np.random.default_rng([seed, zlib.crc32(phase.encode()), number])
    return torch.from_numpy(draw.choice(items, count, replace=False, shuffle=False))


def sampled_softmax(model: Any, user: Tensor, item: Tensor, shared: Tensor) -> Tensor:
    """-log softmax of each pair among shared negatives, without those that are the pair's own item.

    Of I items S are drawn evenly, so log(I/S) is added: in expectation the sum over all items (logQ, Bengio
    and Senecal 2008; Yi et al. 2019).
    """
    net = getattr(model, "module", model)
    positive, others = model(user, [item[:, None], shared])
    others = others + math.log(len(net.item_text) / len(shared))
    others = others.masked_fill(shared == item[:, None], NEVER)
    scores = torch.cat([positive, others], 1).float()
    return (torch.logsumexp(scores, 1) - scores[:, 0]).sum()


def in_batch(model: Any, user: Tensor, item: Tensor, cohort: int) -> Tensor:
    """-log softmax of each pair among the items of its cohort: rows in groups of `cohort`, the last shorter.

    An item is there as often as it is taken, so the log of its expected count is subtracted (logQ).
    """
    net = getattr(model, "module", model)
    expected = net.counts[item].clamp_min(1).float() * (cohort / net.counts.sum())
    total = torch.zeros((), device=user.device)
    for start in range(0, len(user), cohort):
        rows = slice(start, start + cohort)
        mine = item[rows]
        (scores,) = model(user[rows], [mine])
        scores = scores.float() - torch.log(expected[rows])
        own = torch.eye(len(mine), dtype=torch.bool, device=user.device)
        scores = scores.masked_fill((mine[:, None] == mine) & ~own, NEVER)
        total = total + (torch.logsumexp(scores, 1) - scores.diagonal()).sum()
    return total


def untaken(net: Any, user: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """(B, n) items of (B, n, 2) drawn ones: the second where the first was taken by the user; and
    whether that was taken too."""
    first, second = drawn.unbind(-1)
    items = torch.where(net.were_seen(user, first), second, first)
    return items, net.were_seen(user, items)


def binary(
    model: Any, user: Tensor, item: Tensor, negatives: Tensor, taken: Tensor, calibration: float
) -> Tensor:
    """Binary cross-entropy of each pair against (B, n) negatives of its own, without those `taken`.

    gBCE (Petrov and Macdonald 2023) tempers the positives: -beta log sigmoid(s+), beta = a (t (1 - 1/a) +
    1/a), a = n / (I - 1); t = 0 is plain cross-entropy.
    """
    net = getattr(model, "module", model)
    positive, scores = model(user, [item[:, None], negatives])
    rate = min(1.0, negatives.shape[1] / max(1, len(net.item_text) - 1))
    beta = rate * (calibration * (1 - 1 / rate) + 1 / rate)
    against = logsigmoid(-scores.float()).masked_fill(taken, 0.0)
    return -(beta * logsigmoid(positive.float()).sum() + against.sum())


def squares(net: Any, user: Tensor, items: Tensor) -> Tensor:
    """Sum of |u|^2 + |v|^2 over the id vectors of (B,) users with each of their (B, k) items."""
    total = torch.zeros((), device=user.device)
    for table, rows, each in ((net.user_ids, user, items.shape[1]), (net.item_ids, items, 1)):
        different, times = torch.unique(rows, return_counts=True)
        total = total + (table(different).square().sum(1) * times).sum() * each
    return total
