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
    """(count,) different items that all pairs of a step share, the same on every process; at most all."""
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


def binary(model: Any, user: Tensor, item: Tensor, drawn: Tensor, calibration: float) -> Tensor:
    """Binary cross-entropy of each pair against negatives of its own, (B, n, 2): the second where the first
    was taken in training; where both were, none.

    gBCE (Petrov and Macdonald 2023) tempers the positives: -beta log sigmoid(s+), beta = a (t (1 - 1/a) +
    1/a), a = n / (I - 1); t = 0 is plain cross-entropy.
    """
    net = getattr(model, "module", model)
    negatives = torch.where(net.were_seen(user, drawn[..., 0]), drawn[..., 1], drawn[..., 0])
    taken = net.were_seen(user, negatives)
    positive, scores = model(user, [item[:, None], negatives])
    rate = min(1.0, negatives.shape[1] / max(1, len(net.item_text) - 1))
    beta = rate * (calibration * (1 - 1 / rate) + 1 / rate)
    against = logsigmoid(-scores.float()).masked_fill(taken, 0.0)
    return -(beta * logsigmoid(positive.float()).sum() + against.sum())


def squares(model: Any, user: Tensor, item: Tensor) -> Tensor:
    """Sum of the squared id vectors of the pairs."""
    net = getattr(model, "module", model)
    found: Tensor = net.user_ids(user).square().sum() + net.item_ids(item).square().sum()
    return found
